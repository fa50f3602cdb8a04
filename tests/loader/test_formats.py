from __future__ import annotations

import pytest

from config.load import KV_CACHE_DTYPES, QUANTIZATIONS
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.registry import FORMATS, asked_format
from loader.shapes.kv_dtypes import KV_CACHE_DTYPES as BUILT
from loader.shapes.kv_dtypes import KV_FP8, asked_kv_cache_dtype, kv_dtype_of
from loader.sizes.layout import weight_layout
from tests.loader.checkpoints import shape


def test_what_the_setting_may_say_is_what_formats_ask_for() -> None:
    assert {setting for one in FORMATS.values() for setting in one.settings} == {None, *QUANTIZATIONS}
    assert asked_format(None) is asked_format("none") is PLAIN
    assert asked_format("int8") is INT8
    with pytest.raises(ValueError, match="'int4' is no weight format"):
        asked_format("int4")


def test_only_the_matrices_of_layers_are_held_in_another_format() -> None:
    model = shape(attention_bias=True, tie_word_embeddings=False)
    plain, rounded = ({slot.name: slot for slot in weight_layout(model, "bfloat16", one)} for one in (PLAIN, INT8))
    changed = {name for name, slot in rounded.items() if slot.num_bytes != plain[name].num_bytes}
    assert changed == {name for name in plain if name.endswith("_proj.weight")}
    assert all((slot.scales_at_bytes >= 0) == (name in changed) for name, slot in rounded.items())


def test_kv_dtypes() -> None:
    assert ("auto", *BUILT) == KV_CACHE_DTYPES, "what the configuration allows is what is built"
    assert [asked_kv_cache_dtype(setting) for setting in KV_CACHE_DTYPES] == ["", *BUILT]
    assert kv_dtype_of("bfloat16", "") == "bfloat16"
    assert kv_dtype_of("bfloat16", KV_FP8) == KV_FP8
