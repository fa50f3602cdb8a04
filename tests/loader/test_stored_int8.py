"""Checkpoints that compressed-tensors wrote with int8 matrices: which are recognised, what they hold, how they are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.registry import held_format, stored_format
from loader.formats.stored_int8 import STORED_INT8
from loader.models.catalog import scan_one
from loader.sizes.layout import stored_tensors, weight_layout
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.compressed import ACTIVATIONS, compress, quantization_config


def parse(quantization: Any, **changes: Any) -> Any:
    return parse_config(json.dumps(CONFIG | {"quantization_config": quantization} | changes).encode())


def test_the_format_is_the_checkpoints_whatever_the_setting_says() -> None:
    shape = parse(quantization_config())
    assert held_format(shape, None) is held_format(shape, "int8") is stored_format(shape) is STORED_INT8
    for nothing in (None, {}):
        assert stored_format(parse(nothing)) is PLAIN
        assert held_format(parse(nothing), "int8") is INT8


def test_activations_and_group_formats_do_not_matter() -> None:
    weight_only = quantization_config()
    weight_only["config_groups"]["group_0"]["input_activations"] = None
    own = quantization_config(format="mixed-precision")
    own["config_groups"]["group_0"]["format"] = "int-quantized"
    for config in (weight_only, own):
        assert parse(config).stored_format == STORED_INT8.name


@pytest.mark.parametrize(
    "config",
    [
        quantization_config(quant_method="gptq"),
        quantization_config(format="pack-quantized"),
        quantization_config(format="float-quantized"),
        quantization_config(config_groups={}),
        quantization_config(config_groups={"group_0": 5}),
        quantization_config(config_groups={"group_0": {"targets": ["Linear"], "weights": None}}),
        quantization_config({"num_bits": 4}),
        quantization_config({"type": "float"}),
        quantization_config({"symmetric": False}),
        quantization_config({"strategy": "tensor"}),
        quantization_config({"strategy": "group", "group_size": 128}),
        {"bits": 4},
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"key quantization_config\S*: .* is not served; served: "):
        parse(config)


def test_a_configuration_that_is_no_object() -> None:
    with pytest.raises(Exception, match="key quantization_config: is no object"):
        parse([ACTIVATIONS])


def test_quantised_encoders_are_refused(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 30, "max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match="quantised encoders are not served"):
        parse_config(json.dumps(config | {"quantization_config": quantization_config()}).encode())


def test_matrices_lie_as_those_that_a_load_rounds() -> None:
    shape = parse(quantization_config(), attention_bias=True)
    rounded = {slot.name: slot for slot in weight_layout(shape, "bfloat16", INT8)}
    stored = {slot.name: slot for slot in weight_layout(shape, "bfloat16", STORED_INT8)}
    scales = {name: slot for name, slot in stored.items() if name.endswith("_scale")}
    assert {name: slot._replace(held_as="") for name, slot in stored.items() if name not in scales} == rounded
    assert scales.keys() == {f"{name}_scale" for name, slot in rounded.items() if slot.scales_at_bytes >= 0}
    for name, slot in scales.items():
        assert slot.offset_bytes == rounded[name.removesuffix("_scale")].scales_at_bytes
    assert [tensor.name for tensor in stored_tensors(shape)] != []
    assert {tensor.name for tensor in stored_tensors(shape)} == set(stored)


def test_layers_may_be_stored_plain(tmp_path: Path) -> None:
    found = scan_one(
        compress(write_checkpoint(tmp_path / "plain", dtype="F32", random_bytes=True), tmp_path / "int8", plain="down_proj")
    )
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    slots = {slot.name: slot for slot in weight_layout(found.shape, "float32", stored_format(found.shape))}
    assert {name.split(".")[-2] for name, slot in slots.items() if slot.held_as} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"
    }  # fmt: skip


def test_tensors_that_are_read_together_must_be_stored_alike(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", dtype="F32", random_bytes=True)
    for part, other in (("q_proj", "k_proj"), ("k_proj", "q_proj"), ("up_proj", "gate_proj")):
        found = scan_one(compress(plain, tmp_path / part, plain=part))
        assert not found.complete
        for said in (f".{part}.weight: is stored as F32, and ", f".{other}.weight, which is read together with it, is quantised"):
            assert said in found.error


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = compress(write_checkpoint(tmp_path / "plain", dtype="F32", random_bytes=True), tmp_path / "int8")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    found = scan_one(folder)
    assert name in found.error
    assert "missing" in found.error


@pytest.mark.parametrize("wrong", ["twice", "one"])
def test_scales_of_another_shape_are_named(tmp_path: Path, wrong: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = compress(write_checkpoint(tmp_path / "plain", dtype="F32", random_bytes=True), tmp_path / "int8")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    num = len(tensors[name])
    tensors[name] = torch.ones(num, 2) if wrong == "twice" else torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    found = scan_one(folder)
    assert not found.complete
    assert f"tensor {name}: has shape {list(tensors[name].shape)}, config.json asks for {[num, 1]}" in found.error


def test_scales_of_activations_and_kv_may_be_there(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = compress(write_checkpoint(tmp_path / "plain", dtype="F32", random_bytes=True), tmp_path / "int8")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("q_proj.input_scale", "k_scale", "v_scale")}
    save_file(tensors, folder / "model.safetensors")
    assert scan_one(folder).complete
