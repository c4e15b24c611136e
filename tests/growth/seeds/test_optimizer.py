"""Seeds follow the user's optimiser: they step with it and drop gradients with it."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from esper.growth import Grower, GrowthError, add_slots
from esper.growth.lifecycle.stages import Germinate
from esper.growth.seeds.seed import Seed
from tests.growth.builders import QUICK_SHADOW, SAM, Loop, Script, adamw, assert_same, config, make_host, make_loop, sgd, snapshot

GROW = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}
JUNK = 100 * torch.ones(8, 6)


def make_loop_without_dropout(make_optimizer: Callable[[nn.Module], Optimizer] = sgd, **options: Any) -> Loop:
    """Without dropout, so that a pass that is thrown away draws no random numbers; batch norms would remember it."""
    loop = make_loop(Script(GROW), host=make_host(dropout=0.0, norm=False), make_optimizer=make_optimizer, **options)
    loop.grower.begin()
    return loop


def loss_of(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(loop.slotted(x), y)


def seed_of(loop: Loop, name: str = "first") -> Seed:
    seed = loop.slotted.slots[name].seed
    assert seed is not None
    return seed


def weights(loop: Loop) -> list[Tensor]:
    """Return the weights of the host and of all seeds."""
    modules = [loop.host, *(slot.seed for slot in loop.slotted.slots.values() if slot.seed is not None)]
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def forget_by_hand(loop: Loop) -> None:
    for parameter in loop.host.parameters():
        parameter.grad = None


WAYS: dict[str, Callable[[Loop], None]] = {
    "optimizer.zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda loop: loop.host.zero_grad(),
    "model.zero_grad to zeros": lambda loop: loop.host.zero_grad(False),
    "grad = None": forget_by_hand,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_discarded_batch_leaves_no_gradient_in_the_seed(way: str) -> None:
    def trained(*, skips: bool) -> list[Tensor]:
        loop = make_loop_without_dropout(adamw)
        for x, y in loop.data:
            if skips:
                loss_of(loop, JUNK, y).backward()
                WAYS[way](loop)
            loop.step(x, y)
        return weights(loop)

    assert same(trained(skips=True), trained(skips=False))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_dropped_between_forward_and_backward_are_dropped_in_the_seed(way: str) -> None:
    def trained(drop: Callable[[Loop], None]) -> list[Tensor]:
        loop = make_loop_without_dropout()
        for x, y in loop.data:
            loss = loss_of(loop, x, y)
            drop(loop)
            loss.backward()
            loop.optimizer.step()
            loop.grower.after_step(loss)
        return weights(loop)

    assert same(trained(WAYS[way]), trained(WAYS["optimizer.zero_grad"]))


def test_a_step_after_all_gradients_were_set_to_none_steps_nothing() -> None:
    loop = make_loop_without_dropout(adamw)
    loop.step(*loop.data[0])
    before = weights(loop)
    loss_of(loop, JUNK, loop.data[0][1]).backward()
    forget_by_hand(loop)
    loop.optimizer.step()
    assert same(weights(loop), before)
    assert not any(backend.learner.has_gradients for backend in loop.grower.lifecycles.slots.values())


def test_a_seed_keeps_its_gradient_where_only_some_of_the_hosts_are_set_to_none() -> None:
    loop = make_loop_without_dropout()
    loss_of(loop, *loop.data[0]).backward()
    loop.host.head.weight.grad = None
    loss_of(loop, *loop.data[1]).backward()
    expected = [parameter.grad for parameter in seed_of(loop).parameters()]
    loop.optimizer.step()
    assert expected[-1] is not None
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 1


def test_a_step_repeated_without_a_new_gradient_is_repeated_for_the_seed() -> None:
    loop = make_loop_without_dropout(lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    before = copy.deepcopy(seed_of(loop).state_dict())
    loss_of(loop, *loop.data[0]).backward()
    loop.optimizer.step()
    once = copy.deepcopy(seed_of(loop).state_dict())
    loop.optimizer.step()
    for name, value in seed_of(loop).named_parameters():
        torch.testing.assert_close(value.detach() - before[name], 2 * (once[name] - before[name]))


@pytest.mark.slow
def test_calling_after_step_for_every_accumulated_part_equals_calling_it_once() -> None:
    def trained(*, per_part: bool) -> list[Tensor]:
        loop = make_loop_without_dropout(adamw)
        for x, y in loop.data * 2:
            for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
                loss = loss_of(loop, part_x, part_y) / 4
                loss.backward()
                if per_part and part_x is not x.chunk(4)[-1]:
                    loop.grower.after_step(loss * 4)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.grower.after_step(loss * 4)
        loop.grower.after_epoch(loop.evaluate)
        assert loop.grower.lifecycles.slots["first"].record.gradients.steps == 8
        return weights(loop)

    assert same(trained(per_part=True), trained(per_part=False))


def test_seeds_learn_without_after_step_and_the_end_of_the_epoch_reports_it() -> None:
    loop = make_loop_without_dropout()
    before = weights(loop)
    for x, y in loop.data:
        loss_of(loop, x, y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert not torch.equal(weights(loop)[-1], before[-1])
    with pytest.raises(GrowthError, match="without a single after_step"):
        loop.grower.after_epoch(loop.evaluate)


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_a_closure_in_the_optimisers_step_is_followed(kind: str) -> None:
    """The seed steps by the gradient of the closure's last call."""

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1) if kind == "SGD" else torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    loop = make_loop_without_dropout(make, seed_optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=0.1))
    x, y = loop.data[0]
    calls: list[list[Tensor]] = []
    before = [parameter.detach().clone() for parameter in seed_of(loop).parameters()]
    loss_of(loop, JUNK, y).backward()  # thrown away by the zero_grad in the closure

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loss_of(loop, x, y)
        loss.backward()
        calls.append([parameter.grad.clone() for parameter in seed_of(loop).parameters()])
        return loss

    loss = loop.optimizer.step(closure)
    loop.grower.after_step(loss)
    assert len(calls) == (1 if kind == "SGD" else 3)
    for now, then, gradient in zip(seed_of(loop).parameters(), before, calls[-1], strict=True):
        torch.testing.assert_close(now.detach(), then - 0.1 * gradient)


@pytest.mark.parametrize("given", ["SAM", "its base"])
@pytest.mark.parametrize("by", ["two steps", "a closure"])
def test_under_sam_the_seed_learns_by_the_gradient_of_the_perturbed_weights_alone(given: str, by: str) -> None:
    host = make_host(dropout=0.0, norm=False, dtype=torch.float64)
    sam = SAM(host.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    loop = make_loop(
        Script(GROW), host=host, make_optimizer=lambda model: sam if given == "SAM" else sam.base_optimizer, dtype=torch.float64
    )
    loop.grower.begin()
    twin, momentum = copy.deepcopy(loop.slotted), [torch.zeros_like(parameter) for parameter in seed_of(loop).parameters()]
    for x, y in loop.data:
        twin.model.load_state_dict(host.state_dict())
        twin.slots["first"].seed.load_state_dict(seed_of(loop).state_dict())
        twin.slots["second"].seed.load_state_dict(seed_of(loop, "second").state_dict())
        loss = loss_of(loop, x, y)
        loss.backward()
        if by == "two steps":
            sam.first_step()
            twin.model.load_state_dict(host.state_dict())
            loss_of(loop, x, y).backward()
            sam.second_step()
        else:

            def closure() -> None:
                twin.model.load_state_dict(host.state_dict())
                loss_of(loop, x, y).backward()  # noqa: B023

            sam.step(closure)
        gradients = torch.autograd.grad(cross_entropy(twin(x), y), list(twin.slots["first"].seed.parameters()))
        for index, parameter in enumerate(twin.slots["first"].seed.parameters()):
            momentum[index] = 0.9 * momentum[index] + gradients[index]
            torch.testing.assert_close(list(seed_of(loop).parameters())[index].detach(), parameter.detach() - 0.1 * momentum[index])
        loop.grower.after_step(loss)
    loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.lifecycles.slots["first"].record.gradients.steps == len(loop.data)


def test_the_step_of_another_optimiser_does_not_step_the_seed() -> None:
    """A generator grows; the discriminator's loss goes through it as well."""
    loop = make_loop_without_dropout()
    critic = nn.Linear(3, 1)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    before = copy.deepcopy(seed_of(loop).state_dict())
    critic(loop.slotted(JUNK)).mean().backward()
    other.step()
    other.zero_grad()
    assert_same(dict(seed_of(loop).state_dict()), dict(before))
    loop.optimizer.zero_grad()
    loss = -critic(loop.slotted(loop.data[0][0])).mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in seed_of(loop).parameters()]
    loop.optimizer.step()
    for (name, now), gradient in zip(seed_of(loop).named_parameters(), gradients, strict=True):
        torch.testing.assert_close(now.detach(), before[name] - 0.05 * gradient)


def test_a_gradient_penalty_leaves_nothing_behind() -> None:
    loop = make_loop_without_dropout()
    x, y = loop.data[0]
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loop.slotted(inputs).sum(), inputs, create_graph=True)
    loss = loss_of(loop, x, y) + slope.square().mean()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.grower.after_step(loss)
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 1
    assert not any(backend.learner.has_gradients for backend in loop.grower.lifecycles.slots.values())


class Twice(torch.optim.SGD):
    """Calls the step of its base class, which has hooks of its own as soon as there is another SGD."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimiser_whose_step_calls_that_of_its_base_class_steps_seeds_once() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    loop = make_loop_without_dropout(lambda model: Twice(model.parameters(), lr=0.1))
    loop.step(*loop.data[0])
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 1


class Fails(torch.optim.SGD):
    should_fail = False

    def step(self, closure: Any = None) -> Any:
        if self.should_fail:
            raise OSError("no step")
        return super().step(closure)


def test_after_a_step_that_failed_seeds_go_on_with_the_next() -> None:
    loop = make_loop_without_dropout(lambda model: Fails(model.parameters(), lr=0.1))
    loop.optimizer.should_fail = True
    with pytest.raises(OSError, match="no step"):
        loop.step(*loop.data[0])
    loop.optimizer.should_fail = False
    loop.grower.after_step(torch.tensor(1.0))
    loop.optimizer.zero_grad()
    loop.step(*loop.data[1])
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 1


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_schedule_made_before_or_after_the_grower_steps_seeds_once_at_the_rate_of_the_hosts_step(made: str) -> None:
    host = make_host(dropout=0.0, norm=False)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    schedules = [OneCycleLR(optimizer, max_lr=0.5, total_steps=10)] if made == "before" else []
    loop = make_loop(Script(GROW), host=host, make_optimizer=lambda model: optimizer)
    loop.grower.begin()
    schedule = schedules[0] if schedules else OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    learner = loop.grower.lifecycles.slots["first"].learner
    for x, y in loop.data:
        loss = loss_of(loop, x, y)
        loss.backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loop.grower.after_step(loss)
        assert learner.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert learner.report().steps == len(loop.data)


# State that stays unchanged


def ways_out(loop: Loop) -> dict[str, Callable[[], Any]]:
    return {"stop": loop.grower.stop, "bake": loop.grower.bake, "slotted.bake": loop.slotted.bake, "slotted.remove": loop.slotted.remove}


@pytest.mark.parametrize("way", ["stop", "bake", "slotted.bake", "slotted.remove"])
def test_closing_a_grower_leaves_nothing_in_the_optimiser_and_the_model(way: str) -> None:
    host = make_host()
    optimizer = sgd(host)
    before = set(vars(host)), set(vars(optimizer))
    loop = make_loop(Script(GROW), host=host, make_optimizer=lambda model: optimizer)
    loop.epoch()
    ways_out(loop)[way]()
    if way == "stop":
        loop.slotted.remove()
    assert (set(vars(host)), set(vars(optimizer))) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("way", ["stop", "slotted.remove"])
def test_a_zero_grad_that_the_user_replaced_is_restored(way: str) -> None:
    host = make_host()
    optimizer = sgd(host)
    calls: list[str] = []
    host.zero_grad = lambda set_to_none=True: calls.append("model")
    optimizer.zero_grad = lambda set_to_none=True: calls.append("optimizer")
    own = host.zero_grad, optimizer.zero_grad
    loop = make_loop(Script(GROW), host=host, make_optimizer=lambda model: optimizer)
    loop.grower.begin()
    loss_of(loop, *loop.data[0]).backward()
    optimizer.zero_grad()
    host.zero_grad()
    assert calls == ["optimizer", "model"]
    assert not loop.grower.lifecycles.slots["first"].learner.has_gradients
    ways_out(loop)[way]()
    assert (host.zero_grad, optimizer.zero_grad) == own


def test_the_signatures_of_forward_and_zero_grad_stay_what_they_are() -> None:
    loop = make_loop(Script(GROW))
    assert list(inspect.signature(loop.host.forward).parameters) == ["x"]
    for owner in (loop.host, loop.optimizer):
        assert list(inspect.signature(owner.zero_grad).parameters) == ["set_to_none"]


class Whole(torch.optim.SGD):
    """Its copies hold everything, hooks included."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


@pytest.mark.parametrize("kind", [torch.optim.SGD, Whole])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"])
def test_copies_of_optimiser_and_model_do_not_step_the_seeds(kind: type[Optimizer], copied: Callable[[Any], Any]) -> None:
    loop = make_loop_without_dropout(lambda model: kind(model.parameters(), lr=0.1))
    loss_of(loop, *loop.data[0]).backward()
    before, gradients = weights(loop), [parameter.grad.clone() for parameter in seed_of(loop).parameters()]
    model, optimizer = copied((loop.host, loop.optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(weights(loop), before)
    assert same([parameter.grad for parameter in seed_of(loop).parameters()], gradients)
    loop.optimizer.step()
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 1


def test_a_copy_of_the_slotted_model_grows_and_is_baked_independently() -> None:
    loop = make_loop_without_dropout()
    loop.step(*loop.data[0])
    copy.deepcopy(loop.slotted).remove()
    twin = copy.deepcopy(loop.slotted)
    assert "zero_grad" not in vars(twin.model)
    optimizer = sgd(twin.model)
    grower = Grower(twin, optimizer, controller=Script({}), config=config())
    before = weights(loop)
    loss = cross_entropy(twin.model(loop.data[1][0]), loop.data[1][1])
    assert twin.calls.samples == 8
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    grower.after_step(loss)
    assert same(weights(loop), before)
    grower.bake()
    assert not {"forward", "zero_grad"} & set(vars(twin.model))
    loop.step(*loop.data[2])
    assert not same(weights(loop), before)


def test_a_second_grower_for_the_same_slots_takes_over() -> None:
    loop = make_loop_without_dropout()
    second = Grower(loop.slotted, loop.optimizer, controller="never", config=config())
    with pytest.raises(GrowthError, match="another Grower was made for the same slots"):
        loop.grower.after_step(torch.tensor(1.0))
    loop.grower.stop()
    second.after_step(torch.tensor(1.0))
    assert loop.slotted.calls.follower is not None


def test_two_growers_share_an_optimiser_and_each_can_stop_first() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = make_host(dropout=0.0), make_host(1, dropout=0.0)

    for first_to_stop in (0, 1):
        pair = Pair()
        optimizer = sgd(pair)
        loops = [make_loop(Script(GROW), host=part, make_optimizer=lambda model: optimizer) for part in (pair.one, pair.two)]  # noqa: B023
        x, y = loops[0].data[0]
        for loop in loops:
            loop.grower.begin()
        loops[first_to_stop].grower.stop()
        remaining = loops[1 - first_to_stop]
        sum(loss_of(loop, x, y) for loop in loops).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [backend.learner.report().steps for backend in remaining.grower.lifecycles.slots.values()] == [1, 1]
        assert not any(backend.learner.has_gradients for backend in remaining.grower.lifecycles.slots.values())
        remaining.grower.stop()
        optimizer.zero_grad()
        assert not optimizer._optimizer_step_post_hooks


def test_an_optimiser_that_never_steps_is_reported_at_the_end_of_the_epoch() -> None:
    loop = make_loop_without_dropout()
    stranger = sgd(loop.host)
    for x, y in loop.data:
        loss = loss_of(loop, x, y)
        loss.backward()
        stranger.step()
        stranger.zero_grad()
        loop.grower.after_step(loss)
    with pytest.warns(RuntimeWarning, match="has not stepped"):
        loop.grower.after_epoch(loop.evaluate)


# Loss scales


def scaled_step(loop: Loop, scaler: torch.amp.GradScaler, *, spoil: Callable[[], None] = lambda: None, **options: Any) -> None:
    x, y = loop.data[0]
    loss = loss_of(loop, x, y)
    scaler.scale(loss).backward()
    spoil()
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()
    loop.grower.after_step(loss, **options)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_the_scaler_skips_is_skipped_for_the_seed_and_the_next_is_not(is_fused: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = make_loop_without_dropout(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused), scaler=scaler)
    scaled_step(loop, scaler)
    before, state = weights(loop), snapshot(loop.grower.lifecycles.slots["first"].learner.optimizers[0])
    scaled_step(loop, scaler, spoil=lambda: loop.host.head.weight.grad.fill_(math.inf))
    assert same(weights(loop), before)
    assert_same(snapshot(loop.grower.lifecycles.slots["first"].learner.optimizers[0]), state)
    assert scaler.get_scale() == 8.0
    scaled_step(loop, scaler)
    assert not torch.equal(weights(loop)[-1], before[-1])
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 2


def test_a_step_that_the_scaler_skips_is_skipped_for_a_seed_in_the_shadow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = make_loop(Script(GROW), config(QUICK_SHADOW), scaler=scaler)
    loop.grower.begin()
    closure = {"closure": lambda: loss_of(loop, *loop.data[0])}
    scaled_step(loop, scaler, **closure)
    before = weights(loop)
    scaled_step(loop, scaler, spoil=lambda: loop.host.head.weight.grad.fill_(math.inf), **closure)
    assert same(weights(loop), before)
    scaled_step(loop, scaler, **closure)
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 2


def test_gradients_that_the_user_unscales_and_clips_are_unscaled_once_in_the_seed() -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        loop = make_loop_without_dropout(lambda model: torch.optim.SGD(model.parameters(), lr=0.5), scaler=scaler)
        for x, y in loop.data:
            loss = loss_of(loop, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.host.parameters(), 0.1)
            if scaler is None:
                loop.optimizer.step()
            else:
                scaler.step(loop.optimizer)
                scaler.update()
            loop.optimizer.zero_grad()
            loop.grower.after_step(loss)
        return weights(loop)

    for found, expected in zip(trained(torch.amp.GradScaler("cpu", init_scale=4.0)), trained(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_discarded_batch_leaves_nothing_in_the_probe() -> None:
    def promises(*, skips: bool) -> Any:
        loop = make_loop(Script({}, probes=[0]), config(probe_steps=3), host=make_host(dropout=0.0, norm=False))
        loop.grower.begin()
        for x, y in loop.data:
            if skips:
                loss_of(loop, JUNK, y).backward()
                loop.optimizer.zero_grad()
            loop.step(x, y)
        loop.grower.after_epoch(loop.evaluate)
        return next(event for event in loop.events if event.kind == "probed").promises

    assert promises(skips=True) == promises(skips=False)


def test_calls_of_the_model_are_counted_and_calls_of_a_copy_are_not() -> None:
    host = make_host()
    slotted = add_slots(host, torch.zeros(2, 6), slots=["first"])
    host(torch.zeros(5, 6))
    slotted(torch.zeros(4, 6))
    assert slotted.calls.samples == 9
    twin = copy.deepcopy(host)
    twin(torch.zeros(3, 6))
    assert slotted.calls.samples == 9
