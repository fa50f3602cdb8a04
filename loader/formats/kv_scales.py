"""Finds the tensors of quantised checkpoints that hold scales of keys and values. These scales are not used, because keys and
values are held as `kv_cache_dtype` says: in the model's dtype, or as FP8 with scales that are computed for each token and head.
"""

from __future__ import annotations

from collections.abc import Iterable

_KV_SCALES = ("k_scale", "v_scale", "kv_scale")
# some producers name them after the outputs of the projections
_OF_PROJECTIONS = ("k_proj.output_scale", "v_proj.output_scale", "kv_b_proj.output_scale")


def is_kv_scale(name: str) -> bool:
    """Returns whether the tensor of this name holds scales of keys or values."""
    return name.rpartition(".")[2] in _KV_SCALES or name.endswith(_OF_PROJECTIONS)


def unused_kv_scales(names: Iterable[str]) -> str:
    """Returns a sentence for operators, which says that the scales of keys and values among these tensors are not used; "" if there
    are none."""
    kinds = [name.rpartition(".")[2] for name in names if is_kv_scale(name)]
    if not kinds:
        return ""
    listed = ", ".join(sorted(set(kinds)))
    return f"{len(kinds)} scales of keys and values in its files ({listed}) are not used: KV is held as kv_cache_dtype says"
