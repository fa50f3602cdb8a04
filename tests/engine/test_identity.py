from __future__ import annotations

import itertools

import msgspec

from engine.protocol import EAGLE3, MTP, LoadModel
from engine.serve.identity import kv_identity, weights_identity
from loader.formats.registry import FORMATS
from loader.shapes.dtypes import DTYPES
from loader.shapes.kv_dtypes import KV_CACHE_DTYPES

SPEC = LoadModel(1, "m", "/m", "bfloat16", "f", 1, 1, 1, 64, 8, [])


def test_what_changes_keys_and_values_changes_an_identity() -> None:
    changes = [{}, {"fingerprint": "g"}, {"dtype": "float32"}, {"quantize": "int8"}, {"kv_cache_dtype": "fp8"}]
    specs = [msgspec.structs.replace(SPEC, **change) for change in changes]
    for one, other in itertools.combinations(specs, 2):
        assert (weights_identity(one), kv_identity(one)) != (weights_identity(other), kv_identity(other))


def test_no_two_combinations_of_names_have_the_same_identity() -> None:
    """Identities join names without a separator: fingerprints are of one length, and what else there is reads in one way only."""
    formats = [msgspec.structs.replace(SPEC, quantize=name) for name in FORMATS]
    assert len({weights_identity(spec) for spec in formats}) == len(formats)
    choices = itertools.product(DTYPES, ("", *KV_CACHE_DTYPES), ("none", MTP, EAGLE3))
    specs = [msgspec.structs.replace(SPEC, dtype=one, kv_cache_dtype=kv, speculator=drafts) for one, kv, drafts in choices]
    assert len({kv_identity(spec) for spec in specs}) == len(specs) >= 18


def test_what_does_not_change_them_does_not() -> None:
    other = msgspec.structs.replace(SPEC, placement_id=2, model="n", path="/n", max_model_len=32, weights_chunks=2)
    assert (weights_identity(other), kv_identity(other)) == (weights_identity(SPEC), kv_identity(SPEC))
