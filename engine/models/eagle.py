"""Runs the EAGLE-3 head of a decoder: a draft model that predicts tokens from hidden states of some of the decoder's layers
(loader/architectures/eagle.py).

Shapes: T tokens of all rows, end to end; W width of the decoder, H width of the head; V vocabulary of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from engine.layers.attention import Attention
from engine.layers.mlp import MLP
from engine.layers.norms import Norm
from engine.layers.weights import Weights
from engine.ops.ops import BatchT, Ops, PackedMatrix
from loader.architectures import eagle as names
from loader.architectures.eagle import layer_family
from loader.shapes.model_shape import ModelShape


class EagleDrafter(Generic[BatchT]):
    """The EAGLE-3 head of a decoder, which drafts tokens. For each token it reads the decoder's hidden states of that token, from
    several layers combined into one, and the embedding of the next token. To draft further tokens, it reads its own last hidden
    state instead of the decoder's. embedding [V, H]: the decoder's embedding, used if the head has none."""

    def __init__(self, ops: Ops[BatchT], shape: ModelShape, weights: Weights, embedding: Tensor | PackedMatrix) -> None:
        assert shape.eagle is not None
        head, family = shape.eagle, layer_family(shape.eagle)
        own, number = head.layer, shape.num_layers
        outer, layer = names.PREFIX + head.outer_prefix, family.names.layer
        parts = (ops, family, own, weights)
        self.ops, self.vocab_size = ops, shape.vocab_size
        self.states = weights.get(f"{outer}{names.STATES}.weight")
        self.one_norm = Norm(*parts, outer + names.ONE_NORM) if head.one_norm else None
        num_normed = len(head.read_layers) if head.norms else 0
        self.norms = [Norm(*parts, outer + names.NORMS.format(one)) for one in range(num_normed)]
        self.embedding = weights.get(f"{outer}{names.EMBEDDING}.weight") if head.has_embedding else embedding
        self.token_norm, self.state_norm = Norm(*parts, layer + names.TOKEN_NORM), Norm(*parts, layer + names.STATE_NORM)
        self.attention = Attention(ops, family, own, weights, number)
        self.mlp_norm = Norm(*parts, layer + names.MLP_NORM)
        self.mlp = MLP.of_layer(ops, family, own, weights, number)
        self.norm = Norm(*parts, outer + names.NORM)
        self.norm_before_residual, self.norm_output = head.norm_before_residual, head.norm_output
        self.head = weights.get(f"{names.PREFIX}{names.HEAD}.weight")
        self.offsets = weights.get(names.PREFIX + names.OFFSETS) if head.has_offsets else None

    def read(self, kept: Sequence[Tensor]) -> Tensor:
        """Returns the states with which the head begins, [T, H], combined from the decoder's hidden states. kept: for each layer of
        the decoder that the head reads, the hidden states [T, W] that are the input of that layer."""
        if self.norms:
            kept = [norm(one.contiguous()) for norm, one in zip(self.norms, kept, strict=True)]
        states = torch.cat(tuple(kept), dim=1)
        if self.one_norm is not None:
            states = self.one_norm(states)
        return self.ops.linear(states, self.states)

    def __call__(self, states: Tensor, batch: BatchT) -> Tensor:
        """Computes the head for a batch, stores its keys and values at the batch's positions, and returns its states [T, H]. In
        this batch, the input at position p must be the token at position p + 1 of the text. states [T, H]: the result of `read`, or
        of an earlier call."""
        embedded = self.ops.embedding(batch.input_ids, self.embedding, 1.0)
        normed = self.state_norm(states)
        residual = normed.clone() if self.norm_before_residual else states.clone()  # the sum is made in place
        attended = self.attention(torch.cat((self.token_norm(embedded), normed), dim=1), batch)
        self.ops.add(self.mlp(self.mlp_norm.of_sum(attended, residual), batch), residual)
        return self.norm(residual) if self.norm_output else residual

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits [N, V] of N hidden states [N, H] of the head. The head may have a smaller vocabulary than the decoder;
        tokens that are not in it get the lowest finite number."""
        own = self.ops.linear(states if self.norm_output else self.norm(states), self.head)
        if self.offsets is None and own.shape[1] == self.vocab_size:
            return own
        ids = torch.arange(own.shape[1], device=own.device)
        if self.offsets is not None:
            ids = (ids + self.offsets).clamp_(0, self.vocab_size - 1)
        logits = own.new_full((len(own), self.vocab_size), torch.finfo(own.dtype).min)
        logits[:, ids] = own
        return logits
