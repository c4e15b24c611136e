"""What esper uses of torch that is not public. A failure here says what no longer works with this version of torch."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper import torch_internals as internals

OWN = "torch_internals.py"
_PRIVATE = re.compile(r"(torch|nn)(\.\w+)*\._(?!_)\w+")


def compiled_module() -> bool:
    model = torch.compile(nn.Linear(2, 2))
    return [*model._modules] == ["_orig_mod"] and all(name.startswith("_orig_mod.") for name in model.state_dict())


def compiled_call() -> bool:
    model = nn.Linear(2, 2)
    before = internals.is_compiled_itself(model)
    model.compile()
    return not before and internals.is_compiled_itself(model) and not internals.is_compiled_itself(nn.Linear(2, 2))


def number_of_a_backward_pass() -> bool:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        parts = [x * 2, x * 3]
        for part in parts:
            part.register_hook(lambda gradient: seen.append(internals.backward_number()))
        torch.stack(parts).sum().backward()
    return len(seen) == 4 and seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]


def copies() -> bool:
    targets, sources = [torch.zeros(2), torch.zeros(())], [torch.ones(2), torch.tensor(3.0)]
    internals.copy_all(targets, sources)
    return all(map(torch.equal, targets, sources))


def versions() -> bool:
    plain = torch.zeros(2)
    before = internals.version_of(plain)
    plain.add_(1)
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    return before is not None and internals.version_of(plain) == before + 1 and internals.version_of(unversioned) is None


def skips() -> bool:
    weight = nn.Parameter(torch.ones(2))
    fused, plain = (torch.optim.AdamW([weight], fused=is_fused) for is_fused in (True, False))
    weight.grad = torch.ones(2)
    fused.grad_scale, fused.found_inf = None, torch.ones(())  # type: ignore[attr-defined]
    fused.step()
    return internals.skips_on_device(fused) and not internals.skips_on_device(plain) and bool((weight == 1).all())


class Counting:
    """Counts the calls of a method that stays out of compiled code."""

    calls = 0

    @internals.outside_compiled_code
    def note(self) -> None:
        self.calls += not torch.compiler.is_compiling()


def methods_stay_methods() -> bool:
    one = Counting()
    notes = copy.deepcopy([one.note])  # as an optimiser is copied with its hooks
    notes[0]()
    one.note()
    one.note()
    return one.calls == 2


def stays_out_of_compiled_code() -> bool:
    one = Counting()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        one.note()
        return x + 1

    for _ in range(3):
        step(torch.ones(2))
    return one.calls == 3


def bases() -> bool:
    pairs = [
        (internals.DropoutBase, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)),
        (internals.ConvBase, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)),
        (internals.BatchNormBase, (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)),
        (internals.NormBase, (nn.BatchNorm1d, nn.InstanceNorm2d)),
    ]
    return all(issubclass(kind, base) for base, kinds in pairs for kind in kinds)


def weight_norms() -> bool:
    part = weight_norm(nn.Linear(3, 2)).parametrizations.weight[0]
    return isinstance(part, internals.WeightNorm) and part.dim == 0


def dispatch() -> bool:
    class Seen(internals.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.ones(2) + 1
    return seen.count >= 2


BREAKS: dict[str, tuple[Callable[[], bool], str]] = {
    "COMPILED_MODULE": (compiled_module, "compiled models are not recognised, and their checkpoints do not load into plain ones"),
    "COMPILED_CALL, is_compiled_itself": (compiled_call, "evaluations of a model compiled in place are compiled too"),
    "backward_number": (number_of_a_backward_pass, "a model called twice before one backward pass loses gradients of its seeds"),
    "copy_all": (copies, "buffers are not put back after an evaluation"),
    "version_of": (versions, "outputs that were overwritten are replayed in the measurement of contributions"),
    "skips_on_device": (skips, "seeds step where a fused optimiser under a GradScaler skips its step"),
    "outside_compiled_code": (methods_stay_methods, "a copy of an optimiser steps the seeds of the original"),
    "DropoutBase, ConvBase, BatchNormBase, NormBase": (bases, "such layers are not widened, and fleets do not know them"),
    "WeightNorm": (weight_norms, "layers with weight normalisation are not widened"),
    "TorchDispatchMode": (dispatch, "the axes of features cannot be followed through a model, so no slot is found"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if "COMPILED" in name else []) for name in BREAKS])
def test_a_private_name_of_torch_does_what_esper_uses_it_for(name: str) -> None:
    works, what_breaks = BREAKS[name]
    assert works(), f"torch {torch.__version__} has changed {name}: {what_breaks}; mend src/esper/{OWN}"


@pytest.mark.slow
def test_hooks_stay_out_of_compiled_code() -> None:
    assert stays_out_of_compiled_code(), f"a compiled step of an optimiser is compiled again at every step; mend src/esper/{OWN}"


def test_all_of_them_are_tested() -> None:
    assert {part for name in BREAKS for part in name.split(", ")} == {*internals.__all__}


def private_names(path: Path) -> list[str]:
    """Return the private names of torch in a file: `torch._C`, `from torch.utils._pytree import tree_map`, `from torch.nn import _x`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names if "._" in f"{node.module}.{alias.name}"]
        elif isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(name := ast.unparse(node)):
            found.append(name)
    return found


def test_no_other_file_uses_private_names_of_torch() -> None:
    files = [path for path in Path(esper.__file__).parent.rglob("*.py") if path.name != OWN]
    assert {str(path): names for path in files if (names := private_names(path))} == {}
    words = ("_version", "_step_supports_amp_scaling", "_compiled_call_impl", "_orig_mod", "_get_scale_async")
    attributes = {
        (path.name, node.attr) for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    }
    assert not [found for found in attributes if found[1] in words]
