"""Computes an additional input for each layer of a model: per-layer embeddings, as in Gemma 3n and Gemma 4. For each token the
input of a layer is (a row of a table + a projection of the token's embedding) / sqrt(2). Shapes: T tokens, L layers, W width of a
layer's input."""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops
from loader.architectures.decoder import Decoder
from loader.shapes.model_shape import ModelShape

MEAN_FACTOR = 2.0**-0.5  # factor of the sum of both parts


class LayerInputs(Generic[BatchT]):
    """Computes per-layer embeddings (as in Gemma 3n and Gemma 4): for each token and each of the L layers on this device an
    additional input vector of width W. It is made from the token's id (by a table of its own) and from the token's embedding
    [hidden]."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights) -> None:
        assert shape.layer_inputs is not None
        names, width = family.names, shape.layer_inputs.width
        self.ops, self.width, self.num_layers = ops, width, len(shape.own_layers)
        self.table = weights.get(f"{names.input_embedding}.weight")
        self.table_scale = torch.tensor(width**0.5, dtype=self.table.dtype).item()  # rounded to the table's dtype
        self.projection = weights.get(f"{names.input_projection}.weight")
        self.projection_scale = shape.hidden_size**-0.5
        self.norm = Norm(ops, family, shape, weights, names.input_norm)

    def __call__(self, embedded: Tensor, batch: BatchT) -> Tensor:
        """Returns the per-layer embeddings of all L layers for all T tokens, [T L, W]. Row t L + l is the input of token t for the
        l-th of these layers. embedded [T, hidden]: the embeddings of the batch's tokens."""
        ops, num_tokens = self.ops, len(embedded)
        projected = ops.scaled(ops.linear(embedded, self.projection), self.projection_scale)
        made = self.norm(projected.view(num_tokens * self.num_layers, self.width))
        rows = ops.embedding(batch.input_ids, self.table, self.table_scale)
        ops.add(rows.view(made.shape), made)
        return ops.scaled(made, MEAN_FACTOR)


class LayerInput(Generic[BatchT]):
    """Computes one layer's update of the residual from the layer's additional input. The input is multiplied by a gate, which is a
    projection of the residual; the product is projected to [T, hidden] and normalised."""

    def __init__(self, ops: Ops[BatchT], family: Decoder, shape: ModelShape, weights: Weights, layer: int) -> None:
        assert shape.layer_inputs is not None
        names, prefix = family.names, family.names.layer.format(layer)
        width, own = shape.layer_inputs.width, shape.own_layers
        at = own.index(layer)
        self.ops, self.all_width, self.columns = ops, len(own) * width, slice(at * width, (at + 1) * width)
        self.gate = weights.matrix(prefix, (names.input_gate,))
        self.output = weights.matrix(prefix, (names.input_output,))
        self.norm = Norm(ops, family, shape, weights, prefix + names.input_output_norm)

    def __call__(self, residual: Tensor, batch: BatchT) -> Tensor:
        """Returns the update [T, hidden] that is to be added to the residual."""
        inputs = batch.layer_inputs
        assert inputs is not None
        own = inputs.view(len(residual), self.all_width)[:, self.columns]
        gated = self.ops.gelu(self.ops.linear(residual, self.gate))
        self.ops.multiply(gated, own)
        return self.norm(self.ops.linear(gated, self.output))
