"""Which places become slots when the user names none: after the blocks that a host is made of, or else after its activations.

A block is a submodule with layers of its own whose output is one tensor. Containers (nn.Sequential and the like) and whole backbones are
looked into; blocks are not. The host's own output is never chosen: a seed there would write into the predictions.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from esper.growth.errors import GrowthError
from esper.growth.survey import Survey

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BACKBONE_PARTS = 4  # a submodule with so many blocks in it is no block itself


def choose(model: nn.Module, survey: Survey, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Names of places, in the order in which they run."""
    wanted = _default(model, survey) if patterns is None else _named(model, survey, patterns)
    return tuple(name for name in survey.places if name in wanted)


def _default(model: nn.Module, survey: Survey) -> set[str]:
    usable = {name for name in survey.places if survey.same_output[name] != 0}
    blocks = {name for name in _walk(model, "") if name in usable}
    chosen = blocks or _leaves(model, usable)
    if not chosen:
        raise GrowthError(
            "there is no place for a slot in this model. "
            + "; ".join(f"{refusal.name} {refusal.reason}" for refusal in survey.refusals[:8])
            + ". Name places yourself with slots=[...] or grow a model whose parts are modules of their own"
        )
    return _one_each(chosen, survey)


def _walk(module: nn.Module, prefix: str) -> Iterator[str]:
    """Blocks below a module."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_block(child) and not isinstance(child, _CONTAINERS) and not _is_backbone(child):
            yield path
        else:
            yield from _walk(child, f"{path}.")


def _is_block(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _is_backbone(module: nn.Module) -> bool:
    holds_blocks = any(
        isinstance(part, _CONTAINERS) and any(map(_is_block, part.children())) for part in module.modules() if part is not module
    )
    return holds_blocks or sum(map(_is_block, module.children())) >= _BACKBONE_PARTS


def _leaves(model: nn.Module, usable: set[str]) -> set[str]:
    """Activations, or layers with weights where activations are no modules."""
    leaves = {name: model.get_submodule(name) for name in usable if not list(model.get_submodule(name).children())}
    activations = {name for name, leaf in leaves.items() if type(leaf).__module__ == nn.ReLU.__module__}
    return activations or {name for name, leaf in leaves.items() if next(leaf.parameters(), None) is not None}


def _one_each(names: set[str], survey: Survey) -> set[str]:
    """One name for outputs that are the same tensor."""
    by_number = {survey.same_output[name]: name for name in survey.places if name in names}
    return set(by_number.values())


def _named(model: nn.Module, survey: Survey, patterns: Sequence[str]) -> set[str]:
    if isinstance(patterns, str) or not patterns:
        raise GrowthError(f"slots must be a list of names or patterns such as ['layer1', 'blocks.*'], not {patterns!r}")
    duplicates = sorted({pattern for pattern in patterns if list(patterns).count(pattern) > 1})
    if duplicates:
        raise GrowthError(f"{duplicates[0]!r} is named twice in slots")
    names = [name for name, _ in model.named_modules() if name]
    reasons = {refusal.name: refusal.reason for refusal in survey.refusals}
    chosen = set[str]()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
            raise GrowthError(f"no submodule is named {pattern!r}; near to it: {', '.join(near)}. describe() lists all places")
        usable = [name for name in matched if name in survey.places]
        if not usable:
            raise GrowthError(f"nothing can grow after {matched[0]!r}: it {reasons[matched[0]]}")
        chosen |= set(usable)
    return _one_each(chosen, survey)
