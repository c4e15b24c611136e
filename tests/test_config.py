"""Configs: strict validation, readable errors, TOML round trips, and the command line."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import tyro
from hypothesis import given, strategies as st

from esper.config import (
    Config,
    ConfigError,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    describe,
    from_mapping,
    load,
    load_saved,
    save,
    to_toml,
)


class Schedule(Config):
    """How a number falls."""

    steps: PositiveInt = 100  # how long the fall takes
    final: Fraction = 0.0  # the share that is left at the end


class Learner(Config):
    """How the policy learns."""

    learning_rate: PositiveFloat = 3e-4  # Adam's step size at the start
    max_grad_norm: PositiveFloat | None = 0.5  # None leaves gradients alone
    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Widths of the layers, first to last."""
    kernel: tuple[int, int] = (3, 3)  # height and width
    schedule: Schedule = Schedule()
    warmup: Schedule | None = None


class Team(Config):
    size: PositiveInt  # units in it


class Run(Config):
    """A run."""

    seed: NonNegativeInt = 0  # the root of every random stream
    task: Literal["digits", "spirals"] = "digits"  # what is learned
    note: Annotated[str, msgspec.Meta(max_length=20, description="shown in the report")] = ""
    folder: Path | None = None
    is_verbose: bool = False
    num_envs: PositiveInt = 8
    num_minibatches: PositiveInt = 4
    teams: tuple[Team, ...] = ()
    ppo: Learner = Learner(schedule=Schedule(steps=7))  # the learner

    def check(self) -> None:
        if self.num_envs % self.num_minibatches:
            raise ConfigError("num_minibatches", expected=f"a divisor of num_envs ({self.num_envs})", got=self.num_minibatches)


def mistake(build: Callable[..., object], *args: object, **kwargs: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(*args, **kwargs)
    return caught.value


# Built in Python


def test_a_wrong_value_cannot_be_built_and_the_message_says_what_was_expected() -> None:
    error = mistake(Learner, learning_rate=-0.1)
    assert str(error) == "learning_rate: expected a float > 0, got -0.1"
    assert (error.path, error.expected, error.got) == ("learning_rate", "a float > 0", -0.1)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Learner(learning_rate=math.nan), "a float > 0"),
        (lambda: Learner(learning_rate="fast"), "a float > 0"),
        (lambda: Learner(max_grad_norm=-1), "a float > 0 or None"),
        (lambda: Learner(hidden_sizes=(64, 0)), "a list in which each is an int > 0"),
        (lambda: Learner(kernel=(3,)), "a list of 2: an int, an int"),
        (lambda: Learner(schedule=3), "a Schedule"),
        (lambda: Schedule(final=1.5), "a float >= 0 and <= 1"),
        (lambda: Run(task="chess"), "one of 'digits', 'spirals'"),
        (lambda: Run(note="x" * 21), "a string of length <= 20"),
        (lambda: Run(is_verbose="yes"), "true or false"),
        (lambda: Run(folder=3), "a path or None"),
        (lambda: Run(num_minibatches=3), "a divisor of num_envs (8)"),
    ],
)
def test_every_kind_of_field_says_what_it_expects(build: Callable[[], object], expected: str) -> None:
    assert mistake(build).expected == expected


@pytest.mark.parametrize("field", ["seed", "num_envs"])
def test_a_bool_is_refused_as_a_number(field: str) -> None:
    assert mistake(Run, **{field: True}).path == field
    assert mistake(Learner, learning_rate=True).path == "learning_rate"


def test_an_int_is_taken_for_a_float_and_a_list_for_a_tuple() -> None:
    learner = Learner(learning_rate=1, hidden_sizes=[8, 8])
    assert isinstance(learner.learning_rate, float)
    assert learner.hidden_sizes == (8, 8)
    assert mistake(Run, seed=1.0).path == "seed"


def test_a_config_is_frozen_keyword_only_and_knows_its_fields() -> None:
    with pytest.raises(AttributeError):
        Schedule().steps = 3
    with pytest.raises(TypeError):
        Schedule(3)
    with pytest.raises(ConfigError, match="stepz: unknown key; did you mean 'steps'"):
        Schedule(stepz=3)


def test_a_changed_copy_is_checked_too() -> None:
    assert mistake(msgspec.structs.replace, Learner(), learning_rate=0.0).path == "learning_rate"


# From mappings and files


def test_a_partial_mapping_fills_from_the_defaults() -> None:
    run = from_mapping(Run, {"seed": 3, "ppo": {"learning_rate": 1}})
    assert run == Run(seed=3, ppo=Learner(learning_rate=1.0, schedule=Schedule(steps=7)))


def test_a_nested_table_fills_from_the_default_of_its_field_and_not_of_its_type() -> None:
    assert from_mapping(Run, {"ppo": {"schedule": {"final": 0.1}}}).ppo.schedule == Schedule(steps=7, final=0.1)
    assert from_mapping(Run, {"ppo": {"warmup": {"final": 0.1}}}).ppo.warmup == Schedule(steps=100, final=0.1)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"ppo": {"learning_rate": -0.1}}, "ppo.learning_rate: expected a float > 0, got -0.1"),
        ({"ppo": {"schedule": {"steps": 0}}}, "ppo.schedule.steps: expected an int > 0, got 0"),
        ({"ppo": {"warmup": {"steps": 0}}}, "ppo.warmup.steps: expected an int > 0, got 0"),
        ({"ppo": 3}, "ppo: expected a Learner, got 3"),
        ({"ppo": {"learning_rte": 0.1}}, "ppo.learning_rte: unknown key; did you mean 'learning_rate'?"),
        ({"ppo": {"schedule": {"zzz": 1}}}, "ppo.schedule.zzz: unknown key; known keys are steps, final"),
        ({"teams": [{"size": 3}, {"size": 0}]}, "teams[1].size: expected an int > 0, got 0"),
        ({"teams": [{}]}, "teams[0].size: is missing; it has no default and must be an int > 0"),
        ({"num_minibatches": 3}, "num_minibatches: expected a divisor of num_envs (8), got 3"),
    ],
)
def test_a_mistake_in_a_mapping_is_named_by_its_whole_path(mapping: dict[str, object], message: str) -> None:
    assert str(mistake(from_mapping, Run, mapping)) == message


def test_an_unknown_key_fails_however_deep_it_sits() -> None:
    assert mistake(from_mapping, Run, {"teams": [{"size": 1, "sise": 2}]}).path == "teams[0].sise"


def test_a_file_is_named_with_its_mistake(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[ppo]\nlearning_rate = -1\n")
    error = mistake(load, Run, path)
    assert str(error) == f"{path}: ppo.learning_rate: expected a float > 0, got -1"
    assert error.path == "ppo.learning_rate"


def test_a_broken_file_is_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\nseed 2\n")
    message = str(mistake(load, Run, path))
    assert str(path) in message
    assert "at line 2, column 6" in message
    path.write_bytes(b"note = '\xff'")
    assert str(path) in str(mistake(load, Run, path))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert f"no such config file: {tmp_path / 'no.toml'}" == str(mistake(load, Run, tmp_path / "no.toml"))
    assert str(tmp_path) in str(mistake(load, Run, tmp_path))


# To TOML


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
schedules = st.builds(Schedule, steps=st.integers(1, 10**9), final=st.floats(0, 1))
learners = st.builds(
    Learner,
    learning_rate=positive,
    max_grad_norm=st.none() | positive,
    hidden_sizes=st.lists(st.integers(1, 99), max_size=3).map(tuple),
    schedule=schedules,
    warmup=st.none() | schedules,
)
runs = st.builds(
    Run,
    seed=st.integers(0, 2**63 - 1),
    task=st.sampled_from(["digits", "spirals"]),
    note=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    folder=st.none() | st.just(Path("runs/a")),
    is_verbose=st.booleans(),
    teams=st.lists(st.builds(Team, size=st.integers(1, 9)), max_size=2).map(tuple),
    ppo=learners,
)


@pytest.mark.slow
@given(runs)
def test_toml_gives_the_same_config_back(run: Run) -> None:
    assert from_mapping(Run, tomllib.loads(to_toml(run))) == run


def test_a_field_that_is_none_is_left_out_unless_its_default_is_not_none() -> None:
    text = to_toml(Learner(max_grad_norm=None))
    assert "warmup" not in text
    assert 'max_grad_norm = "None"' in text
    assert from_mapping(Learner, {"max_grad_norm": "None"}).max_grad_norm is None


class Named(Config):
    name: str | None = "ada"
    options: dict[str, bool | int | str | None] = {}


@pytest.mark.parametrize("name", ["None", "", "x", None])
@pytest.mark.parametrize("option", ["None", "{}", None, 3])
def test_the_text_none_stays_a_text_and_none_stays_none(name: str | None, option: str | int | None, tmp_path: Path) -> None:
    config = Named(name=name, options={"mode": option})
    assert from_mapping(Named, tomllib.loads(to_toml(config))) == config
    save(config, tmp_path / "config.toml")
    assert load_saved(Named, tmp_path / "config.toml") == load(Named, tmp_path / "config.toml") == config


def test_a_text_in_a_toml_file_is_taken_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "None"\n[options]\nmode = "None"\nother = {}\n')
    assert load(Named, tmp_path / "mine.toml") == Named(name="None", options={"mode": "None", "other": None})


def test_whole_floats_stay_floats_in_toml() -> None:
    assert "learning_rate = 1.0" in to_toml(Learner(learning_rate=1))


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    save(Run(seed=1), path)
    save(Run(seed=2), path)
    assert load(Run, path) == Run(seed=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.toml"]


def test_the_config_of_a_run_comes_back_and_one_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    save(Run(seed=1), path)
    assert load_saved(Run, path) == load(Run, path) == Run(seed=1)
    text = path.read_text()
    for harmless in (text.replace("\n", "\r\n"), f"# a good one\n{text}# so far\n", text.replace("seed = 1", "seed =  1  # one")):
        path.write_text(harmless)
        assert load_saved(Run, path) == Run(seed=1)
    lines = text.splitlines(keepends=True)
    for changed in (text.replace("seed = 1", "seed = 2"), "".join(lines[:-1]), "".join(lines[:-3]), "", "\n"):
        path.write_text(changed)
        with pytest.raises(ConfigError, match=r"config\.toml: it was changed .* these values by --config .*config\.toml"):
            load_saved(Run, path)
        load(Run, path)


# Described


def test_describe_lists_every_field_flat_with_its_help() -> None:
    rows = {path: (value, text) for path, value, text in describe(Run(seed=5))}
    assert rows["seed"] == (5, "the root of every random stream")
    assert rows["note"] == ("", "shown in the report")
    assert rows["folder"] == (None, "")
    assert rows["ppo.hidden_sizes"] == ((64, 64), "Widths of the layers, first to last.")
    assert rows["ppo.schedule.steps"] == (7, "how long the fall takes")
    assert rows["ppo.warmup"] == (None, "")
    assert "ppo" not in rows


def test_an_inherited_field_keeps_its_help() -> None:
    class LongSchedule(Schedule):
        hold: PositiveInt = 3  # steps before the fall

    assert [text for _, _, text in describe(LongSchedule())] == [
        "how long the fall takes", "the share that is left at the end", "steps before the fall",
    ]  # fmt: skip


# On the command line


def test_the_help_of_a_field_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(Run, args=["--help"])
    shown = capsys.readouterr().out
    assert "the root of every random stream" in shown
    assert "Adam's step size at the start" in shown
    assert "Widths of the layers" in shown


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 3\ntask = 'spirals'\n[ppo]\nlearning_rate = 0.1\nhidden_sizes = [8]\n")
    args = ["--seed", "4", "--ppo.hidden-sizes", "16", "32", "--ppo.max-grad-norm", "None", "--folder", "runs/a", "--is-verbose"]
    run = tyro.cli(Run, args=args, default=load(Run, path))
    expected_learner = Learner(learning_rate=0.1, hidden_sizes=(16, 32), max_grad_norm=None, schedule=Schedule(steps=7))
    assert run == Run(seed=4, task="spirals", is_verbose=True, folder=Path("runs/a"), ppo=expected_learner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seed", "-1"], "seed: expected an int >= 0, got -1"),
        (["--ppo.learning-rate", "-1"], "ppo: learning_rate: expected a float > 0, got -1.0"),
        (["--num-minibatches", "3"], "num_minibatches: expected a divisor of num_envs"),
    ],
)
def test_a_value_out_of_range_on_the_command_line_is_refused_by_its_path(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tyro.cli(Run, args=args)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_optional_config_is_chosen_as_a_subcommand() -> None:
    run = tyro.cli(Run, args=["ppo.warmup:schedule", "--ppo.warmup.steps", "5"])
    assert run.ppo.warmup == Schedule(steps=5)


def test_configs_import_without_torch_and_numpy() -> None:
    code = "import sys, esper.config; sys.exit(bool({'torch', 'numpy', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_number_that_is_not_finite_is_refused():
    class Rate(Config):
        rate: float = 1.0

    for value in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="rate: expected a float, and a finite one"):
            Rate(rate=value)
