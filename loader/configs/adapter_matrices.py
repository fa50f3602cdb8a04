"""Lists the matrix multiplications (products) of a model that a LoRA adapter may change. The index of a product in the list is
called its matrix number; loader and engine both identify the product by it.
"""

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
    """One or more matrices of a model that an adapter may change and that are fused into one matrix multiplication. Their tensors
    have the names prefix + name + ".weight", for each name in `names`. outputs: number of rows of each matrix. inputs: number of
    columns, the same for all."""

    prefix: str
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int


@lru_cache(maxsize=256)
def adapted_matrices(shape: ModelShape) -> tuple[AdaptedMatrix, ...]:
    """Returns the matrix multiplications of a decoder that adapters may change; () for an encoder. They are ordered by layer;
    within a layer, those of attention (or of the gated delta rule) come before those of the MLP or, in a layer with experts, of the
    shared expert.

    Adapters cannot change experts, routers, the gates of the delta rule, per-layer inputs, embeddings, the head, and the matrix of
    latent attention that makes keys and values from latents."""
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
    """Returns the matrix numbers of all matrix multiplications that adapters may change: (prefix, names of the fused matrices) ->
    number."""
    return {(matrix.prefix, matrix.names): number for number, matrix in enumerate(adapted_matrices(shape))}


def _products(family: Decoder, shape: ModelShape) -> Iterator[_Product]:
    """Yields each matrix multiplication that adapters may change, as (prefix, names of the fused matrices), in the order of the
    matrix numbers. family: the decoder's description with the names in the checkpoint."""
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
