"""Two ranks equal one process with the environments of both."""

import copy
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from esper.parallel import ALONE, FirstRankFailed, Group, RankLost, Ranks, joined
from esper.rl.batch import Rollout
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.distributions import Choice
from esper.rl.events import Update
from esper.rl.learner import Learner
from esper.rl.policy import Policy
from esper.rl.ppo import PPO
from esper.runs import read
from esper.runs.folder import CHECKPOINTS
from esper.statistics import RunningMoments, sums_of
from esper.vecenv import ActionSpec, Continuous, Discrete, Relevance, make
from tests.commands import assert_same_state, last_line, wait_for
from tests.processes import Process, results_of_ranks, spawn, torchrun
from tests.rl.counting import Counting

pytestmark = pytest.mark.slow  # they start processes of their own

RANKS, ENVS, STEPS = 2, 6, 16
MIXED = ActionSpec((Discrete("op", 3), Discrete("slot", 2), Continuous("aim", 2)), (Relevance("slot", given="op", choices=(1,)),))
SMALL = NetworkConfig(hidden_size=8, encoder_sizes=(6,))


def config(**changes) -> PPOConfig:
    return PPOConfig(**{"num_steps": STEPS, "num_minibatches": 3, "num_epochs": 2, "network": SMALL, **changes})


CONFIGS = {
    "whole rows": config(),
    "pieces of rows": config(bptt_length=4, micro_batches=2),
    "without memory": config(network=NetworkConfig(core="none", encoder_sizes=(6,))),
    "joint ratio": config(ratio="joint", value_clip_coef=0.1),
    "entropy floor": config(entropy_floor=1.0, entropy_floor_coef=3.0),
    "stopped by KL": config(target_kl=2e-5, num_epochs=8),
    "nothing normalised": config(normalize_advantages=False, normalize_observations=False, normalize_rewards=False, normalize_values=False),
    "not finite": config(normalize_rewards=False, normalize_values=False),
}


class Shuffles:
    """Deals the units of all ranks as each of them deals its own: part k of the whole is the union of the ranks' parts k."""

    def __init__(self, config: PPOConfig, ranks: int) -> None:
        self.parts, self.ranks = config.num_minibatches, ranks
        self.streams = [np.random.default_rng(rank) for rank in range(ranks)]

    def permutation(self, units: int) -> np.ndarray:
        share = ENVS // RANKS
        of_ranks = [stream.permutation(units // self.ranks) for stream in self.streams]
        chunks_and_envs = [np.divmod(order, share) for order in of_ranks]
        wide = [chunk * ENVS + env + rank * share for rank, (chunk, env) in enumerate(chunks_and_envs)]
        return np.concatenate(
            [part for parts in zip(*(np.array_split(order, self.parts) for order in wide), strict=True) for part in parts]
        )


class Half:
    """The shuffles of one rank."""

    def __init__(self, rank: int) -> None:
        self.permutation = np.random.default_rng(rank).permutation


def start(name: str) -> tuple[Policy, Rollout]:
    """The policy after one update, and its second rollout, in float64. Some steps of it are not real, and no two rows are alike."""
    ppo = PPO(Counting(ENVS, length=5, spec=MIXED), CONFIGS[name])
    ppo.update(ppo.collect())
    rollout = ppo.collect()
    rollout.valid[3, 1:5] = False
    if name == "not finite":
        rollout.rewards[7, -1] = torch.nan
    return copy.deepcopy(ppo.policy).double(), rollout


def doubled(rollout: Rollout, envs: slice) -> Rollout:
    def part(tensor):
        return (tensor.double() if tensor.is_floating_point() else tensor)[:, envs].clone()

    changed = {}
    for field in dataclasses.fields(rollout):
        value = getattr(rollout, field.name)
        if isinstance(value, Choice):
            changed[field.name] = Choice(*(part(tensor) for tensor in value))
        else:
            changed[field.name] = {key: part(tensor) for key, tensor in value.items()} if isinstance(value, dict) else part(value)
    return Rollout(**changed)


def learn(name: str, envs: slice, rng, group: Group) -> dict:
    """Everything that one update leaves behind, except the diagnostics that are those of one rank."""
    policy, rollout = start(name)
    rows = doubled(rollout, envs)
    learner = Learner(policy, CONFIGS[name], num_envs=rows.rewards.shape[1], rng=rng, on_compile_failure=lambda error: None, group=group)
    outcome = learner.update(rows, progress=0.1)
    rewards = None if learner.reward_normalizer is None else learner.reward_normalizer.moments.state_dict()
    return {
        "policy": policy.state_dict(),
        "moments": policy.training_state(),
        "rewards": rewards,
        "outcome": {
            name: value for name, value in dataclasses.asdict(outcome).items() if name not in ("hidden_state", "inputs", "calibration")
        },
    }


def update_each(rank: int) -> dict:
    share = ENVS // RANKS
    return {name: learn(name, slice(rank * share, (rank + 1) * share), Half(rank), Ranks()) for name in CONFIGS}


def trained(ppo: PPO, updates: int) -> list:
    return list(ppo.train(total_steps=ppo.step + updates * ppo.steps_per_update))


def resume(rank: int) -> dict:
    """Four updates at once, and two after another two."""

    def fresh() -> PPO:
        # Schedules would go by the steps that each call of `train` asks for.
        return PPO(make("cue", 4, delay=3), config(num_minibatches=2, entropy_coef_end=None), group=Ranks())

    whole = fresh()
    seeds_differ = whole.streams.integer("environment")
    last = trained(whole, 4)[-1]
    first = fresh()
    trained(first, 2)
    state = Ranks().gather_trees(first.state_dict())[0]  # what rank 0 would save
    trained(first, 1)
    second = fresh()
    second.load_state_dict(state)
    trained(second, 2)
    with pytest.raises(ValueError, match="saved by a training on 2 ranks, and now there are 1"):
        PPO(make("cue", 4, delay=3), config(num_minibatches=2)).load_state_dict(state)
    return {
        "seed": seeds_differ,
        "whole": whole.policy.state_dict(),
        "second": second.policy.state_dict(),
        "returns": [list(ppo.collector.recent_returns) for ppo in (whole, second)],
        "own_episodes": whole.collector.episodes,
        "update": last,
    }


def exchange(rank: int) -> dict:
    """Check the operations of a group."""
    group = Ranks()
    rows = torch.arange(10.0, dtype=torch.float64).reshape(5, 2) ** 2
    own = rows[:2] if rank == 0 else rows[2:]
    weights = torch.full((3,), float(rank))
    group.broadcast_([weights])
    found = {
        "sum": group.sum_(torch.tensor([1.0, rank])).tolist(),
        "merged": group.merge([sums_of(own, (2,)), sums_of(own[:, 0], ())]),
        "any": [group.any(rank == 1), group.any(False)],
        "first": group.first(lambda: f"made on {rank}"),
        "weights": weights.tolist(),
    }
    with group.only_first(lambda: open(os.devnull)) as file:
        found["opened"] = file is not None
    try:
        group.first(lambda: 1 // 0)
    except (ZeroDivisionError, FirstRankFailed) as error:
        found["error"] = type(error).__name__
    try:
        group.first(interrupt)
    except (KeyboardInterrupt, FirstRankFailed) as error:
        found["interrupt"] = type(error).__name__, str(error)
    return found


def interrupt() -> None:
    raise KeyboardInterrupt


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        results = {"updates": update_each(rank), "resume": resume(rank), "exchange": exchange(rank)}
        torch.save(results, folder / f"results {rank}")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Results of two ranks. Starting processes is slow, so all tests share them."""
    return results_of_ranks(run_rank, tmp_path_factory.mktemp("ranks"), RANKS)


def assert_close(one, other, *, atol: float) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_close(value, other[key], atol=atol)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_close(left, right, atol=atol)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)
    elif one is not None:
        assert one == pytest.approx(other, abs=atol, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_equal_one_process_with_both_halves_of_the_environments(name: str, results: list[dict]) -> None:
    alone = learn(name, slice(None), Shuffles(CONFIGS[name], RANKS), ALONE)
    for rank in results:
        found = rank["updates"][name]
        for part in ("policy", "moments", "rewards"):
            assert_close(found[part], alone[part], atol=1e-10)
        assert_close(found["outcome"], alone["outcome"], atol=1e-5)  # read in float32


def test_the_compared_updates_contain_learning_early_stops_and_skipped_steps(results: list[dict]) -> None:
    for name, found in results[0]["updates"].items():
        before = start(name)[0].state_dict()
        has_moved = any(not torch.equal(before[key], value) for key, value in found["policy"].items() if key.startswith("core"))
        taken, planned = found["outcome"]["steps_taken"], CONFIGS[name].num_epochs * CONFIGS[name].num_minibatches
        if name == "not finite":
            assert (taken, found["outcome"]["skipped"]) == (0, planned)
        else:
            assert has_moved or name == "without memory"
            assert 0 < taken < planned if name == "stopped by KL" else taken == planned


def test_the_weights_of_all_ranks_are_the_same_bit_for_bit(results: list[dict]) -> None:
    for name in CONFIGS:
        one, other = (rank["updates"][name]["policy"] for rank in results)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_resuming_two_ranks_equals_never_having_stopped_bit_for_bit(results: list[dict]) -> None:
    for rank in results:
        found = rank["resume"]
        assert all(torch.equal(value, found["second"][key]) for key, value in found["whole"].items())
        assert found["returns"][0] == found["returns"][1]


def test_every_rank_has_its_own_random_stream_and_reports_joint_results(results: list[dict]) -> None:
    one, other = (rank["resume"] for rank in results)
    assert one["seed"] != other["seed"]
    assert one["returns"] != other["returns"]
    for found in (one, other):
        update = found["update"]
        assert update.step == 4 * RANKS * 4 * STEPS
        assert update.episodes == one["own_episodes"] + other["own_episodes"]
        assert update.mean_return == pytest.approx(np.mean(one["returns"][0] + other["returns"][0]))


def test_a_group_sums_merges_broadcasts_and_agrees(results: list[dict]) -> None:
    whole = RunningMoments((2,))
    whole.update(torch.arange(10.0, dtype=torch.float64).reshape(5, 2) ** 2)
    for rank, found in enumerate(result["exchange"] for result in results):
        assert found["sum"] == [2.0, 1.0]
        for merged, expected in zip(found["merged"][0], whole.sums, strict=True):
            assert torch.allclose(merged, expected, rtol=1e-12)
        assert torch.equal(found["merged"][1].mean, found["merged"][0].mean[0])
        assert found["any"] == [True, False]
        assert found["first"] == "made on 0"
        assert found["weights"] == [0.0, 0.0, 0.0]
        assert found["opened"] == (rank == 0)
        assert found["error"] == ("ZeroDivisionError", "FirstRankFailed")[rank]


def test_ctrl_c_on_the_first_rank_stops_the_others_too(results: list[dict]) -> None:
    found = [result["exchange"].get("interrupt") for result in results]
    assert found == [("KeyboardInterrupt", ""), ("FirstRankFailed", "KeyboardInterrupt")]


OPTIONS = [
    "--env-args", "delay=3", "--num-envs", "4", "--device", "cpu", "--threads", "1", "--checkpoint-every", "3", "--eval-episodes", "8",
    "--num-steps", "16", "--num-minibatches", "2", "--num-epochs", "2", "--hidden-size", "8", "--encoder-sizes", "8",
]  # fmt: skip
UPDATES = 18


@pytest.mark.parametrize(("ranks", "backend"), [(2, "nccl"), (5, "gloo")])
def test_ranks_share_gpus_if_there_are_too_few_and_then_talk_by_gloo(ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, torch.device] = {}
    backends: set[str] = set()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "init_process_group", backends.add)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "new_group", lambda **options: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value: None)
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device, rank=rank: chosen.update({rank: device}))
        for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
        with joined(torch.device("cuda")) as group:
            assert group.place(torch.device("cuda")) == chosen[rank]
    assert [chosen[rank].index for rank in range(ranks)] == [rank % 2 for rank in range(ranks)]
    assert backends == {backend}


def end_one_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    group = Ranks()
    if rank == 1:
        (folder / "process").write_text(str(os.getpid()))
        os._exit(0)
    with pytest.raises(RankLost) as caught:
        group.gather_objects(1)
    (folder / "error").write_text(str(caught.value))
    os._exit(0)


def test_the_error_after_a_lost_rank_names_it(tmp_path: Path) -> None:
    spawn(end_one_rank, (tmp_path,), RANKS)
    process = (tmp_path / "process").read_text()
    assert (tmp_path / "error").read_text() == f"rank 1 (process {process}) has ended, so the training cannot go on"


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs a single CUDA device")
def test_ranks_that_share_a_gpu_finish_a_run(tmp_path: Path) -> None:
    settings = [*OPTIONS, "--total-steps", str(UPDATES * RANKS * 4 * 16), "--device", "cuda"]
    process = torchrun(RANKS, "ppo", "train", "cue", *settings, "--run", str(tmp_path / "shared"), "--json")
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert last_line(output)["status"] == "finished"


def test_a_run_under_torchrun_that_is_stopped_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    def start(name: str, *arguments: str) -> Process:
        return torchrun(RANKS, "ppo", "train", *arguments, "--run", str(tmp_path / name), "--json")

    settings = ["cue", *OPTIONS, "--total-steps", str(UPDATES * RANKS * 4 * 16)]
    whole = start("whole", *settings)
    output, errors = whole.communicate(timeout=90)
    assert whole.returncode == 0, errors
    assert len([line for line in output.splitlines() if line.startswith("finished after")]) == 1  # told by one rank

    stopped = start("stopped", *settings)
    wait_for(tmp_path / "stopped" / CHECKPOINTS / "latest")
    stopped.send_signal(signal.SIGTERM)
    output, errors = stopped.communicate(timeout=90)
    assert last_line(output)["status"] == "stopped", errors

    again = start("stopped", "--resume")
    output, errors = again.communicate(timeout=90)
    assert again.returncode == 0, errors
    assert last_line(output)["status"] == "finished"
    one, other = (open_store(tmp_path / name).load("latest").state["ppo"] for name in ("whole", "stopped"))
    assert_same_state(one, other)
    assert len(one["other_ranks"]) == RANKS - 1
    records = [list(read(tmp_path / name / "events.jsonl")) for name in ("whole", "stopped")]
    updates = [[record.event.mean_return for record in run if isinstance(record.event, Update)] for run in records]
    assert updates[0] == updates[1]
    assert len(updates[0]) == UPDATES
