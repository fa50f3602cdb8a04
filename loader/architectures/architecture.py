"""Defines the interface of a model family's description (Architecture), and parts that several descriptions use."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from loader.shapes.config_fields import Fields
from loader.shapes.dtypes import DTYPES
from loader.shapes.model_shape import ModelShape

MAX_LAYERS = 1024  # the deepest models have some 130; a list of all layers is built before the files can tell how many there are

Dims = tuple[int, ...]


# How the devices of a group share a tensor (TensorGroup.divided): by its rows, by its columns, or only the first device has it,
# because the devices' outputs are added up.
ROWS, COLUMNS, FIRST_ALONE = "rows", "columns", "first alone"
WHOLE = "whole"  # every stage of a pipeline has a tensor whole (TensorGroup.by_layer)


class Cut(NamedTuple):
    """A device's share of a stored tensor. Along one axis, which has `whole` elements in the whole tensor, the share has the
    elements whose indices lie in `ranges` [begin, end). The ranges are in ascending order and do not touch; in the share their
    elements lie one after the other.

    axis: index of the axis that is cut. With axis 0 the share has some rows; with another axis k it has some columns of the tensor
    regarded as a matrix [prod(dims[:k]), prod(dims[k:])]. experts: a second cut, along the first axis, of a tensor that has experts
    along it; None: the share has all experts."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    whole: int
    experts: Cut | None = None

    @property
    def length(self) -> int:
        """The number of elements that the share has along the axis `axis`."""
        return sum(end - begin for begin, end in self.ranges)

    def part_of(self, dims: Dims) -> Dims:
        """Returns the shape of the part of a tensor that this cut takes. dims: shape of the whole tensor."""
        dims = dims if self.experts is None else self.experts.part_of(dims)
        return (*dims[: self.axis], self.length, *dims[self.axis + 1 :])

    def whole_of(self, dims: Dims) -> Dims:
        """Returns the shape of the whole tensor from which this cut takes a part. dims: shape of the part."""
        dims = dims if self.experts is None else self.experts.whole_of(dims)
        return (*dims[: self.axis], self.whole, *dims[self.axis + 1 :])


class TensorGroup(NamedTuple):
    """Tensors that lie end to end in a model's memory, because one matrix multiplication reads them together.

    tensors: for each tensor, its name in the checkpoint and its shape. layer: the index of the layer that needs them; None: they
    are needed before the first layer or after the last.

    may_be_quantized: whether they are matrices of a layer, which `quantize` may round; embeddings, heads, norms and biases are not.
    may_be_packed: whether they are an embedding or a head, which only a lossless format may hold. held_as: their dtype in memory;
    "": the model's dtype. may_be_reordered: whether the matrix multiplication that reads them may take its inputs in an order that
    the checkpoint gives.

    divided: how the devices of a split model (tensor parallelism) share the tensors. ROWS, COLUMNS: each device has some rows or
    columns. FIRST_ALONE: only the first device has them. "": each device has them whole. unit: number of adjacent rows or columns
    that are never divided, for example those of a head; if there are fewer such units than devices, several devices have the same
    unit. joined: for each tensor that consists of several matrices one after the other, the numbers of rows of these matrices, each
    of which is divided separately; (): each tensor is one matrix.

    cuts: for each tensor, which part of it a device's share (loader/sizes/slices.py) has; `tensors` then has the shapes of these
    parts. (): the tensors are whole.

    num_experts: number of experts to which the tensors belong, in the experts' order; 0: they do not belong to routed experts. Each
    device may have some of the experts; `divided` says how devices with the same experts share each of them. stacked: each tensor
    has the experts along its first axis, and `divided` applies to the other axes.

    by_layer: how the stages of a pipeline share tensors of which every layer needs a part. ROWS or COLUMNS: each layer has an equal
    number of rows or columns, in the order of the layers; a stage has those of its own layers, and each of its devices has all of
    these. WHOLE: each stage has the tensors whole. "": only one stage needs them."""

    tensors: tuple[tuple[str, Dims], ...]
    layer: int | None = None
    may_be_quantized: bool = False
    may_be_packed: bool = False
    held_as: str = ""
    may_be_reordered: bool = False
    divided: str = ""
    unit: int = 1
    joined: tuple[Dims, ...] = ()
    num_experts: int = 0
    stacked: bool = False
    by_layer: str = ""
    cuts: tuple[Cut, ...] = ()

    def in_parts(self, cuts: tuple[Cut, ...]) -> TensorGroup:
        """Returns the group with only a part of each tensor, as a device's share has it. cuts: for each tensor, which part."""
        tensors = tuple((name, cut.part_of(dims)) for (name, dims), cut in zip(self.tensors, cuts, strict=True))
        return self._replace(tensors=tensors, cuts=cuts)

    def in_layer(self, layer: int, prefix: str) -> TensorGroup:
        """Returns a copy of this group for one layer. This group must have tensor names without the layer's prefix. layer: the
        layer's index. prefix: put before each tensor's name."""
        return self._replace(tensors=tuple((prefix + name, dims) for name, dims in self.tensors), layer=layer)


class Architecture(Protocol):
    """The interface of a family's description. name: the value that the key `architectures` of config.json has for this family.
    model_type: the value of the key `model_type`, by which the family is recognised if `architectures` is missing; "": the family
    is recognised by `architectures` alone."""

    @property
    def name(self) -> str: ...

    @property
    def model_type(self) -> str: ...

    def parse(self, fields: Fields) -> ModelShape:
        """Returns the shape of the model that a config.json describes. Raises UnsupportedModel for a variant that is not served,
        and CheckpointError, which names a key with a wrong value."""
        ...

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns all tensors that the checkpoint must hold, in the order in which they lie in the model's memory. A group has the
        tensors that one matrix multiplication reads together."""
        ...

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain the tensor `name` although tensor_groups does not list it. Such a tensor is not
        read."""
        ...

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape adapted to a checkpoint whose tensors have these names, because a family's checkpoints may name or
        stack the same tensors differently. Called before tensor_groups, once the files or their index have been read."""
        ...


def one_tensor(name: str, *dims: int, divided: str = "") -> TensorGroup:
    return TensorGroup(((name, dims),), divided=divided)


def stored_dtype(fields: Fields, default: str = "float32") -> str:
    """Returns the dtype of the stored weights. It is read from the key `dtype` of config.json or, in files written before
    transformers 5, from `torch_dtype`. default: the dtype if the file has neither key. Raises UnsupportedModel for any dtype that
    is not in DTYPES."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(key) or default
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise fields.unsupported(key, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value
