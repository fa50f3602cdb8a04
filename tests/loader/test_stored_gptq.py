"""Checkpoints of GPTQ and AWQ: which are recognised, what they hold, how they are laid out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.files.packed import WORD_ROWS, frame_values
from loader.formats.registry import held_format, stored_format
from loader.formats.relayout import AWQ_WORDS
from loader.models.catalog import scan_one
from loader.sizes.layout import weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.gptq import awq, gptq, quantize
from tests.loader.refusals import Change, check_refused

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": "bfloat16"}
O_PROJ = "model.layers.0.self_attn.o_proj"
LEFT_OUT = {"-:.*mlp.gate.*": {}}


def parse(quantization: Any, **changes: Any) -> Any:
    return parse_config(json.dumps(CONFIG | SIZES | {"quantization_config": quantization} | changes).encode())


@pytest.mark.parametrize(
    ("config", "wanted", "kernels"),
    [
        (gptq(), "gptq by 32", "int4"),
        (gptq(group_size=-1, desc_act=True, dynamic=LEFT_OUT), "gptq by output", "int4"),
        (gptq(group_size=128, sym=False, checkpoint_format="gptq_v2"), "gptq by 128, v2, zero points", "int4_zeros"),
        (gptq(group_size=64, desc_act=True), "gptq by 64, desc_act", "int4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq by 128", "int4"),
        (awq(group_size=128, modules_to_not_convert=["visual"]), "awq by 128", "int4_zeros"),
        (awq(version=None, format="GEMM", zero_point=False), "awq by 32, symmetric", "int4"),
    ],
)
def test_the_configuration_is_recognised(config: dict[str, Any], wanted: str, kernels: str) -> None:
    shape = parse(config)
    assert shape.stored_format == wanted
    assert held_format(shape, None) is held_format(shape, "int8") is stored_format(shape), "whatever the setting says"
    assert stored_format(shape).kernels == kernels


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (gptq(bits=8), "bits: '8' is not served; served: 4"),
        (gptq(bits=3), "bits: '3' is not served; served: 4"),
        (gptq(group_size=16), "group_size: '16' is not served; served: 32, 64, 128, -1"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format: 'marlin' is not served; served: gptq, gptq_v2"),
        (gptq(sym="yes"), "sym: 'yes' is not served; served: True, False"),
        (gptq(lm_head=True), "lm_head: a quantised head is not served"),
        (gptq(pack_dtype="int8"), "pack_dtype: 'int8' is not served; served: int32"),
        (gptq(dynamic=LEFT_OUT | {r".*\\.1\\..*": {"bits": 8}}), r"dynamic\..*1.*: layers with other settings are not served"),
        (awq(version="gemv"), "version: 'gemv' is not served; served: gemm"),
        (awq(bits=8), "bits: '8' is not served; served: 4"),
        (awq(backend="llm-awq"), "backend: 'llm-awq' is not served; served: autoawq"),
    ],
)
def test_settings_that_are_not_served_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"key quantization_config.{said}"):
        parse(config)


def test_widths_of_no_whole_groups_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="key intermediate_size: 192 is no multiple of 128, which INT4 needs"):
        parse(gptq(group_size=128), intermediate_size=192)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), CONFIG | SIZES, dtype="BF16", random_bytes=True)


@pytest.mark.parametrize(
    ("config", "bits"), [(gptq(), 4.5), (gptq(sym=False), 4.75), (awq(group_size=128), 4.1875), (gptq(group_size=-1), 4.125)]
)
def test_places_and_bytes(plain: Path, tmp_path: Path, config: dict[str, Any], bits: float) -> None:
    """A weight takes half a byte, a scale two bytes, a zero point one where there are any."""
    quantize(plain, tmp_path, config, plain="down_proj")
    found = scan_one(tmp_path)
    assert found.complete, found.reason or found.error
    assert found.shape is not None
    own = stored_format(found.shape)
    slots = [slot for slot in weight_layout(found.shape, "bfloat16", own) if ".weight" not in slot.name]
    assert {slot.name.split(".")[-2] for slot in slots} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    num_weights = sum(2 * slot.num_bytes for slot in slots if slot.name.endswith("qweight"))
    assert 8 * sum(slot.num_bytes for slot in slots) / num_weights == bits
    assert found.weights_bytes["bfloat16"] == weights_bytes(found.shape, "bfloat16", own)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (gptq(), lambda tensors: tensors.pop(f"{O_PROJ}.g_idx"), f"tensor {O_PROJ}.g_idx: missing"),
        (awq(), lambda tensors: tensors.pop(f"{O_PROJ}.qzeros"), f"tensor {O_PROJ}.qzeros: missing"),
        (
            gptq(),
            lambda tensors: tensors.update({f"{O_PROJ}.scales": torch.ones(1, 128)}),
            rf"tensor {O_PROJ}.scales: has shape \[1, 128\], config.json asks for \[4, 128\]",
        ),
        (
            awq(),
            lambda tensors: tensors.update({f"{O_PROJ}.qweight": tensors[f"{O_PROJ}.qweight"].t().contiguous()}),
            rf"tensor {O_PROJ}.qweight: has shape \[16, 128\], config.json asks for \[128, 16\]",
        ),
        (
            gptq(),
            lambda tensors: tensors.update({f"{O_PROJ}.qweight": tensors[f"{O_PROJ}.qweight"].long()}),
            f"tensor {O_PROJ}.qweight: dtype I64 is not supported here; supported: I32",
        ),
        (
            awq(),
            lambda tensors: tensors.update({O_PROJ.replace("o_proj", "q_proj.weight"): torch.ones(128, 128)}),
            "q_proj.weight: is stored as F32, and model.layers.0.self_attn.q_proj.qweight, which is read together with it",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(plain: Path, tmp_path: Path, config: dict[str, Any], change: Change, said: str) -> None:
    quantize(plain, tmp_path, config)
    check_refused(tmp_path, change, said)


def test_frames_of_packed_files_hold_whole_units_of_rows() -> None:
    assert WORD_ROWS % AWQ_WORDS.rows == 0
    for width in (16, 1376, 1792, 3696):  # words in a row
        assert frame_values((4096, width), "I32") % (AWQ_WORDS.rows * width) == 0
