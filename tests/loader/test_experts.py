"""Mixtures of experts: what config.json may say of them, where their tensors lie, and what is refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError
from loader.formats.stored_int8 import STORED_INT8
from loader.models.catalog import scan_one
from loader.shapes.model_shape import SigmoidShape
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from loader.sizes.layout import parameter_shapes, weight_layout
from loader.sizes.work_space import work_space_bytes
from tests.loader.checkpoints import CONFIG, safetensors_bytes, tensors_for, write_checkpoint
from tests.loader.compressed import quantization_config
from tests.loader.test_families import GLM45_AIR, MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN15_MOE, parse

EXPERTS, INNER, HIDDEN, SHARED = 4, 24, 16, 8
MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
QWEN2 = CONFIG | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": SHARED,
}
GLM4_MOE = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "num_nextn_predict_layers": 1,
}
ONE_BILLION = 1_000_000_000


def test_the_layers_that_have_experts() -> None:
    def dense(**changes: Any) -> set[int]:
        shape = parse(QWEN3_30B_A3B, num_hidden_layers=6, **changes)
        assert shape.experts is not None
        without = {layer for layer in range(6) if f"model.layers.{layer}.mlp.gate_proj.weight" in parameter_shapes(shape)}
        assert without == shape.experts.dense_layers
        return without

    assert dense() == dense(decoder_sparse_step="absent", mlp_only_layers=None) == set()
    assert dense(decoder_sparse_step=3) == {0, 1, 3, 4}
    assert dense(mlp_only_layers=[0, 5]) == {0, 5}
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == {0, 1, 2, 4}
    assert dense(mlp_only_layers=list(range(6))) == set(range(6))
    mixtral = parse(MIXTRAL_8X7B, mlp_only_layers=[0], decoder_sparse_step=2)
    assert mixtral.experts is not None
    assert not mixtral.experts.dense_layers, "not keys of theirs"
    for num in (0, 1, 3, 99):
        glm = parse(GLM45_AIR, first_k_dense_replace=num, mlp_only_layers=[5]).experts
        assert glm is not None
        assert glm.dense_layers == set(range(min(num, 46)))


def test_what_is_read_of_experts() -> None:
    mixtral, qwen2, qwen3 = (parse(config).experts for config in (MIXTRAL_8X7B, QWEN15_MOE, QWEN3_30B_A3B))
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.num_chosen, mixtral.intermediate_size, mixtral.normalised) == (8, 2, 14336, True)
    assert qwen2 is not None
    assert (qwen2.num_experts, qwen2.num_chosen, qwen2.intermediate_size, qwen2.normalised) == (60, 4, 1408, False)
    assert qwen2.shared_size == 5632
    assert qwen3 is not None
    assert (qwen3.num_experts, qwen3.num_chosen, qwen3.intermediate_size, qwen3.normalised) == (128, 8, 768, True)
    left_out = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    assert parse(QWEN15_MOE, **dict.fromkeys(left_out, "absent")).experts == qwen2, "the configuration class's own defaults"
    assert parse(QWEN15_MOE, norm_topk_prob=True).experts == replace(qwen2, normalised=True)
    assert not parse(QWEN15_MOE, qkv_bias=False).attention_bias
    assert parse(QWEN15_MOE).attention_bias


def test_what_is_read_of_a_router_with_sigmoids() -> None:
    air = parse(GLM45_AIR).experts
    assert air is not None
    assert (air.num_experts, air.num_chosen, air.intermediate_size, air.shared_size, air.normalised) == (128, 8, 1408, 1408, True)
    assert air.sigmoid == SigmoidShape(1, 1, 1.0)
    left_out = [key for key in GLM45_AIR if key.startswith(("n_", "topk", "norm_", "routed", "first_k", "moe_", "num_experts"))]
    assert len(left_out) == 9
    assert parse(GLM45_AIR, **dict.fromkeys(left_out, "absent")).experts == air, "the configuration class's own defaults"
    groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": False}
    wanted = replace(air, sigmoid=SigmoidShape(8, 4, 2.5), shared_size=2816, normalised=False)
    assert parse(GLM45_AIR, **groups).experts == wanted
    assert "model.layers.3.self_attn.q_norm.weight" not in parameter_shapes(parse(GLM45_AIR))
    assert "model.layers.3.self_attn.q_norm.weight" in parameter_shapes(parse(GLM45_AIR, use_qk_norm=True))
    slots = {slot.name: slot for slot in weight_layout(parse(GLM45_AIR, num_hidden_layers=2), "bfloat16")}
    held = {name.removeprefix("model.layers.1.mlp.") for name, slot in slots.items() if slot.held_as == "float32"}
    assert held == {"gate.weight", "gate.e_score_correction_bias"}


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    folder, tensors = write_checkpoint(tmp_path / "m", GLM4_MOE), tensors_for(GLM4_MOE)
    known = next(iter(tensors.values()))

    def error_with(name: str) -> str:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors | {name: known}))
        return scan_one(folder).error

    assert error_with("model.layers.2.eh_proj.weight") == ""
    assert "has no such parameter" in error_with("model.layers.3.eh_proj.weight")
    (folder / "config.json").write_text(json.dumps(GLM4_MOE | {"num_nextn_predict_layers": 0}))
    assert "has no such parameter" in error_with("model.layers.2.eh_proj.weight")


def test_windows_of_families_with_experts() -> None:
    window = {"use_sliding_window": True, "sliding_window": 1024}
    assert parse(QWEN15_MOE, num_hidden_layers=6, max_window_layers=4, **window).layer_windows == (1024, 0, 1024, 0, 0, 0)
    kinds = ["full_attention", "sliding_attention"]
    assert parse(QWEN15_MOE, num_hidden_layers=2, layer_types=kinds, **window).layer_windows == (0, 1024)
    assert parse(QWEN3_30B_A3B, num_hidden_layers=3, **window).layer_windows == (1024,) * 3
    assert parse(QWEN3_30B_A3B, num_hidden_layers=3, sliding_window=1024).layer_windows == (0,) * 3
    assert parse(MIXTRAL_8X7B, sliding_window=4096).layer_windows == (4096,) * 32


def test_all_experts_of_a_layer_lie_in_one_block() -> None:
    """Gate and up of expert after expert, then all down, whatever the order in the files; the shared gate is the router's last
    row."""
    shape = parse_config(json.dumps(QWEN2).encode())
    slots = {slot.name: slot for slot in weight_layout(shape, "float32")}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        gate_up = [f"{prefix}experts.{number}.{name}_proj.weight" for number in range(EXPERTS) for name in ("gate", "up")]
        down = [f"{prefix}experts.{number}.down_proj.weight" for number in range(EXPERTS)]
        for names in (gate_up, down, [f"{prefix}gate.weight", f"{prefix}shared_expert_gate.weight"]):
            ends = [slots[name].offset_bytes + slots[name].num_bytes for name in names[:-1]]
            assert ends == [slots[name].offset_bytes for name in names[1:]]
            assert {slots[name].stage for name in names} == {layer + 1}
    assert slots["model.layers.1.mlp.shared_expert_gate.weight"].shape == (1, HIDDEN)
    assert slots["model.layers.1.mlp.shared_expert.down_proj.weight"].shape == (HIDDEN, SHARED)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN2, GLM4_MOE], ids=["mixtral", "qwen2-moe", "glm4-moe"])
def test_missing_and_misshapen_experts_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "m", config)
    assert scan_one(folder).error == ""
    tensors = tensors_for(config)

    def error_with(changed: dict[str, Any]) -> str:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(changed))
        return scan_one(folder).error

    for name in [one for one in tensors if ".layers.1." in one and (".experts.3." in one or "shared" in one or ".gate." in one)]:
        assert error_with({key: value for key, value in tensors.items() if key != name}).startswith(
            f"model.safetensors: tensor {name}: missing"
        )
        dtype, dims, data = tensors[name]
        wrong = (dims[0] + 1, *dims[1:])
        assert f"tensor {name}: has shape {list(wrong)}, config.json asks for {list(dims)}" in error_with(
            tensors | {name: (dtype, wrong, data + bytes(4 * math.prod(dims[1:])))}
        )
    known = next(name for name in tensors if ".experts.3." in name)
    further = known.replace(".experts.3.", f".experts.{EXPERTS}.")
    error = error_with(tensors | {further: tensors[known]})
    assert f"tensor {further}: " in error
    assert "has no such parameter" in error


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than there are experts"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 0}, "num_experts_per_tok: 0 is out of range"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts: 0 is out of range"),
        (QWEN3_30B_A3B, {"num_experts": 0}, "num_experts: 0 is out of range"),
        (QWEN3_30B_A3B, {"num_experts": ONE_BILLION}, "num_experts: 1000000000 is out of range"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "num_experts: 128 contradicts num_local_experts 64"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": 0}, "moe_intermediate_size: 0 is out of range"),
        (QWEN3_30B_A3B, {"norm_topk_prob": 1}, "norm_topk_prob: 1 is not true or false"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step: 0 is out of range"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers: not a list of layers from 0 to 47"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [True]}, "mlp_only_layers: not a list"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers: not a list"),
        (QWEN15_MOE, {"shared_expert_intermediate_size": "8"}, "shared_expert_intermediate_size: '8' is not a whole number"),
        (GLM45_AIR, {"topk_group": 2}, r"topk_group: 2 is more than there are groups \(n_group 1\)"),
        (GLM45_AIR, {"n_group": 3}, "n_group: 3 does not divide n_routed_experts 128"),
        (GLM45_AIR, {"n_group": 128}, "n_group: 128 leaves 1 of n_routed_experts 128 to a group, which needs 2"),
        (GLM45_AIR, {"n_group": 32, "topk_group": 1}, "num_experts_per_tok: 8 is more than 1 groups of 4 experts"),
        (GLM45_AIR, {"num_local_experts": 64}, "n_routed_experts: 128 contradicts num_local_experts 64"),
        (GLM45_AIR, {"n_shared_experts": 0}, "n_shared_experts: 0 is out of range"),
        (GLM45_AIR, {"routed_scaling_factor": 0.0}, "routed_scaling_factor: 0.0 is not positive"),
        (GLM45_AIR, {"first_k_dense_replace": -1}, "first_k_dense_replace: -1 is out of range"),
        (GLM45_AIR, {"use_qk_norm": 1}, "use_qk_norm: 1 is not true or false"),
        (GLM45_AIR, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: -1 is out of range"),
    ],
)
def test_bad_values_name_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"key {message}"):
        parse(config, **changes)


def test_int8_checkpoints_are_read() -> None:
    assert parse(QWEN3_30B_A3B, quantization_config=quantization_config()).stored_format == STORED_INT8.name


@pytest.mark.parametrize("changes", [{"num_experts": 4096}, {"num_experts": 4096, "num_hidden_layers": 1024}])
def test_more_experts_than_tensors_are_refused_before_they_are_listed(tmp_path: Path, changes: dict[str, int]) -> None:
    folder = write_checkpoint(tmp_path / "m", QWEN2)
    (folder / "config.json").write_text(json.dumps(QWEN2 | changes))
    scan_one(folder)  # what it imports is not counted
    tracemalloc.start()
    try:
        error = scan_one(folder).error
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.startswith("config.json: ")
    assert "the files hold" in error
    assert peak_bytes < 6 << 20, "reading config.json takes 4 MiB"


def test_work_space_holds_every_token_at_each_of_its_experts() -> None:
    """Each token of a step passes through as many experts as any other, so the bound does not depend on the routing."""
    tokens, sequences = 2048, 8
    few, many = parse(QWEN3_30B_A3B, num_experts_per_tok=1), parse(QWEN3_30B_A3B)
    pairs = tokens * 8 * (768 + 2048) * 2  # inner values and outputs, in bfloat16
    for sizes in (work_space_bytes, gpu_work_space_bytes):
        assert sizes(many, "bfloat16", tokens, sequences) > pairs
        assert sizes(many, "bfloat16", tokens, sequences) > sizes(few, "bfloat16", tokens, sequences)
        assert sizes(parse(QWEN3_30B_A3B, num_experts=64), "bfloat16", tokens, sequences) <= sizes(
            many, "bfloat16", tokens, sequences
        )


def test_work_space_holds_what_a_router_in_float32_reads_and_gives() -> None:
    few = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1, "max_position_embeddings": 256}
    with_sigmoids = parse(GLM45_AIR, vocab_size=64, **few)
    assert with_sigmoids.experts is not None
    with_softmax = replace(with_sigmoids, experts=replace(with_sigmoids.experts, sigmoid=None))
    for sizes in (work_space_bytes, gpu_work_space_bytes):
        more = sizes(with_sigmoids, "bfloat16", 2048, 8) - sizes(with_softmax, "bfloat16", 2048, 8)
        assert more > 2048 * (4096 * 4 + 128 * 2)
