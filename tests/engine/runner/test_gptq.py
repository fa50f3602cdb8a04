"""Checkpoints of GPTQ and AWQ on the cpu device: their weights are those of the formats' own rules, and logits follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.loading.runner import TorchRunner
from engine.ops import reference
from engine.ops.ops import Int4Matrix
from loader.errors import CheckpointError
from loader.models.catalog import scan_one
from tests.engine.model_bench import CASES, load, load_both, make_checkpoint
from tests.engine.runner.test_fp8 import check_held, format_of, logits, logits_of, wanted
from tests.loader.gptq import awq, gptq, quantize
from tests.loader.refusals import Change

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "attention_bias": True}
FORMS = {
    "gptq": gptq(),
    "gptq-zeros": gptq(sym=False),
    "gptq-v2-zeros": gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq-v2": gptq(checkpoint_format="gptq_v2", group_size=-1),
    "gptq-desc-act": gptq(sym=False, desc_act=True),
    "awq": awq(),
    "awq-symmetric": awq(zero_point=False, group_size=-1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, make_checkpoint(folder, "qwen3", tie_word_embeddings=True, **SIZES)


def widen(matrix: Int4Matrix, out: Tensor) -> None:
    """Writes a matrix's weights to out, with its inputs in the checkpoint's order."""
    lying = torch.empty_like(out)
    reference.int4_rows(matrix.packed, matrix.scales, matrix.zeros, matrix.group_inputs, lying)
    out[:, slice(None) if matrix.order is None else matrix.order.long()] = lying


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_weights_that_are_meant(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, form: str
) -> None:
    """In float32, against transformers' model with the weights of the definition; the weights themselves to the last bit."""
    meant = quantize(made[0], tmp_path, FORMS[form], plain="-" if form == "gptq" else "o_proj")
    model = load(runner, tmp_path)
    assert model.weights_bytes == scan_one(tmp_path).weights_bytes["float32"]
    layer: Any = model._model.layers[1]  # type: ignore[attr-defined]
    for matrix, names in (
        (layer.attention.qkv.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.gate_up.weight, ("mlp.gate_proj", "mlp.up_proj")),
        (layer.mlp.down.weight, ("mlp.down_proj",)),
    ):
        config = FORMS[form]
        has_zeros = config.get("zero_point", not config.get("sym"))
        assert (matrix.zeros is not None, matrix.order is not None) == (has_zeros, config.get("desc_act", False))
        check_held(lambda out, own=matrix: widen(own, out), [meant[f"model.layers.1.{name}.weight"] for name in names])
    found, expected = logits(model), wanted(made[1], meant)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    model.release()


@pytest.mark.parametrize("form", ["gptq-desc-act", "awq"])
def test_half_precision_and_recorded_steps(runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, form: str) -> None:
    """Recorded steps give bit for bit what others give."""
    meant = quantize(made[0], tmp_path, FORMS[form])
    recorded, plain = load_both(runner, tmp_path, "bfloat16", quantize=format_of(tmp_path))
    half = logits(plain)
    for _ in range(2):  # recorded, then run again
        assert np.array_equal(logits(recorded), half)
    assert np.abs(half - wanted(made[1], meant)).mean() < 0.03 * half.std()
    recorded.release()
    plain.release()


def put(name: str, value: Any) -> Change:
    """Returns a change of a tensor's last number."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    return change


UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
NOT_IN_ORDER = "has inputs that are not in the order of their groups of 32: not served for this matrix"


@pytest.mark.parametrize(
    ("form", "name", "value", "said"),
    [
        ("gptq", f"{UP}.scales", float("nan"), "holds NaN or an infinity: no scale"),
        ("awq", f"{UP}.scales", float("inf"), "holds NaN or an infinity: no scale"),
        ("gptq", f"{UP}.qzeros", 0x77777776, "holds a zero point that is not 8, although sym is true"),
        ("gptq", f"{UP}.g_idx", 0, NOT_IN_ORDER),
        ("gptq-desc-act", f"{DOWN}.g_idx", 3, "holds a group that does not exist: there are 3, from 0 on"),
        ("gptq-desc-act", f"{DOWN}.g_idx", -1, "holds a group that does not exist: there are 3, from 0 on"),
    ],
)
def test_numbers_that_cannot_be_held_fail_the_load_by_name(
    runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path, form: str, name: str, value: float, said: str
) -> None:
    quantize(made[0], tmp_path, FORMS[form])
    whole = logits_of(runner, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damaged = dict(tensors)
    put(name, value)(damaged)
    save_file(damaged, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name}: {said}"):
        load(runner, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(logits_of(runner, tmp_path), whole), "the engine serves on"


def test_orders_that_differ_within_a_product_are_refused(runner: TorchRunner, made: tuple[Path, Any], tmp_path: Path) -> None:
    quantize(made[0], tmp_path, FORMS["gptq-desc-act"])
    tensors = load_file(tmp_path / "model.safetensors")
    for change, said in (
        (lambda groups: groups.flip(0), f"{UP}.g_idx: is another order than model.layers.1.mlp.gate_proj.g_idx, which is read"),
        (lambda groups: groups * 0, f"{UP}.g_idx: has groups that are not of 32 inputs"),
    ):
        save_file(tensors | {f"{UP}.g_idx": change(tensors[f"{UP}.g_idx"]).contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            load(runner, tmp_path)


MOE = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_intermediate_size": 32, "q_lora_rank": 32}
LATENT |= {"kv_lora_rank": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}


@pytest.mark.parametrize(
    ("case", "changes", "config"),
    [
        ("qwen3-moe", MOE | {"intermediate_size": 96}, gptq()),
        ("qwen3-moe", MOE | {"intermediate_size": 96}, awq()),
        ("deepseek-v3", LATENT | {"attention_bias": False}, awq()),
    ],
)
def test_experts_and_latents(
    runner: TorchRunner, tmp_path: Path, case: str, changes: dict[str, Any], config: dict[str, Any]
) -> None:
    """Logits equal those of the plain checkpoint with the weights of the definition, for few rows an expert and for many. An expert
    without one of its tensors is refused by name."""
    make_checkpoint(tmp_path / "plain", **(CASES[case] | changes))
    meant = quantize(tmp_path / "plain", tmp_path / "held", config)
    assert sum(".experts." in name for name in meant) == 4 * 3
    found = logits_of(runner, tmp_path / "held")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "plain" / "model.safetensors")
    expected = logits_of(runner, tmp_path / "plain")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    whole = load_file(tmp_path / "held" / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.qzeros"
    save_file({key: tensor for key, tensor in whole.items() if key != name}, tmp_path / "held" / "model.safetensors")
    assert f"tensor {name}: missing" in scan_one(tmp_path / "held").error


def test_experts_whose_inputs_lie_apart_are_refused_by_name(runner: TorchRunner, tmp_path: Path) -> None:
    """The other matrices of such a checkpoint are served in any order."""
    make_checkpoint(tmp_path / "plain", **(CASES["qwen3-moe"] | MOE | {"intermediate_size": 96}))
    quantize(tmp_path / "plain", tmp_path / "held", gptq(desc_act=True))
    with pytest.raises(CheckpointError, match=rf"tensor model.layers.1.mlp.experts.\d.gate_proj.g_idx: {NOT_IN_ORDER}"):
        load(runner, tmp_path / "held")
