"""Describes multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434). For each token the KV cache holds one vector, the
latent, from which the keys and values of all heads are computed.

The description of a family of decoders with such attention contains a `Latents`. Defaults are those of transformers' configuration
classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.architectures.architecture import COLUMNS, FIRST_ALONE, ROWS, TensorGroup, one_tensor
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import LatentShape

NORM_EPS = 1e-6  # eps of the norms of latents; rms_norm_eps applies to other norms


@dataclass(slots=True, frozen=True)
class LatentNames:
    """The names of the tensors of multi-head latent attention in a layer, without `.weight` and `.bias`. They follow the layer's
    prefix.

    queries: the matrix of queries, in models that make them with a single matrix. query_down, query_norm, query_up: in all other
    models, the two matrices that make the queries, and the norm between them.

    down: the matrix that makes the latent and the part of the keys that has rotary embedding (RoPE). norm: the norm of the latent.
    up: the matrix that makes values, and the other part of the keys, from a latent, head by head."""

    queries: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    output: str = "self_attn.o_proj"

    def read_together(self, latent: LatentShape) -> tuple[str, ...]:
        """Returns the names of the matrices that are fused into one matrix multiplication: the one that makes the latents of KV
        and, in models that have it, the one that makes the latents of queries."""
        return (self.query_down, self.down) if latent.query_rank else (self.down,)


@dataclass(slots=True, frozen=True)
class Latents:
    """The settings of multi-head latent attention in a family of decoders: tensor names, and defaults for keys that config.json
    leaves out. LatentShape explains the sizes."""

    query_rank: int
    rank: int = 512
    plain_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    names: LatentNames = LatentNames()
    interleaved_key: str = ""  # the key that says whether pairs of rotated dimensions are neighbours; "": they are

    def parse(self, fields: Fields) -> LatentShape:
        """Returns the sizes of latent attention, from config.json. Raises CheckpointError, which names a key with a wrong value."""
        has_rank = not ("q_lora_rank" in fields.values and fields.is_null("q_lora_rank"))
        latent = LatentShape(
            query_rank=fields.integer("q_lora_rank", self.query_rank) if has_rank else 0,
            rank=fields.integer("kv_lora_rank", self.rank),
            plain_dim=fields.integer("qk_nope_head_dim", self.plain_dim),
            rope_dim=fields.integer("qk_rope_head_dim", self.rope_dim),
            value_dim=fields.integer("v_head_dim", self.value_dim),
        )
        if latent.rope_dim % 2:
            raise fields.fail("qk_rope_head_dim", f"{latent.rope_dim} is odd; rotary embedding needs pairs")
        return latent

    def interleaved(self, fields: Fields) -> bool:
        """Returns whether rotary embedding (RoPE) pairs neighbouring dimensions; if not, a pair is one dimension of each half."""
        return fields.boolean(self.interleaved_key, True) if self.interleaved_key else True

    def tensor_groups(self, latent: LatentShape, num_heads: int, hidden: int, has_bias: bool) -> list[TensorGroup]:
        """Returns the tensor groups of attention in one layer, with names that lack the layer's prefix. hidden: the model's width.
        Matrices that consist of parts for each head are divided among devices. Each device has all other matrices whole, so it
        computes and keeps the latents of all tokens."""
        names, rank = self.names, latent.query_rank
        of_query, of_key_value = latent.plain_dim + latent.rope_dim, latent.plain_dim + latent.value_dim
        widths = (rank, latent.token_values) if rank else (latent.token_values,)
        together = list(zip(names.read_together(latent), widths, strict=True))
        down = tuple((f"{name}.weight", (width, hidden)) for name, width in together)
        groups = [TensorGroup(down, may_be_quantized=True, may_be_reordered=True)]
        if has_bias:
            groups.append(TensorGroup(tuple((f"{name}.bias", (width,)) for name, width in together)))
        if rank:
            groups.append(one_tensor(f"{names.query_norm}.weight", rank))
        queries, inputs = (names.query_up, rank) if rank else (names.queries, hidden)
        groups.append(_matrix(queries, num_heads * of_query, inputs, ROWS, of_query))
        up = _matrix(names.up, num_heads * of_key_value, latent.rank, ROWS, of_key_value)
        # heads' products read it both ways
        groups += [one_tensor(f"{names.norm}.weight", latent.rank), up._replace(may_be_reordered=False)]
        groups.append(_matrix(names.output, hidden, num_heads * latent.value_dim, COLUMNS, latent.value_dim))
        return [*groups, one_tensor(f"{names.output}.bias", hidden, divided=FIRST_ALONE)] if has_bias else groups


def _matrix(name: str, outputs: int, inputs: int, divided: str, unit: int) -> TensorGroup:
    matrix = ((f"{name}.weight", (outputs, inputs)),)
    return TensorGroup(matrix, may_be_quantized=True, may_be_reordered=True, divided=divided, unit=unit)
