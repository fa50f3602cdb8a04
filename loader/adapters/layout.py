"""Computes where the matrices of a LoRA adapter lie in device memory, and checks whether an adapter fits its base model.

In this file a product is a matrix multiplication of the base model. A product may read several matrices of the checkpoint that lie
one below the other, such as those of queries, keys and values; these matrices are the product's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from loader.architectures.registry import architecture_of
from loader.configs.adapter_matrices import AdaptedMatrix, adapted_matrices, decoder_of
from loader.errors import CheckpointError
from loader.models.adapter import Adapter, AdapterModule
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import parameter_shapes

RANK_STEP = 8  # kernels process so many ranks at a time
ALIGN_BYTES = 64
# Prefixes of the names of a decoder's layers. Adapters use the module names of a model in memory, whose prefix differs from that of
# the tensors in a checkpoint of a wrapper, or of a decoder without its head; the rest of the name is the same.
_BODIES = ("model.language_model.", "language_model.model.", "model.", "")
_LAYERS = "layers."


@dataclass(slots=True, frozen=True)
class AdapterPlace:
    """The location in memory of an adapter's matrices for one matrix multiplication (product) of the base model. The product may
    read several matrices of the checkpoint at once, such as those of queries, keys and values: its parts. number: the product's
    index among all that adapters may change (loader/configs/adapter_matrices.py).

    rank: the rank r that each of the product's P parts has in memory: the largest LoRA rank among them, rounded up to a multiple of
    RANK_STEP. inputs: number of inputs of the product. outputs: number of outputs of each part.

    offset: where the matrices begin, in elements from the adapter's first byte. First comes "down" [P * r, inputs], in which the
    rows of part p begin at p * r. After it comes "up" [r, outputs of the part] for each part: the adapter's matrix lora_B,
    transposed and multiplied by the module's scale.

    parts: for each part, the adapter's module that changes it; None: the adapter does not change the part, whose matrices are zeros
    in memory."""

    number: int
    rank: int
    offset: int
    inputs: int
    outputs: tuple[int, ...]
    parts: tuple[AdapterModule | None, ...]

    def down_at(self, part: int) -> int:
        """Returns where the matrix "down" [r, inputs] of a part begins, in elements from the adapter's first byte. part: index of
        the part, one of the checkpoint's matrices that the matrix multiplication fuses."""
        return self.offset + part * self.rank * self.inputs

    def up_at(self, part: int) -> int:
        """Returns where the matrix "up" [r, outputs[part]] of a part begins, in elements from the adapter's first byte. part: index
        of the part, one of the checkpoint's matrices that the matrix multiplication fuses."""
        return self.offset + self.rank * (len(self.parts) * self.inputs + sum(self.outputs[:part]))

    @property
    def num_elements(self) -> int:
        return self.rank * (len(self.parts) * self.inputs + sum(self.outputs))


@dataclass(slots=True, frozen=True)
class AdapterLayout:
    """The layout of a LoRA adapter's matrices in memory. places: the location of the matrices for each matrix multiplication of the
    base model that the adapter changes, in the order of `adapted_matrices`. num_bytes: the adapter's size in memory, a multiple of
    ALIGN_BYTES."""

    places: tuple[AdapterPlace, ...]
    num_bytes: int


class _Part(NamedTuple):
    number: int
    part: int


def adapter_layout(adapter: Adapter, shape: ModelShape, item_bytes: int) -> AdapterLayout:
    """Returns the layout of an adapter for a base model of this shape: where each matrix lies, and the size of all. item_bytes:
    bytes of an element, 4 or 2. Raises CheckpointError, which names a tensor, if the adapter does not fit the base."""
    matrices = adapted_matrices(shape)
    places = []
    offset, step = 0, ALIGN_BYTES // item_bytes
    for number, found in sorted(_modules_by_number(adapter, shape).items()):
        matrix = matrices[number]
        rank = -(-max(module.rank for module in found.values()) // RANK_STEP) * RANK_STEP
        parts = tuple(found.get(part) for part in range(len(matrix.names)))
        place = AdapterPlace(number, rank, offset, matrix.inputs, matrix.outputs, parts)
        places.append(place)
        offset += -(-place.num_elements // step) * step
    return AdapterLayout(tuple(places), offset * item_bytes)


def misfit(adapter: Adapter, shape: ModelShape) -> str:
    """Returns why an adapter does not fit a base model of this shape, with the name of the tensor at fault; "" if it fits."""
    if not adapted_matrices(shape):
        return f"{shape.architecture} is an encoder; adapters of encoders are not served"
    try:
        _modules_by_number(adapter, shape)
    except CheckpointError as error:
        return str(error)
    return ""


def _modules_by_number(adapter: Adapter, shape: ModelShape) -> dict[int, dict[int, AdapterModule]]:
    """Returns the adapter's modules by the matrices that they change: index of the matrix multiplication in `adapted_matrices` ->
    index of the matrix among those that it fuses -> module. Modules for matrices that the base model does not use, such as those of
    an image encoder, are left out. Raises CheckpointError, which names a tensor, for a module that does not fit the base model, and
    if all modules are left out."""
    known, matrices = _parts(shape), adapted_matrices(shape)
    found: dict[int, dict[int, AdapterModule]] = {}
    for module in adapter.modules:
        place = known.get(_plain(module.name))
        if place is None:
            if _is_unread(module.name, shape):
                continue
            raise CheckpointError(module.down.file, module.down.name, _why_not(module.name, shape))
        _check_shape(module, matrices[place.number], place.part)
        others = found.setdefault(place.number, {})
        if place.part in others:
            raise CheckpointError(module.down.file, module.down.name, f"adapts the same matrix as {others[place.part].down.name}")
        others[place.part] = module
    if not found:
        down = adapter.modules[0].down
        raise CheckpointError(down.file, down.name, "like all modules of the adapter changes a part of the base that is not served")
    return found


@lru_cache(maxsize=64)
def _parts(shape: ModelShape) -> Mapping[str, _Part]:
    return {
        _plain(matrix.prefix + name): _Part(number, part)
        for number, matrix in enumerate(adapted_matrices(shape))
        for part, name in enumerate(matrix.names)
    }


def _plain(module: str) -> str:
    """Returns a module's name without the prefix before "layers.", since this prefix may differ between the adapter and the base
    model. The name of a module outside the layers is returned unchanged."""
    for body in _BODIES:
        if module.startswith(body + _LAYERS):
            return module.removeprefix(body)
    return module


def _check_shape(module: AdapterModule, matrix: AdaptedMatrix, part: int) -> None:
    for tensor, axis, wanted in ((module.down, 1, matrix.inputs), (module.up, 0, matrix.outputs[part])):
        if tensor.shape[axis] != wanted:
            of_base = f"{matrix.prefix}{matrix.names[part]}.weight is [{matrix.outputs[part]}, {matrix.inputs}]"
            raise CheckpointError(tensor.file, tensor.name, f"has shape {list(tensor.shape)}, and the base's {of_base}")


def _is_unread(module: str, shape: ModelShape) -> bool:
    """Returns whether an adapter's module changes a matrix that the base model does not use, so that the module has no effect. A
    head that is the same matrix as the embedding counts as used."""
    names, plain = decoder_of(shape).names, _plain(module)
    if plain.startswith(_LAYERS):
        module = names.layer.partition(_LAYERS)[0] + plain
    return module != names.head and architecture_of(shape).ignores(shape, f"{module}.weight")


def _why_not(module: str, shape: ModelShape) -> str:
    if ".experts." in module:
        return "adapters of experts are not served"
    names = {name.removesuffix(".weight") for name in parameter_shapes(shape)}
    if module in names or _plain(module) in map(_plain, names):
        return "adapters of this matrix are not served: served are those of attention's, the delta rule's and MLPs' projections"
    if module.endswith(("lm_head", "embed_tokens")):
        return "adapters of embeddings and of the head are not served"
    return f"the base, {shape.architecture} with {shape.num_layers} layers, has no module {module}"
