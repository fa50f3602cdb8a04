"""Checkpoints with INT4 matrices: which are recognised, what they hold, how they are laid out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.formats.registry import held_format, stored_format
from loader.models.catalog import scan_one
from loader.sizes.layout import stored_tensors, weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.int4 import BY_OUTPUT, compressed, quantize
from tests.loader.refusals import Change, check_refused

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 16, "dtype": "bfloat16"}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def parse(quantization: Any, **changes: Any) -> Any:
    return parse_config(json.dumps(CONFIG | SIZES | {"quantization_config": quantization} | changes).encode())


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (compressed(), "int4 by 32"),
        (compressed({"group_size": 64, "actorder": "weight"}), "int4 by 64"),
        (BY_OUTPUT, "int4 by output"),
        (compressed({"group_size": 128, "symmetric": False}), "int4 by 128, zero points"),
    ],
)
def test_the_configuration_is_recognised(config: dict[str, Any], wanted: str) -> None:
    shape = parse(config, intermediate_size=256)
    assert shape.stored_format == wanted
    assert held_format(shape, None) is held_format(shape, "int8") is stored_format(shape), "whatever the setting says"


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (compressed({"num_bits": 8}), {}, "config_groups.group_0.weights.num_bits: '8' is not served; served: 4"),
        (compressed({"symmetric": "no"}), {}, "weights.symmetric: 'no' is not served; served: True, False"),
        (compressed({"strategy": "tensor"}), {}, "weights.strategy: 'tensor' is not served; served: group, channel"),
        (compressed({"group_size": 16}), {}, "weights.group_size: '16' is not served; served: 32, 64, 128"),
        (compressed({"actorder": "group"}), {}, "weights.actorder: 'group' is not served; served: None, False, weight, static"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), {}, "transform_config: transformed weights are not served"),
        (compressed(config_groups={"a": {"weights": None}}), {}, "config_groups.a.weights: missing"),
        (compressed({"group_size": 128}), {}, "intermediate_size: 192 is no multiple of 128, which INT4 needs"),
        (BY_OUTPUT, {"hidden_size": 136}, "hidden_size: 136 is no multiple of 32, which INT4 needs"),
    ],
)
def test_settings_that_are_not_served_are_named(config: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"key .*{said}"):
        parse(config, **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), CONFIG | SIZES, dtype="BF16", random_bytes=True)


@pytest.mark.parametrize(("group_inputs", "bits"), [(32, 4.5), (0, 4)])
def test_places_and_bytes(plain: Path, tmp_path: Path, group_inputs: int, bits: float) -> None:
    """A weight takes half a byte, and a scale two bytes; words may be read straight into place. down_proj is stored plain."""
    quantize(plain, tmp_path, compressed({"group_size": group_inputs}) if group_inputs else BY_OUTPUT, plain="down_proj")
    found = scan_one(tmp_path)
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    own = stored_format(found.shape)
    slots = {slot.name: slot for slot in weight_layout(found.shape, "bfloat16", own)}
    names = {tensor.name for tensor in stored_tensors(found.shape)}
    assert names - slots.keys() == {name for name in names if name.endswith("_shape")}
    assert {name.split(".")[-2] for name, slot in slots.items() if slot.group_inputs} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"
    }  # fmt: skip
    num_bytes = num_weights = 0
    for packed in (slot for slot in slots.values() if slot.group_inputs):
        scales = slots[packed.name.replace("_packed", "_scale")]
        assert (packed.scales_at_bytes, packed.held_as) == (scales.offset_bytes, "int32")
        num_bytes += packed.num_bytes + scales.num_bytes
        num_weights += packed.num_bytes * 2
    assert 8 * num_bytes / num_weights == pytest.approx(bits, abs=0.2)
    assert found.weights_bytes["bfloat16"] == weights_bytes(found.shape, "bfloat16", own)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(f"{O_PROJ}_scale"), f"tensor {O_PROJ}_scale: missing"),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_scale": torch.ones(128, 1)}),
            rf"tensor {O_PROJ}_scale: has shape \[128, 1\], config.json asks for \[128, 2\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_packed": tensors[f"{O_PROJ}_packed"][:, :4].contiguous()}),
            rf"tensor {O_PROJ}_packed: has shape \[128, 4\], config.json asks for \[128, 8\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_packed": tensors[f"{O_PROJ}_packed"].float()}),
            f"tensor {O_PROJ}_packed: dtype F32 is not supported here; supported: I32",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_shape": torch.ones(3, dtype=torch.int64)}),
            rf"tensor {O_PROJ}_shape: has shape \[3\], config.json asks for \[2\]",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_zero_point": torch.zeros(8, 2, dtype=torch.int32)}),
            f"tensor {O_PROJ}_zero_point: LlamaForCausalLM with this config.json has no such parameter",
        ),
        (
            lambda tensors: tensors.update({f"{O_PROJ}_g_idx": torch.ones(128, dtype=torch.int32)}),
            f"tensor {O_PROJ}_g_idx: LlamaForCausalLM with this config.json has no such parameter",
        ),
        (
            lambda tensors: tensors.update({O_PROJ.replace("o_proj", "q_proj"): torch.ones(128, 128)}),
            "q_proj.weight: is stored as F32, and model.layers.0.self_attn.q_proj.weight_packed, which is read together with it",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(plain: Path, tmp_path: Path, change: Change, said: str) -> None:
    quantize(plain, tmp_path, compressed())
    check_refused(tmp_path, change, said)
