"""A grower in a user's own loop: optimiser, schedule, samples, errors and resuming."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from esper.config import ConfigError
from esper.gradients import GradientStats
from esper.growth import Grower, GrowthError, add_slots
from esper.growth.config import HeuristicConfig, LifecycleConfig, SeedOptimizerConfig
from esper.growth.lifecycle import history
from esper.growth.lifecycle.stages import Fossilize, Germinate, Prune, Stage
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SLOTS,
    Script,
    adamw,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
    plain_losses,
    sgd,
    snapshot,
)

GROW = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_grower_that_never_grows_equals_the_plain_loop_bit_for_bit(make_optimizer) -> None:
    plain = make_host()
    optimizer = make_optimizer(plain)
    torch.manual_seed(7)
    expected = plain_losses(plain, optimizer, make_data(), epochs=3)
    loop = make_loop("never", make_optimizer=make_optimizer)
    torch.manual_seed(7)
    loop.epoch(epochs=3)
    assert loop.losses == expected
    assert_same(snapshot(loop.host, loop.optimizer), snapshot(plain, optimizer))


def test_a_grower_added_in_mid_training_leaves_adam_and_one_cycle_unchanged() -> None:
    def trained(grows: bool) -> tuple[nn.Module, torch.optim.Optimizer, OneCycleLR, list[float]]:
        host = make_host()
        optimizer = torch.optim.Adam(host.parameters(), lr=0.01)
        schedule = OneCycleLR(optimizer, max_lr=0.05, total_steps=40)
        losses, grower, call = [], None, host
        torch.manual_seed(3)
        for step, (x, y) in enumerate(make_data() * 4):
            if step == 6 and grows:
                slotted = add_slots(host, x[:2], slots=list(SLOTS))
                grower, call = Grower(slotted, optimizer, scheduler=schedule, controller="never"), slotted
            loss = cross_entropy(call(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if grower is not None:
                grower.after_step(loss)
        return host, optimizer, schedule, losses

    (host, optimizer, schedule, losses), (plain, plain_optimizer, plain_schedule, expected) = trained(True), trained(False)
    assert losses == expected
    assert_same(snapshot(host, optimizer), snapshot(plain, plain_optimizer))
    assert schedule.get_last_lr() == plain_schedule.get_last_lr()


@pytest.mark.slow
def test_a_seed_follows_the_hosts_schedule_and_changes_neither_it_nor_the_optimiser() -> None:
    host = make_host()
    groups = [
        {"params": host.first.parameters(), "lr": 0.02},
        {"params": [*host.after.parameters(), *host.second.parameters(), *host.head.parameters()], "lr": 0.01},
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 0.1**epoch])
    settings = config(seed_optimizer=SeedOptimizerConfig(learning_rate_factor=3.0))
    loop = make_loop(Script(GROW), settings, host=host, make_optimizer=lambda model: optimizer)
    keys = len(optimizer.state_dict()["param_groups"][0]["params"]), len(optimizer.state_dict()["param_groups"][1]["params"])
    for epoch in range(3):
        loop.epoch()
        rates = [loop.grower.lifecycles.slots[name].learner.optimizers[0].param_groups[0]["lr"] for name in SLOTS]
        assert rates == pytest.approx([3 * 0.02 * 0.5**epoch, 3 * 0.01 * 0.1**epoch])
        schedule.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == list(keys)
    optimizer.load_state_dict(optimizer.state_dict())  # its groups are other objects afterwards
    optimizer.param_groups[0]["lr"] = 0.5
    loop.epoch()
    assert loop.grower.lifecycles.slots["first"].learner.optimizers[0].param_groups[0]["lr"] == 1.5


@pytest.mark.slow
def test_a_seed_that_joins_a_host_in_training_warms_up_over_the_epochs_that_are_set() -> None:
    settings = config(seed_optimizer=SeedOptimizerConfig(warmup_epochs=2.0))
    loop = make_loop(Script({1: GROW[0]}), settings, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    loop.epoch()
    learner = loop.grower.lifecycles.slots["first"].learner
    rates = []
    for _ in range(3):
        for x, y in loop.data:  # of 4 batches, so the warm-up has 8 steps
            loop.step(x, y)
            rates.append(learner.optimizers[0].param_groups[0]["lr"])
        loop.grower.after_epoch(loop.evaluate)
    assert rates == pytest.approx([0.5 * min(step / 9, 1.0) for step in range(1, 13)])


def test_a_seed_learns_in_a_slot_whose_module_is_frozen_or_has_no_parameters() -> None:
    host = make_host()
    host.first.requires_grad_(False)
    trained = [parameter for parameter in host.parameters() if parameter.requires_grad]
    loop = make_loop(
        Script({0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="after", reason="test", blueprint="mlp")]}),
        host=host,
        make_optimizer=lambda model: torch.optim.SGD(trained, lr=0.05),
        slots=["first", "after"],
    )
    before = [parameter.detach().clone() for parameter in host.first.parameters()]
    loop.epoch(epochs=2)
    assert_same([parameter.detach() for parameter in host.first.parameters()], before)
    for backend in loop.grower.lifecycles.slots.values():
        assert backend.record.gradients.mean_norm > 0
        assert backend.learner.optimizers[0].param_groups[0]["lr"] == 0.05


def test_clipping_over_the_models_parameters_excludes_seeds() -> None:
    loop = make_loop(Script(GROW))
    x, y = loop.data[0]
    loop.grower.begin()
    loss = cross_entropy(loop.slotted(x), y)
    loss.backward()
    host_norm = torch.linalg.vector_norm(torch.cat([parameter.grad.reshape(-1) for parameter in loop.host.parameters()]))
    seed = loop.slotted.slots["first"].seed
    before = [parameter.grad.clone() for parameter in seed.parameters() if parameter.grad is not None]
    assert torch.allclose(clip_grad_norm_(loop.host.parameters(), 1e-3), host_norm)
    assert_same([parameter.grad for parameter in seed.parameters() if parameter.grad is not None], before)


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_accumulated_gradients_equal_those_of_one_large_batch(lifecycle) -> None:
    x, y = make_data(1, size=16, dtype=torch.float64)[0]

    def trained(parts: int) -> tuple[dict, dict]:
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        loop = make_loop(Script(GROW, probes=[0]), config(lifecycle), host=host, dtype=torch.float64)
        loop.grower._steps.shadow._can_replay = False  # what is replayed is of the weights before the step
        loop.grower.begin()
        for _ in range(5):
            for small_x, small_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = cross_entropy(loop.host(small_x), small_y) / parts
                loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.grower.after_step(loss * parts, closure=lambda: cross_entropy(loop.host(x), y))
        return host.state_dict(), {name: loop.slotted.slots[name].seed.state_dict() for name in SLOTS}

    (host, seeds), (other_host, other_seeds) = trained(1), trained(4)
    for name, value in host.items():
        torch.testing.assert_close(value, other_host[name], rtol=1e-9, atol=1e-12)
    for slot in SLOTS:
        for name, value in seeds[slot].items():
            torch.testing.assert_close(value, other_seeds[slot][name], rtol=1e-9, atol=1e-12)


class Halved(torch.optim.SGD):
    """A class of the user's own, with a setting of its own."""

    def __init__(self, parameters, lr: float, share: float = 0.5) -> None:
        super().__init__(parameters, lr=lr * share)
        self.defaults["share"] = share
        for group in self.param_groups:
            group["share"] = share


KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Halved": lambda parameters: Halved(parameters, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_seeds_learn_by_an_optimiser_of_the_hosts_kind_with_its_settings(kind: str) -> None:
    loop = make_loop(Script(GROW), make_optimizer=lambda model: KINDS[kind](model.parameters()))
    loop.epoch(epochs=2)
    own = loop.grower.lifecycles.slots["first"].learner.optimizers[0]
    assert type(own) is type(loop.optimizer)
    settings = {name: value for name, value in loop.optimizer.param_groups[0].items() if name not in ("params", "lr")}
    assert {name: own.param_groups[0][name] for name in settings} == settings
    assert own.state or kind == "Halved"


class Demanding(torch.optim.SGD):
    def __init__(self, parameters, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda host: torch.optim.LBFGS(host.parameters()), "LBFGS"), (lambda host: Demanding(host.parameters(), host), "Demanding")],
)
def test_an_optimiser_that_cannot_train_seeds_is_refused_and_another_can_be_given(make, words: str) -> None:
    host = make_host()
    slotted = add_slots(host, torch.zeros(2, 6), slots=["first"])
    with pytest.raises(GrowthError, match=f"{words}.*seed_optimizer=lambda"):
        Grower(slotted, make(host))
    own = lambda parameters, learning_rate: torch.optim.SGD(parameters, lr=learning_rate)  # noqa: E731
    grower = Grower(
        slotted, make(host), controller=Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}), seed_optimizer=own
    )
    grower.begin()
    assert type(grower.lifecycles.slots["first"].learner.optimizers[0]) is torch.optim.SGD


def test_a_new_seed_in_a_used_slot_has_a_fresh_optimiser() -> None:
    script = Script(
        {
            0: [Germinate(slot="first", reason="test", blueprint="mlp")],
            2: [Prune(slot="first", reason="test")],
            5: [Germinate(slot="first", reason="test", blueprint="mlp")],
        }
    )
    loop = make_loop(script)
    loop.epoch(epochs=2)
    old = loop.grower.lifecycles.slots["first"].learner
    assert old.optimizers[0].state
    loop.epoch(epochs=3)
    backend = loop.grower.lifecycles.slots["first"]
    assert backend.stage is Stage.HOLDING
    assert backend.learner is not old
    assert not backend.learner.optimizers[0].state
    assert backend.record.gradients is None
    assert backend.record.age == 0


def test_gradient_statistics_are_of_unclipped_global_norms_and_healthy_ones_are_near_one() -> None:
    settings = config(seed_optimizer=SeedOptimizerConfig(max_grad_norm=1e-3))
    loop = make_loop(Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}), settings)
    loop.grower.begin()
    norms = []
    for x, y in loop.data:
        loss = cross_entropy(loop.slotted(x), y)
        loss.backward()
        seed = loop.slotted.slots["first"].seed
        gradients = [parameter.grad for parameter in seed.parameters() if parameter.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(loss)
        assert all(parameter.grad is None for parameter in seed.parameters())
    loop.grower.after_epoch(loop.evaluate)
    stats = loop.grower.lifecycles.slots["first"].record.gradients
    assert stats == GradientStats(len(norms), pytest.approx(sum(norms) / len(norms)), pytest.approx(max(norms)), stats.health, 0)
    assert stats.max_norm > 1e-3
    assert stats.health == 1.0


@pytest.mark.parametrize(
    ("norm", "health"),
    [(0.0, 0.5), (1e-9, 0.5), (1e-6, 0.75), (1e-3, 1.0), (10.0, 1.0), (1e3, 0.5), (1e9, 0.0), (float("inf"), 0.0), (float("nan"), 0.0)],
)
def test_a_seed_whose_gradients_vanish_is_half_healthy_and_one_whose_gradients_explode_is_not_at_all(norm: float, health: float) -> None:
    loop = make_loop(Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}))
    loop.grower.begin()
    learner = loop.grower.lifecycles.slots["first"].learner
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter)
    learner.parameters[0].grad.view(-1)[0] = norm
    learner.step()
    stats = learner.report()
    assert stats.health == pytest.approx(health, abs=1e-6)
    assert stats.steps == 1
    assert stats.skipped == (0 if norm < float("inf") else 1)


@pytest.mark.slow
def test_an_evaluation_that_fails_changes_nothing_and_can_be_repeated() -> None:
    def until_the_end(fails: bool):
        torch.manual_seed(0)
        script = Script(
            {0: [Germinate(slot="first", reason="test", blueprint="mlp")], 2: [Fossilize(slot="first", reason="test")]}, probes=[0, 1]
        )
        loop = make_loop(script, config(probe_steps=2))
        for _ in range(3):
            for x, y in loop.data:
                loop.step(x, y)
            if fails:
                before = snapshot(loop.host, loop.optimizer)
                epoch, told = loop.grower.epoch, len(loop.events)
                with pytest.raises(ZeroDivisionError):
                    loop.grower.after_epoch(lambda: (loop.evaluate(), 1 // 0))
                assert loop.host.training
                assert (loop.grower.epoch, len(loop.events)) == (epoch, told)
                assert_same(snapshot(loop.host, loop.optimizer), before)
            loop.grower.after_epoch(loop.evaluate)
        return loop, [event for event in loop.events if event.kind != "epoch_ended"]

    (loop, events), (other, expected) = until_the_end(True), until_the_end(False)
    assert events == expected
    assert any(event.kind == "probed" for event in events)
    assert_same(snapshot(loop.host), snapshot(other.host))
    assert loop.grower.history.val_losses == other.grower.history.val_losses


def test_an_error_in_a_listener_is_raised_after_the_epochs_work_is_done() -> None:
    def listen(event) -> None:
        if event.kind == "stage_entered":
            raise RuntimeError("nobody home")

    host = make_host()
    optimizer = sgd(host)
    slotted = add_slots(host, torch.zeros(2, 6), slots=["first"])
    grower = Grower(
        slotted,
        optimizer,
        controller=Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}),
        config=config(),
        on_event=listen,
    )
    with pytest.raises(RuntimeError, match="nobody home"):
        grower.begin()
    backend = grower.lifecycles.slots["first"]
    assert backend.stage is Stage.HOLDING
    assert backend.slot.is_connected
    assert backend.slot.alpha == 1.0


def test_a_decision_about_an_unknown_slot_or_a_slot_twice_is_refused() -> None:
    loop = make_loop(Script({0: [Germinate(slot="frist", reason="test", blueprint="mlp")]}))
    with pytest.raises(GrowthError, match="no slot is named 'frist'; the slots of this model are first, second"):
        loop.grower.begin()
    loop = make_loop(
        Script({0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="first", reason="test", blueprint="norm")]})
    )
    with pytest.raises(GrowthError, match="decided twice about one slot"):
        loop.grower.begin()


def test_a_loss_that_is_not_a_scalar_and_an_epoch_without_steps_are_refused() -> None:
    loop = make_loop()
    with pytest.raises(GrowthError, match=r"shape \[3\]; take its mean"):
        loop.grower.after_step(torch.ones(3))
    with pytest.raises(GrowthError, match="without a single after_step"):
        loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.epoch == 0


def test_baking_leaves_nothing_of_the_grower_in_the_model() -> None:
    loop = make_loop(Script(GROW, probes=[0, 1, 2]), config(QUICK_SHADOW))
    names = list(loop.host.state_dict())
    loop.epoch(epochs=2)
    model = loop.grower.bake()
    assert model is loop.host
    assert list(model.state_dict()) == names
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_samples_are_counted_without_being_passed_by_the_loop(lifecycle) -> None:
    def grown(tells: bool) -> Grower:
        torch.manual_seed(5)
        host = make_host()
        optimizer = adamw(host)
        slotted = add_slots(host, torch.zeros(2, 6), slots=list(SLOTS))
        slotted(torch.zeros(9, 6))  # of no concern to a grower that is made later
        rules = HeuristicConfig(evidence_of_host=0.1)
        grower = Grower(slotted, optimizer, config=config(lifecycle, probe_steps=2, heuristic=rules), epochs=12)
        data, val = make_data(5, size=30), make_data(3, seed=2)

        def evaluate() -> list[torch.Tensor]:
            return [cross_entropy(slotted(x), y).detach() for x, y in val]  # with gradients on

        for _ in range(6):
            for x, y in data:
                for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):  # accumulated
                    loss = cross_entropy(slotted(part_x), part_y)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                closure = lambda: cross_entropy(slotted(x), y)  # noqa: B023, E731
                grower.after_step(loss, closure=closure, **({"samples": len(x)} if tells else {}))
            grower.after_epoch(evaluate)
        return grower

    quiet, telling = grown(False), grown(True)
    assert quiet.ledger == telling.ledger
    assert quiet.state().samples_per_epoch == telling.state().samples_per_epoch == 150
    assert quiet.history.flops == telling.history.flops > 0
    assert quiet.ledger.seeds  # the heuristic does not grow where it does not know how much data there is


@pytest.mark.slow
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_a_loop_that_calls_the_model_grows_as_one_that_calls_the_slotted_model(lifecycle) -> None:
    def grown(*, use_slotted: bool) -> tuple[Grower, list[Tensor]]:
        torch.manual_seed(5)
        host = make_host()
        optimizer = adamw(host)
        slotted = add_slots(host, torch.zeros(2, 6), slots=list(SLOTS))
        rules = HeuristicConfig(longer_training=1.0, evidence_of_host=0.1)
        grower = Grower(slotted, optimizer, config=config(lifecycle, probe_steps=2, heuristic=rules), epochs=12)
        call = slotted if use_slotted else host
        data, val = make_data(5, size=30), make_data(3, seed=2)
        for _ in range(6):
            for x, y in data:
                loss = cross_entropy(call(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(call(x), y))
            with torch.no_grad():
                grower.after_epoch(lambda: [cross_entropy(call(x), y) for x, y in val])
        return grower, [*host.parameters(), *(weight for slot in slotted.slots.values() if slot.seed for weight in slot.seed.parameters())]

    (one, weights), (other, others) = grown(use_slotted=False), grown(use_slotted=True)
    assert one.ledger == other.ledger
    assert one.ledger.seeds
    assert one.history.flops == other.history.flops > 0
    assert one.state().samples_per_epoch == 150
    assert_same(weights, others)  # what is recorded for the shadow is the same too


def test_an_epoch_with_an_unknown_number_of_samples_is_reported_once() -> None:
    loop = make_loop("never")
    for _ in loop.data:
        loop.grower.after_step(1.0)
    with pytest.warns(RuntimeWarning, match=r"number of samples of this epoch is unknown.* after_step\(loss, samples=len\(x\)\)"):
        loop.grower.after_epoch(loop.evaluate)
    for _ in loop.data:
        loop.grower.after_step(1.0)
    loop.grower.after_epoch(loop.evaluate)


class Odd(nn.Module):
    """Takes anything beside what it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, kind, scale=None, *, x=None):
        return self.body(torch.ones(4, 6) if x is None else x)


def test_samples_are_counted_in_calls_with_unusual_arguments() -> None:
    slotted = add_slots(Odd(), {"kind": "a", "x": torch.zeros(2, 6)}, slots=["body"])
    for arguments, keywords, expected in [
        (("a",), {}, 0),
        (("a", torch.tensor(2.0)), {"x": torch.zeros(5, 6)}, 5),
        (({"deep": [torch.zeros(3, 1)]}, None), {"x": torch.zeros(5, 6)}, 3),
        ((object(),), {"x": torch.zeros(0, 6)}, 0),
    ]:
        slotted.calls.samples = 0
        slotted(*arguments, **keywords)
        assert slotted.calls.samples == expected
    with torch.no_grad():
        slotted("a", x=torch.zeros(5, 6))
    assert slotted.calls.samples == 0


def test_an_optimiser_of_another_model_is_refused() -> None:
    host = make_host()
    slotted = add_slots(host, torch.zeros(2, 6), slots=["first"])
    with pytest.raises(GrowthError, match=r"holds none of the model's parameters; make it for this model"):
        Grower(slotted, sgd(copy.deepcopy(host)))
    assert slotted.calls.recording is None
    host.requires_grad_(False)
    host.head.requires_grad_(True)
    Grower(slotted, torch.optim.SGD(host.head.parameters(), lr=0.1))  # one that trains all that is not frozen is not


def test_a_model_without_slots_and_settings_that_are_no_config_are_refused() -> None:
    host = make_host()
    with pytest.raises(GrowthError, match=r"got a Host; call add_slots first"):
        Grower(host, sgd(host))
    slotted = add_slots(host, torch.zeros(2, 6), slots=["first"])
    with pytest.raises(GrowthError, match=r"config is a dict; pass config=GrowthConfig"):
        Grower(slotted, sgd(host), config={"probe_steps": 3})


@pytest.mark.parametrize("how", ["bake", "remove", "bake by the grower"])
def test_a_grower_whose_slots_were_removed_is_refused_and_does_nothing(how: str) -> None:
    loop = make_loop(Script(GROW))
    loop.epoch()
    {"bake": loop.slotted.bake, "remove": loop.slotted.remove, "bake by the grower": loop.grower.bake}[how]()
    ledger = copy.deepcopy(loop.grower.ledger)
    for call in (loop.grower.begin, lambda: loop.grower.after_step(torch.tensor(1.0)), lambda: loop.grower.after_epoch(loop.evaluate)):
        with pytest.raises(GrowthError, match="the slots were removed"):
            call()
    assert loop.grower.ledger == ledger
    assert loop.grower.history.steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["slotted", "model"])
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_a_seed_that_germinates_after_a_cast_of_the_host_has_its_dtype(mover: str, lifecycle) -> None:
    actions = {0: [Germinate(slot="first", reason="test", blueprint="mlp")], 1: [Germinate(slot="after", reason="test", blueprint="norm")]}
    loop = make_loop(Script(actions, probes=[0, 1]), config(lifecycle, probe_steps=2), slots=["first", "after", "second"])
    (loop.slotted if mover == "slotted" else loop.host).to(torch.float64)
    loop.data, loop.val = make_data(dtype=torch.float64), make_data(3, seed=2, dtype=torch.float64)
    loop.epoch(epochs=3)
    for name in ("first", "after"):  # one has parameters, the other only such of a norm
        assert {parameter.dtype for parameter in loop.slotted.slots[name].seed.parameters()} == {torch.float64}
    assert sum(event.kind == "probed" for event in loop.events) == 2
    loop.grower.after_step(torch.tensor(float("nan")), closure=lambda: None)
    assert loop.grower.rollbacks == 1
    loop.epoch()


def test_a_target_of_alpha_above_1_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha_target: expected a float > 0 and <= 1, got 1.5"):
        LifecycleConfig(raise_mode="shadow", alpha_target=1.5)


@pytest.mark.slow
def test_a_copy_of_a_grower_is_baked_on_its_own() -> None:
    loop = make_loop(Script(GROW))
    loop.epoch(epochs=2)
    names = list(loop.host.state_dict())
    baked = copy.deepcopy(loop.grower).bake()
    assert baked is not loop.host
    assert list(loop.host.state_dict()) == names
    loop.epoch()
    assert loop.grower.epoch == 3


@pytest.mark.parametrize("has_events", [True, False])
def test_the_time_of_a_step_is_taken_by_events_of_the_device_without_a_wait_of_its_own(
    has_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Watch:
        def __init__(self, device: torch.device) -> None:
            self.has_events = has_events

        def mark(self) -> None:
            calls.append("mark")

        def seconds(self) -> list[float]:
            calls.append("seconds")
            return [6.0]

    monkeypatch.setattr(history, "Stopwatch", Watch)
    steps = history.History(checks_per_epoch=2)
    read = steps._read
    monkeypatch.setattr(steps, "_read", lambda: (calls.append("read"), read())[1])
    steps.start_clock(torch.device("cpu"))
    for loss in (3.0, 2.0, 1.0):
        steps.note_step(torch.tensor(loss), samples=4, flops_per_sample=1)
    assert steps.chunks() == [2.5, 1.0]
    assert steps.step_seconds == 2.0
    # An event is recorded before the losses are read, which waits for it; without events the clock is read once the steps are done.
    assert calls == (["mark", "mark", "read", "seconds"] if has_events else ["mark", "read", "mark", "seconds"])
