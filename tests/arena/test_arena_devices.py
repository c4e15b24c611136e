"""Arenas that have stepped before behave as new ones, on every device. On a CUDA device their steps are replays of a graph by then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.arena.arena import Arena, ManualResetArena, StepResult, no_actions
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.recorder import Recorder
from esper.arena.replay import verify
from esper.devices import GraphedCall
from tests.arena.worlds import assert_identical, saved

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
CONFIG = ArenaConfig(battles=6, team_size=2, size=24, maps=3, seconds=3.0, contacts=2, allies=1, state_view=True)
DECISIONS = 40  # battles end after at most 12
RESULTS = ("observation", "whole", "reward", "was_alive", "was_present", "died", "ended", "winner", "by_time", "last")

pytestmark = pytest.mark.slow


def stepped(device: str, *, seed: int = 0, decisions: int = 4) -> Arena:
    """Return an arena that has stepped."""
    arena = Arena(CONFIG, seed=seed, device=device)
    play(arena, decisions)
    return arena


def play(arena: Arena, decisions: int = DECISIONS) -> list[dict[str, torch.Tensor]]:
    """Let strong bots play, and return copies of all results."""
    bot = Bot("strong", arena)
    return [copied(arena.step(bot.act())) for _ in range(decisions)]


def copied(result: StepResult) -> dict[str, torch.Tensor]:
    return {
        **{name: getattr(result, name).cpu().clone() for name in RESULTS},
        **{k: mask.cpu().clone() for k, mask in result.masks.items()},
    }


def assert_same(results: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for decision, (one, other) in enumerate(zip(results, expected, strict=True)):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{name} differs in decision {decision}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 5])
def test_reset_arena_plays_the_battles_of_a_new_one(device: str, seed: int) -> None:
    arena, new = stepped(device), Arena(CONFIG, seed=seed, device=device)
    first, expected_first = arena.reset(seed), new.look()
    assert torch.equal(first.observation, expected_first.observation)
    results = play(arena)
    assert_same(results, play(new))
    assert_identical(saved(arena), saved(new))
    assert sum(int(result["ended"].sum()) for result in results) >= CONFIG.battles


@pytest.mark.parametrize("device", DEVICES)
def test_loaded_state_goes_on_in_an_arena_that_has_stepped(device: str) -> None:
    arena, other = stepped(device, seed=3, decisions=7), stepped(device)
    other.load_state_dict(arena.state_dict())
    assert_same(play(other), play(arena))
    assert_identical(saved(other), saved(arena))


@pytest.mark.parametrize("device", DEVICES)
def test_largest_team_changes_in_an_arena_that_has_stepped(device: str) -> None:
    arena = stepped(device)
    arena.set_largest_team(1)
    play(arena, CONFIG.decisions)
    assert (arena.simulation.number[at.IS_PRESENT].view(CONFIG.battles, 2, -1).sum(2) == 1).all()
    new = Arena(CONFIG, device=device)
    new.set_largest_team(1)
    new.reset()
    arena.reset()
    assert_same(play(arena), play(new))


@pytest.mark.parametrize("device", DEVICES)
def test_battles_that_are_replaced_by_hand_are_those_of_an_arena(device: str) -> None:
    arena, manual = Arena(CONFIG, device=device), ManualResetArena(CONFIG, device=device)
    bot, manual_bot = Bot("strong", arena), Bot("strong", manual)
    ended = 0
    for _ in range(DECISIONS):
        result, by_hand = arena.step(bot.act()), manual.step(manual_bot.act())
        assert torch.equal(result.ended, by_hand.ended)
        assert torch.equal(result.reward, by_hand.reward)
        ended += int(result.ended.sum())
        manual.replace(by_hand.ended.clone())
        assert_identical(saved(manual), saved(arena))
        assert torch.equal(manual.simulation.views["observation"], arena.simulation.views["observation"])
    assert ended >= CONFIG.battles


@pytest.mark.parametrize("device", DEVICES)
def test_replay_verifies_on_the_device_that_recorded_it(device: str, tmp_path: Path) -> None:
    arena = stepped(device)
    arena.reset()
    recorder, bot = Recorder(arena, 1), Bot("strong", arena)
    recorder.begin()
    while not recorder.is_over:
        actions = {name: value.clone() for name, value in bot.act().items()}
        recorder.add(actions, arena.step(actions))
    path = tmp_path / "battle.safetensors"
    recorder.write(path)
    found = verify(path, device)
    assert found.ok, found


@pytest.mark.parametrize("device", DEVICES)
def test_bot_that_became_another_acts_as_a_new_one(device: str) -> None:
    arena = stepped(device)
    bot = Bot("weak", arena, seed=1)
    for name, seed in (("random", 2), ("expert", 3), ("random", 2**62)):
        for _ in range(3):  # the second call records a graph on a CUDA device
            bot.act()
        bot.become(name, seed=seed)
        actions, expected = bot.act(), Bot(name, arena, seed=seed).act()
        assert all(torch.equal(actions[head], expected[head]) for head in expected)
        arena.step(actions)


@needs_cuda
def test_replayed_steps_are_those_of_single_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed = Arena(CONFIG, device="cuda")
    expected = play(graphed)
    assert graphed._decision._graph is not None
    monkeypatch.setattr(GraphedCall, "__call__", lambda self, function: function())
    launched = Arena(CONFIG, device="cuda")
    assert_same(play(launched), expected)
    assert launched._decision._graph is None


@needs_cuda
def test_steps_can_be_recorded_in_a_graph_of_the_caller() -> None:
    arena, other = stepped("cuda", decisions=3), stepped("cuda", decisions=3)
    bot, stream = Bot("expert", arena), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arena.step(bot.act())  # loads kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arena.step(bot.act())
    for _ in range(DECISIONS):
        graph.replay()
    other_bot = Bot("expert", other)
    for _ in range(1 + DECISIONS):
        other.step(other_bot.act())
    assert_identical(saved(arena), saved(other))


@needs_cuda
def test_wrong_value_in_a_replayed_step_is_reported_later() -> None:
    arena = stepped("cuda")
    arena.reset()
    actions = no_actions(CONFIG, "cuda")
    actions["motion"][5, 1] = float("nan")
    actions["fire"][6] = 99
    arena.step(actions)
    assert int(arena.simulation.actions["fire"][6]) == 7
    arena.step(no_actions(CONFIG, "cuda"))
    with pytest.raises(ValueError, match="battle 1, unit 1"):
        arena.check()
    arena.reset()
    arena.check()


@needs_cuda
def test_battles_begin_equally_on_cpu_and_cuda_and_stay_close_for_a_decision() -> None:
    config = ArenaConfig(battles=256, maps=32, team_size=5, smallest_team=2)
    on_cpu, on_cuda = (Arena(config, seed=2, device=device) for device in ("cpu", "cuda"))
    assert_identical(saved(on_cuda), saved(on_cpu))
    for _ in range(20):
        on_cpu.step(Bot("strong", on_cpu).act())
    on_cuda.load_state_dict(on_cpu.state_dict())
    actions = Bot("strong", on_cpu).act()
    on_cpu.step(actions)
    on_cuda.step({name: value.to("cuda") for name, value in actions.items()})
    apart = (on_cpu.simulation.unit[at.X : at.Z + 1] - on_cuda.simulation.unit[at.X : at.Z + 1].cpu()).abs().amax(0)
    assert (apart > 1e-4).float().mean() < 0.001
