"""Feature axes are followed through all operations, and an uncertain axis is not guessed.

Every tensor here has the same size in all its dimensions, so that sizes tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.host.layout import _LABEL, FeatureAxes

torch.manual_seed(0)
CONV, LINEAR = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)
LINE, LSTM, MIX = nn.Conv1d(4, 4, 3, padding=1), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
PLANES, TOKENS = torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4)

Function = Callable[[Tensor], Tensor]
OF_PLANES: dict[str, tuple[Function, int | None]] = {
    "a convolution": (CONV, 1),
    "its activation": (lambda x: CONV(x).relu_(), 1),
    "its norm": (lambda x: F.batch_norm(CONV(x), torch.zeros(4), torch.ones(4)), 1),
    "a functional instance norm": (lambda x: F.instance_norm(CONV(x)), None),
    "a residual": (lambda x: CONV(x) + CONV(CONV(x)), 1),
    "channels last": (lambda x: CONV(x).permute(0, 2, 3, 1), 3),
    "there and back": (lambda x: LINEAR(CONV(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 1),
    "by movedim": (lambda x: CONV(x).movedim(1, -1), 3),
    "a transposed plane": (lambda x: CONV(x).mT, 1),
    "a linear layer": (LINEAR, 3),
    "a product": (lambda x: x @ LINEAR.weight, 3),
    "a gated half": (lambda x: LINEAR(torch.cat([x, x], -1)[..., :4]).chunk(2, -1)[0], 3),
    "joined": (lambda x: torch.cat([CONV(x), CONV(x)], 1), 1),
    "split and joined otherwise": (lambda x: torch.cat(CONV(x).split(2, 1)[::-1], 1), 1),
    "a shuffle of channels": (lambda x: CONV(x).view(4, 2, 2, 4, 4).transpose(1, 2).reshape(4, 4, 4, 4), 1),
    "a pixel shuffle": (lambda x: F.pixel_shuffle(CONV(x), 2), 1),
    "a pool": (lambda x: F.max_pool2d(CONV(x), 2), 1),
    "a mean": (lambda x: CONV(x).mean((2, 3), keepdim=True), 1),
    "a larger plane": (lambda x: F.interpolate(CONV(x), scale_factor=2, mode="bilinear"), 1),
    "padding": (lambda x: F.pad(CONV(x), (1, 1, 1, 1), mode="reflect"), 1),
    "windows": (lambda x: LINEAR(x).view(4, 2, 2, 2, 2, 4).transpose(2, 3).reshape(4, 4, 4, 4), 3),
    "rolled": (lambda x: LINEAR(x).roll((1, 1), (1, 2)), 3),
    "a squeezed gate": (lambda x: CONV(x) * LINEAR(CONV(x).mean((2, 3)))[:, :, None, None].sigmoid(), 1),
    "a norm over all": (lambda x: F.layer_norm(CONV(x), (4, 4, 4)), 1),
    "a norm of the last": (lambda x: F.layer_norm(x, (4,)), 3),
    "two that disagree": (lambda x: CONV(x) + LINEAR(x), None),
    "reshaped": (lambda x: CONV(x).reshape(4, 2, 2, 16), None),
    "read in another order": (lambda x: CONV(x).flatten().view(2, 8, 4, 4), None),
    "attention between positions": (lambda x: torch.softmax(CONV(x) @ CONV(x).mT, -1), None),
    "the input": (lambda x: x.relu(), None),
    "one channel less": (lambda x: CONV(x)[:, 0], None),
    "one row less": (lambda x: CONV(x)[:, :, 0], 1),
    "in a memory format": (lambda x: F.adaptive_avg_pool2d(CONV(x.to(memory_format=torch.channels_last)), 1), 1),
}
OF_TOKENS: dict[str, tuple[Function, int | None]] = {
    "a linear layer": (LINEAR, 2),
    "a convolution along a line": (LINE, 1),
    "its transpose": (lambda x: LINE(x).transpose(1, 2), 2),
    "time first": (lambda x: LINEAR(x).transpose(0, 1), 2),
    "an embedding": (lambda x: F.embedding(torch.zeros(4, 4, dtype=torch.int64), LINEAR.weight), 2),
    "patches": (lambda x: CONV(x.unsqueeze(1).expand(4, 4, 4, 4)).flatten(2).transpose(1, 2), 2),
    "an LSTM": (lambda x: LSTM(x)[0], 2),
    "an LSTM in float64": (lambda x: nn.LSTM(4, 4, batch_first=True, dtype=torch.float64)(x.double())[0], 2),
    "a token before all others": (lambda x: torch.cat([torch.zeros(4, 1, 4), LINEAR(x)], 1), 2),
    "heads": (lambda x: LINEAR(x).unflatten(-1, (2, 2)).transpose(1, 2), None),
    "heads that are joined": (lambda x: LINEAR(x).unflatten(-1, (2, 2)).flatten(-2), 2),
    "positions mixed in a residual stream": (lambda x: (h := LINEAR(x)) + MIX(h.transpose(1, 2)).transpose(1, 2), 2),
    "an RMS norm": (lambda x: nn.RMSNorm(4)(LINEAR(x)), 2),
    "written by experts": (lambda x: torch.zeros(4, 4, 4).index_put_((x[..., 0] > 0,), LINEAR(x[x[..., 0] > 0])), 2),
    "a sum over time": (lambda x: LINEAR(x).cumsum(1), 2),
}


def axis_of(function: Function, x: Tensor) -> int | None:
    with torch.no_grad(), FeatureAxes() as axes:
        made = function(x)
        return axes.axis_of(made)


@pytest.mark.parametrize("name", OF_PLANES)
def test_features_of_planes_are_followed(name: str) -> None:
    function, axis = OF_PLANES[name]
    assert axis_of(function, PLANES) == axis


@pytest.mark.parametrize("name", OF_TOKENS)
def test_features_of_sequences_are_followed(name: str) -> None:
    function, axis = OF_TOKENS[name]
    assert axis_of(function, TOKENS) == axis


def test_an_instance_norm_has_its_channels_second() -> None:
    norm = nn.InstanceNorm2d(4)
    with torch.no_grad(), FeatureAxes() as axes:
        assert axes.axis_of(norm(CONV(PLANES)), norm) == 1


def test_no_axis_label_stays_on_a_tensor() -> None:
    x = torch.randn(4, 4)
    with torch.no_grad(), FeatureAxes() as axes:
        kept = LINEAR(x)
        x.add_(kept)
        assert axes.axis_of(x) == axes.axis_of(kept) == 1
    assert not hasattr(x, _LABEL)
    assert not hasattr(kept, _LABEL)
