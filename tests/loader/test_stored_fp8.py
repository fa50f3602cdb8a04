"""Checkpoints with FP8 matrices: which are recognised, what they hold, how they are laid out, what a load refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.files.weight_files import PACKED_DIR, read_headers
from loader.formats.fp8_values import nan_at
from loader.formats.registry import held_format, stored_format
from loader.formats.stored_fp8 import BY_BLOCK, BY_MATRIX, BY_OUTPUT
from loader.models.catalog import scan_one
from loader.sizes.layout import stored_tensors, weight_layout
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.fp8 import FBGEMM, FINE_GRAINED, KINDS, MODELOPT, compressed, quantize, quark
from tests.loader.packed_checkpoints import pack_checkpoint
from tests.loader.refusals import Change, check_refused


def parse(quantization: Any, **changes: Any) -> Any:
    return parse_config(json.dumps(CONFIG | {"quantization_config": quantization} | changes).encode())


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (FINE_GRAINED, BY_BLOCK.name),
        (FINE_GRAINED | {"scale_fmt": "ue8m0"}, BY_BLOCK.name),  # DeepSeek-V3.1: scales are powers of two, stored as float32
        ({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}, BY_MATRIX.name),
        (compressed(), BY_OUTPUT.name),
        (compressed({"strategy": "tensor"}), BY_MATRIX.name),
        (compressed({"strategy": "block", "block_structure": [128, 128]}), "fp8 by block (weight_scale)"),
        (FBGEMM, BY_OUTPUT.name),
        (MODELOPT, BY_MATRIX.name),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, BY_OUTPUT.name),
        (quark(), BY_MATRIX.name),
        (quark("per_channel"), BY_OUTPUT.name),
    ],
)
def test_each_producers_configuration_is_recognised(config: dict[str, Any], wanted: str) -> None:
    shape = parse(config)
    assert shape.stored_format == wanted
    assert held_format(shape, None) is held_format(shape, "int8") is stored_format(shape), "whatever the setting says"


def _without_weight(config: dict[str, Any]) -> dict[str, Any]:
    config["global_quant_config"]["weight"] = None
    return config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FINE_GRAINED | {"weight_block_size": [64, 128]}, r"weight_block_size: '\[64, 128\]' is not served; served: \[128, 128\]"),
        (FINE_GRAINED | {"fmt": "e5m2"}, "fmt: 'e5m2' is not served; served: e4m3"),
        (FINE_GRAINED | {"activation_scheme": "mixed"}, "activation_scheme: 'mixed' is not served; served: dynamic, static"),
        (FINE_GRAINED | {"expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not served"),
        (compressed({"num_bits": 4}), "config_groups.group_0.weights.num_bits: '4' is not served; served: 8"),
        (compressed({"type": "int"}), "weights.type: 'int' is not served; served: float"),
        (compressed({"symmetric": False}), "weights.symmetric: 'False' is not served; served: True"),
        (compressed({"strategy": "group", "group_size": 32}), "weights.strategy: 'group' is not served; served: tensor, channel"),
        (compressed({"strategy": "block", "block_structure": [1, 128]}), r"weights.block_structure: '\[1, 128\]' is not served"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config: transformed weights are not served"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: compressed sparse weights are not served"),
        (compressed(config_groups={"a": compressed()["config_groups"]["group_0"], "b": {"weights": 5}}), "b.weights: missing"),
        (
            compressed(
                config_groups={
                    "a": compressed()["config_groups"]["group_0"],
                    "b": compressed({"strategy": "tensor"})["config_groups"]["group_0"],
                }
            ),
            "config_groups: groups whose scales are stored differently",
        ),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo: 'NVFP4_AWQ' is not served; served: FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        (quark("per_group"), "global_quant_config.weight.qscheme: 'per_group' is not served; served: per_tensor, per_channel"),
        (_without_weight(quark()), "global_quant_config.weight: missing"),
        (quark(export={"weight_format": "fake_quantized"}), "export.weight_format: 'fake_quantized' is not served"),
        (quark(layer_quant_config={"*q_proj": {"weight": None}}), "layer_quant_config.*q_proj: layers that are stored differently"),
    ],
)
def test_settings_that_are_not_served_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"key quantization_config.*{said.replace('*', '[*]')}"):
        parse(config)


def test_quantised_encoders_are_refused() -> None:
    config = {"architectures": ["BertModel"], "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 30, "max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match="quantised encoders are not served"):
        parse_config(json.dumps(config | {"quantization_config": FINE_GRAINED}).encode())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("plain"), CONFIG | {"hidden_size": 160, "head_dim": 16}, dtype="F32", random_bytes=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_each_producer_writes_is_complete(plain: Path, tmp_path: Path, kind: str) -> None:
    """Also with what it writes about activations and KV, which is not used. A matrix takes a byte a weight, and its scales."""
    quantize(plain, tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_proj.v_scale", "q_proj.input_scale_ub")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = scan_one(tmp_path)
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    own = stored_format(found.shape)
    assert own.name.endswith("(weight_scale_inv)") == (kind == "transformers-matrix")
    slots = weight_layout(found.shape, "bfloat16", own)
    assert {slot.name for slot in slots} == {tensor.name for tensor in stored_tensors(found.shape)} < set(tensors)
    spans = sorted((slot.offset_bytes, slot.offset_bytes + slot.num_bytes) for slot in slots)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    by_name = {slot.name: slot for slot in slots}
    for name in (name for name, slot in by_name.items() if slot.group_inputs):
        values, scales = by_name[name], by_name[name + own.scale_suffix.removeprefix(".weight")]
        outputs, inputs = values.shape
        assert (values.num_bytes, values.scales_at_bytes) == (outputs * inputs, scales.offset_bytes)
        assert scales.num_bytes == 4 * outputs * -(-inputs // values.group_inputs)
    assert found.weights_bytes["bfloat16"] < scan_one(plain).weights_bytes["bfloat16"]


def test_layers_may_be_stored_plain(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, KINDS["fine-grained"], plain="down_proj")
    found = scan_one(tmp_path)
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    slots = weight_layout(found.shape, "float32", stored_format(found.shape))
    assert {slot.name.split(".")[-2] for slot in slots if slot.group_inputs} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"
    }  # fmt: skip


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(f"{O_PROJ}_scale_inv"), f"tensor {O_PROJ}_scale_inv: missing"),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale_inv": torch.ones(3, 1)}),
            rf"tensor {O_PROJ}_scale_inv: has shape \[3, 1\], config.json asks for \[2, 1\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale_inv": torch.ones(2, 1).to(torch.float8_e8m0fnu)}),
            f"tensor {O_PROJ}_scale_inv: dtype F8_E8M0 is not supported here",
        ),
        (
            lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ].float().to(torch.float8_e5m2)}),
            f"tensor {O_PROJ}: dtype F8_E5M2 is not supported here; supported: F8_E4M3",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(plain: Path, tmp_path: Path, change: Change, said: str) -> None:
    quantize(plain, tmp_path, KINDS["fine-grained"])
    check_refused(tmp_path, change, said)


def test_packing_leaves_codes_as_they_are(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, KINDS["fine-grained"])
    pack_checkpoint(tmp_path)
    (header,) = read_headers(tmp_path, PACKED_DIR).values()
    assert {tensor.dtype for tensor in header.tensors if tensor.name.endswith("_proj.weight")} == {"F8_E4M3"}
    assert not any(tensor.is_packed for tensor in header.tensors if tensor.dtype == "F8_E4M3")


def test_codes_of_nan_are_found_anywhere() -> None:
    codes = torch.arange(600_000).remainder(0x7F).to(torch.uint8).numpy()
    assert nan_at(codes) == -1
    for at, code in ((0, 0x7F), (300_001, 0xFF), (len(codes) - 1, 0x7F)):
        changed = codes.copy()
        changed[at] = code
        assert nan_at(changed) == at
