from __future__ import annotations

import json
from typing import Any

import pytest

from loader.configs.hf_config import GenerationDefaults, parse_config, parse_generation
from loader.errors import CheckpointError, UnsupportedModel
from loader.shapes.rope_config import RopeParameters
from loader.sizes.layout import parameter_shapes
from tests.loader.checkpoints import CONFIG

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def parse(**changes: Any) -> Any:
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    return parse_config(json.dumps(config).encode())


def test_both_dialects_say_the_same() -> None:
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16")
    old = parse(
        rope_parameters="absent",
        dtype="absent",
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **LLAMA3},
        torch_dtype="bfloat16",
    )
    assert new == old
    assert new.rope == RopeParameters("llama3", 5e5, 8.0, 1.0, 4.0, 32)
    assert new.dtype == "bfloat16"


def test_older_spelling_of_linear_scaling() -> None:
    shape = parse(rope_parameters="absent", rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2})
    assert shape.rope == RopeParameters("linear", 1e4, 2.0)


def test_no_rope_key_means_the_default() -> None:
    assert parse(rope_parameters="absent").rope == RopeParameters()


def test_head_dim_is_derived_or_explicit() -> None:
    assert parse().head_dim == 4
    assert parse(head_dim=8).head_dim == 8
    assert parse(num_key_value_heads="absent").num_kv_heads == 4


def test_qwen3() -> None:
    shape = parse(architectures=["Qwen3ForCausalLM"], head_dim=8, mlp_bias=True)
    assert "model.layers.1.self_attn.q_norm.weight" in parameter_shapes(shape)
    assert not shape.mlp_bias
    assert "model.layers.1.self_attn.q_norm.weight" not in parameter_shapes(parse())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM, .*Qwen3ForCausalLM"),
        ({"architectures": "absent", "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {"rope_parameters": {"rope_type": "mrope"}},
            r"rope_parameters\.rope_type: 'mrope'.*default, linear, llama3, yarn, dynamic",
        ),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_is_not_supported_says_what_is(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": "absent"}, "hidden_size: missing"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06 is not positive"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0.0 is not positive"),
        ({"rms_norm_eps": 1e39}, r"rms_norm_eps: 1e\+39 is out of range \(at most 3.40e\+38\)"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"rope_parameters\.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor"),
    ],
)
def test_bad_values_name_the_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        parse(**changes)
    assert caught.value.file == "config.json"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
def test_not_an_object(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parse_config(text)


def test_generation_config_goes_before_config() -> None:
    config = json.dumps({"eos_token_id": 2, "bos_token_id": 1}).encode()
    assert parse_generation(config, None) == GenerationDefaults((2,), 1)
    given = json.dumps({"eos_token_id": [7, 8, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20}).encode()
    assert parse_generation(config, given) == GenerationDefaults((7, 8), 1, 0.6, 0.9, 20)
    assert parse_generation(config, b'{"eos_token_id": null}').eos_token_ids == (2,)
    bent = parse_generation(config, b'{"repetition_penalty": 1.05, "min_p": 0.1}')
    assert (bent.repetition_penalty, bent.min_p) == (1.05, 0.1)


@pytest.mark.parametrize(
    "given",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [-1]},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": 0.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": "1"},
    ],
)
def test_bad_generation_values_name_file_and_key(given: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: key {next(iter(given))}"):
        parse_generation(b"{}", json.dumps(given).encode())


BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}


def test_sizes_an_encoders_vectors_may_be_cut_to() -> None:
    def sizes(**config: object) -> list[int] | str:
        shape = parse_config(json.dumps(BERT | config).encode())
        return "any" if shape.any_cut_size else list(shape.cut_sizes)

    assert sizes() == sizes(is_matryoshka=False) == []
    assert sizes(matryoshka_dimensions=[32, 8]) == [8, 32]
    assert sizes(is_matryoshka=True) == "any"
    assert sizes(is_matryoshka=True, matryoshka_dimensions=[8]) == [8]
    for wrong in ([65], [0], [True], 8, ["8"], [8.5]):
        with pytest.raises(CheckpointError, match="matryoshka_dimensions"):
            sizes(matryoshka_dimensions=wrong)
