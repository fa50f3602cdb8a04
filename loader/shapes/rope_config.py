"""Reads the settings of the rotary embedding (RoPE) from a config.json, which transformers 5 writes under `rope_parameters`, and
earlier versions under `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from loader.shapes.config_fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
PROPORTIONAL = "proportional"
MAX_POSITIONS = 1 << 40
_LAYER_KINDS = ("full_attention", "sliding_attention")
_ROTATED_KEY = "no_rope_layers"  # in spite of its name, a list with 1 for layers that are rotated


@dataclass(slots=True, frozen=True)
class RopeRules:
    """The settings of rotary embedding (RoPE) that a family's config.json may have, and their defaults.

    theta: the base of the frequencies if config.json gives none. scaling: (key, value) pairs that apply if config.json has no RoPE
    settings; with is_local, they apply only to layers with full attention.

    may_be_partial: whether RoPE may apply to only a part of each head's dimensions, and LongRoPE may scale the frequencies.
    partial: the fraction of the dimensions to which it applies if config.json gives none. may_be_proportional: whether the
    rope_type may be "proportional". interleaved: whether RoPE rotates pairs of neighbouring dimensions; if not, a pair is one
    dimension of the first half and one of the second.

    is_local: whether sliding-window layers have frequencies of their own. local_theta: their base if config.json gives none; None:
    the base of the other layers. only_windows: whether RoPE applies only in layers with windows. only_listed: whether it applies
    only in layers for which the key no_rope_layers has a 1."""

    theta: float = 10000.0
    may_be_partial: bool = False
    partial: float = 1.0
    is_local: bool = False
    local_theta: float | None = 10000.0
    only_windows: bool = False
    only_listed: bool = False
    interleaved: bool = False
    may_be_proportional: bool = False
    scaling: tuple[tuple[str, str | float | bool], ...] = ()


@dataclass(slots=True, frozen=True)
class RopeParameters:
    """The settings of a rotary embedding (RoPE): its base `theta`, and how its frequencies are scaled (engine/layers/rope.py).
    kind: one of ROPE_TYPES, "longrope" or PROPORTIONAL.

    partial_rotary_factor: the fraction of each head's dimensions to which RoPE applies. score_factor: factor of attention's scores,
    which only latent attention applies (yarn). extended_to: the context length in positions that the scaling reaches, which may
    exceed the one that config.json gives (yarn, dynamic); 0: the scaling does not say.

    longrope: short_factors and long_factors have one factor per frequency, for sequences within original_max_position_embeddings
    and for longer ones; cosines and sines are multiplied by attention_factor.

    yarn: dimensions that rotate at least beta_fast times within original_max_position_embeddings keep their frequency; those that
    rotate at most beta_slow times have it divided by `factor`.

    proportional: frequencies are computed as for a head to which RoPE applies as a whole. Only the fastest ones are kept, a
    fraction partial_rotary_factor of all; the others become 0."""

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
    score_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the range between both is widened to whole dimensions
    extended_to: int = 0
    interleaved: bool = False  # a pair is two neighbouring dimensions

    def rotary_dim(self, head_dim: int) -> int:
        return head_dim if self.kind == PROPORTIONAL else int(head_dim * self.partial_rotary_factor)


def parse_rope(
    fields: Fields, name: str, rules: RopeRules, head_dim: int, full_head_dim: int, max_position_embeddings: int
) -> tuple[RopeParameters, RopeParameters | None]:
    """Returns the settings of rotary embedding (RoPE) for two kinds of layers: (layers with full attention, layers with sliding
    windows). The second is None if all layers have the same settings.

    fields: config.json. name: the architecture, for errors. rules: what the family's config.json may say. head_dim: dimensions of a
    head. full_head_dim: dimensions of a head in layers with full attention; used only if the two kinds have different settings.
    max_position_embeddings: the longest context by config.json, in tokens. Raises UnsupportedModel for settings that are not
    served, and CheckpointError for a wrong value."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    nothing = Fields({}, fields.file)
    has_kinds = new is not None and any(isinstance(new.values.get(kind), dict) for kind in _LAYER_KINDS)
    if not rules.is_local:
        if new is not None and has_kinds:
            raise new.unsupported("full_attention", f"{name} is supported with one rotary embedding only")
        theta = fields.number("rope_theta", rules.theta)
        given = new or old or Fields(dict(rules.scaling), fields.file)
        rope = _rope(given, fields, name, rules, theta, head_dim, max_position_embeddings)
        rope = replace(rope, interleaved=rules.interleaved)
        return rope, None
    if new is not None and not has_kinds:
        # before transformers 5 had one object for each kind of layer, this object applied to layers with full attention
        wide: Fields | None = new
        near = None
    else:
        wide = new.mapping("full_attention") if new else old
        near = new.mapping("sliding_attention") if new else None
    theta = fields.number("rope_theta", rules.theta)
    local_theta = fields.number("rope_local_base_freq", theta if rules.local_theta is None else rules.local_theta)
    wide = wide or Fields(dict(rules.scaling), fields.file)
    return (
        _rope(wide, fields, name, rules, theta, full_head_dim, max_position_embeddings),
        _rope(near or nothing, fields, name, rules, local_theta, head_dim, max_position_embeddings),
    )


def rotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns, for each layer, whether rotary embedding (RoPE) applies in it: it does if the list `no_rope_layers` has a 1 for the
    layer. Without that list, RoPE applies in all layers except the last of every `no_rope_layer_interval`. Raises CheckpointError
    for a list that is not valid."""
    interval = fields.integer("no_rope_layer_interval", 4)
    given = fields.values.get(_ROTATED_KEY) or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not all(one in (0, 1) for one in given):
        raise fields.fail(_ROTATED_KEY, f"not a list of num_hidden_layers {num_layers} numbers, each 0 or 1")
    return [bool(one) for one in given]


def _rope(
    given: Fields, fields: Fields, name: str, rules: RopeRules, theta: float, head_dim: int, max_position_embeddings: int
) -> RopeParameters:
    kind = str(given.values.get("rope_type") or given.values.get("type") or "default")
    supported = (*ROPE_TYPES, "longrope") if rules.may_be_partial else ROPE_TYPES
    if rules.may_be_proportional:
        supported = (*ROPE_TYPES, PROPORTIONAL)
    if rules.may_be_partial and kind == "su":
        kind = "longrope"  # "su" is its earlier name
    if kind not in supported:
        raise given.unsupported("rope_type", f"{kind!r} is not supported; supported: {', '.join(supported)}")
    theta = given.number("rope_theta", theta)
    if theta <= 0:
        raise fields.fail("rope_theta", f"{theta} is not positive")
    if kind == PROPORTIONAL:
        return _proportional(given, theta, head_dim)
    share = _partial(given, fields, name, rules, head_dim)
    if kind == "default":
        return RopeParameters(theta=theta, partial_rotary_factor=share)
    if kind == "longrope":
        return _longrope(given, fields, theta, share, head_dim, max_position_embeddings)
    if kind == "yarn":
        return _yarn(given, fields, theta, share, max_position_embeddings)
    factor = given.number("factor")
    if factor < 1:
        raise given.fail("factor", f"{factor} is below 1")
    if kind == "dynamic":
        if int(head_dim * share) <= 2:
            raise given.unsupported("rope_type", f"'dynamic' is supported with more than 2 dimensions, head_dim {head_dim} has not")
        reach = _reach(given, max_position_embeddings, factor)
        return RopeParameters(
            kind="dynamic",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=max_position_embeddings,
            partial_rotary_factor=share,
            extended_to=reach,
        )
    if kind == "linear":
        return RopeParameters("linear", theta, factor, partial_rotary_factor=share)
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not 0 < low <= high:
        raise given.fail("high_freq_factor", f"{high} must be at least low_freq_factor {low}, which must be positive")
    original = given.integer("original_max_position_embeddings", max_position_embeddings)
    return RopeParameters("llama3", theta, factor, low, high, original, share)


def _partial(given: Fields, fields: Fields, name: str, rules: RopeRules, head_dim: int) -> float:
    holder = given if given.has("partial_rotary_factor") else fields
    share = holder.number("partial_rotary_factor", rules.partial)
    if share == 1.0:
        return share
    if not rules.may_be_partial:
        raise holder.unsupported("partial_rotary_factor", f"{name} is supported with whole rotary embedding only")
    if not 0 < share < 1 or int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise holder.fail("partial_rotary_factor", f"{share} of head_dim {head_dim} is not an even number of dimensions")
    return share


def _proportional(given: Fields, theta: float, head_dim: int) -> RopeParameters:
    share = given.number("partial_rotary_factor", 1.0)
    if not 0 < share <= 1 or int(share * head_dim // 2) == 0:
        raise given.fail("partial_rotary_factor", f"{share} of head_dim {head_dim} leaves no pair of dimensions, or has too many")
    factor = given.positive("factor", 1.0)
    return RopeParameters(PROPORTIONAL, theta, factor, partial_rotary_factor=share)


def _yarn(given: Fields, fields: Fields, theta: float, share: float, max_position_embeddings: int) -> RopeParameters:
    """Returns the parameters of YaRN (https://arxiv.org/abs/2309.00071). given: the object of config.json with the RoPE settings.
    fields: config.json itself; if it has the key original_max_position_embeddings outside `given`, that value is used, as in
    transformers. share: the fraction of each head's dimensions to which RoPE applies."""
    holder = fields if fields.has("original_max_position_embeddings") else given
    original = holder.integer("original_max_position_embeddings", max_position_embeddings)
    is_given = holder.has("original_max_position_embeddings")
    if theta <= 1:
        raise fields.fail("rope_theta", f"{theta} is not above 1, which yarn needs")
    factor = given.number("factor", max_position_embeddings / original if is_given else None)
    if factor < 1:
        raise given.fail("factor", f"{factor} is below 1")
    fast, slow = given.number("beta_fast", 32.0) or 32.0, given.number("beta_slow", 1.0) or 1.0
    if not 0 < slow <= fast:
        raise given.fail("beta_fast", f"{fast} must be at least beta_slow {slow}, which must be positive")
    part, all_dims = (given.number(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    computed = _yarn_scale(factor, part) / _yarn_scale(factor, all_dims) if part and all_dims else _yarn_scale(factor, 1.0)
    return RopeParameters(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        partial_rotary_factor=share,
        attention_factor=given.positive("attention_factor", computed),
        score_factor=_yarn_scale(factor, all_dims) ** 2,
        beta_fast=fast,
        beta_slow=slow,
        truncate=given.boolean("truncate", True),
        extended_to=_reach(given, original, factor) if is_given else 0,
    )


def _yarn_scale(factor: float, weight: float) -> float:
    """Returns YaRN's factor of cosines and sines, 0.1 * weight * ln(factor) + 1; 1 if factor is at most 1. factor: by how much the
    context is extended. weight: 1, as in the paper (which calls the result the square root of 1/t), or a number in config.json
    (mscale, mscale_all_dim)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _reach(given: Fields, length: int, factor: float) -> int:
    if length * factor > MAX_POSITIONS:
        raise given.fail("factor", f"{factor} times {length} is out of range (at most {MAX_POSITIONS})")
    return int(length * factor)


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
