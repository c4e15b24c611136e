"""The prefix before a slot is replayed instead of computed, with identical results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, interpolate, scaled_dot_product_attention

from esper.growth.host.discover import discover
from esper.growth.host.isolation import eager, isolated
from esper.growth.host.layout import Call
from esper.growth.host.prefix_cache import PrefixCache, PrefixCacheMismatch
from tests.growth.host.test_model_kinds import tokens
from tests.growth.hosts import MaskedEncoder


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.norm1(self.conv1(x)))
        inner = self.norm2(self.conv2(self.dropout(inner)))
        inner += x
        output: Tensor = self.relu(inner)
        return output


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return output


class UNet(nn.Module):
    """Outputs from before the slot are used long after it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Conv2d(24, 8, 3, padding=1)
        self.out = nn.Conv2d(11, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x).relu()
        second = self.down2(first).relu_()
        middle = self.middle(second) + second
        up = self.up(torch.cat([interpolate(middle, scale_factor=2.0), first], 1))
        output: Tensor = self.out(torch.cat([up, x], 1)).mean((2, 3))
        return output


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        output: Tensor = x + self.fall(gelu(self.rise(self.norm2(x))))
        return output


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 16), nn.Parameter(torch.randn(12, 16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.norm(x) @ self.tokens.weight.T
        return logits


class Shared(nn.Module):
    """One module runs before the slot, inside another, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.nest = nn.Sequential(self.shared, nn.Tanh())
        self.slot, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.shared(x.relu())
        x = self.slot(self.nest(x))
        output: Tensor = self.head(self.shared(x))
        return output


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


class Split(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.left, self.right, self.make = nn.Linear(6, 6), nn.Linear(6, 6), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.left(x), self.right(x))


class Branches(nn.Module):
    """Something other than a tensor leaves a module before the slot."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any], read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.split, self.read = Split(make), read
        self.slot, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.read(self.split(x))
        output: Tensor = self.head(self.slot(left) * right)
        return output


class Opaque:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.parts = (left, right)


def random_input(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """The same weights every time."""
    model = build()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model.eval()


def calls_of(model: nn.Module, x: Tensor) -> list[Call]:
    """Record the calls of one forward pass."""
    calls, starts, ticks = [], [], iter(range(10_000))
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, inputs: starts.append(next(ticks))))
        handles.append(
            module.register_forward_hook(lambda module, inputs, output, name=name: calls.append(Call(name, starts.pop(), next(ticks))))
        )
    with isolated(model):
        model(x)
    for handle in handles:
        handle.remove()
    return calls


class Seed(nn.Module):
    """Sits behind a module, as a slot's hook does."""

    def __init__(self, model: nn.Module, slot: str) -> None:
        super().__init__()
        self.is_on = False
        self.scale = nn.Parameter(torch.tensor(0.3))
        model.get_submodule(slot).register_forward_hook(lambda module, inputs, output: output + self.scale * output if self.is_on else None)


class Ran:
    """Names of the modules whose own forward ran."""

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        for name, module in model.named_modules():
            if not list(module.children()):
                vars(module)["forward"] = self.counted(name, module.forward)

    def counted(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.names.append(name)
            return forward(*arguments, **named)

        return run


IMAGES = tuple(random_input(4, 3, 8, 8, seed=seed) for seed in range(3))
ROWS = tuple(random_input(4, 6, seed=seed) for seed in range(3))
TOKENS = tuple(torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3))

BLOCK_3 = [f"blocks.3.{name}" for name in ("conv1", "norm1", "relu", "dropout", "conv2", "norm2", "relu")]

HOSTS = [
    pytest.param(
        ResNet, "blocks.1.conv2", IMAGES, {"stem", "blocks.0", "blocks.1.conv1", "blocks.1.norm1", "blocks.1.relu"}, id="residual"
    ),
    pytest.param(ResNet, "blocks.2", IMAGES, {"stem", "blocks.0", "blocks.1", "blocks.2"}, id="residual block"),
    pytest.param(ResNet, "stem.1", IMAGES, {"stem.0", "stem.1"}, id="before an in-place activation"),
    pytest.param(UNet, "middle", IMAGES, {"down1", "down2", "middle"}, id="skips"),
    pytest.param(GPT, "blocks.1", TOKENS, {"tokens", "blocks.0", "blocks.1"}, id="transformer"),
    pytest.param(GPT, "blocks.1.fall", TOKENS, {"tokens", "blocks.0", "blocks.1.qkv", "blocks.1.fall"}, id="in a transformer"),
    pytest.param(Shared, "slot", ROWS, {"shared", "nest", "slot"}, id="shared"),
    pytest.param(ResNet, "", IMAGES, {""}, id="the whole host"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "slot", "inputs", "replayed"), HOSTS)
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_recorded_on", [False, True])
def test_a_replayed_pass_equals_the_computed_one_bit_for_bit(
    build: Callable[[], nn.Module],
    slot: str,
    inputs: tuple[Tensor, ...],
    replayed: set[str],
    guard: Callable[[], Any],
    is_recorded_on: bool,
) -> None:
    model = made(build)
    replay, seed = PrefixCache(model, calls_of(model, inputs[0]), slot), Seed(model, slot)
    assert replayed <= set(replay.modules)
    with guard():
        expected = {}
        for seed.is_on in (False, True):
            expected[seed.is_on] = [model(x) for x in inputs]
        seed.is_on = is_recorded_on
        for _ in range(2):  # the second time it knows what is overwritten
            replay.clear()
            with replay.recording():
                recorded = [model(x) for x in inputs]
            assert all(torch.equal(*pair) for pair in zip(recorded, expected[is_recorded_on], strict=True))
            for seed.is_on in (not is_recorded_on, is_recorded_on, not is_recorded_on):
                with replay.replaying():
                    outputs = [model(x) for x in inputs]
                assert all(torch.equal(*pair) for pair in zip(outputs, expected[seed.is_on], strict=True))
            seed.is_on = is_recorded_on
    assert not torch.equal(expected[True][0], expected[False][0])
    assert replay.is_complete
    assert replay.nbytes > 0


@pytest.mark.parametrize(
    ("build", "slot", "x", "rest"),
    [
        (ResNet, "blocks.2", IMAGES[0], [*BLOCK_3, "head"]),
        (GPT, "blocks.2.rise", TOKENS[0], ["blocks.2.fall", "norm"]),
        (Shared, "slot", ROWS[0], ["shared", "head"]),
        (UNet, "middle", IMAGES[0], ["up", "out"]),
    ],
)
def test_modules_before_the_slot_are_not_run_again(build: Callable[[], nn.Module], slot: str, x: Tensor, rest: list[str]) -> None:
    model = made(build)
    replay, ran = PrefixCache(model, calls_of(model, x), slot), Ran(model)
    for _ in range(2):
        with replay.recording(keep_last=True):
            model(x)
        ran.names.clear()
        with replay.replaying():
            model(x)
        assert ran.names == rest


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda left, right: (left, right), lambda pair: pair),
        (lambda left, right: [left, (right, None, 3)], lambda pair: (pair[0], pair[1][0])),
        (lambda left, right: {"left": left, "right": right}, lambda pair: (pair["left"], pair["right"])),
        (lambda left, right: Pair(left, [right]), lambda pair: (pair.left, pair.right[0])),
    ],
    ids=["tuple", "list", "dict", "named tuple"],
)
def test_outputs_that_hold_several_tensors_are_replayed(make: Callable[..., Any], read: Callable[..., Any]) -> None:
    model = made(lambda: Branches(make, read))
    x = ROWS[0]
    replay, ran = PrefixCache(model, calls_of(model, x), "slot"), Ran(model)
    with replay.recording():
        computed = model(x)
    ran.names.clear()
    with replay.replaying():
        assert torch.equal(model(x), computed)
    assert ran.names == ["head"]


def test_a_module_whose_output_cannot_be_stored_is_replayed_by_its_children() -> None:
    model = made(lambda: Branches(Opaque, lambda opaque: opaque.parts))
    x = ROWS[0]
    replay, ran = PrefixCache(model, calls_of(model, x), "slot"), Ran(model)
    for names in (["split.left", "split.right", "slot", "head"], ["head"], ["head"]):
        with replay.recording(keep_last=True):
            computed = model(x)
        ran.names.clear()
        with replay.replaying():
            assert torch.equal(model(x), computed)
        assert ran.names == names
    assert replay.modules == ("split.left", "split.right", "slot")
    assert replay.is_complete


def test_a_slot_whose_own_output_cannot_be_stored_is_not_usable() -> None:
    model = made(lambda: Branches(Opaque, lambda opaque: opaque.parts))
    replay = PrefixCache(model, calls_of(model, ROWS[0]), "split")
    with replay.recording():
        model(ROWS[0])
    assert not replay.is_usable
    assert "Opaque" in replay.reason
    with replay.replaying():
        assert torch.equal(model(ROWS[0]), model(ROWS[0]))


def test_a_training_pass_is_replayed_up_to_the_slot_and_gradients_stop_there() -> None:
    model = made(ResNet).train()
    x, y = IMAGES[0], torch.tensor([0, 1, 2, 3])
    replay, seed, ran = PrefixCache(model, calls_of(model, x), "blocks.1"), Seed(model, "blocks.1"), Ran(model)
    raw: list[Tensor] = []
    model.get_submodule("blocks.1").register_forward_hook(lambda module, inputs, output: raw.append(output), prepend=True)
    for _ in range(2):
        with replay.recording(keep_last=True):
            cross_entropy(model(x), y).backward()
        statistics = [buffer.clone() for buffer in model.get_submodule("blocks.0").buffers()]
        ran.names.clear()
        seed.is_on = True
        with isolated(model), replay.replaying():
            (gradient,) = torch.autograd.grad(cross_entropy(model(x), y), [seed.scale])
        seed.is_on = False
        assert float(gradient) != 0
        assert torch.equal(raw[-1], raw[-2])  # with the dropout of the user's own pass
        assert raw[-2].requires_grad
        assert not raw[-1].requires_grad
        assert not any(name.startswith(("stem", "blocks.0", "blocks.1")) for name in ran.names)
        assert all(torch.equal(*pair) for pair in zip(statistics, model.get_submodule("blocks.0").buffers(), strict=True))


def test_keeping_the_last_pass_holds_no_more_than_one() -> None:
    model = made(ResNet)
    replay = PrefixCache(model, calls_of(model, IMAGES[0]), "blocks.1")
    with replay.recording():
        model(IMAGES[0])
    one = replay.nbytes
    with replay.recording(keep_last=True):
        computed = [model(x) for x in IMAGES]
    assert replay.nbytes == one
    with replay.replaying():
        assert torch.equal(model(IMAGES[-1]), computed[-1])


def test_several_slots_are_recorded_in_the_same_passes() -> None:
    model = made(ResNet)
    calls, names = calls_of(model, IMAGES[0]), ("stem.1", "blocks.1.conv2", "blocks.2")
    replays, seeds = [PrefixCache(model, calls, name) for name in names], [Seed(model, name) for name in names]
    for seed in seeds:
        seed.is_on = True
    for _ in range(2):
        with replays[0].recording(keep_last=True), replays[1].recording(keep_last=True), replays[2].recording(keep_last=True):
            model(IMAGES[0])
        for replay, seed in zip(replays, seeds, strict=True):
            seed.is_on = False
            expected = model(IMAGES[0])
            with replay.replaying():
                assert torch.equal(model(IMAGES[0]), expected)
            seed.is_on = True


def test_replaying_more_passes_than_recorded_is_refused() -> None:
    model = made(ResNet)
    replay = PrefixCache(model, calls_of(model, IMAGES[0]), "blocks.1")
    with replay.recording():
        model(IMAGES[0])
    with replay.replaying():
        model(IMAGES[0])
        with pytest.raises(RuntimeError, match="forward pass 2 cannot be replayed, only 1 were recorded"):
            model(IMAGES[1])


def test_replaying_a_batch_of_another_shape_is_refused() -> None:
    model = made(ResNet)
    replay = PrefixCache(model, calls_of(model, IMAGES[0]), "blocks.1")
    with replay.recording():
        model(IMAGES[0])
    with replay.replaying(), pytest.raises(RuntimeError, match=r"'stem' have the shapes \[\(2, 3, 8, 8\)\] and had \[\(4, 3, 8, 8\)\]"):
        model(IMAGES[0][:2])


def test_a_recording_stops_at_its_limit_and_the_rest_is_computed() -> None:
    model = made(ResNet)
    calls = calls_of(model, IMAGES[0])
    whole = PrefixCache(model, calls, "blocks.1")
    with whole.recording():
        expected = [model(x) for x in IMAGES]
    limited = PrefixCache(model, calls, "blocks.1", max_bytes=whole.nbytes // 2)
    ran = Ran(model)
    for _ in range(2):
        limited.clear()
        with limited.recording():
            for x in IMAGES:
                model(x)
        assert not limited.is_complete
        assert limited.nbytes == whole.nbytes // 3
        ran.names.clear()
        with limited.replaying():
            outputs = [model(x) for x in IMAGES]
        assert ran.names.count("stem.0") == 2
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("mode", ["recording", "replaying"])
def test_after_an_exception_every_module_has_its_own_forward_again(mode: str) -> None:
    model = made(ResNet)
    replay = PrefixCache(model, calls_of(model, IMAGES[0]), "blocks.1.conv2")
    with replay.recording():
        expected = model(IMAGES[0])
    own = model.get_submodule("stem").forward
    vars(model.get_submodule("stem"))["forward"] = own  # a user's own, on the instance
    failing = model.get_submodule("head").register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError), getattr(replay, mode)():
        model(IMAGES[0])
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["stem"]
    assert vars(model.get_submodule("stem"))["forward"] is own
    failing.remove()
    with replay.replaying():  # the pass that failed was not recorded
        assert torch.equal(model(IMAGES[0]), expected)


def test_a_stored_output_that_is_overwritten_later_is_computed_again() -> None:
    model = made(Shared)
    x = ROWS[0].clone()
    nest = nn.Sequential(nn.Identity(), model)  # its output is the batch itself
    replay, ran = PrefixCache(nest, calls_of(nest, x), "1.slot"), Ran(nest)
    with replay.recording():
        nest(x)
    replay.clear()
    with replay.recording():
        nest(x)
    x.zero_()
    ran.names.clear()
    with replay.replaying():
        nest(x)
    assert ran.names == ["0", "1.shared", "1.head"]


def test_a_consumer_that_overwrites_only_while_replaying_does_no_harm() -> None:
    model = made(ResNet)
    x, is_overwriting = IMAGES[0], False
    replay, ran = PrefixCache(model, calls_of(model, x), "blocks.1"), Ran(model)
    model.get_submodule("blocks.0").register_forward_hook(lambda module, inputs, output: output.mul_(2) if is_overwriting else output * 2)
    with replay.recording():
        expected = model(x)
    is_overwriting = True
    for runs in (0, 1, 1):
        ran.names.clear()
        with replay.replaying():
            assert torch.equal(model(x), expected)
        assert ran.names.count("blocks.0.conv1") == runs


def test_calls_outside_a_forward_pass_are_computed() -> None:
    model = made(ResNet)
    replay = PrefixCache(model, calls_of(model, IMAGES[0]), "blocks.1")
    stem = model.get_submodule("stem")
    with replay.recording():
        model(IMAGES[0])
        stem(IMAGES[1])
    expected = stem(IMAGES[2])
    with replay.replaying():
        assert torch.equal(stem(IMAGES[2]), expected)
        model(IMAGES[0])


class Misbehaving(nn.Module):
    """Does what `mood` says before the slot."""

    def __init__(self, mood: str = "plain") -> None:
        super().__init__()
        self.mood, self.count = mood, 0
        self.first, self.relu = nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.slot, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.first(x)
        if self.mood == "ignores what a module returns":
            self.relu(x)
        if self.mood == "repeats a module":
            x = self.first(x)
        if self.mood == "has a memory":
            x = x + self.count
        extra = torch.rand(()) if self.mood == "is random" else 0.0
        output: Tensor = self.head(self.slot(x) + x + extra)
        return output


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("ignores what a module returns", "a replayed pass gives another result"),
        ("has a memory", "different results"),
        ("is random", "different results"),
    ],
)
def test_verification_disables_a_replay_that_gives_other_outputs(mood: str, reason: str) -> None:
    model = made(lambda: Misbehaving(mood))
    x = ROWS[0]
    replay = PrefixCache(model, calls_of(model, x), "slot")
    with torch.random.fork_rng(devices=[]):
        assert not replay.verify(lambda: model(x).sum())
    assert reason in replay.reason
    assert not replay.is_usable
    with replay.recording():
        model(x)
    assert replay.nbytes == 0


@pytest.mark.parametrize(("build", "slot", "inputs", "replayed"), HOSTS)
def test_verification_accepts_a_replay_that_gives_the_same_outputs(
    build: Callable[[], nn.Module], slot: str, inputs: tuple[Tensor, ...], replayed: set[str]
) -> None:
    model = made(build)
    replay = PrefixCache(model, calls_of(model, inputs[0]), slot)
    assert replay.verify(lambda: torch.stack([model(x).sum() for x in inputs]))
    assert replay.nbytes == 0


def test_equal_nans_do_not_disable_the_replay() -> None:
    model = made(Shared)
    assert PrefixCache(model, calls_of(model, ROWS[0]), "slot").verify(lambda: model(ROWS[0]).sum() * float("nan"))


@pytest.mark.parametrize("mode", ["recording", "replaying"])
def test_a_pass_with_other_calls_than_the_probe_disables_it(mode: str) -> None:
    model = made(lambda: Misbehaving("repeats a module"))
    x = ROWS[0]
    replay = PrefixCache(model, calls_of(model, x), "slot")
    with replay.recording():
        model(x)
    assert replay.is_complete
    model.mood = "plain"  # type: ignore[assignment]
    with getattr(replay, mode)():
        model(x)
        assert torch.equal(model(x), model(x))  # computed from here on
    assert "'first' ran 1 times" in replay.reason
    assert not replay.is_complete


def test_a_slot_must_have_run_once() -> None:
    model = made(Shared)
    calls = calls_of(model, ROWS[0])
    with pytest.raises(ValueError, match="'shared' ran 4 times"):
        PrefixCache(model, calls, "shared")
    with pytest.raises(ValueError, match="'nowhere' ran 0 times"):
        PrefixCache(model, calls, "nowhere")


@pytest.mark.slow
def test_a_compiled_model_is_replayed_only_where_it_runs_eagerly() -> None:
    model = made(Shared)
    x = ROWS[0]
    calls, ran = calls_of(model, x), Ran(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        replay = PrefixCache(compiled, calls, "slot")
        assert "compiled" in replay.reason
        with replay.recording():
            compiled(x)
        with eager(), replay.replaying():
            assert not replay.is_complete
            assert torch.equal(compiled(x), model(x))
        replay.clear()
        with eager():
            assert replay.is_usable
            with replay.recording():
                computed = compiled(x)
            ran.names.clear()
            with replay.replaying():
                assert torch.equal(compiled(x), computed)
    assert ran.names == ["shared", "head"]


def test_a_batch_with_padding_is_replayed_through_torchs_nested_tensors() -> None:
    """torch's encoder makes nested tensors of it in eval mode; they have no shape."""
    host, batch = MaskedEncoder().eval(), tokens(3, 8)
    mask = torch.tensor([[False] * 8, [False] * 5 + [True] * 3, [False] * 3 + [True] * 5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = discover(host, (batch, mask))
    cache = PrefixCache(host, found.calls, "encoder.layers.1")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are new
        with cache.recording():
            expected = host(batch, mask)
        with cache.replaying():
            assert torch.equal(host(batch, mask), expected)
        with cache.replaying(), pytest.raises(PrefixCacheMismatch, match="have the shapes"):
            host(batch[:2], mask[:2])
