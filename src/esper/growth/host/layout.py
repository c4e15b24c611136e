"""The layout of a submodule's output: what a place for a seed is, and which dimension of a tensor holds the features.

A `Place` describes the output of a submodule after which a seed could grow; a `Refusal` says why none can. Features are the second
dimension in a conv place and the last one in a token place, whose positions may be those of a sequence or of a plane.

`FeatureAxes` finds the feature dimension of every tensor in a forward pass. A convolution puts its channels second, a linear layer its
features last. The operations after it move, split or join dimensions, and the label of a tensor follows them:

    with FeatureAxes() as axes:
        h = model.stem(x).permute(0, 2, 3, 1)        # [B, C, H, W] to [B, H, W, C]
        axes.axis_of(h)                              # 3

A tensor has no label if its feature dimension is uncertain; sizes are never used to guess it.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from esper.torch_internals import TorchDispatchMode

CPU = torch.device("cpu")
Kind = Literal["conv", "token", "dense"]


class LayerSize(NamedTuple):
    """The sizes of a layer, from which the cost of new rows and columns follows."""

    inputs: int
    outputs: int
    kernel: int  # weights per pair of input and output
    per_output: int  # parameters of each output besides the weights: a bias, the length of a weight norm
    positions: int  # per sample for which it computes its output

    def cost(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return the parameters and FLOPs of a block of weights from these inputs to these outputs."""
        weights = inputs * outputs * self.kernel
        return weights, 2 * weights * self.positions


class Reader(NamedTuple):
    """A layer that reads units: its name, and the number of its input features per unit. A flattened map has one for each position."""

    name: str
    features: int


class Through(NamedTuple):
    """How units go through a module with weights, statistics or random numbers for each unit."""

    features: int = 1  # of the module per unit; a batch norm behind a flattened map has one for each position
    axis: int | None = None  # dimension of the units, for a dropout


@dataclass(frozen=True, slots=True)
class Units:
    """Units that can be widened. Names are those of submodules, in the order in which they run."""

    producers: tuple[str, ...]  # several if the host combines their outputs, as a gated network or attention does
    own: tuple[str, ...]  # modules with weights, statistics or random numbers for each unit
    readers: tuple[Reader, ...]
    width: int  # number of units
    step: int  # new units come in multiples of this: whole groups of a group norm or a grouped convolution
    carriers: tuple[str, ...] = ()  # submodules whose output holds the units, containers included
    sizes: tuple[tuple[str, LayerSize], ...] = ()  # of producers and readers
    own_cost: tuple[int, int] = (0, 0)  # parameters and FLOPs of the modules in `own`, for the host's units
    kept: int = 0  # units that width seeds have added and that are kept
    through: tuple[tuple[str, Through], ...] = ()  # how units go through some of the modules in `own`; the others have the defaults
    made: tuple[tuple[str, int], ...] = ()  # features of a producer per unit, if a unit is an attention head; otherwise they make one each

    @property
    def name(self) -> str:
        return self.producers[0]

    def features_of(self, producer: str) -> int:
        """Return the number of output features of a producer per unit."""
        return dict(self.made).get(producer, 1)

    def added(self, share: float) -> int:
        """Return the number of new units for a share of those that are there, in whole steps.

        >>> [Units(("a",), (), (), 10, step).added(0.25) for step in (1, 2, 5)]
        [2, 2, 5]
        """
        return max(round((self.width + self.kept) * share / self.step), 1) * self.step

    def beside(self, kept: Mapping[str, tuple[int, int]]) -> Units:
        """Return the units as they are beside kept seeds. `kept` maps each module to the inputs and outputs that these seeds have added."""
        sizes = []
        for name, size in self.sizes:
            inputs, outputs = kept.get(name, (0, 0))
            sizes.append((name, size._replace(inputs=size.inputs + inputs, outputs=size.outputs + outputs)))
        return replace(self, sizes=tuple(sizes), kept=kept.get(self.name, (0, 0))[1] // self.features_of(self.name))


@dataclass(frozen=True, slots=True)
class Place:
    """The output of a submodule after which a seed could grow.

    `shape` is the shape of one sample, without the batch: conv (C, H, W) or (C, L), token (T, D) or (H, W, D), dense (D,).
    """

    name: str  # of the submodule in the host
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32  # for the parameters of a seed
    device: torch.device = CPU
    batch_axis: int = 0  # 1 for a sequence [T, B, D]; a branch gets it as [B, T, D]
    is_causal: bool = False  # a position depends only on those before it, so a seed must not look ahead either
    alone: str = ""  # reason why a seed must treat every position alone (a mask or cache of the host); "" if it may mix positions
    is_fused: bool = False  # a module around it computes it by a fused kernel in eval mode, unless the submodule has a hook
    depth: float = 0.0  # fraction of the host's FLOPs before this place: 0 at its input, 1 at its output
    flops_behind: int = 0  # FLOPs per sample of the host's forward pass after this place
    chain: tuple[Units, ...] = ()  # units that can be widened: those at this place and in a row behind, or those inside the submodule
    why_not_wider: str = ""  # reason why the units at this place cannot be widened
    only_wider: str = ""  # reason why only units inside the submodule may be added here, by a width seed; "" if any seed may grow
    earlier: int = 0  # slots at the same place that hold kept seeds; this one is applied after them

    @property
    def module(self) -> str:
        """Name of the submodule. The name of a slot that is not the first at its place has a number behind it: "layer1#2"."""
        return self.name.rpartition("#")[0] if self.earlier else self.name

    @property
    def name_of_next(self) -> str:
        """Name of the slot that opens behind this one."""
        return f"{self.module}#{self.earlier + 2}"

    def again(self) -> Place:
        """Return the next place behind the same submodule."""
        return replace(self, name=self.name_of_next, earlier=self.earlier + 1)

    @property
    def width(self) -> int:
        """Number of channels or features."""
        return self.shape[0] if self.kind == "conv" else self.shape[-1]

    @property
    def positions(self) -> int:
        """Number of positions in space or time; they share the weights of a seed."""
        sizes = self.shape[1:] if self.kind == "conv" else self.shape[:-1]
        return math.prod(sizes)

    def own_units(self, output: Tensor) -> Tensor:
        """Return the host's own units of a batched output, without those that width seeds have added."""
        axis = 1 if self.kind == "conv" else -1
        return output if output.shape[axis] == self.width else output.narrow(axis, 0, self.width)

    @property
    def is_plane(self) -> bool:
        """Whether positions have two dimensions: [B, C, H, W] or [B, H, W, D]."""
        return len(self.shape) == 3

    @property
    def spatial(self) -> int:
        """Number of spatial dimensions: 1 or 2 for a conv place, else 0."""
        return len(self.shape) - 1 if self.kind == "conv" else 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a submodule in the forward pass of the discovery.

    Ticks count the starts and ends of all calls; calls inside this one have ticks between `start` and `end`.
    """

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submodule after which no seed can grow, and the reason, which completes the sentence "The submodule ..."."""

    name: str
    reason: str


_LABEL = "_esper_feature_axes"


class Label(NamedTuple):
    """The feature dimensions of a tensor, and the layer that made the features."""

    axes: tuple[int, ...]  # several while the features are split into groups, such as attention heads
    layer: int  # number of the layer in the order of the forward pass


class FeatureAxes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which every new tensor gets a `Label` and a number, and uses of tensors are counted. Labels are removed at the end.

    A tensor that is changed in place gets a new number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = Counter[int]()  # number of a tensor -> operations that use it
        self._numbers: dict[int, int] = {}  # id of a tensor -> its number
        self._sources: dict[int, int] = {}  # number of an activation's output -> number of its input
        self._layers = 0  # layers so far
        self._made: list[weakref.ref[Tensor]] = []  # all tensors with a number

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for reference in self._made:
            tensor = reference()
            if tensor is not None and hasattr(tensor, _LABEL):
                delattr(tensor, _LABEL)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Run the operation and number its results. A pointwise operation with one input counts as an activation.
        given = [number for number in map(self.number_of, _tensors([*args, *(kwargs or {}).values()])) if number is not None]
        result = func(*args, **(kwargs or {}))
        made = list(_tensors(result))
        self.uses.update(given)
        for tensor in made:
            number = self._numbers[id(tensor)] = len(self._made)
            self._made.append(weakref.ref(tensor))
            if torch.Tag.pointwise in func.tags and len(given) == 1:
                self._sources[number] = given[0]
        # Label the results: a layer starts a new label, any other known operation passes that of its input on.
        name = func._schema.name.partition("::")[2].removesuffix("_")  # without the namespace and the suffix for "in place"
        if name in _LAYERS and made:
            self._layers += 1
            self._set(made[0], Label((_LAYERS[name](made[0]),), self._layers))
        elif made:
            follow = _pointwise if torch.Tag.pointwise in func.tags else _FOLLOWS.get(name)
            label = None if follow is None else follow(args, kwargs or {}, made[0])
            for tensor in made:
                self._set(tensor, label)
        return result

    def number_of(self, tensor: Any) -> int | None:
        """Return the number of a tensor; None if it was made before the context began."""
        return self._numbers.get(id(tensor))

    def origins_of(self, tensor: Any) -> list[int]:
        """Return the number of the tensor, and of the tensors that activations made it from, latest first."""
        number = self.number_of(tensor)
        origins = []
        while number is not None:
            origins.append(number)
            number = self._sources.get(number)
        return origins

    def axis_of(self, tensor: Tensor, layer: nn.Module | None = None) -> int | None:
        """Return the feature dimension of a tensor; None if it is unknown. `layer` is the module that made the tensor."""
        label = _label(tensor)
        if type(layer) in _CHANNELS_SECOND and tensor.ndim > 1:  # inside they join batch and channels, which loses the label
            self._layers += 1
            label = Label((1,), self._layers)
            self._set(tensor, label)
        return label.axes[0] if label is not None and len(label.axes) == 1 else None

    def _set(self, tensor: Tensor, label: Label | None) -> None:
        if label is not None:
            setattr(tensor, _LABEL, label)
        elif hasattr(tensor, _LABEL):
            delattr(tensor, _LABEL)


_CHANNELS_SECOND = (nn.InstanceNorm1d, nn.InstanceNorm2d)


def _label(tensor: Any) -> Label | None:
    return getattr(tensor, _LABEL, None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# Operations of layers: each makes features in a fixed dimension.


def _second(made: Tensor) -> int:
    return 1


def _last(made: Tensor) -> int:
    return made.ndim - 1


_LAYERS: dict[str, Callable[[Tensor], int]] = {
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "miopen_convolution", "mkldnn_convolution"), _second),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), _second),
    **dict.fromkeys(("_batch_norm_no_update", "_batch_norm_with_update", "miopen_batch_norm", "native_group_norm"), _second),
    **dict.fromkeys(("mm", "addmm", "_addmm_activation", "linear", "mkldnn_linear", "embedding"), _last),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _last),
}


# All other operations: they keep the feature dimension or move it. Each function below gets an operation's arguments, its keyword arguments
# and its result, and returns the label of the result; None if the feature dimension is unknown.


def _same(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """All dimensions keep their meaning."""
    label = _label(args[0])
    return label if label is not None and args[0].ndim == made.ndim else None


def _pointwise(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Inputs are broadcast to one shape. Their labels must agree, except in a sequence, where that of the earliest layer counts."""
    labels = []
    for tensor in _tensors(list(args)):
        label = _label(tensor)
        if label is not None:
            axes = tuple(axis + made.ndim - tensor.ndim for axis in label.axes)
            if all(made.shape[axis] == tensor.shape[axis - made.ndim + tensor.ndim] for axis in axes):
                labels.append(Label(axes, label.layer))
    # In a residual stream [B, T, D] a block may mix positions by linear layers (as an MLP-Mixer does). Their label would be the position
    # dimension; the stream's own label, from an earlier layer, is right.
    if len({label.axes for label in labels}) > 1 and made.ndim != 3:
        return None
    return min(labels, key=lambda label: label.layer, default=None)


def _view(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Find the feature dimensions after a reshape: those with the same number of elements before them and among them."""
    source, label = args[0], _label(args[0])
    if label is None or not _is_run(label.axes):
        return None
    first, last = min(label.axes), max(label.axes)
    before, size = math.prod(source.shape[:first]), math.prod(source.shape[first : last + 1])
    if size == 1:
        return label if source.shape == made.shape else None
    for start in range(made.ndim):
        if math.prod(made.shape[:start]) == before and made.shape[start] > 1:
            for end in range(start + 1, made.ndim + 1):
                if math.prod(made.shape[start:end]) == size and (end == made.ndim or made.shape[end - 1] > 1):
                    return Label(tuple(range(start, end)), label.layer)
    return None


def _is_run(axes: Sequence[int]) -> bool:
    """Return whether dimensions are neighbours.

    >>> [_is_run(axes) for axes in [(1,), (1, 2), (2, 1), (1, 3)]]
    [True, True, True, False]
    """
    return max(axes) - min(axes) == len(axes) - 1


def _permuted(order: Callable[[Sequence[Any], int], Sequence[int]]) -> Callable[..., Label | None]:
    """Dimensions are reordered; `order(args, ndim)` lists the source dimension of every dimension of the result."""

    def follow(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
        label = _label(args[0])
        if label is None:
            return None
        sources = [axis % made.ndim for axis in order(args, made.ndim)]
        return Label(tuple(sorted(sources.index(axis) for axis in label.axes)), label.layer)

    return follow


def _swapped(args: Sequence[Any], ndim: int) -> list[int]:
    """Return the order of dimensions for `transpose`."""
    order = list(range(ndim))
    one, other = (args[1], args[2]) if len(args) > 2 else (ndim - 2, ndim - 1)
    order[one], order[other] = order[other], order[one]
    return order


def _unsqueezed(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """A dimension of size 1 is inserted."""
    label, new = _label(args[0]), args[1] % made.ndim
    return None if label is None else Label(tuple(axis + (axis >= new) for axis in label.axes), label.layer)


def _expanded(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Dimensions may be added at the front."""
    label = _label(args[0])
    return None if label is None else Label(tuple(axis + made.ndim - args[0].ndim for axis in label.axes), label.layer)


def _without(dimensions: Callable[[Sequence[Any], Any, Tensor], Sequence[int]]) -> Callable[..., Label | None]:
    """Some dimensions are removed: `dimensions(args, named, made)` returns which. The label is lost if one of them held features."""

    def follow(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
        label, source = _label(args[0]), args[0]
        if label is None:
            return None
        gone = {axis % source.ndim for axis in dimensions(args, named, made)}
        if gone & set(label.axes):
            return None
        if source.ndim == made.ndim:  # keepdim: the dimensions are still there, with a size of 1
            return label
        return Label(tuple(axis - sum(other < axis for other in gone) for axis in label.axes), label.layer)

    return follow


def _squeezed(args: Sequence[Any], named: Any, made: Tensor) -> Sequence[int]:
    """Return the dimensions that `squeeze` removes."""
    if len(args) == 1:
        return [axis for axis, size in enumerate(args[0].shape) if size == 1]
    wanted = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    return [axis for axis in wanted if args[0].shape[axis] == 1]


def _chosen(args: Sequence[Any], named: Any, made: Tensor) -> Sequence[int]:
    """Return the dimension that `select` or `unbind` removes."""
    return [args[1] if len(args) > 1 else 0]


def _reduced(args: Sequence[Any], named: Any, made: Tensor) -> Sequence[int]:
    """Return the dimensions that a reduction such as `mean` removes; all of them by default."""
    wanted = args[1] if len(args) > 1 else named.get("dim")
    if wanted is None or isinstance(wanted, bool):
        return range(args[0].ndim)
    return wanted if isinstance(wanted, list | tuple) else [wanted]


def _joined(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Tensors are concatenated; those with a label must agree."""
    labels = {label.axes: label for label in map(_label, reversed(args[0])) if label is not None}
    return next(iter(labels.values())) if len(labels) == 1 else None


def _stacked(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Tensors are joined along a new dimension."""
    label, new = _joined(args, named, made), (args[1] if len(args) > 1 else 0) % made.ndim
    return None if label is None else Label(tuple(axis + (axis >= new) for axis in label.axes), label.layer)


def _indexed(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Positions of one dimension are picked by one list of indices; that dimension stays where it is."""
    used = [index for index in args[1] if index is not None]
    return _same(args, named, made) if len(used) == 1 and used[0].ndim == 1 and used[0].dtype != torch.bool else None


def _written(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Features are written to some positions, as in a mixture of experts. The target keeps its label, or takes that of the features."""
    own, written = _label(args[0]), args[-1] if isinstance(args[-1], Tensor) else args[2]
    other = _label(written)
    if own is not None or other is None:
        return own
    if written.ndim == made.ndim:
        return other
    return Label((made.ndim - 1,), other.layer) if other.axes == (written.ndim - 1,) else None


def _restrided(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Strides change; the meaning of the dimensions is known only if the shape stays."""
    return _same(args, named, made) if args[0].shape == made.shape else None


def _layer_norm(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """An unlabelled tensor that is normalised over its last dimension has its features there; otherwise the label stays."""
    is_first = len(args[1]) == 1 and _label(args[0]) is None
    return Label((made.ndim - 1,), 0) if is_first else _same(args, named, made)


def _shuffled(args: Sequence[Any], named: Any, made: Tensor) -> Label | None:
    """Channels become positions or the reverse; the label stays if it is the channel dimension of [..., C, H, W]."""
    label = _label(args[0])
    return label if label is not None and label.axes == (made.ndim - 3,) else None


# Operations that keep all dimensions in place.
_STAYS = [
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh",
    "contiguous",
    "native_dropout",
    "bernoulli",
    "hardswish",
    "_prelu_kernel",
    "prelu",
    "masked_fill",
    "log_sigmoid_forward",
    "rrelu_with_noise",
    "glu",
    "_softmax",
    "_log_softmax",
    "softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "roll",
    "flip",
    "constant_pad_nd",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "_pad_circular",
    "max_pool1d",
    "max_pool2d",
    "max_pool2d_with_indices",
    "mkldnn_max_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "adaptive_avg_pool1d",
    "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d",
    "mkldnn_adaptive_avg_pool2d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "fractional_max_pool2d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "grid_sampler_2d",
    "slice",
    "narrow",
    "split",
    "unsafe_split",
    "split_with_sizes",
    "unsafe_split_with_sizes",
    "index_select",
    "gather",
    "sort",
    "topk",
    "_fft_c2c",
    "_fft_r2c",
    "_fft_c2r",
    "view_as_real",
    "view_as_complex",
    "_conj",
    "fill",
    "zero",
    "triu",
    "tril",
]
_FOLLOWS: dict[str, Callable[[Sequence[Any], Any, Tensor], Label | None]] = {
    **dict.fromkeys(_STAYS, _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    "permute": _permuted(lambda args, ndim: args[1]),
    "transpose": _permuted(_swapped),
    "t": _permuted(lambda args, ndim: range(ndim)[::-1]),
    "unsqueeze": _unsqueezed,
    "squeeze": _without(_squeezed),
    "expand": _expanded,
    **dict.fromkeys(("select", "unbind"), _without(_chosen)),
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "max", "min", "var", "std", "linalg_vector_norm", "logsumexp", "prod"), _without(_reduced)
    ),
    "copy": _pointwise,
    "as_strided": _restrided,
    **dict.fromkeys(("index_put", "index_add", "index_copy", "scatter", "scatter_add", "masked_scatter"), _written),
    "cat": _joined,
    "stack": _stacked,
    "index": _indexed,
    "native_layer_norm": _layer_norm,
    "pixel_shuffle": _shuffled,
    "pixel_unshuffle": _shuffled,
}
