"""Checkpoints with NVFP4 matrices: which are recognised, by which file, what they hold, how they are laid out, what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.formats.fp8_values import fill_scales
from loader.formats.registry import held_format, stored_format
from loader.models.catalog import scan_one
from loader.models.described_model import CONFIG as BY_CONFIG
from loader.models.described_model import described_model
from loader.sizes.layout import parameter_shapes, stored_tensors, weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.nvfp4 import compressed, hf_quant_config, modelopt, quantize
from tests.loader.refusals import Change, check_refused

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "dtype": "bfloat16"}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
MODELOPT, COMPRESSED = "nvfp4", "nvfp4 (compressed-tensors)"


def parse(quantization: Any, beside: Any = None, **changes: Any) -> Any:
    own = {} if quantization is None else {"quantization_config": quantization}
    quant_text = None if beside is None else json.dumps(beside).encode()
    return parse_config(json.dumps(CONFIG | SIZES | own | changes).encode(), quant_text=quant_text)


@pytest.mark.parametrize(
    ("config", "beside", "wanted"),
    [
        (modelopt(), None, MODELOPT),
        (modelopt(quant_algo="W4A16_NVFP4"), hf_quant_config(quant_algo="FP8"), MODELOPT),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, None, MODELOPT),
        (compressed(), None, COMPRESSED),
        (compressed(activations=None), None, COMPRESSED),
        (None, hf_quant_config(), MODELOPT),
        (None, hf_quant_config(quant_algo="FP8", group_size=None), "fp8 by matrix"),
        (None, hf_quant_config(quant_algo=None), ""),
    ],
)
def test_the_configuration_is_recognised(config: Any, beside: Any, wanted: str) -> None:
    """By config.json, or by hf_quant_config.json where that says nothing of quantised matrices."""
    shape = parse(config, beside)
    assert shape.stored_format == wanted
    if wanted:
        assert held_format(shape, None) is held_format(shape, "int8") is stored_format(shape), "whatever the setting says"


@pytest.mark.parametrize(
    ("config", "beside", "changes", "said"),
    [
        (compressed({"group_size": 32}), None, {}, "config_groups.group_0.weights.group_size: '32' is not served; served: 16"),
        (compressed({"strategy": "group"}), None, {}, "weights.strategy: 'group' is not served; served: tensor_group"),
        (compressed({"num_bits": 8}), None, {}, "weights.num_bits: '8' is not served; served: 4"),
        (modelopt({"group_size": 32}), None, {}, "config_groups.group_0.weights.group_size: '32' is not served; served: 16"),
        (modelopt(config_groups={"a": {"weights": 4}}), None, {}, "config_groups.a.weights: missing"),
        (modelopt(quant_algo="NVFP4_AWQ"), None, {}, "quant_algo: 'NVFP4_AWQ' is not served; served: FP8, .*NVFP4"),
        (modelopt(quant_algo="MIXED_PRECISION"), None, {}, "quant_algo: 'MIXED_PRECISION' is not served"),
        (modelopt(), None, {"hidden_size": 48}, "key hidden_size: 48 is no multiple of 32, which NVFP4 needs"),
        (None, hf_quant_config(group_size=32), {}, "hf_quant_config.json: key quantization.group_size: '32' is not served"),
        (None, hf_quant_config(quant_algo="INT8"), {}, "hf_quant_config.json: key quantization.quant_algo: 'INT8' is not served"),
    ],
)
def test_settings_that_are_not_served_are_named(config: Any, beside: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        parse(config, beside, **changes)


@pytest.mark.parametrize(
    ("beside", "said"), [({"producer": {}}, "key quantization: missing"), ({"quantization": 4}, "4 is not an object")]
)
def test_a_file_beside_it_that_says_nothing_is_named(beside: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"hf_quant_config\.json: .*{said}"):
        parse(None, beside)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("plain"), CONFIG | SIZES, dtype="BF16", random_bytes=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.nan_to_num(tensor).clamp(-4, 4) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["modelopt", "compressed", "beside"])
def test_places_and_bytes(plain: Path, tmp_path: Path, kind: str) -> None:
    """A weight takes 4.5 bits, and an output four bytes. down_proj is stored plain; what is there for activations and KV is not
    used."""
    config = {"modelopt": modelopt(), "compressed": compressed(), "beside": hf_quant_config()}[kind]
    quantize(plain, tmp_path, config, plain="down_proj", beside=kind == "beside")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(()) for name in ("k_proj.k_scale", "v_proj.v_scale")}
    save_file(tensors, tmp_path / "model.safetensors")
    found = scan_one(tmp_path)
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    own = stored_format(found.shape)
    slots = {slot.name: slot for slot in weight_layout(found.shape, "bfloat16", own)}
    assert {tensor.name for tensor in stored_tensors(found.shape)} == slots.keys()
    in_nvfp4 = [slot for slot in slots.values() if slot.group_inputs]
    assert {slot.name.split(".")[-2] for slot in in_nvfp4} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    shapes, num_bytes = parameter_shapes(found.shape), 0
    for numbers in in_nvfp4:
        name = numbers.name.removesuffix("_packed")
        scales, whole = slots[f"{name}_scale"], slots[f"{name}_{'global_scale' if kind == 'compressed' else 'scale_2'}"]
        num_outputs, num_inputs = shapes[name]
        sizes = tuple(slot.num_bytes for slot in (numbers, scales, whole))
        assert sizes == (num_outputs * num_inputs // 2, num_outputs * num_inputs // 16, num_outputs * 4)
        assert (scales.held_as, whole.held_as, whole.inverse) == ("float8_e4m3fn", "float32", kind == "compressed")
        num_bytes += sum(sizes)
    ends = sorted((slot.offset_bytes, slot.offset_bytes + slot.num_bytes) for slot in slots.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends)), "no two overlap"
    assert found.weights_bytes["bfloat16"] == weights_bytes(found.shape, "bfloat16", own) >= num_bytes


def test_a_change_of_the_file_beside_it_is_seen(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, hf_quant_config(), beside=True)
    before = scan_one(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(exclude_modules=[])))
    assert scan_one(tmp_path).fingerprint != before.fingerprint
    (tmp_path / "hf_quant_config.json").unlink()
    assert "_proj" in scan_one(tmp_path).error, "it is no plain checkpoint"


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_plan_by_configuration_alone_counts_listed_modules_as_plain(tmp_path: Path, is_beside: bool) -> None:
    """Names with wildcards too."""
    listed = ["lm_head", "model.layers.0.self_attn*", "model.layers.1.mlp.*_proj"]
    own = {} if is_beside else {"quantization_config": modelopt(ignore=listed)}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SIZES | own))
    if is_beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(exclude_modules=listed)))
    found = described_model(tmp_path)
    assert (found.source, found.shape.stored_format) == (BY_CONFIG, MODELOPT)
    quantised = {slot.name for slot in weight_layout(found.shape, "bfloat16", stored_format(found.shape)) if slot.group_inputs}
    attention = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert quantised == attention | {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(f"{O_PROJ}_scale"), f"tensor {O_PROJ}_scale: missing"),
        (lambda tensors: tensors.pop(f"{O_PROJ}_scale_2"), f"tensor {O_PROJ}_scale_2: missing"),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale": tensors[f"{O_PROJ}_scale"].view(torch.uint8)}),
            f"tensor {O_PROJ}_scale: dtype U8 is not supported here; supported: F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale": torch.ones(64, 2).to(torch.float8_e4m3fn)}),
            rf"tensor {O_PROJ}_scale: has shape \[64, 2\], config.json asks for \[64, 4\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale_2": torch.ones(64)}),
            rf"tensor {O_PROJ}_scale_2: has shape \[64\], config.json asks for \[1\]",
        ),
        (
            lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ][:, :31].contiguous()}),
            rf"tensor {O_PROJ}: has shape \[64, 31\], config.json asks for \[64, 32\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ.removesuffix('weight')}pre_quant_scale": torch.ones(64)}),
            "o_proj.pre_quant_scale: LlamaForCausalLM with this config.json has no such parameter",
        ),
        (
            lambda tensors: tensors.update({O_PROJ.replace("o_proj", "q_proj"): torch.ones(64, 64)}),
            "q_proj.weight: is stored as F32, and model.layers.0.self_attn.q_proj.weight_scale, which is read together with it",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(plain: Path, tmp_path: Path, change: Change, said: str) -> None:
    quantize(plain, tmp_path, modelopt())
    check_refused(tmp_path, change, said)


def test_a_matrix_with_an_odd_number_of_inputs_is_named(tmp_path: Path) -> None:
    """Widths of the model are checked first; heads may make another number of a matrix's inputs."""
    shape = parse(modelopt(), head_dim=12)
    with pytest.raises(CheckpointError, match=f"{O_PROJ}: has 48 inputs, no multiple of 32, which NVFP4 needs"):
        weight_layout(shape, "bfloat16", stored_format(shape))


def test_divisors_are_held_as_their_inverses() -> None:
    held = torch.empty(3)
    fill_scales(torch.tensor([[384.0]]), 3, held, inverse=True)
    assert torch.equal(held, torch.full((3,), 1 / 384.0))
    for wrong in (0.0, float("nan"), float("inf"), 1e-45):
        with pytest.raises(ValueError, match="by which scales cannot be divided"):
            fill_scales(torch.tensor([[wrong]]), 3, held, inverse=True)
