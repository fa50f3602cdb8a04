"""An encoder's pooled, normalised vectors equal those of transformers in float32, and its requests are queued, bounded and
answered.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.cpu.encoder import CpuEncoder
from engine.loop.worker import Engine
from engine.null.runner import NullRunner
from engine.protocol import EMBED, JOURNAL_BYTES, EmbeddingsOut, LoadModel, RequestFailed, SamplingParams, Submit
from engine.serve.embedder import Embedder
from engine.serve.served_models import Place
from loader.errors import UnsupportedModel
from loader.models.catalog import scan_one
from tests.engine.engine_process import Messages, load_message, null_configure
from tests.engine.model_bench import load_task, make_memory, make_runner

TOLERANCE = 1e-4
LENGTHS = (1, 2, 17, 64, 33, 5)
TEXTS = [np.random.default_rng(at).integers(0, 211, length).astype(np.int32) for at, length in enumerate(LENGTHS)]
NO_PAIRS = [0] * len(TEXTS)


def make_bert(folder: Path, prefix: str = "", pooling: dict[str, Any] | None = None) -> Any:
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=80,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    save_file({prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


def spec_of(folder: Path) -> LoadModel:
    return LoadModel(1, "m", str(folder), "float32", scan_one(folder).fingerprint, 16, 1, 8, 64, 8, [])


def load(folder: Path) -> CpuEncoder:
    model = make_runner(make_memory()).load(load_task(spec_of(folder)))
    assert isinstance(model, CpuEncoder)
    return model


def expected(model: Any, pooling: str) -> np.ndarray:
    """Returns the vectors that transformers computes, with padding and masks as in sentence-transformers."""
    longest = max(LENGTHS)
    ids = torch.zeros(len(TEXTS), longest, dtype=torch.long)
    mask = torch.zeros(len(TEXTS), longest, dtype=torch.long)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].float()
    pooled = hidden[:, 0] if pooling == "cls" else (hidden * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(pooled, dim=1).numpy()


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_equal_transformers(tmp_path: Path, prefix: str, pooling: str) -> None:
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    wanted = expected(make_bert(tmp_path, prefix, modes), pooling)
    model = load(tmp_path)
    together, seconds = model.embed(TEXTS, NO_PAIRS)
    assert seconds > 0
    assert together.dtype == np.float32
    assert np.abs(together - wanted).max() < TOLERANCE
    alone = np.concatenate([model.embed([text], [0])[0] for text in TEXTS])
    assert np.abs(alone - together).max() < TOLERANCE
    assert np.abs(together[0] - together[1]).max() > 0.05, "the vectors are too alike to tell anything"
    model.release()
    with pytest.raises(RuntimeError, match="released"):
        model.embed(TEXTS, NO_PAIRS)


def test_other_pooling_is_refused_by_its_key(tmp_path: Path) -> None:
    make_bert(tmp_path, pooling={"pooling_mode_max_tokens": True})
    checkpoint = scan_one(tmp_path)
    assert not checkpoint.complete
    assert "pooling_mode_max_tokens" in checkpoint.error


def test_a_module_after_the_pooling_is_refused(tmp_path: Path) -> None:
    make_bert(tmp_path)
    known = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in known]))
    assert scan_one(tmp_path).complete
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in [*known, "sentence_transformers.models.Dense"]]))
    checkpoint = scan_one(tmp_path)
    assert not checkpoint.complete
    assert "models.Dense" in checkpoint.error


class FakeEncoder:
    name, weights_bytes, vocab_size, task = "m", 0, 211, "embed"

    def embed(self, texts: Any, second_at: Any) -> Any:
        return np.array([[float(len(text)), 0.0] if text[0] else [np.nan, 0.0] for text in texts], np.float32), 0.5

    def release(self) -> None:
        pass


def submit(request_id: int, prompt: list[int], priority: int = 0, tenant: str = "", weight: float = 1.0) -> Submit:
    params = SamplingParams(0)
    return Submit(request_id, "m", prompt, params, task="embed", priority=priority, tenant=tenant, tenant_weight=weight)


def test_steps_are_bounded_and_each_request_is_answered_once(tmp_path: Path) -> None:
    embedder = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), FakeEncoder(), max_tokens=10, turn_s=0.01)
    for request_id, length in enumerate((6, 4, 1, 20, 3)):
        assert embedder.submit(submit(request_id, [1] * length)) == ""
    assert embedder.submit(submit(9, [0, 1], priority=1)) == ""
    steps = []
    while embedder.waiting:
        chosen = embedder.next_texts(others_busy=False)
        out, failed = embedder.step(chosen, len(steps) + 1)
        assert (out.model, out.step_id, out.seconds, len(out.values)) == ("m", len(steps) + 1, 0.5, len(out.request_ids))
        steps.append(chosen)
        assert out.request_ids == [request_id for request_id in chosen if request_id != 9]
        assert [type(failure) for failure in failed] == [RequestFailed] * (9 in chosen)
    assert steps == [[9, 0], [1, 2], [3], [4]], "a text longer than a step goes alone; priority goes first"


def test_what_a_step_takes_is_known_once_some_of_its_size_were_seen() -> None:
    embedder = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), FakeEncoder(), max_tokens=10, turn_s=0.01)
    told = []
    for request_id in range(4):
        embedder.submit(submit(request_id, [1] * 6))
        chosen = embedder.next_texts(others_busy=False)
        told.append(embedder.expected_s(chosen))
        embedder.step(chosen, request_id)
    assert told == [0.0, 0.0, 0.0, pytest.approx(0.5)]


def test_tenants_are_served_by_their_weights_and_what_is_aborted_is_not(tmp_path: Path) -> None:
    embedder = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), FakeEncoder(), max_tokens=4, turn_s=0.01)
    for request_id in range(40):
        embedder.submit(submit(request_id, [1], tenant="flood"))
    for request_id in range(100, 109):
        embedder.submit(submit(request_id, [1], tenant="small", weight=3.0))
    embedder.abort(0)
    embedder.abort(100)
    embedder.abort(7777)
    chosen: list[int] = []
    for step_id in range(3):
        texts = embedder.next_texts(others_busy=False)
        embedder.step(texts, step_id)
        chosen += texts
    assert len([request_id for request_id in chosen if request_id >= 100]) == 8
    assert not {0, 100} & set(chosen)
    assert len(embedder.waiting) == 39 - 4


class CostedEncoder(FakeEncoder):
    """An encoder whose steps take fixed_s seconds and a millisecond for each token."""

    def __init__(self, fixed_s: float) -> None:
        self.fixed_s = fixed_s

    def embed(self, texts: Any, second_at: Any) -> Any:
        return super().embed(texts, second_at)[0], self.fixed_s + 1e-3 * sum(map(len, texts))


def test_steps_keep_within_a_turn_while_another_model_is_busy() -> None:
    configure, channel = null_configure(max_num_batched_tokens=64, turn_budget_ms=10.0), Messages()
    engine = Engine(channel, mmap.mmap(-1, JOURNAL_BYTES), configure, NullRunner(configure), None)  # type: ignore[arg-type]
    place = Place(np.zeros(0, np.int32), np.zeros(0, np.int32))
    for name in ("a", "b"):
        engine.models.add_encoder(load_message("", name), CostedEncoder(1e-3), place)

    def steps(**num_texts: int) -> list[tuple[str, int]]:
        """Returns the model and the number of texts of each step, until texts of two tokens each are computed."""
        before = len(channel.sent)
        for name, num in num_texts.items():
            for _ in range(num):
                engine._handle(Submit(next(request_ids), name, [1, 1], SamplingParams(1), task=EMBED))
        while busy := engine.models.busy():
            engine._turn(busy)
        return [(out.model, len(out.values)) for out in channel.sent[before:] if isinstance(out, EmbeddingsOut)]

    request_ids = itertools.count(1)
    try:
        assert steps(a=30) == [("a", 30)], "a model that is busy alone computes all that its limit of tokens allows"
        both = steps(a=30, b=60)
        last_of_a = max(at for at, (name, _) in enumerate(both) if name == "a")
        beside = {one: [num for name, num in both[:last_of_a] if name == one] for one in "ab"}
        assert beside["b"][0] == 1, "what its texts cost is not known"
        for sizes in (beside["a"], beside["b"][1:]):
            assert min(sizes) >= 3
            assert max(sizes) <= 5, "4 texts take 9 ms, 5 take 11 ms and are tried"
        assert steps(a=30) == [("a", 30)]
        followed = SimpleNamespace(has_sequences=True, name="followed")
        engine.models.followed["followed"] = followed  # type: ignore[assignment]
        assert max(num for _, num in steps(a=30)) <= 5, "streams of a model that another engine leads wait for each step"
        followed.has_sequences = False
        assert steps(a=30) == [("a", 30)]
    finally:
        os.close(engine.lifecycle.fileno())


@pytest.mark.parametrize(
    ("fixed_s", "length", "most"),
    [
        (1e-3, 30, 1),  # a text alone takes three turns, and two take twice as long
        (30e-3, 2, 5),  # a text takes 32 ms, five take 40 ms
    ],
)
def test_steps_are_little_longer_than_the_shortest_where_that_is_longer_than_a_turn(fixed_s: float, length: int, most: int) -> None:
    spec, encoder = LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), CostedEncoder(fixed_s)
    embedder = Embedder(spec, encoder, max_tokens=64, turn_s=0.01)
    for request_id in range(100):
        assert embedder.submit(submit(request_id, [1] * length)) == ""
    sizes = []
    while embedder.waiting:
        chosen = embedder.next_texts(others_busy=True)
        embedder.step(chosen, len(sizes) + 1)
        sizes.append(len(chosen))
    assert max(sizes) <= 2 * most, "a size of which nothing is known is tried"
    assert set(sizes[10:-1]) == {most}


@pytest.mark.parametrize("prompt", [[], [1] * 65, [211], [-1]])
def test_what_cannot_be_embedded_is_refused(prompt: list[int]) -> None:
    embedder = Embedder(LoadModel(1, "m", "", "float32", "", 1, 1, 1, 64, 8, []), FakeEncoder(), max_tokens=10, turn_s=0.01)
    assert embedder.submit(submit(1, prompt))
    assert not embedder.waiting


def test_quantize_is_refused_by_its_field(tmp_path: Path) -> None:
    make_bert(tmp_path)
    spec = msgspec.structs.replace(spec_of(tmp_path), quantize="int8")
    with pytest.raises(UnsupportedModel, match="quantize: int8 is not built for encoders"):
        make_runner(make_memory()).load(load_task(spec))
