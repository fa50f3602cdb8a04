"""The weights that a loaded model holds are, bit for bit, those that other projects' own code makes of the same files:

- compressed-tensors' `decompress`: INT4 (`pack-quantized`), FP8 (`float-quantized`), int8 (`int-quantized`) and NVFP4
  (`nvfp4-pack-quantized`), in which it dequantises to bfloat16;
- the same behind its converters of other projects' checkpoints: AWQ, and ModelOpt's NVFP4;
- transformers' Fp8Dequantize: FP8 by blocks and by matrix, with `weight_scale_inv`. FP8 of FBGEMM, AutoFP8, ModelOpt and Quark,
  whose arithmetic is the same, is compared with compressed-tensors' for scales of their shape.

MXFP4 is compared with transformers' in tests/engine/ops/test_experts.py. For GPTQ neither has code: test_gptq.py compares it with
the format's own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.loading.runner import TorchRunner
from engine.ops import reference
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, Nvfp4Matrix
from tests.engine.model_bench import load, make_checkpoint
from tests.loader import compressed as int_quantized
from tests.loader import fp8, gptq, int4, nvfp4

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
Tensors = dict[str, Tensor]
MATRICES = {  # the names of those that lie end to end, by the place in a layer
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_checkpoint(folder, "qwen3", tie_word_embeddings=False, **SIZES)
    return folder


def widen(matrix: Any, out: Tensor) -> None:
    """Writes a matrix's weights to out, in out's dtype."""
    match matrix:
        case Fp8Matrix():
            reference.fp8_rows(matrix.values, matrix.scales, matrix.group_inputs, out)
        case Int4Matrix():
            assert matrix.order is None
            reference.int4_rows(matrix.packed, matrix.scales, matrix.zeros, matrix.group_inputs, out)
        case Nvfp4Matrix():
            reference.nvfp4_rows(matrix.packed, matrix.scales, matrix.factors, out)
        case Int8Matrix():
            out.copy_(matrix.values.float() * matrix.scales.unsqueeze(1))
        case _:
            raise AssertionError(f"{type(matrix).__name__} is not quantised")


def check_all(runner: TorchRunner, folder: Path, theirs: Callable[[str], Tensor]) -> None:
    """Checks all matrices of all layers. theirs: returns the weights [N, K] of a matrix by its name, as the other project's code
    makes them, in any dtype: in it the model's weights are the same, and so they are rounded from float32 to bfloat16."""
    model = load(runner, folder)
    for number, layer in enumerate(model._model.layers):  # type: ignore[attr-defined]
        for place, names in MATRICES.items():
            part, _, kind = place.partition(".")
            wanted = torch.cat([theirs(f"model.layers.{number}.{name}") for name in names])
            for dtype in {torch.float32: (torch.float32, torch.bfloat16)}.get(wanted.dtype, (wanted.dtype,)):
                held = torch.empty(wanted.shape, dtype=dtype)
                widen(getattr(getattr(layer, part), kind).weight, held)
                assert torch.equal(held, wanted.to(dtype)), f"layer {number}, {place}, {dtype}"
    model.release()


def decompressed(tensors: Tensors, config: dict[str, Any], name: str, scales_in: torch.dtype | None = None) -> Tensor:
    """Returns the weights of a matrix as compressed-tensors decompresses them, in the dtype of the scales. config: the checkpoint's
    `quantization_config`. scales_in: a dtype to which the scales are converted first; None: the stored one."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    local = ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_global_scale")
    state = {part: tensors[f"{name}.{part}"] for part in local if f"{name}.{part}" in tensors}
    if scales_in is not None:
        state["weight_scale"] = state["weight_scale"].to(scales_in)
    found = compressors.BaseCompressor.get_value_from_registry(config["format"]).decompress(state, scheme)["weight"]
    assert isinstance(found, Tensor)
    return found


INT4 = {
    "groups-32": int4.compressed(),
    "groups-128": int4.compressed({"group_size": 128}),
    "outputs": int4.BY_OUTPUT,
    "zeros": int4.compressed({"symmetric": False}),
    "zeros-outputs": int4.compressed({"strategy": "channel", "group_size": None, "symmetric": False}),
}


@pytest.mark.parametrize("form", INT4)
def test_int4_is_as_compressed_tensors_decompresses_it(runner: TorchRunner, plain: Path, tmp_path: Path, form: str) -> None:
    """Compares twice: scales as they are stored make bfloat16 weights, and the same in float32 make exact ones."""
    int4.quantize(plain, tmp_path, INT4[form])
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        check_all(runner, tmp_path, partial(decompressed, tensors, INT4[form], scales_in=dtype))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_int8_is_as_compressed_tensors_decompresses_it(
    runner: TorchRunner, plain: Path, tmp_path: Path, scales: torch.dtype
) -> None:
    int_quantized.compress(plain, tmp_path, scales)
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype in {scales, torch.float32}:
        check_all(runner, tmp_path, partial(decompressed, tensors, int_quantized.quantization_config(), scales_in=dtype))


OF_SHAPE = {fp8.of_matrix: {"strategy": "tensor"}, fp8.of_outputs: {"strategy": "channel"}}
OF_SHAPE[fp8.of_blocks] = {"strategy": "block", "block_structure": [fp8.BLOCK, fp8.BLOCK]}


@pytest.mark.parametrize("kind", fp8.KINDS)
def test_fp8_is_as_compressed_tensors_decompresses_it(runner: TorchRunner, plain: Path, tmp_path: Path, kind: str) -> None:
    """Scales of other producers get the name and the shape that compressed-tensors gives such scales."""
    own = fp8.KINDS[kind]
    fp8.quantize(plain, tmp_path, own)
    weights = OF_SHAPE[own.quantize]
    tensors = {
        name.replace(own.suffix, "_scale"): each.reshape(-1, 1) if weights["strategy"] == "channel" and own.suffix in name else each
        for name, each in load_file(tmp_path / "model.safetensors").items()
    }
    for dtype in {own.dtype, torch.float32}:
        check_all(runner, tmp_path, partial(decompressed, tensors, fp8.compressed(weights), scales_in=dtype))


@pytest.mark.parametrize("kind", ["fine-grained", "fine-grained-bfloat16", "transformers-matrix"])
def test_fp8_is_as_transformers_dequantises_it(runner: TorchRunner, plain: Path, tmp_path: Path, kind: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    fp8.quantize(plain, tmp_path, fp8.KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")

    def theirs(name: str) -> Tensor:
        parts = {part: [tensors[f"{name}.{part}"]] for part in ("weight", "weight_scale_inv")}
        found = Fp8Dequantize(None).convert(parts)["weight"]
        assert isinstance(found, Tensor)
        assert found.dtype is fp8.KINDS[kind].dtype
        return found

    check_all(runner, tmp_path, theirs)


@pytest.mark.parametrize("is_modelopt", [False, True], ids=["compressed", "modelopt"])
def test_nvfp4_is_as_compressed_tensors_decompresses_it(
    runner: TorchRunner, plain: Path, tmp_path: Path, is_modelopt: bool
) -> None:
    """Compares in bfloat16, to which compressed-tensors dequantises. ModelOpt's checkpoints go through its converter of them, which
    inverts `weight_scale_2`: here these are powers of two, whose inverses are not rounded."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    nvfp4.quantize(plain, tmp_path, nvfp4.modelopt() if is_modelopt else nvfp4.compressed())
    tensors = load_file(tmp_path / "model.safetensors")
    if is_modelopt:
        tensors |= {name: each.log2().round().exp2() for name, each in tensors.items() if name.endswith("weight_scale_2")}
        save_file(tensors, tmp_path / "model.safetensors")
        tensors = ModelOptNvfp4Converter(targets=[r"re:.*_proj$"]).process(tensors)
    check_all(runner, tmp_path, partial(decompressed, tensors, nvfp4.compressed()))


@pytest.mark.parametrize("zero_point", [True, False], ids=["zeros", "symmetric"])
def test_awq_is_as_compressed_tensors_converts_it(runner: TorchRunner, plain: Path, tmp_path: Path, zero_point: bool) -> None:
    """Compares twice: with scales in float16, as they are stored, and with the same in float32."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    gptq.quantize(plain, tmp_path, gptq.awq(zero_point=zero_point))
    converter = AutoAWQConverter(bits=4, group_size=32, zero_point=zero_point, targets=["Linear"])
    tensors = converter.process(load_file(tmp_path / "model.safetensors"))
    config = int4.compressed({"symmetric": not zero_point})
    for dtype in (torch.float16, torch.float32):
        check_all(runner, tmp_path, partial(decompressed, tensors, config, scales_in=dtype))
