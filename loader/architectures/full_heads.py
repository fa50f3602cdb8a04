"""Reads the number and size of the heads in layers with full attention, for families in which they differ from the heads in layers
with sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import HeadShape

_BY_LAYER, _NUM, _DIM, _TIED = "per_layer_config", "num_key_value_heads", "head_dim", "attention_k_eq_v"


@dataclass(slots=True, frozen=True)
class FullHeads:
    """The settings of the heads in layers with full attention, for a family in which they differ from the heads in layers with
    sliding windows. head_dim: dimensions of a head if config.json has neither `global_head_dim` nor `per_layer_config`."""

    head_dim: int

    def parse(self, fields: Fields, sliding: Sequence[bool], usual: HeadShape, num_heads: int) -> HeadShape | None:
        """Returns the heads of layers with full attention; None if they are the same as `usual`, the heads of layers with sliding
        windows. sliding: for each layer, whether it has a sliding window. num_heads: number of query heads. Raises UnsupportedModel
        for heads that are not served, and CheckpointError for a wrong value.

        The key `per_layer_config`, which later versions of transformers write, maps the index of each layer with other heads to an
        object that describes them. Files without that key have `global_head_dim` and, if one projection makes both keys and values,
        `num_global_key_value_heads`."""
        tied = fields.boolean(_TIED)
        if fields.has(_BY_LAYER):
            num_key = dim_key = _BY_LAYER
            heads = _listed(fields, sliding, usual)
        else:
            num_key, dim_key = "num_global_key_value_heads", "global_head_dim"
            num = fields.integer(num_key, usual.num_kv_heads) if tied else usual.num_kv_heads
            heads = HeadShape(num, fields.integer(dim_key, self.head_dim))
        if num_heads % heads.num_kv_heads:
            raise fields.fail(num_key, f"{heads.num_kv_heads} heads do not divide num_attention_heads {num_heads}")
        if heads.head_dim % 2:
            raise fields.fail(dim_key, f"head size {heads.head_dim} is odd; rotary embedding needs pairs")
        heads = HeadShape(heads.num_kv_heads, heads.head_dim, keys_are_values=tied)
        return None if heads == usual else heads


def _listed(fields: Fields, sliding: Sequence[bool], usual: HeadShape) -> HeadShape:
    """Returns the heads of layers with full attention as `per_layer_config` lists them. sliding: for each layer, whether it has a
    sliding window. usual: the heads of layers that are not listed. Raises UnsupportedModel unless all layers with full attention
    have the same heads and all other layers have `usual`, and CheckpointError for an entry that is not valid."""
    by_layer = fields.mapping(_BY_LAYER)
    assert by_layer is not None
    numbers = {str(layer): layer for layer in range(len(sliding))}
    found: dict[int, HeadShape] = {}
    for name in by_layer.values:
        own = by_layer.mapping(name)
        if name not in numbers or own is None:
            raise by_layer.fail(name, f"is not an object for one of the layers from 0 to {len(sliding) - 1}")
        _refuse_others(own)
        found[numbers[name]] = HeadShape(own.integer(_NUM, usual.num_kv_heads), own.integer(_DIM, usual.head_dim))
    windowed = {found.get(layer, usual) for layer, slides in enumerate(sliding) if slides}
    full = {found.get(layer, usual) for layer, slides in enumerate(sliding) if not slides}
    if windowed - {usual} or len(full) > 1:
        raise fields.unsupported(_BY_LAYER, "is supported where all layers without windows, and no others, have the same values")
    return next(iter(full), usual)


def _refuse_others(own: Fields) -> None:
    for key, value in own.values.items():
        if key not in (_NUM, _DIM) and value is not None:
            raise own.unsupported(key, f"is not supported for single layers; supported: {_NUM}, {_DIM}")
