"""Choose the places that get slots, by name or by default: after the blocks of a host, or after its activations if it has no blocks.

A block is a submodule with layers inside whose output is one tensor. Containers (nn.Sequential and the like) and whole backbones are
searched for blocks; blocks are not. Outputs of the host, and places with nothing behind them, are not chosen by default, because a seed
there would change the predictions directly. Only a last block with units inside that can be widened gets a slot, for seeds that widen them.
If only a pool uses the output of a place, the slot is put after the pool, where a seed costs a fraction, unless the pool leaves a single
position. `benchmarks/growth/places.py` compares the accuracy of both places.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from esper.growth.config import GrowthError, problem_of_slots
from esper.growth.host.discover import Discovery
from esper.growth.seeds.seed import Seed

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BACKBONE_PARTS = 4  # a submodule with at least this many blocks inside is a backbone, not a block


def choose(model: nn.Module, discovery: Discovery, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the places that get slots, in the order in which they run. `patterns` None chooses by default."""
    wanted = _default(model, discovery) if patterns is None else _named(model, discovery, patterns)
    return tuple(name for name in discovery.places if name in wanted)


def _default(model: nn.Module, discovery: Discovery) -> set[str]:
    """Return the default places. Raise a GrowthError with all reasons if there are none."""
    inner = set(discovery.places) - discovery.last
    hidden = {name for name in inner if discovery.same_output[name] != 0}
    blocks = [name for name in _walk(model, "") if name in discovery.places]
    last = {name for name in blocks if name not in hidden and discovery.places[name].chain}
    for usable in (hidden, inner):  # a host may return all its hidden outputs too; then these are allowed
        chosen = {_cheapest(name, discovery, usable) for name in usable.intersection(blocks) or _leaves(model, usable)}
        if chosen:
            around = {name for name in last - inner if not any(place.startswith(f"{name}.") for place in chosen)}
            return _one_each(chosen, discovery) | around
    if last:
        return last
    raise GrowthError(
        "there is no place for a slot inside this model: "
        + "; ".join(_reasons(model, discovery))
        + (f". With slots=[...], these can be chosen: {', '.join(discovery.places)}" if discovery.places else "")
    )


def with_last_blocks(discovery: Discovery, names: Sequence[str]) -> Discovery:
    """Return the discovery in which a last block that was chosen by default takes only seeds that widen the units inside it."""
    reason = "it would change the predictions directly"
    last = {name: replace(discovery.places[name], only_wider=reason) for name in names if name in discovery.last}
    return replace(discovery, places={**discovery.places, **last})


def _reasons(model: nn.Module, discovery: Discovery) -> list[str]:
    """Return why nothing was chosen, each reason once."""
    if not discovery.places and not discovery.refusals:
        return [
            f"a {type(model).__name__} has no submodules, and seeds grow after submodules; put hidden layers before it, as in "
            "nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))"
        ]
    reasons = dict[str, str]()
    for refusal in discovery.refusals:
        reasons.setdefault(refusal.reason, refusal.name)
    for name in discovery.places:
        if discovery.same_output[name] == 0:
            reason = "gives the predictions, and a seed there would change them directly"
        elif name in discovery.last:
            reason = "has nothing behind it that could use a seed's output"
        else:
            reason = "is no block, no activation and no layer with weights"
        reasons.setdefault(reason, name)
    return [f"{name!r} {reason}" for reason, name in reasons.items()]


def _cheapest(name: str, discovery: Discovery, usable: set[str]) -> str:
    """Return the place with the fewest positions among this one and the places without weights, such as pools, directly behind it."""
    place, chain = discovery.places[name], [name]
    # A module that returns its input, such as nn.Identity, is behind itself.
    while (following := discovery.behind.get(chain[-1])) in usable and following not in chain:
        chain.append(following)
    places = [discovery.places[other] for other in chain]
    alike = [other for other in places if (other.kind, other.width) == (place.kind, place.width) and other.positions > 1]
    return min(alike, key=lambda other: other.positions, default=place).name


def _walk(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of all blocks inside a module."""
    for name, child in _children(module):
        path = f"{prefix}{name}"
        if _is_block(child) and not isinstance(child, _CONTAINERS) and not _is_backbone(child):
            yield path
        else:
            yield from _walk(child, f"{path}.")


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module, without baked seeds and parametrizations of weights."""
    return ((name, child) for name, child in module.named_children() if not isinstance(child, Seed) and name != "parametrizations")


def _is_block(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for _, child in _children(module))


def _is_backbone(module: nn.Module) -> bool:
    parts = [child for _, child in _children(module)]
    return _holds_blocks(module) or sum(map(_is_block, parts)) >= _BACKBONE_PARTS


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether there is a container of blocks inside, at any depth."""
    for _, child in _children(module):
        if isinstance(child, _CONTAINERS) and any(_is_block(part) for _, part in _children(child)):
            return True
        if _holds_blocks(child):
            return True
    return False


def _leaves(model: nn.Module, usable: set[str]) -> set[str]:
    """Return the activations; if activations are not modules, the layers with weights."""
    leaves = {name: model.get_submodule(name) for name in usable if not _is_block(model.get_submodule(name))}
    activations = {name for name, leaf in leaves.items() if type(leaf).__module__ == nn.ReLU.__module__}
    return activations or {name for name, leaf in leaves.items() if next(leaf.parameters(), None) is not None}


def _one_each(names: set[str], discovery: Discovery) -> set[str]:
    """Keep one name of all places whose outputs are the same tensor."""
    return set({discovery.same_output[name] or name: name for name in discovery.places if name in names}.values())


def _named(model: nn.Module, discovery: Discovery, patterns: Sequence[str]) -> set[str]:
    names = [name for name, _ in model.named_modules() if name]
    if problem := problem_of_slots(patterns, names):
        raise GrowthError(problem)
    # Exact names are kept as they are. A pattern adds no place whose output is the same tensor as that of an exact name.
    matched = {pattern: _matched(pattern, names, discovery) for pattern in patterns}
    exact = {name for name in patterns if name in discovery.places}
    taken = {discovery.same_output[name] for name in exact}
    by_pattern = {name for places in matched.values() for name in places if discovery.same_output[name] not in taken}
    return exact | _one_each(by_pattern, discovery)


def _matched(pattern: str, submodules: Sequence[str], discovery: Discovery) -> list[str]:
    """Return the places that match a name or pattern. Raise a GrowthError if nothing can grow after any of them."""
    matched = [pattern] if pattern in submodules else fnmatch.filter(submodules, pattern)
    usable = [name for name in matched if name in discovery.places]
    if not usable:
        reasons = {refusal.name: refusal.reason for refusal in discovery.refusals}
        raise GrowthError(f"nothing can grow after {matched[0]!r}: it {reasons[matched[0]]}")
    return usable
