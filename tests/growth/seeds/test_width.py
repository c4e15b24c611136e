"""Width seeds are the wider network: identity at birth, equal training, and equal weights and optimiser states after folding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from esper.growth import add_slots
from esper.growth.host.find_units import find_units
from esper.growth.host.layout import Place, Units
from esper.growth.host.slots import WidePatch
from esper.growth.host.units import chains
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds import folding, width
from esper.growth.seeds.folding import fold
from esper.growth.seeds.width import WidthSeed, cost_between, kept_units, plan_of
from tests.growth.host.test_units import Attention, Gated, InvertedResidual, Residual, Two

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
PLACE = Place("", "dense", (1,), dtype=torch.float64)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
}


def conv_host() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 5)),
    )


def pooled(*blocks: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def normed(layer: nn.Module) -> nn.Module:
    return nn.Sequential(weight_norm(layer), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def attending(attention: Attention) -> nn.Module:
    """Return a host that reads an image as 24 tokens of 8 features."""
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 8), attention, nn.Flatten(), nn.Linear(192, 5))


class FeedForward(nn.Module):
    """The feed-forward part of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return output


def feeding_forward(block: FeedForward) -> nn.Module:
    """Return a host that reads an image as 24 tokens of 8 features."""
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 8), block, nn.Flatten(), nn.Linear(192, 5))


HOSTS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # name -> host, number of units in the chain that is widened
    "pair": (conv_host, 1),
    "chain of two": (conv_host, 2),
    "chain of three": (conv_host, 3),
    "residual": (lambda: pooled(Residual(4), width=4), 1),
    "inverted residual": (lambda: pooled(InvertedResidual(4), width=4), 1),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), 1),
    "feed-forward": (lambda: feeding_forward(FeedForward(8)), 1),
    "gated": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Gated(8, 12), nn.Linear(8, 5)), 1),
    "heads": (lambda: attending(Attention(8, heads=3)), 1),
    "grouped queries": (lambda: attending(Attention(8, heads=4, shared_by=2)), 1),
    "weight norm": (lambda: normed(nn.Conv2d(3, 4, 3)), 1),
    "two readers": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), Two(), nn.Linear(4, 5)), 1),
}


@pytest.fixture(autouse=True)
def double() -> Iterable[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def chain_in(host: nn.Module, example: Tensor, length: int) -> tuple[Units, ...]:
    """Return the first chain of this length. A single pair is the one in the block, not the layer before it."""
    units = find_units(host, example)[0]
    if length > 1:
        return chains(units)[0][:length]
    inside = [one for one in units if "." in one.name]
    return ((inside or units)[0],)


class Widened:
    """A host with a connected width seed."""

    def __init__(self, host: nn.Module, chain: tuple[Units, ...], *, share: float = 0.5, random_seed: int = 1) -> None:
        self.host, self.modules = host, dict(host.named_modules())
        plan = plan_of(chain, [units.added(share) for units in chain])
        self.seed = WidthSeed(PLACE, "widen_50", self.modules, plan, random_seed=random_seed)
        self.seed.alpha.fill_(1.0)
        self.patches = {one.module: WidePatch() for one in plan}
        for name, patch in self.patches.items():
            patch.attach(self.modules[name])
        self.seed.connect(self.patches, True)

    def fold(self, seeds: Optimizer | None = None, host: Optimizer | None = None) -> nn.Module:
        self.seed.connect(self.patches, False)
        for patch in self.patches.values():
            patch.detach()
        fold(self.modules, [self.seed], {} if seeds is None else {self.seed: [seeds]}, [] if host is None else [host])
        return self.host


def made(name: str) -> tuple[nn.Module, tuple[Units, ...], Tensor, Tensor]:
    torch.manual_seed(0)
    make, length = HOSTS[name]
    host, inputs, targets = make(), torch.randn(12, 3, 8, 8), torch.randint(5, (12,))
    return host, chain_in(host, inputs[:2], length), inputs, targets


def step(model: nn.Module, inputs: Tensor, targets: Tensor, *optimizers: Optimizer) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def error(some: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return ((some - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("name", HOSTS)
def test_a_new_seed_is_the_identity_bit_for_bit_and_has_a_gradient(name: str) -> None:
    host, chain, inputs, targets = made(name)
    plain = copy.deepcopy(host)
    widened = Widened(host, chain)
    outputs = host(inputs)
    assert torch.equal(outputs, plain(inputs))
    cross_entropy(outputs, targets).backward()
    cross_entropy(plain(inputs), targets).backward()
    for one, other in zip(host.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)  # the order of sums may differ
    backs = [part.back for part in widened.seed.parts if part.back is not None]
    assert all(back.weight.grad is not None and back.weight.grad.any() for back in backs)


@pytest.mark.slow
@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", HOSTS)
def test_host_and_seed_train_as_the_wider_network_does(name: str, optimizer: str, is_joined: bool) -> None:
    make = OPTIMIZERS[optimizer]
    host, chain, inputs, targets = made(name)
    static = Widened(copy.deepcopy(host), chain).fold()
    widened = Widened(host, chain)
    set_joined(widened.seed, is_joined)
    own, of_seed, of_static = make(host.parameters()), make(widened.seed.parameters()), make(static.parameters())
    for _ in range(50):
        step(host, inputs, targets, own, of_seed)
        step(static, inputs, targets, of_static)
    folded = widened.fold(of_seed, own)
    for (key, one), other in zip(folded.named_parameters(), static.parameters(), strict=True):
        assert one.shape == other.shape
        assert error(one, other) < 1e-10, key
        for statistic in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if statistic in of_static.state[other]:
                assert error(own.state[one][statistic], of_static.state[other][statistic]) < 1e-8, (key, statistic)
    for one, other in zip(folded.buffers(), static.buffers(), strict=True):
        assert error(one.double(), other.double()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_width_seed_around_a_depth_seed_trains_as_the_wider_network_does(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    inputs, targets = torch.randn(12, 3, 8, 8), torch.randint(5, (12,))
    torch.manual_seed(0)
    slotted = add_slots(conv_host(), inputs[:2], slots=["0", "2"])
    for slot, blueprint in (("2", "conv1x1"), ("0", "widen_50_chain")):  # a convolution behind the first ReLU, and new units around it
        slotted.slot(slot).plant(slotted.new_seed(slot, blueprint, random_seed=1), connected=True)
        slotted.slot(slot).alpha = 1.0
        slotted.slot(slot).is_kept = True
    static = copy.deepcopy(slotted).bake()
    seeds = [slotted.slot(slot).seed for slot in ("2", "0")]
    own, of_static = make(slotted.host.parameters()), make(static.parameters())
    of_seeds = [make(seed.parameters()) for seed in seeds]
    for _ in range(50):
        step(slotted, inputs, targets, own, *of_seeds)
        step(static, inputs, targets, of_static)
    folded = slotted.bake()
    for (key, one), other in zip(folded.named_parameters(), static.parameters(), strict=True):
        assert one.shape == other.shape
        assert error(one, other) < 1e-10, key


@pytest.mark.parametrize("name", HOSTS)
def test_a_folded_model_has_wider_layers_equal_outputs_and_no_other_modules(name: str) -> None:
    host, chain, inputs, targets = made(name)
    names, count = [key for key, _ in host.named_modules()], sum(parameter.numel() for parameter in host.parameters())
    identities = [id(parameter) for parameter in host.parameters()]
    widened = Widened(host, chain)
    optimizers = [OPTIMIZERS["adamw"](host.parameters()), OPTIMIZERS["adamw"](widened.seed.parameters())]
    for _ in range(5):
        step(host, inputs, targets, *optimizers)
    widened.seed.alpha.fill_(0.7)
    host.eval()
    before = host(inputs)
    added = sum(parameter.numel() for parameter in widened.seed.parameters())
    folded = widened.fold().eval()
    assert error(folded(inputs), before) < 1e-12
    assert [key for key, _ in folded.named_modules()] == names
    assert [id(parameter) for parameter in folded.parameters()] == identities
    assert sum(parameter.numel() for parameter in folded.parameters()) == count + added


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_losses_after_a_late_fold_are_those_of_a_run_without_one(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    losses = []
    for is_folded in (False, True):
        host, chain, inputs, targets = made("chain of three")
        own = make(host.parameters())
        for _ in range(10):
            step(host, inputs, targets, own)
        widened = Widened(host, chain)
        of_seed = make(widened.seed.parameters())
        for _ in range(10):
            step(host, inputs, targets, own, of_seed)
        optimizers = [own, of_seed]
        if is_folded:
            widened.fold(of_seed, own)
            optimizers = [own]
        losses.append([step(host, inputs, targets, *optimizers) for _ in range(50)])
    plain, folded = losses
    assert plain[0] == pytest.approx(folded[0], rel=1e-10)  # the fold itself changes nothing
    # Adam's bias correction then belongs to the host's step, so later steps are close, not equal.
    assert max(abs(one - other) / (abs(one) + 1e-2) for one, other in zip(plain, folded, strict=True)) < (
        0.2 if optimizer == "adamw" else 1e-8
    )


BLOCK_BY_BLOCK = {
    "inverted residual": ["Conv2d"],  # the depthwise one
    "group norm": ["GroupNorm"],
    "weight norm": ["ParametrizedConv2d"],
    "heads": ["Dropout"],
    "grouped queries": ["Dropout"],
}


MANY = 400  # samples, so that the inputs of all layers are larger than their weights


def set_joined(seed: WidthSeed, is_joined: bool) -> None:
    seed.spec = msgspec.structs.replace(seed.spec, is_joined=is_joined)


def with_random_weights(*seeds: WidthSeed) -> None:
    """Draw the weights with which the host's outputs read the new units, which are zero at birth."""
    for seed in seeds:
        for part in seed.parts:
            if part.back is not None:
                nn.init.normal_(part.back.weight)


def assert_equal_as_one_layer(host: nn.Module, *seeds: WidthSeed) -> None:
    """Compare outputs, gradients and statistics of a host whose seeds are computed block by block, and as parts of wide layers."""
    inputs = torch.randn(MANY, 3, 8, 8)
    start, found = copy.deepcopy(host.state_dict()), list[list[Tensor]]()
    tensors = [*host.parameters(), *(parameter for seed in seeds for parameter in seed.parameters())]
    for is_joined in (False, True):
        for seed in seeds:
            set_joined(seed, is_joined)
            for part in seed.parts:
                if isinstance(part.own, nn.BatchNorm2d):
                    part.own.reset_running_stats()
        host.load_state_dict(start)
        gradients = torch.autograd.grad(host.train()(inputs).square().sum(), tensors)
        statistics = [*host.buffers(), *(buffer for seed in seeds for buffer in seed.buffers())]
        found.append([*gradients, *(buffer.double().clone() for buffer in statistics), host.eval()(inputs)])
    for one, other in zip(*found, strict=True):
        assert error(one, other) < 1e-10


def joined_modules(host: nn.Module, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the modules that are computed together with their seeds in a pass, in their order."""
    found: list[nn.Module] = []
    compute = width.compute_joined
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(width, "compute_joined", lambda module, *others: found.append(module) or compute(module, *others))
        host(inputs)
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_a_joined_seed_is_computed_as_part_of_wide_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, chain, *_ = made(name)
    widened = Widened(host, chain)
    with_random_weights(widened.seed)
    assert_equal_as_one_layer(host, widened.seed)
    joined = joined_modules(host, torch.randn(MANY, 3, 8, 8), monkeypatch)
    apart = [type(patch.module).__name__ for patch in widened.patches.values() if patch.module not in joined]
    assert apart == BLOCK_BY_BLOCK.get(name, [])


def test_a_seed_is_not_joined_to_a_layer_whose_weights_are_larger_than_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    host, chain, inputs, _ = made("chain of three")
    widened = Widened(host, chain)
    set_joined(widened.seed, True)
    host.eval()
    assert [type(module).__name__ for module in joined_modules(host, inputs[:1], monkeypatch)] == ["Conv2d", "BatchNorm2d", "BatchNorm2d"]


def test_a_new_seed_beside_a_joined_one_and_its_removal_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    host, chain, *_ = made("chain of three")
    first, inputs = Widened(host, chain), torch.randn(MANY, 3, 8, 8)
    with_random_weights(first.seed)
    set_joined(first.seed, True)
    host.eval()
    before = host(inputs)
    second = planted_beside(first, chain, kept_units([(first.seed.spec.wide, True)]))
    assert len(joined_modules(host, inputs, monkeypatch)) == len(first.patches)
    assert torch.equal(host(inputs), before)
    with_random_weights(second)
    assert not torch.equal(host(inputs), before)
    second.alpha.fill_(0.0)
    assert torch.equal(host(inputs), before)
    second.connect(first.patches, False)
    assert torch.equal(host(inputs), before)


@pytest.mark.parametrize(("affine", "tracks", "is_switched_off"), [(False, True, False), (True, False, False), (True, True, True)])
def test_a_joined_batch_norm_is_computed_as_torch_does(affine: bool, tracks: bool, is_switched_off: bool) -> None:
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=tracks, momentum=0.3)
    host = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 5))
    inputs = torch.randn(MANY, 3, 8, 8)
    host(inputs)
    norm.track_running_stats = tracks and not is_switched_off
    widened = Widened(host, chain_in(host, inputs[:2], 1))
    with_random_weights(widened.seed)
    assert_equal_as_one_layer(host, widened.seed)
    before = host(inputs)
    folded = widened.fold()
    assert error(folded(inputs), before) < 1e-10


def test_a_fold_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    host, chain, inputs, _ = made("chain of three")
    widened = Widened(host, chain)
    before = copy.deepcopy(host.state_dict())

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(folding, "_fold_own", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        widened.fold()
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.state_dict().items())
    host(inputs)


def test_a_folded_layer_keeps_its_memory_format() -> None:
    host, chain, *_ = made("chain of three")
    folded = Widened(host.to(memory_format=torch.channels_last), chain).fold()
    assert folded[4].weight.is_contiguous(memory_format=torch.channels_last)
    assert not folded[4].weight.is_contiguous()


def test_a_layer_whose_forward_the_user_replaced_is_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 5))
    inputs = torch.randn(MANY, 3, 8, 8)
    chain = chain_in(host, inputs[:2], 1)
    host[1].forward = lambda x, layer=host[1]: 2 * nn.Linear.forward(layer, x)
    widened = Widened(host, chain)
    set_joined(widened.seed, True)
    assert joined_modules(host, inputs, monkeypatch) == [host[3]]


def planted_beside(first: Widened, chain: tuple[Units, ...], kept: dict[str, tuple[int, int]] | None = None) -> WidthSeed:
    """Connect a second seed to the host of a first one. `kept` are the units of the first that it reads, as those of the host."""
    plan = plan_of(chain, [units.added(0.5) for units in chain], kept)
    second = WidthSeed(PLACE, "widen_50", first.modules, plan, random_seed=2, order=1)
    second.alpha.fill_(1.0)
    for one in plan:
        if one.module not in first.patches:
            first.patches[one.module] = WidePatch()
            first.patches[one.module].attach(first.modules[one.module])
    second.connect(first.patches, True)
    return second


def test_two_seeds_that_grew_apart_fold_into_one_layer_with_zero_blocks_between_them() -> None:
    host, _, inputs, _ = made("pair")
    units = find_units(host, inputs[:2])[0]
    first = Widened(host, (units[0],))
    second = planted_beside(first, (units[1],))
    with_random_weights(first.seed, second)
    assert_equal_as_one_layer(host, first.seed, second)
    before = host(inputs)
    for seed in (first.seed, second):
        seed.connect(first.patches, False)
    for patch in first.patches.values():
        patch.detach()
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in (host, first.seed, second)]
    fold(first.modules, [first.seed, second])
    assert error(host(inputs), before) < 1e-12
    assert not host[4].weight[6:, 4:].any()
    # The zero blocks are weights of the folded model, and count.
    between = cost_between([(first.seed.spec.wide, units[:1]), (second.spec.wide, units[1:2])])
    assert between.parameters == sum(parameter.numel() for parameter in host.parameters()) - sum(sizes) == 3 * 2 * 9


def test_two_seeds_of_the_same_units_are_computed_as_one_layer_if_the_second_reads_the_first() -> None:
    host, chain, *_ = made("chain of three")
    first = Widened(host, chain)
    second = planted_beside(first, chain, kept_units([(first.seed.spec.wide, True)]))
    with_random_weights(first.seed, second)
    assert any(plan.seen_inputs and plan.seen_outputs for plan in second.spec.wide)
    assert cost_between([(seed.spec.wide, chain) for seed in (first.seed, second)]) == Cost(0, 0)
    assert_equal_as_one_layer(host, first.seed, second)


def test_a_disconnected_seed_leaves_no_trace() -> None:
    host, chain, inputs, _ = made("chain of three")
    plain = copy.deepcopy(host)
    widened = Widened(host, chain)
    with_random_weights(widened.seed)
    assert not torch.equal(host(inputs), plain(inputs))
    host.load_state_dict(plain.state_dict())
    widened.seed.connect(widened.patches, False)
    assert torch.equal(host(inputs), plain(inputs))


@pytest.mark.parametrize("shared_by", [1, 2])
def test_new_heads_look_at_no_later_position_and_decode_from_the_cache_as_in_a_full_pass(shared_by: int) -> None:
    torch.manual_seed(0)
    host, tokens = Attention(8, heads=4, shared_by=shared_by).eval(), torch.randn(2, 6, 8)
    (units,) = find_units(host, tokens)[0]
    plain = host(tokens)
    widened = Widened(host, (units,))
    for part in widened.seed.parts:
        if part.back is not None:
            nn.init.normal_(part.back.weight)

    def decoded() -> Tensor:
        cache: list[Tensor] = []
        outputs = torch.cat([host(tokens[:, position : position + 1], cache) for position in range(6)], 1)
        assert cache[0].shape[1] == 6 // shared_by  # heads of keys: four and two more, or half of them
        return outputs

    full = host(tokens)
    assert error(full, plain) > 0.1
    changed = tokens.clone()
    changed[:, 3] += 1
    assert torch.equal(host(changed)[:, :3], full[:, :3])
    assert error(decoded(), full) < 1e-12
    widened.fold()
    assert error(host(tokens), full) < 1e-12
    assert error(decoded(), full) < 1e-12


class DrawingBlock(nn.Module):
    """A block of BERT: attention by torch's function or by hand, and dropouts that are functions, before norms."""

    def __init__(self, width: int, *, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = DrawingAttention(width, heads, by_hand=by_hand), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + dropout(self.attention(x), 0.3, self.training))
        hidden = dropout(gelu(self.up(x)), p=0.3, training=self.training)
        result: Tensor = self.norm2(x + self.down(hidden))
        return result


class DrawingAttention(nn.Module):
    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.size, self.by_hand = width // heads, by_hand
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.by_hand:
            weights = dropout((query @ key.transpose(2, 3) / self.size**0.5).softmax(-1), p=0.3, training=self.training)
            mixed = weights @ value
        else:
            mixed = scaled_dot_product_attention(query, key, value, dropout_p=0.3 if self.training else 0.0)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class DrawingBert(nn.Module):
    def __init__(self, *, by_hand: bool, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(DrawingBlock(12, heads=3, by_hand=by_hand) for _ in range(2))
        self.head, self.is_checkpointed = nn.Linear(12, 4), is_checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        result: Tensor = self.head(x)
        return result


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["torch's attention", "attention by hand"])
def test_new_units_draw_no_random_numbers_of_the_host(by_hand: bool, is_checkpointed: bool) -> None:
    """In training mode, outputs and gradients of the host are those without the seeds, as long as these change nothing."""
    torch.manual_seed(0)
    host = DrawingBert(by_hand=by_hand, is_checkpointed=is_checkpointed).train()
    ids = torch.randint(20, (3, 7))

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        output = host(ids)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), list(host.parameters())), torch.rand(3)]

    before = step()
    slotted = add_slots(host, ids, slots=["blocks.0.attention.value", "blocks.1.up", "blocks.1.attention.query"])
    assert all(torch.equal(one, other) for one, other in zip(before, step(), strict=True))  # idle
    for count, name in enumerate(slotted.slots):
        for alpha in (0.0, 1.0):  # the host reads the new units by weights of zero
            slotted.slot(name).plant(slotted.new_seed(name, "widen_100", random_seed=1), connected=True)
            slotted.slot(name).alpha = alpha
            for one, other in zip(before, step(), strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (count, name)
    seeds = [slot.seed for slot in slotted.slots.values() if slot.seed is not None]
    with_random_weights(*(seed for seed in seeds if isinstance(seed, WidthSeed)))
    after = step()
    assert torch.equal(after[-1], before[-1])  # the same numbers are left
    assert not torch.allclose(after[0], before[0], rtol=1e-3)
    assert all(bool(gradient.any()) for gradient in torch.autograd.grad(host(ids).square().sum(), list(seeds[0].parameters())))
    for slot in slotted.slots.values():
        slot.plant(None)
    assert all(torch.equal(one, other) for one, other in zip(before, step(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
