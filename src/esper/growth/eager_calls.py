"""A compiled model that runs as it was written for a while, wherever it is called from.

Torch's own way, `torch.compiler.set_stance`, is global: it would reach other models, and outlive a training loop that is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from esper.growth.around import forward_replaced, own_forward
from esper.growth.isolation import eager


@contextmanager
def eager_calls(model: nn.Module) -> Iterator[None]:
    """Calls of the compiled parts of a model compile nothing. A copy that is made meanwhile does not know of this."""
    with ExitStack() as stack:
        for module in list(model.modules()):
            if "_orig_mod" in module._modules:  # by torch.compile(module)
                stack.enter_context(forward_replaced(module, _eagerly(own_forward(module))))
            compiled = vars(module).get("_compiled_call_impl")  # by module.compile()
            if compiled is not None:
                vars(module)["_compiled_call_impl"] = _eagerly(compiled)
                stack.callback(vars(module).update, _compiled_call_impl=compiled)
        yield


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # code of the user's around the model, in which the stance cannot be changed
            return function(*arguments, **named)
        with eager():
            return function(*arguments, **named)

    return call
