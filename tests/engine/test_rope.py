"""The frequencies of scaled rotary embeddings equal those of transformers, and have the properties that their papers state."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from engine.layers.rope import inverse_frequencies, rotaries_of
from loader.configs.hf_config import parse_config
from loader.shapes.model_shape import ModelShape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "model_type": "llama",
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}


def shape_of(rope: dict[str, Any], **changes: Any) -> ModelShape:
    return parse_config(json.dumps(LLAMA | {"rope_theta": 10000.0, "rope_scaling": rope} | changes).encode())


def theirs(rope: dict[str, Any], num_tokens: int | None = None, **changes: Any) -> tuple[torch.Tensor, float]:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = LLAMA | changes
    theta = given.pop("rope_theta", 10000.0)
    kind = transformers.Qwen3Config if given.pop("model_type") == "qwen3" else transformers.LlamaConfig
    config = kind(**{**given, "rope_parameters": {"rope_theta": theta, **rope}})
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=num_tokens)
    return found


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        (YARN, {}),
        (YARN | {"factor": 1.0}, {}),
        (YARN | {"factor": 2.5, "original_max_position_embeddings": 300}, {}),
        (YARN | {"original_max_position_embeddings": 5}, {}),  # no frequency makes a full turn
        (YARN | {"beta_fast": 16, "beta_slow": 2}, {}),
        (YARN | {"beta_fast": 1, "beta_slow": 1, "truncate": False}, {}),
        (YARN | {"beta_fast": 0, "beta_slow": None}, {}),
        (YARN | {"truncate": False}, {}),
        (YARN | {"attention_factor": 0.7}, {}),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, {}),
        (YARN | {"mscale": 0.707, "mscale_all_dim": 0}, {}),
        (YARN | {"factor": 40, "original_max_position_embeddings": 4096}, {"max_position_embeddings": 163840}),
        (YARN | {"factor": 4.0, "original_max_position_embeddings": 32768}, {"rope_theta": 1e6, "max_position_embeddings": 40960}),
        (YARN, {"head_dim": 96, "rope_theta": 500000.0}),
        ({"rope_type": "yarn", "factor": 4.0}, {}),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}, {}),
        (YARN, {"original_max_position_embeddings": 1024}),  # the one in the configuration itself takes precedence
    ],
)
def test_yarn_is_transformers(rope: dict[str, Any], changes: dict[str, Any]) -> None:
    wanted, scale = theirs(rope, **changes)
    shape = shape_of(rope, **changes)
    rotary, local = rotaries_of(shape, shape.max_position_embeddings)
    assert local is rotary
    torch.testing.assert_close(rotary.inv_freq, wanted, rtol=2e-6, atol=0.0)
    assert rotary.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("factor", [4.0, 16.0])
def test_yarn_keeps_what_turns_often_and_stretches_what_hardly_turns(factor: float) -> None:
    """YaRN leaves frequencies that turn often within the original length as they are and divides those that hardly turn by the
    factor. The limits on the number of turns, 1 and 32, are the paper's alpha and beta."""
    rope = shape_of(YARN | {"factor": factor, "truncate": False}).rope
    found = inverse_frequencies(rope, 128, 1).double()
    plain = 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    turns = 2048 * plain / (2 * math.pi)
    stretched = plain / found
    assert torch.allclose(stretched[turns > 32.01], torch.tensor(1.0).double(), atol=1e-5)
    assert torch.allclose(stretched[turns < 0.99], torch.tensor(factor).double(), rtol=1e-5)
    between = stretched[(turns > 1.01) & (turns < 31.9)]
    assert len(between) > 10
    assert ((between > 1) & (between < factor)).all()
    assert (between.diff() > 0).all()
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(factor)), "the paper's table of temperatures"


@pytest.mark.parametrize("num_tokens", [1, 2048, 2049, 3000, 4096])
def test_dynamic_is_transformers_at_the_longest_context(num_tokens: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    wanted, _ = theirs(rope, num_tokens)
    found, _ = rotaries_of(shape_of(rope), num_tokens)
    torch.testing.assert_close(found.inv_freq, wanted, rtol=2e-6, atol=0.0)
    assert found.scale == 1.0


def test_dynamic_within_the_original_length_is_unscaled() -> None:
    rope = shape_of({"type": "dynamic", "factor": 8.0}).rope
    assert torch.equal(inverse_frequencies(rope, 128, 2048), inverse_frequencies(shape_of({"type": "default"}).rope, 128, 2048))
    assert (inverse_frequencies(rope, 128, 2049)[1:] < inverse_frequencies(rope, 128, 2048)[1:]).all()
