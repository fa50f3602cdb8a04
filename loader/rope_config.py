"""Rotary embedding settings of a config.json, in both dialects: `rope_parameters` (transformers 5), or `rope_theta` and
`rope_scaling` (before)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loader.config_fields import Fields
from loader.families import Family

ROPE_TYPES = ("default", "linear", "llama3")
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(slots=True, frozen=True)
class RopeParameters:
    """Base `theta` and how its frequencies are scaled. See engine/layers/rope.py.

    partial_rotary_factor: the share of each head's dimensions that turn. longrope: one factor per frequency for sequences within
    original_max_position_embeddings and one for longer ones; cosines and sines are multiplied by attention_factor.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)


def parse_rope(
    fields: Fields, family: Family, head_dim: int, max_position_embeddings: int
) -> tuple[RopeParameters, RopeParameters | None]:
    """(of full attention, of windowed layers where they have their own). Raises UnsupportedModel or CheckpointError."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if not family.local_rope:
        if new is not None and any(isinstance(new.values.get(kind), dict) for kind in _LAYER_KINDS):
            raise new.unsupported("full_attention", f"{family.architecture} is supported with one rotary embedding only")
        given = new or old or Fields({}, fields.file)
        theta = fields.number("rope_theta", family.rope_theta)
        return _rope(given, fields, family, theta, head_dim, max_position_embeddings), None
    if new is not None and not any(isinstance(new.values.get(kind), dict) for kind in _LAYER_KINDS):
        # before transformers 5 knew one per kind of layer, this object was the full layers'
        wide: Fields | None = new
        near = None
    else:
        wide = new.mapping("full_attention") if new else old
        near = new.mapping("sliding_attention") if new else None
    nothing = Fields({}, fields.file)
    theta, local_theta = fields.number("rope_theta", family.rope_theta), fields.number("rope_local_base_freq", 10000.0)
    return (
        _rope(wide or nothing, fields, family, theta, head_dim, max_position_embeddings),
        _rope(near or nothing, fields, family, local_theta, head_dim, max_position_embeddings),
    )


def _rope(
    given: Fields, fields: Fields, family: Family, theta: float, head_dim: int, max_position_embeddings: int
) -> RopeParameters:
    kind = str(given.values.get("rope_type") or given.values.get("type") or "default")
    supported = (*ROPE_TYPES, "longrope") if family.partial_rotary else ROPE_TYPES
    if family.partial_rotary and kind == "su":
        kind = "longrope"  # its first name
    if kind not in supported:
        raise given.unsupported("rope_type", f"{kind!r} is not supported; supported: {', '.join(supported)}")
    theta = given.number("rope_theta", theta)
    if theta <= 0:
        raise fields.fail("rope_theta", f"{theta} is not positive")
    share = _partial(given, fields, family, head_dim)
    if kind == "default":
        return RopeParameters(theta=theta, partial_rotary_factor=share)
    if kind == "longrope":
        return _longrope(given, fields, theta, share, head_dim, max_position_embeddings)
    factor = given.number("factor")
    if factor < 1:
        raise given.fail("factor", f"{factor} is below 1")
    if kind == "linear":
        return RopeParameters("linear", theta, factor, partial_rotary_factor=share)
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not 0 < low < high:
        raise given.fail("high_freq_factor", f"{high} must be above low_freq_factor {low}, which must be positive")
    original = given.integer("original_max_position_embeddings", max_position_embeddings)
    return RopeParameters("llama3", theta, factor, low, high, original, share)


def _partial(given: Fields, fields: Fields, family: Family, head_dim: int) -> float:
    holder = given if given.has("partial_rotary_factor") else fields
    share = holder.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return share
    if not family.partial_rotary:
        raise holder.unsupported("partial_rotary_factor", f"{family.architecture} is supported with whole rotary embedding only")
    if not 0 < share < 1 or int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise holder.fail("partial_rotary_factor", f"{share} of head_dim {head_dim} is not an even number of dimensions")
    return share


def _longrope(
    given: Fields, fields: Fields, theta: float, share: float, head_dim: int, max_position_embeddings: int
) -> RopeParameters:
    holder = given if given.has("original_max_position_embeddings") else fields
    original = holder.integer("original_max_position_embeddings", at_least=2)
    pairs = int(head_dim * share) // 2
    factor = given.number("factor", max_position_embeddings / original)
    # the paper's: keeps the entropy of attention weights over longer contexts (https://arxiv.org/abs/2402.13753)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeParameters(
        kind="longrope",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial_rotary_factor=share,
        short_factors=given.numbers("short_factor", pairs),
        long_factors=given.numbers("long_factor", pairs),
        attention_factor=given.positive("attention_factor", computed),
    )
