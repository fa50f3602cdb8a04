"""Encoders other than BERT, and cross-encoders of all families: vectors and scores equal those of transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.cpu.encoder import CpuEncoder
from engine.layers import encoder_attention
from engine.protocol import LoadModel, SamplingParams, Submit
from engine.serve.embedder import Embedder
from loader.models.catalog import scan_one
from tests.engine.model_bench import load_task, make_memory, make_runner

TOLERANCE = 2e-4
VOCAB, MAX_TOKENS, PADDING = 97, 72, 1
LENGTHS = (1, 2, 17, MAX_TOKENS, 33, 5)
TEXTS = [np.random.default_rng(at).integers(3, VOCAB, length).astype(np.int32) for at, length in enumerate(LENGTHS)]
SECOND_AT = [0, 1, 8, 40, 0, 4]

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "initializer_range": 0.2,
}
ROBERTA: dict[str, Any] = SIZES | {
    "max_position_embeddings": MAX_TOKENS + PADDING + 1,
    "pad_token_id": PADDING,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
MODERN: dict[str, Any] = SIZES | {
    "num_hidden_layers": 5,
    "max_position_embeddings": MAX_TOKENS,
    "local_attention": 12,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "initializer_cutoff_factor": 2.0,
    "reference_compile": False,
}
BERT: dict[str, Any] = SIZES | {"max_position_embeddings": MAX_TOKENS, "type_vocab_size": 2}


def save(folder: Path, name: str, config: dict[str, Any], prefix: str = "") -> Any:
    """Writes a seeded checkpoint of transformers' class `name`, its tensors' names behind the prefix, and returns the model."""
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(5)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for at, parameter in model.named_parameters():
            if at.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    if prefix:
        tensors = {prefix + at: tensor.contiguous() for at, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
    return model


def spec_of(folder: Path) -> LoadModel:
    checkpoint = scan_one(folder)
    assert checkpoint.complete, checkpoint.error or checkpoint.reason
    assert checkpoint.shape is not None
    assert checkpoint.shape.max_position_embeddings == MAX_TOKENS
    return LoadModel(1, "m", str(folder), "float32", checkpoint.fingerprint, 16, 1, 8, MAX_TOKENS, 8, [])


def load(folder: Path) -> CpuEncoder:
    model = make_runner(make_memory()).load(load_task(spec_of(folder)))
    assert isinstance(model, CpuEncoder)
    return model


def expected(model: Any, text: np.ndarray, second_at: int = 0) -> torch.Tensor:
    """Returns what transformers computes of one text, whose tokens all count: a vector of norm 1, or a score [1]."""
    ids = torch.from_numpy(text.astype(np.int64))[None]
    kinds = {"token_type_ids": (torch.arange(len(text)) >= (second_at or len(text))).long()[None]} if second_at else {}
    with torch.inference_mode():
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **kinds)
    if "logits" in out:
        return out.logits[0]
    return torch.nn.functional.normalize(out.last_hidden_state[0].mean(0), dim=0)


def check(model: Any, mine: CpuEncoder, second_at: list[int], texts: list[np.ndarray]) -> np.ndarray:
    takes_kinds = getattr(model.config, "type_vocab_size", 1) > 1
    pairs = zip(texts, second_at, strict=True)
    wanted = torch.stack([expected(model, text, at if takes_kinds else 0) for text, at in pairs]).numpy()
    together, seconds = mine.embed(texts, second_at)
    assert seconds > 0
    assert together.dtype == np.float32
    assert np.abs(together - wanted).max() < TOLERANCE
    alone = np.concatenate([mine.embed([text], [at])[0] for text, at in zip(texts, second_at, strict=True)])
    assert np.abs(alone - together).max() < TOLERANCE
    assert np.abs(wanted - wanted[:1]).max() > 0.05, "the answers are too alike to tell anything"
    return together


@pytest.mark.parametrize("name", ["XLMRobertaModel", "RobertaModel"])
@pytest.mark.parametrize("prefix", ["", "roberta."])
def test_positions_begin_behind_the_padding(tmp_path: Path, name: str, prefix: str) -> None:
    model = save(tmp_path, name, ROBERTA, prefix)
    mine = load(tmp_path)
    written = np.array([7, PADDING, 9, PADDING, PADDING, 4], np.int32)  # a text may write the padding's name
    check(model, mine, [0] * 7, [*TEXTS, written])


def test_a_position_behind_another_padding(tmp_path: Path) -> None:
    config = ROBERTA | {"pad_token_id": 5, "max_position_embeddings": MAX_TOKENS + 6, "type_vocab_size": 2}
    check(save(tmp_path, "XLMRobertaModel", config), load(tmp_path), [0] * 6, TEXTS)


def test_the_first_tokens_vector(tmp_path: Path) -> None:
    """BGE-M3's dense vectors."""
    model = save(tmp_path, "XLMRobertaModel", ROBERTA)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with torch.inference_mode():
        first = [model(input_ids=torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0, 0] for text in TEXTS]
    wanted = torch.nn.functional.normalize(torch.stack(first), dim=1).numpy()
    assert np.abs(load(tmp_path).embed(TEXTS, [0] * 6)[0] - wanted).max() < TOLERANCE


@pytest.mark.parametrize("dialect", ["newer", "older"])
@pytest.mark.parametrize("tile", [8, 256])
def test_modernbert(tmp_path: Path, dialect: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_attention, "ENCODER_TILE_TOKENS", tile)
    ropes = {"global_rope_theta": 500.0, "local_rope_theta": 30.0}
    model = save(tmp_path, "ModernBertModel", MODERN | ropes, "model." if dialect == "older" else "")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"]["full_attention"]["rope_theta"] == 500.0, "transformers has read what it was given"
    if dialect == "older":
        del written["rope_parameters"], written["layer_types"]
        (tmp_path / "config.json").write_text(json.dumps(written | ropes | {"global_attn_every_n_layers": 2}))
    shape = scan_one(tmp_path).shape
    assert shape is not None
    assert shape.layer_windows == (0, 13, 0, 13, 0)
    check(model, load(tmp_path), [0] * 6, TEXTS)


@pytest.mark.parametrize("keys", [{"attention_bias": True}, {"mlp_bias": True}])
def test_modernbert_with_biases(tmp_path: Path, keys: dict[str, bool]) -> None:
    check(save(tmp_path, "ModernBertModel", MODERN | keys), load(tmp_path), [0] * 6, TEXTS)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BertForSequenceClassification", BERT),
        ("XLMRobertaForSequenceClassification", ROBERTA),
        ("RobertaForSequenceClassification", ROBERTA | {"type_vocab_size": 2}),
        ("ModernBertForSequenceClassification", MODERN),
        ("ModernBertForSequenceClassification", MODERN | {"classifier_pooling": "mean"}),
    ],
)
def test_scores_of_pairs(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    model = save(tmp_path, name, config | {"num_labels": 1})
    mine = load(tmp_path)
    assert mine.task == "score"
    scores = check(model, mine, SECOND_AT, TEXTS)
    assert scores.shape == (len(TEXTS), 1)
    others = mine.embed(TEXTS, [0] * 6)[0]
    has_kinds = config.get("type_vocab_size", 1) > 1
    changed = [bool(at) and has_kinds for at in SECOND_AT]
    assert ((np.abs(others - scores) > TOLERANCE)[:, 0] == changed).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["XLMRobertaForSequenceClassification", "ModernBertForSequenceClassification"])
def test_half_precision_is_close(tmp_path: Path, name: str, dtype: str) -> None:
    model = save(tmp_path, name, (ROBERTA if "Roberta" in name else MODERN) | {"num_labels": 1, "initializer_range": 0.1})
    wanted = torch.stack([expected(model, text) for text in TEXTS]).numpy()
    spec = msgspec.structs.replace(spec_of(tmp_path), dtype=dtype)
    close = make_runner(make_memory()).load(load_task(spec))
    assert isinstance(close, CpuEncoder)
    error = np.abs(close.embed(TEXTS, SECOND_AT)[0] - wanted).max()
    assert 0 < error < 0.1 * (wanted.max() - wanted.min())


def test_a_cross_encoder_whose_names_have_no_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1})
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("bert."): tensor for name, tensor in load_file(file).items()}, file)
    check(model, load(tmp_path), SECOND_AT, TEXTS)


class FakeScorer:
    name, weights_bytes, vocab_size, task = "m", 0, 211, "score"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def embed(self, texts: Any, second_at: Any) -> Any:
        self.asked.append(([len(text) for text in texts], second_at))
        return np.array([[float(text[0]) or np.nan] for text in texts], np.float32), 0.5

    def release(self) -> None:
        pass


def submit(request_id: int, prompt: list[int], second_at: int, task: str = "score") -> Submit:
    return Submit(request_id, "m", prompt, SamplingParams(0), task=task, second_at=second_at)


def test_each_pair_keeps_the_place_where_its_second_text_begins() -> None:
    scorer = FakeScorer()
    queue = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), scorer, max_tokens=100, turn_s=0.01)
    for request_id, (prompt, second_at) in enumerate([([7] * 5, 2), ([8] * 3, 0), ([9] * 4, 4), ([0] * 2, 1)]):
        assert queue.submit(submit(request_id, prompt, second_at)) == ""
    queue.abort(2)
    assert queue.submit(submit(2, [6] * 4, 0)) == ""
    out, failed = queue.step(queue.next_texts(others_busy=False), 1)
    assert sorted(zip(*scorer.asked[0], strict=True)) == [(2, 1), (3, 0), (4, 0), (5, 2)]
    scores = {request_id: np.frombuffer(value, "<f4") for request_id, value in zip(out.request_ids, out.values, strict=True)}
    assert scores == {0: [7.0], 1: [8.0], 2: [6.0]}
    assert [(one.request_id, one.code) for one in failed] == [(3, "nan_logits")]
    assert "the score is not finite" in failed[0].error


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (submit(1, [1, 2], 3), "second_at 3"),
        (submit(1, [1, 2], -1), "second_at -1"),
        (submit(1, [1, 2], 1, task="embed"), "does not do task embed"),
    ],
)
def test_what_cannot_be_scored_is_refused(message: Submit, why: str) -> None:
    queue = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), FakeScorer(), max_tokens=10, turn_s=0.01)
    assert why in queue.submit(message)
    assert not queue.waiting
