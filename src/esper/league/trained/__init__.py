"""Trained players that come with the package: every file NAME.safetensors here is the player NAME of the commands. Imports no torch.

`esper arena export RUN src/esper/league/trained/player-2v2.safetensors` adds one; nothing else has to change.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files(__name__)))
SUFFIX = ".safetensors"


def shipped_players() -> dict[str, Path]:
    """Return the files of the players that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob(f"*{SUFFIX}"))}
