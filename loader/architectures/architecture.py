"""What a family's description offers to the rest of hearthd, and the pieces that descriptions of all kinds are made of."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from loader.config_fields import Fields
from loader.dtypes import DTYPES
from loader.model_shape import ModelShape

MAX_LAYERS = 1024  # the deepest models have some 130; a list of so many is built before the files can tell how many there are

Dims = tuple[int, ...]


class TensorGroup(NamedTuple):
    """Tensors that lie end to end in a model's memory, because one matrix product reads them together.

    tensors: name in the checkpoint and shape of each. layer: the one that needs them; None: what comes before the first layer or
    after the last, as they stand in the list of groups. may_be_quantized: they are matrices of a layer, which `quantize` may round;
    embeddings, heads, norms and biases stay as they are.
    """

    tensors: tuple[tuple[str, Dims], ...]
    layer: int | None = None
    may_be_quantized: bool = False

    def in_layer(self, layer: int, prefix: str) -> TensorGroup:
        """Returns the group of a layer whose names begin so."""
        return TensorGroup(tuple((prefix + name, dims) for name, dims in self.tensors), layer, self.may_be_quantized)


class Architecture(Protocol):
    """A family of models. name: as `architectures` in config.json has it; model_type: the key of that name, which stands in for a
    missing `architectures`."""

    @property
    def name(self) -> str: ...

    @property
    def model_type(self) -> str: ...

    def parse(self, fields: Fields) -> ModelShape:
        """Reads config.json. Raises UnsupportedModel for a variant that is not served, CheckpointError naming a wrong key."""
        ...

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Lists every tensor that the checkpoint must hold, in the order of the model's memory."""
        ...

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Tells whether a checkpoint may hold this tensor beside those, unread."""
        ...


def one_tensor(name: str, *dims: int) -> TensorGroup:
    return TensorGroup(((name, dims),))


def stored_dtype(fields: Fields) -> str:
    """Reads `dtype`, or `torch_dtype` as it was called before transformers 5."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(key) or "float32"
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise fields.unsupported(key, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value


def refuse_quantized(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.unsupported("quantization_config", "quantised checkpoints are not supported")
