"""Encoders' and cross-encoders' config.json, as published and changed, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loader.architectures.registry import architecture_of
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import num_parameters, parameter_shapes
from loader.sizes.work_space import work_space_bytes

BGE_RERANKER_V2_M3: dict[str, Any] = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 4096,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
BGE_M3 = BGE_RERANKER_V2_M3 | {"architectures": ["XLMRobertaModel"], "id2label": None, "label2id": None}
MS_MARCO_MINILM_L6: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "hidden_act": "gelu",
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
GTE_RERANKER_MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForSequenceClassification"],
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 1152,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "torch_dtype": "float16",
    "vocab_size": 50368,
}
GTE_MODERNBERT = GTE_RERANKER_MODERNBERT | {"architectures": ["ModernBertModel"], "id2label": None}


def parse(config: dict[str, Any], **changes: object) -> ModelShape:
    return parse_config(json.dumps(config | changes).encode())


@pytest.mark.parametrize(
    ("config", "num", "longest", "pooling", "scoring"),
    [
        (BGE_M3, 566_705_152, 8192, "mean", ""),
        (BGE_RERANKER_V2_M3, 567_755_777, 8192, "cls", "sigmoid"),
        (MS_MARCO_MINILM_L6, 22_713_601, 512, "cls", "identity"),
        (GTE_MODERNBERT, 149_014_272, 8192, "mean", ""),
        (GTE_RERANKER_MODERNBERT, 149_605_633, 8192, "mean", "sigmoid"),
    ],
)
def test_published_models(config: dict[str, Any], num: int, longest: int, pooling: str, scoring: str) -> None:
    shape = parse(config)
    assert num_parameters(shape) == num
    assert (shape.max_position_embeddings, shape.pooling, shape.scoring) == (longest, pooling, scoring)


def test_the_table_of_positions_has_rows_that_no_text_reaches() -> None:
    assert parameter_shapes(parse(BGE_M3))["embeddings.position_embeddings.weight"] == (8194, 1024)
    assert parse(BGE_M3, pad_token_id=None).first_position == 2, "the configuration class's own"
    assert parse(BGE_M3, pad_token_id=0).max_position_embeddings == 8193
    with pytest.raises(CheckpointError, match="key max_position_embeddings: 2 leaves no position behind pad_token_id"):
        parse(BGE_M3, max_position_embeddings=2)


def test_modernberts_windows_and_angles_in_both_dialects() -> None:
    older = parse(GTE_MODERNBERT)
    kinds = ["full_attention" if layer % 3 == 0 else "sliding_attention" for layer in range(22)]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    without = dict.fromkeys(("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"))
    assert parse(GTE_MODERNBERT, layer_types=kinds, rope_parameters=ropes, **without) == older
    assert parse(GTE_MODERNBERT, **without) == older, "the configuration class's own"
    assert older.layer_windows[:5] == (0, 129, 129, 0, 129)
    assert older.local_rope is not None
    assert (older.rope.theta, older.local_rope.theta) == (160000.0, 10000.0)
    assert "layers.0.attn_norm.weight" not in parameter_shapes(older)
    assert "layers.1.attn_norm.weight" in parameter_shapes(older)


ACTIVATION = "torch.nn.modules.activation.Sigmoid"


def test_activations_of_scores() -> None:
    assert parse(MS_MARCO_MINILM_L6, sentence_transformers=None).scoring == "sigmoid"
    assert parse(MS_MARCO_MINILM_L6, sentence_transformers={"activation_fn": ACTIVATION}).scoring == "sigmoid"
    older = {"sentence_transformers": {"version": "4"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert parse(MS_MARCO_MINILM_L6, **older).scoring == "identity"
    assert parse(MS_MARCO_MINILM_L6, id2label=None, num_labels=1).scoring == "identity"


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (MS_MARCO_MINILM_L6, {"id2label": {"0": "a", "1": "b"}}, "id2label"),
        (MS_MARCO_MINILM_L6, {"id2label": None}, "num_labels"),
        (MS_MARCO_MINILM_L6, {"id2label": None, "num_labels": 3}, "num_labels"),
        (MS_MARCO_MINILM_L6, {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "sentence_transformers.activation_fn"),
        (
            MS_MARCO_MINILM_L6,
            {"sentence_transformers": None, "sbert_ce_default_activation_function": "x"},
            "sbert_ce_default_activation_function",
        ),
        (MS_MARCO_MINILM_L6, {"hidden_act": "relu"}, "hidden_act"),
        (BGE_M3, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BGE_M3, {"is_decoder": True}, "is_decoder"),
        (GTE_MODERNBERT, {"hidden_activation": "silu"}, "hidden_activation"),
        (GTE_RERANKER_MODERNBERT, {"classifier_activation": "tanh"}, "classifier_activation"),
        (GTE_RERANKER_MODERNBERT, {"classifier_pooling": "max"}, "classifier_pooling"),
        (GTE_RERANKER_MODERNBERT, {"classifier_bias": True}, "classifier_bias"),
        (GTE_MODERNBERT, {"norm_bias": True}, "norm_bias"),
        (GTE_MODERNBERT, {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling"),
        (GTE_MODERNBERT, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_parameters"),
        (GTE_MODERNBERT, {"layer_types": ["chunked_attention"] * 22}, "layer_types"),
    ],
)
def test_refusals_name_the_key(config: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: key {re.escape(key)}: "):
        parse(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (GTE_MODERNBERT, {"global_rope_theta": 0}, "global_rope_theta"),
        (GTE_MODERNBERT, {"num_attention_heads": 768}, "num_attention_heads"),
        (GTE_MODERNBERT, {"local_attention": "128"}, "local_attention"),
        (BGE_M3, {"pad_token_id": -1}, "pad_token_id"),
        (BGE_M3, {"layer_norm_eps": -1e-12}, "layer_norm_eps"),
        (GTE_MODERNBERT, {"norm_eps": -1e-5}, "norm_eps"),
        (BGE_RERANKER_V2_M3, {"id2label": ["a"]}, "id2label"),
    ],
)
def test_wrong_values_name_the_key(config: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: key {key}: "):
        parse(config, **changes)


def test_scores_of_a_long_text_are_never_held_at_once() -> None:
    """16 heads of 8,192 x 8,192 scores would take 4 GiB."""
    shape = parse(BGE_M3)
    assert work_space_bytes(shape, "float32", 512, 64) < 800 << 20
    assert work_space_bytes(shape, "float32", 512, 64, 512) < 60 << 20
    assert work_space_bytes(parse(GTE_MODERNBERT), "float32", 512, 64) > work_space_bytes(shape, "float32", 512, 64, 512)


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        (BGE_M3, ["roberta.pooler.dense.weight", "embeddings.position_ids"]),
        (BGE_RERANKER_V2_M3, ["roberta.pooler.dense.bias", "roberta.embeddings.position_ids"]),
        (GTE_MODERNBERT, ["head.dense.weight", "decoder.bias"]),
    ],
)
def test_what_stands_beside_an_encoder_is_not_read(config: dict[str, Any], beside: list[str]) -> None:
    shape = parse(config)
    family = architecture_of(shape)
    shape = family.as_stored(shape, ["roberta.embeddings.word_embeddings.weight", "model.final_norm.weight"])
    assert shape.tensor_prefix
    assert all(family.ignores(shape, name) for name in beside)
    assert not family.ignores(shape, "encoder.layer.9.new.weight")
    assert not architecture_of(parse(GTE_RERANKER_MODERNBERT)).ignores(shape, "head.dense.weight")
