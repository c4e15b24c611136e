"""Run the code of a notebook without Jupyter, and save its outputs.

python -m tests.notebook examples/story_of_a_growth.ipynb     # runs every cell and writes the outputs into the file
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

DPI = 70  # of saved figures, so that the file stays small


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in order, in one namespace, and give each its outputs: printed text and figures. Returns the namespace."""
    import matplotlib  # here, since tests that are only collected need not wait for it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        cell["execution_count"] = number
        cell["outputs"] = [_stream(printed.getvalue())] if printed.getvalue() else []
        cell["outputs"] += [_figure(plt.figure(index)) for index in plt.get_fignums()]
        plt.close("all")
    return names


def _stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _figure(figure: Any) -> dict[str, Any]:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def main(path: Path) -> None:
    notebook = json.loads(path.read_text())
    execute(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
