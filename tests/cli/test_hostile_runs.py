"""Runs that strangers made: links, pipes and texts in them neither change files outside, nor hang or steer the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.cli.main import main
from esper.files import remove
from tests.cli.test_ppo import OPTIONS as PPO
from tests.cli.test_watch import make_all
from tests.faults.damage import limited
from tests.faults.hostile import ESCAPE, with_escapes
from tests.runs.made import made_growth, made_ppo

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

# Files and folders of a run. A hostile one takes the place of each.
FILES = ("events.jsonl", "labels.json", ".lock", "report.html", "config.toml", "checkpoints/latest", "policy.md", "model.safetensors")
FOLDERS = ("checkpoints", "twin", "league")
COMMANDS = (
    *("runs show RUN", "runs diff RUN runs/good", "runs tag RUN x", "report RUN", "watch --terminal runs"),
    *("runs export RUN --to out.csv", "arena league RUN", "runs rm RUN --yes"),
)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A folder outside of all runs, which nothing may change."""
    place = tmp_path / "precious"
    (place / "folder").mkdir(parents=True)
    for name in ("file", "folder/latest", "folder/events.jsonl", "folder/config.toml"):
        (place / name).write_text("PRECIOUS\n")
    yield place
    found = [path.read_text() for path in sorted(place.rglob("*")) if path.is_file()]
    assert found == ["PRECIOUS\n"] * 4


def make_hostile(place: Path, hostile: str, precious: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    remove(place)
    if hostile == "a pipe":
        os.mkfifo(place)
    elif hostile == "a link to itself":
        place.symlink_to(place.name)
    else:
        place.symlink_to(precious / ("folder" if place.name in (*FOLDERS, "tensorboard") else "file"))


@pytest.mark.parametrize("hostile", ["a link", "a pipe", "a link to itself"])
@pytest.mark.parametrize("kind", ["growth", "ppo"])
@pytest.mark.slow
def test_no_command_leaves_the_folder_of_a_run_by_a_link_or_waits_for_a_pipe(
    kind: str, hostile: str, tmp_path: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_ppo(tmp_path / "runs" / "good", [1.0])
    run = tmp_path / "runs" / "bad"
    places = {"a link": (*FILES, *FOLDERS), "a pipe": FILES, "a link to itself": ("events.jsonl", "config.toml", "league")}
    for name in places[hostile]:
        if kind == "growth":
            made_growth(run, [1.0, 0.5], twin=[1.0, 0.7])
        else:
            made_ppo(run, [1.0])
        for command in COMMANDS:
            if run.is_dir():
                make_hostile(run / name, hostile, precious)
                with limited(20.0):
                    assert main(command.replace("RUN", "runs/bad").split()) in (0, 1, 2)
                assert "(unexpected" not in capsys.readouterr().err, (command, name)
        remove(run)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", ["a link", "a pipe"])
def test_a_resumed_training_leaves_the_folder_of_a_run_by_no_link_and_waits_for_no_pipe(
    hostile: str, tmp_path: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run", "good"]) == 0
    for name in ("events.jsonl", ".lock", "checkpoints", "checkpoints/latest", "checkpoints/best", "tensorboard"):
        shutil.copytree("good", "bad")
        make_hostile(tmp_path / "bad" / name, hostile, precious)
        with limited(60.0):
            code = main(["ppo", "train", "--resume", "--run", "bad", "--total-steps", "128", "--tensorboard"])
        replaced = ("checkpoints/latest", "checkpoints/best") if hostile == "a link" else ()
        assert code == (0 if name in replaced else 2 if name == ".lock" or (name, hostile) == ("tensorboard", "a link") else 1), name
        if code:
            assert "is a link, and links in the folder of a run are not followed" in capsys.readouterr().err or hostile == "a pipe"
        remove(tmp_path / "bad")


SHOWING = (
    *("runs ls runs", "runs show RUN --settings", "runs diff RUN runs/good", "runs tag RUN", "compare RUN runs/good", "report RUN"),
    *("watch --terminal runs", "watch --terminal RUN", "watch --terminal RUN runs/good", "runs export RUN --to out.csv", "ppo eval RUN"),
    *("runs tag RUN --remove nothing", "arena league RUN", "arena replay RUN", "controller card RUN", "grow --resume --run RUN"),
    *("analyse RUN", "ppo train --resume --run RUN", "query SELECT runs", "runs rm RUN --yes"),
)


@pytest.mark.parametrize("kind", ["growth", "ppo", "controller", "arena"])
def test_no_command_prints_control_characters_of_names_labels_settings_and_events(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shared = tmp_path / "runs" / f"bad{ESCAPE}", {"telemetry": "normal"}
    made_ppo(tmp_path / "runs" / "good", [1.0])
    if kind == "growth":
        made_growth(run, [1.0, 0.5], twin=[1.0, 0.7], **shared)
    elif kind == "ppo":
        made_ppo(run, [1.0], **shared)
    else:
        make_all(tmp_path / "all")
        (tmp_path / "all" / kind).rename(run)
    (run / "labels.json").write_text(json.dumps({"tags": [f"a{ESCAPE}"], "note": f"b{ESCAPE}"}))
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steered = [with_escapes(line) for line in lines] + [{**lines[-1], "kind": f"own{ESCAPE}"}]
    steered.append({**lines[0], "kind": "warned", "step": 1, "message": f"c{ESCAPE}"})
    (run / "events.jsonl").write_text("".join(json.dumps(line, ensure_ascii=number % 2 == 0) + "\n" for number, line in enumerate(steered)))
    for name in ("config.toml", "grow.toml"):
        if (run / name).is_file():
            text = (run / name).read_text().replace('"cue"', f'"cue{in_toml(ESCAPE)}"').replace('"digits"', f'"digits{in_toml(ESCAPE)}"')
            (run / name).write_text(f'{text}\n["x{in_toml(ESCAPE)}"]\ny = 1\n')
    for command in SHOWING:
        words = ["select * from runs, events" if word == "SELECT" else str(run) if word == "RUN" else word for word in command.split()]
        main(words)
        said = capsys.readouterr()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said.out + said.err), command


def in_toml(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)
