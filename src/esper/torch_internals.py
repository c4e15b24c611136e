"""Everything that esper uses of torch and that is not public, in one place, because it may change with any version of torch.

`tests/test_torch_internals.py` says for each name what breaks without it, and finds private names in all other files. The tables of every
`nn.Module` (`_modules`, `_parameters`, `_buffers`, those of its hooks) are used everywhere: subclasses of modules rely on them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase, _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.utils.parametrizations import _WeightNorm as WeightNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILED_CALL",
    "COMPILED_MODULE",
    "BatchNormBase",
    "ConvBase",
    "DropoutBase",
    "NormBase",
    "TorchDispatchMode",
    "WeightNorm",
    "backward_number",
    "copy_all",
    "is_compiled_itself",
    "outside_compiled_code",
    "skips_on_device",
    "version_of",
]

COMPILED_MODULE = "_orig_mod"  # name of the original in the module that torch.compile(module) returns, also in the keys of a state dict
COMPILED_CALL = "_compiled_call_impl"  # attribute in which module.compile() puts the compiled call; None otherwise

# Decorator of functions that run uncompiled where compiled code calls them. The public one, torch.compiler.disable, imports the compiler at
# once, and its result is no method: a copy of an object would call the original.
outside_compiled_code = torch._disable_dynamo  # type: ignore[attr-defined]


def is_compiled_itself(module: nn.Module) -> bool:
    """Return whether this module was compiled, by `torch.compile(module)` or by `module.compile()`; not whether a part of it was."""
    return COMPILED_MODULE in module._modules or getattr(module, COMPILED_CALL) is not None


def backward_number() -> int:
    """Return a number that is the same in all hooks of one backward pass."""
    return torch._C._current_graph_task_id()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, on a GPU in few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def version_of(tensor: Tensor) -> int | None:
    """Return how often the tensor was written in place; None for an inference tensor, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimiser itself skips a step where its `found_inf` is above 0, as GradScaler asks of fused optimisers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
