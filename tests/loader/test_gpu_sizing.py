from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loader.configs.hf_config import parse_config
from loader.shapes.model_shape import Division
from loader.sizes.gpu_sizing import (
    COMMUNICATOR_BYTES,
    LIBRARY_BYTES,
    LOGITS_ROWS,
    PEER_REGION_BYTES,
    gpu_step_bytes,
    gpu_work_space_bytes,
    sampling_bytes,
)
from loader.sizes.slices import split
from loader.sizes.work_space import MOST_STAGED_TOKENS, work_space_bytes
from tests.loader.checkpoints import shape


def test_it_grows_with_tokens_sequences_and_item_size() -> None:
    model = shape(vocab_size=512, intermediate_size=4096)
    base = gpu_work_space_bytes(model, "bfloat16", 512, 64)
    assert LIBRARY_BYTES < base < gpu_work_space_bytes(model, "bfloat16", 4096, 64)
    assert base < gpu_work_space_bytes(shape(vocab_size=200_000), "bfloat16", 512, 64)
    assert base < gpu_work_space_bytes(model, "float32", 512, 64)
    predicting = gpu_work_space_bytes(replace(model, predicts=True), "bfloat16", 512, 64)
    assert predicting > base + 3 * 512 * model.hidden_size * 2, "hidden states of all tokens, and what the predictor makes of them"
    in_gptq, ordered = (replace(model, stored_format=name) for name in ("gptq by 32", "gptq by 32, desc_act"))
    assert base < gpu_work_space_bytes(in_gptq, "bfloat16", 512, 64) < gpu_work_space_bytes(ordered, "bfloat16", 512, 64)
    assert gpu_work_space_bytes(model, "bfloat16", 16, 64) == gpu_work_space_bytes(model, "bfloat16", 64, 64)


def test_a_large_model_with_a_long_context_needs_a_fraction_of_the_cpus() -> None:
    """Llama 3.1 8B: 32 heads of 128, 8 KV heads, 131,072 positions."""
    llama = shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    needed = gpu_work_space_bytes(llama, "bfloat16", 4096, 256)
    # the MLP's arrays of 4,096 tokens, or logits of 256 rows
    assert 4096 * 14336 * 3 * 2 < needed < 1 << 30
    assert work_space_bytes(llama, "bfloat16", 4096, 256, 131072) > 4 << 30


PUBLISHED = Path(__file__).parents[1] / "published"


@pytest.mark.parametrize(
    ("name", "division", "part"), [("llama-3.1-8b", Division(8), 0.25), ("qwen3-235b-a22b", Division(8, 8), 1.0)]
)
def test_steps_of_many_tokens(name: str, division: Division, part: float) -> None:
    """A share has an eighth of a layer's heads and inner dimensions, but the residual of the model, and whole experts are as wide
    as all are."""
    model = parse_config((PUBLISHED / f"{name}.json").read_bytes())
    kept = COMMUNICATOR_BYTES + PEER_REGION_BYTES + LOGITS_ROWS * model.vocab_size * 2
    own, others = (
        gpu_work_space_bytes(one, "bfloat16", 65_536, 256) - 65_536 * model.hidden_size * 3 * 2 * 3 // 2
        for one in (split(model, 3, division), model)
    )
    assert kept < own <= kept + part * others


def test_logits_of_a_share() -> None:
    """Checks this for steps of few tokens, in which logits take most: the share's own, all parts as they arrive and side by side,
    and once more in the memory that the share keeps."""
    model, rows = shape(vocab_size=4096 * 64, num_attention_heads=4, num_key_value_heads=2), 256
    whole, half = (gpu_work_space_bytes(one, "bfloat16", 1, rows) for one in (model, split(model, 1, Division(2))))
    logits = rows * model.vocab_size * 2
    assert (half - whole) == (logits // 2 + logits) * 3 // 2 + logits + COMMUNICATOR_BYTES + PEER_REGION_BYTES
    few = [gpu_work_space_bytes(split(model, 1, Division(2)), "bfloat16", 1, num) for num in (8, 16)]
    assert few[1] - few[0] > 8 * (3.5 * model.vocab_size * 2) + sampling_bytes(8, model.vocab_size), "as many rows as sequences"


def test_norms_over_all_heads_are_computed_in_float32_in_a_share() -> None:
    model = shape(vocab_size=512, hidden_size=64, num_attention_heads=16, head_dim=128)
    plain, normed = (split(replace(model, whole_width_norms=own), 0, Division(2)) for own in (False, True))
    more = gpu_work_space_bytes(normed, "bfloat16", 4096, 8) - gpu_work_space_bytes(plain, "bfloat16", 4096, 8)
    query = 8 * 128
    assert more == 4096 * query * (2 + 2 * 4) * 3 // 2


def test_a_stage_keeps_states_for_its_graphs() -> None:
    """A residual and an update of 512 tokens, in the model's dtype, whatever a step has."""
    model = shape()
    stage, alone = split(model, 0, Division(2, num_stages=2)), split(model, 0, Division(2))
    for num_tokens in (1, 2048):
        took = gpu_work_space_bytes(stage, "bfloat16", num_tokens, 1) - gpu_step_bytes(stage, "bfloat16", num_tokens, 1)
        without = gpu_work_space_bytes(alone, "bfloat16", num_tokens, 1) - gpu_step_bytes(alone, "bfloat16", num_tokens, 1)
        assert took - (without - COMMUNICATOR_BYTES - PEER_REGION_BYTES) == 2 * MOST_STAGED_TOKENS * model.hidden_size * 2
