"""Lists the matrix multiplications (products) of a model that a LoRA adapter may change. The index of a product in the list is its
matrix number, by which both the loader and the engine identify it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from loader.architectures.decoder import Decoder, has_delta_rule, has_experts
from loader.architectures.registry import architecture_of
from loader.architectures.wrapper import Wrapper
from loader.shapes.model_shape import ModelShape

_Product = tuple[str, tuple[str, ...]]


class AdaptedMatrix(NamedTuple):
    """One or more matrices of a model that are multiplied in one matrix multiplication and that an adapter may change. They are the
    tensors prefix + name + ".weight" for all `names`. outputs: number of rows of each matrix. inputs: number of columns, the same
    for all."""

    prefix: str
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int


@lru_cache(maxsize=256)
def adapted_matrices(shape: ModelShape) -> tuple[AdaptedMatrix, ...]:
    """Returns the matrix multiplications of a decoder that adapters may change, layer by layer: first those of attention (or of the
    delta rule), then those of the MLP, or of the shared expert. () for encoders.

    They are those that engine/layers builds with Weights.matrix of the same prefix and names. Not among them are experts, routers,
    the gates of the delta rule, additional layer inputs, embeddings, the head, and the matrix of latent attention that is
    multiplied head by head."""
    family = architecture_of(shape)
    if not isinstance(family, Decoder | Wrapper):
        return ()
    dims = {name: sizes for group in family.tensor_groups(shape) for name, sizes in group.tensors}
    found = []
    for prefix, names in _products(decoder_of(shape), shape):
        sizes = [dims[f"{prefix}{name}.weight"] for name in names]
        found.append(AdaptedMatrix(prefix, names, tuple(outputs for outputs, _ in sizes), sizes[0][1]))
    return tuple(found)


def decoder_of(shape: ModelShape) -> Decoder:
    """Returns the description of a decoder's family, with the names that its checkpoint gives the tensors. Raises TypeError for
    encoders."""
    family = architecture_of(shape)
    if not isinstance(family, Decoder | Wrapper):
        raise TypeError(f"{shape.architecture} is no decoder")
    return family.decoder_of(shape)


def numbers_of(shape: ModelShape) -> dict[_Product, int]:
    """Returns the matrix number of each matrix multiplication that adapters may change: (prefix, names of its matrices) ->
    number."""
    return {(matrix.prefix, matrix.names): number for number, matrix in enumerate(adapted_matrices(shape))}


def _products(family: Decoder, shape: ModelShape) -> Iterator[_Product]:
    """Yields (prefix, names of the matrices) of each matrix multiplication that adapters may change, in the order of their matrix
    numbers. family: the decoder's description with the names in the checkpoint."""
    names = family.names
    for layer in range(shape.num_layers):
        prefix = names.layer.format(layer)
        if family.deltas is not None and has_delta_rule(shape, layer):
            yield prefix, family.deltas.names.inputs
            yield prefix, (family.deltas.names.output,)
        elif family.latents is not None and shape.latent is not None:
            latent = family.latents.names
            yield prefix, latent.read_together(shape.latent)
            yield prefix, (latent.query_up if shape.latent.query_rank else latent.queries,)
            yield prefix, (latent.output,)
        else:
            yield prefix, names.of_heads(shape.heads_of(layer))
            yield prefix, (names.attention_output,)
        if not has_experts(shape, layer):
            yield prefix, names.gate_up
            yield prefix, (names.down,)
        elif family.experts is not None and (shared := family.experts.names.shared):
            yield prefix + shared, family.experts.names.gate_up
            yield prefix + shared, (family.experts.names.down,)
