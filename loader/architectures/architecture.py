"""The interface of a family's description, and parts that several descriptions use."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from loader.config_fields import Fields
from loader.dtypes import DTYPES
from loader.model_shape import ModelShape

MAX_LAYERS = 1024  # the deepest models have some 130; a list of so many is built before the files can tell how many there are

Dims = tuple[int, ...]


# How the devices of a group share a tensor (TensorGroup.divided): by its rows, by its columns, or the first device has all of it
# because what the devices make is added up.
ROWS, COLUMNS, FIRST_ALONE = "rows", "columns", "first alone"


class Cut(NamedTuple):
    """A share of a stored tensor: of an axis, which has `whole` elements, those of the ranges [begin, end), which are in ascending
    order, do not meet, and lie one after the other in the share. axis: 0 takes rows. Along another axis k the tensor is a matrix
    [prod(dims[:k]), prod(dims[k:])], and the share has some of its columns."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    whole: int

    @property
    def length(self) -> int:
        """Returns the number of elements that the share has along the axis."""
        return sum(end - begin for begin, end in self.ranges)

    def part_of(self, dims: Dims) -> Dims:
        """Returns the shape of the share. dims: of the whole tensor."""
        return (*dims[: self.axis], self.length, *dims[self.axis + 1 :])

    def whole_of(self, dims: Dims) -> Dims:
        """Returns the shape of the whole tensor. dims: of the share."""
        return (*dims[: self.axis], self.whole, *dims[self.axis + 1 :])


class TensorGroup(NamedTuple):
    """Tensors that lie end to end in a model's memory, because one matrix product reads them together.

    tensors: name in the checkpoint and shape of each. layer: the number of the layer that needs them; None: they are needed
    before the first layer or after the last. may_be_quantized: whether they are matrices of a layer, which `quantize` may round;
    embeddings, heads, norms and biases are not. held_as: the dtype that they have in memory; "": the model's. may_be_reordered:
    whether the product that reads them may take its inputs in an order that the checkpoint says.

    divided: how the devices of a group share them: ROWS, COLUMNS, FIRST_ALONE; "": each of them has them whole. unit: so many rows
    or columns, those of a head, are not divided; with fewer units than devices several devices have the same. joined: for
    each tensor, the rows of the matrices that it holds one after the other, because each of them is divided; (): each tensor is one
    matrix. cuts: of the share of one device (loader/slices.py), for each tensor: which part of it this is, with shapes in `tensors`
    that are those of the part; (): they are whole.

    num_experts: the tensors are those of so many experts, in the experts' order, of which each device may have some. `divided` then
    says how the devices that have the same experts share each of them. 0: they are not of experts that a router chooses. stacked:
    each tensor has the experts along its first axis, and `divided` is about the axes behind it."""

    tensors: tuple[tuple[str, Dims], ...]
    layer: int | None = None
    may_be_quantized: bool = False
    held_as: str = ""
    may_be_reordered: bool = False
    divided: str = ""
    unit: int = 1
    joined: tuple[Dims, ...] = ()
    num_experts: int = 0
    stacked: bool = False
    cuts: tuple[Cut, ...] = ()

    def in_layer(self, layer: int, prefix: str) -> TensorGroup:
        """Returns the same group for one layer: its number is `layer`, and its tensors' names begin with `prefix`."""
        return self._replace(tensors=tuple((prefix + name, dims) for name, dims in self.tensors), layer=layer)


class Architecture(Protocol):
    """A family of models. name: the value in `architectures` of config.json. model_type: the value of that key, which is used if
    `architectures` is missing; "": a file without `architectures` means another family."""

    @property
    def name(self) -> str: ...

    @property
    def model_type(self) -> str: ...

    def parse(self, fields: Fields) -> ModelShape:
        """Reads config.json. Raises UnsupportedModel for a variant that is not served, and CheckpointError, which names a key
        with a wrong value."""
        ...

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Lists every tensor that the checkpoint must hold, in the order of the model's memory."""
        ...

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain this tensor in addition to those of tensor_groups. It is not read."""
        ...

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape for a checkpoint whose tensors have these names, where a family's checkpoints name the same tensors in
        different ways. Called once the files, or their index, are read, before tensor_groups."""
        ...


def one_tensor(name: str, *dims: int, divided: str = "") -> TensorGroup:
    return TensorGroup(((name, dims),), divided=divided)


def stored_dtype(fields: Fields, default: str = "float32") -> str:
    """Returns the dtype of the stored weights: the key `dtype`, or `torch_dtype`, as it was called before transformers 5. default:
    of files that have neither."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(key) or default
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise fields.unsupported(key, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value
