"""Llama 4's config.json and tensors: published models, the two ways in which experts are stored, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.models.catalog import scan_one
from loader.shapes.kv_layout import kv_groups
from loader.shapes.model_shape import ModelShape, TemperatureShape
from loader.sizes.layout import num_parameters
from tests.loader.checkpoints import safetensors_bytes, tensors_for, write_checkpoint
from tests.loader.fp8 import FINE_GRAINED

SCOUT = json.loads((Path(__file__).parents[1] / "published" / "llama-4-scout.json").read_text())
TEXT = SCOUT["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
SMALL = TEXT | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "interleave_moe_layer_step": 2,
    "vocab_size": 50,
    "torch_dtype": "float32",
}
STACKED = "model.layers.1.feed_forward.experts."


def parse(config: dict[str, Any], **changes: Any) -> ModelShape:
    return parse_config(json.dumps({key: value for key, value in (config | changes).items() if value != "absent"}).encode())


def one_by_one(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors with each expert's matrices apart, as quantised checkpoints have them."""
    found = {name: told for name, told in tensors.items() if not name.startswith(STACKED)}
    for expert in range(3):
        for name, dims in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            found[f"{STACKED}{expert}.{name}.weight"] = ("F32", dims, bytes(4 * math.prod(dims)))
    return found


def test_scout_is_what_was_published() -> None:
    shape = parse(SCOUT)
    assert num_parameters(shape) == 107_769_861_120
    assert [bool(window) for window in shape.layer_windows[:8]] == [True, True, True, False] * 2
    assert set(shape.layer_windows) == {0, 8192}
    assert (shape.rope.kind, shape.local_rope) == ("llama3", None)
    assert shape.unrotated_layers == frozenset(range(3, 48, 4))
    assert shape.temperature == TemperatureShape(0.1, 8192)
    groups = kv_groups(shape, "bfloat16", 16)
    assert [(group.kind, group.reach, len(group.layers)) for group in groups] == [("full", 0, 12), ("chunked", -8192, 36)]
    rope = SCOUT["text_config"]["rope_scaling"] | {"rope_theta": 500000.0}
    newer = {
        key: value for key, value in SCOUT["text_config"].items() if key not in ("rope_scaling", "rope_theta", "no_rope_layers")
    }
    kinds = {"layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12, "no_rope_layers": [1, 1, 1, 0] * 12}
    assert parse(SCOUT, text_config=newer | kinds | {"rope_parameters": rope}) == shape


def test_maverick_has_experts_on_every_second_layer() -> None:
    text = SCOUT["text_config"] | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "rope_scaling": None}
    shape = parse(SCOUT, text_config=text | {"use_qk_norm": False, "attn_temperature_tuning": False})
    assert shape.experts is not None
    assert sorted(shape.experts.dense_layers) == list(range(0, 48, 2))
    assert not shape.unit_norms
    assert shape.temperature is None
    assert 395e9 < num_parameters(shape) < 405e9


def test_experts_may_be_one_tensor_or_one_each(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", SMALL)
    stacked = scan_one(folder)
    assert stacked.shape is not None, stacked.error
    tensors = tensors_for(SMALL)
    assert tensors[f"{STACKED}gate_up_proj"][1] == (3, 64, 64)

    def error_with(changed: dict[str, Any]) -> str:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(changed))
        return scan_one(folder).error

    assert error_with(one_by_one(tensors)) == ""
    split = scan_one(folder).shape
    assert split is not None
    assert split.experts is not None
    assert not split.experts.stacked
    for part in ("gate_up_proj", "down_proj"):
        name = STACKED + part
        left = {key: told for key, told in tensors.items() if key != name}
        assert f"tensor {name}: missing" in error_with(left)
        dtype, dims, data = tensors[name]
        turned = (dims[0], dims[2] + 1, dims[1])
        message = f"tensor {name}: has shape {list(turned)}, config.json asks for {list(dims)}"
        assert message in error_with(tensors | {name: (dtype, turned, data + bytes(4 * dims[0] * dims[1]))})
    assert f"tensor {STACKED}2.up_proj.weight: missing" in error_with(
        {key: told for key, told in one_by_one(tensors).items() if key != f"{STACKED}2.up_proj.weight"}
    )


def test_quantised_experts_in_one_tensor_are_refused_by_its_name(tmp_path: Path) -> None:
    folder, tensors = write_checkpoint(tmp_path / "m", SMALL | {"quantization_config": FINE_GRAINED}), tensors_for(SMALL)
    name = f"{STACKED}gate_up_proj"
    _, dims, data = tensors[name]
    fp8 = ("F8_E4M3", dims, bytes(len(data) // 4))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors | {name: fp8}))
    assert f"tensor {name}: dtype F8_E4M3 is not supported here" in scan_one(folder).error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1]}, "no_rope_layers: not a list of num_hidden_layers 2 numbers"),
        ({"no_rope_layers": [1, 2]}, "no_rope_layers: not a list"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: .*chunks where layers are rotated"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: 'sliding_attention' is not supported; supported: .*chunked"),
        ({"attention_chunk_size": None}, "attention_chunk_size: missing, but there are chunked_attention layers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size: 0 is out of range"),
        ({"moe_layers": [2]}, "moe_layers: not a list of layers from 0 to 1"),
        ({"moe_layers": "all"}, "moe_layers: not a list of layers"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step: 0 is out of range"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning: 'yes' is neither true nor false"),
        ({"floor_scale": 0}, "floor_scale: 0 is out of range"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok"),
    ],
)
def test_bad_values_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        parse(SMALL, **changes)
