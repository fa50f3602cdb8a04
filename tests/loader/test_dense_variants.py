"""Dense families that differ from Llama in more than tensors' names: their config.json, as published and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CheckpointError, UnsupportedModel
from loader.hf_config import parse_config
from loader.kv_layout import kv_groups
from loader.model_shape import ModelShape

PUBLISHED = Path(__file__).parents[1] / "published"
SMOLLM3 = json.loads((PUBLISHED / "smollm3-3b.json").read_text())


def parse(config: dict[str, Any], **changes: Any) -> ModelShape:
    return parse_config(json.dumps({key: value for key, value in (config | changes).items() if value != "absent"}).encode())


def test_smollm3_has_layers_without_rotation() -> None:
    shape = parse(SMOLLM3)
    assert shape.unrotated_layers == frozenset(range(3, 36, 4))
    assert [group.kind for group in kv_groups(shape, "bfloat16", 16)] == ["full"]
    assert parse(SMOLLM3, no_rope_layers="absent") == shape
    assert parse(SMOLLM3, no_rope_layers=None, no_rope_layer_interval=2).unrotated_layers == frozenset(range(1, 36, 2))
    windows = {"use_sliding_window": True, "sliding_window": 100, "layer_types": "absent"}
    assert parse(SMOLLM3, **windows).layer_windows == (0, 0, 0, 100) * 9
    assert parse(SMOLLM3, **windows | {"sliding_window": None}).layer_windows == (0,) * 36
    listed = ["sliding_attention"] * 18 + ["full_attention"] * 18
    assert parse(SMOLLM3, **windows | {"layer_types": listed}).layer_windows == (100,) * 18 + (0,) * 18


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers: not a list of num_hidden_layers 36 numbers"),
        (SMOLLM3, {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval: 0 is out of range"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36}, "layer_types: has sliding_attention layers, but use_sliding_window"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36, "use_sliding_window": True}, "sliding_window: missing"),
    ],
)
def test_what_is_not_served_names_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=f"key {message}"):
        parse(config, **changes)
