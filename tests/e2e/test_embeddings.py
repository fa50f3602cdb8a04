"""Encoders, and decoders that embed, through the daemon: the official client, refusals, co-hosting, an engine's death."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from loader.configs import hf_config
from tests.e2e.checkpoints import END_ID, make_model, write_weights
from tests.e2e.node import Node

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sky", "is", "blue", "why", "##s")
HIDDEN, MAX_TOKENS = 32, 32
HALVES = ("bfloat16", "float16")
DECODER_TOKENS = 600  # more than a step takes


def make_encoder(folder: Path, num_layers: int = 2, hidden: int = HIDDEN, **config: object) -> Path:
    """A seeded BERT with a WordPiece tokenizer that cuts and pads, as sentence-transformers' do."""
    folder.mkdir(parents=True)
    text = json.dumps(
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "vocab_size": len(WORDS),
            "max_position_embeddings": MAX_TOKENS,
            "hidden_act": "gelu",
            **config,
        }
    )
    write_weights(folder / "model.safetensors", hf_config.parse_config(text.encode()), 1)
    write_tokenizer(folder)
    (folder / "config.json").write_text(text)
    return folder


def make_reranker(folder: Path) -> Path:
    """A seeded cross-encoder as transformers writes it."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.4,
        num_labels=1,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a WordPiece tokenizer that cuts and pads."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_decoder(folder: Path, **config: object) -> Path:
    """A seeded Qwen3 with sentence-transformers' files, and a tokenizer that ends texts as Qwen3-Embedding's does."""
    from tokenizers import Tokenizer, processors

    make_model(folder, architecture="Qwen3ForCausalLM", max_position_embeddings=DECODER_TOKENS, **config)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", END_ID)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("embeddings")
    make_encoder(folder / "models" / "enc")
    make_encoder(folder / "models" / "deep", num_layers=6, hidden=256)
    make_encoder(folder / "models" / "cut", matryoshka_dimensions=[16, 8])
    make_reranker(folder / "models" / "rank")
    make_model(folder / "models" / "gen")
    make_decoder(folder / "models" / "dec", is_matryoshka=True)
    for dtype in HALVES:
        make_encoder(folder / "models" / f"enc-{dtype}")
    config = "[models.enc]\nmax_queued = 4\n" + "".join(f'[models.enc-{dtype}]\ndtype = "{dtype}"\n' for dtype in HALVES)
    with Node(folder, runner="torch", config=config, flags=["--max-num-batched-tokens", "256"]) as node:
        yield node


def vectors(answer: Any) -> np.ndarray:
    return np.array([each.embedding for each in answer.data], np.float32)


def test_official_client(node: Node) -> None:
    texts = ["the sky", "why is the sky blue", "blues"]
    with node.openai() as client:
        plain = client.embeddings.create(model="enc", input=texts, encoding_format="float")
        default = client.embeddings.create(model="enc", input=texts, dimensions=HIDDEN)  # the client asks for base64
        ids = client.embeddings.create(model="enc", input=[[2, 5, 6, 3], [2, 9, 7, 5, 6, 8, 3]], encoding_format="float")
        alone = client.embeddings.create(model="enc", input=[2, 5, 6, 3], encoding_format="float")
        raw = client.embeddings.with_raw_response.create(model="enc", input="the sky", encoding_format="base64")
        assert "enc" in [model.id for model in client.models.list()]
    assert [each.index for each in plain.data] == [0, 1, 2]
    assert vectors(plain).shape == (3, HIDDEN)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 4 + 7 + 4
    assert np.allclose(np.linalg.norm(vectors(plain), axis=1), 1, atol=1e-5)
    assert np.allclose(vectors(default), vectors(plain), atol=1e-5)
    assert np.allclose(vectors(ids), vectors(plain)[:2], atol=1e-5)
    assert np.allclose(vectors(alone)[0], vectors(plain)[0], atol=1e-5)
    encoded = json.loads(raw.text)["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), vectors(plain)[0], atol=1e-5)


def test_as_many_inputs_as_the_specification_allows(node: Node) -> None:
    """Asks a cold model for many more embeddings than requests may wait for it."""
    assert node.cli("unload", "enc").returncode == 0
    with node.openai() as client:
        answer = client.embeddings.create(model="enc", input=["the", "the sky"] * 1024)
        assert len(answer.data) == 2048
        assert np.allclose(vectors(answer)[:2], vectors(answer)[-2:], atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="2049 are more than the 2048") as raised:
            client.embeddings.create(model="enc", input=["the"] * 2049)
        assert raised.value.param == "input"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_checkpoint_trained_for_it_has_its_vectors_cut(node: Node, encoding: str) -> None:
    with node.openai() as client:
        whole = vectors(client.embeddings.create(model="cut", input=["the sky", "blue"], encoding_format="float"))
        for size in (8, 16, HIDDEN):
            options = {"encoding_format": "float"} if encoding == "float" else {}  # the client asks for base64 by itself
            cut = vectors(client.embeddings.create(model="cut", input=["the sky", "blue"], dimensions=size, **options))
            assert cut.shape == (2, size)
            assert np.allclose(cut, whole[:, :size] / np.linalg.norm(whole[:, :size], axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": "the " * 40}, "input", "42 tokens, 10 more than the 32"),
        ({"input": ["the", [1]]}, "input", ""),
        ({"input": []}, "input", "empty"),
        ({"input": [[2], [99]]}, "input[1]", "vocabulary of 11"),
        ({"input": "the", "dimensions": 16}, "dimensions", "16 was asked for, enc has 32"),
        ({"input": "the", "model": "cut", "dimensions": 12}, "dimensions", "cut has 32 and may be cut to 8, 16"),
        ({"input": "the", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "the", "normalize": False}, "normalize", ""),
        ({"input": "the", "model": "gen"}, "model", "gen generates text"),
        ({"input": "x" * DECODER_TOKENS, "model": "dec"}, "input", "601 tokens, 1 more than the 600 that dec takes"),
        ({"input": "the", "model": "dec", "dimensions": 33}, "dimensions", "dec has 32 and may be cut to 1 or more"),
        ({}, "input", ""),
    ],
)
def test_refusals_name_the_field(node: Node, body: dict[str, Any], param: str, told: str) -> None:
    with node.openai() as client, pytest.raises(openai.BadRequestError) as raised:
        client.post("/embeddings", body={"model": "enc", **body}, cast_to=object)
    assert raised.value.param is not None
    assert raised.value.param.startswith(param)
    assert told in raised.value.message


def test_a_decoder_that_embeds(node: Node) -> None:
    """The tokenizer ends each text; a long one takes several steps; the first numbers of a vector are one, too."""
    texts = ["the sky", "why is the sky blue", "y" * (DECODER_TOKENS - 1)]
    with node.openai() as client:
        plain = client.embeddings.create(model="dec", input=texts, encoding_format="float")
        ids = [[*text.encode(), END_ID] for text in texts]
        told = client.embeddings.create(model="dec", input=ids)
        unended = client.embeddings.create(model="dec", input=ids[0][:-1])
        cut = client.embeddings.create(model="dec", input=texts, dimensions=8)
        listed = {model.id: model.model_dump()["task"] for model in client.models.list()}
        kept = client.post("/embeddings", body={"model": "dec", "input": texts[1], "truncate_prompt_tokens": 5}, cast_to=object)
    assert plain.usage.prompt_tokens == 8 + 20 + DECODER_TOKENS
    whole = vectors(plain)
    assert whole.shape == (3, HIDDEN)
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors(told), whole, atol=2e-4)
    assert np.abs(vectors(unended)[0] - whole[0]).max() > 0.01
    assert np.allclose(vectors(cut), whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=2e-4)
    assert kept["usage"]["prompt_tokens"] == 5  # type: ignore[index]
    embedders = ("cut", "dec", "deep", "enc", *(f"enc-{dtype}" for dtype in HALVES))
    assert listed == {**dict.fromkeys(embedders, "embed"), "gen": "generate", "rank": "score"}
    table = node.cli("models").stdout
    assert f"embeddings, and no text, are made by {', '.join(embedders)}" in table
    assert "pairs of texts are scored, and no text is made, by rank" in table
    with node.openai() as client:
        answer: Any = client.with_options(base_url=node.url).post(
            "/api/embed", body={"model": "dec", "input": texts[:2]}, cast_to=object
        )
    assert np.allclose(np.array(answer["embeddings"], np.float32), whole[:2], atol=2e-4)


def test_ollamas_client(node: Node) -> None:
    with ollama.Client(node.url) as client:
        assert node.cli("unload", "enc").returncode == 0
        told = client.embed("enc", ["the sky", "blue"])
        assert [len(vector) for vector in told.embeddings] == [HIDDEN, HIDDEN]
        assert told.prompt_eval_count == 4 + 3
        assert 0 < (told.load_duration or 0) < (told.total_duration or 0)
        assert client.embed("enc", "blue").embeddings[0] == pytest.approx(told.embeddings[1], abs=1e-5)
        assert client.embed("enc", []).embeddings == []
        cut = client.embed("enc", ["the sky " * 20, "the sky " * 15])  # of 42 and 32 tokens, where 32 fit
        assert cut.prompt_eval_count == 2 * MAX_TOKENS
        assert cut.embeddings[0] == pytest.approx(cut.embeddings[1], abs=1e-5)
        with pytest.raises(ollama.ResponseError, match="42 tokens, 10 more than the 32"):
            client.embed("enc", "the sky " * 20, truncate=False)


@pytest.mark.parametrize("name", ["enc", "dec"])
def test_they_generate_no_text(node: Node, name: str) -> None:
    with node.openai() as client:
        for path, body in (
            ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/completions", {"prompt": "x"}),
            ("/responses", {"input": "x"}),
        ):
            with pytest.raises(openai.BadRequestError, match=f"{name} makes embeddings and generates no text") as raised:
                client.post(path, body={"model": name, **body}, cast_to=object)
            assert raised.value.param == "model"


def test_an_encoder_below_its_own_path(node: Node) -> None:
    with node.openai() as client:
        scoped = client.with_options(base_url=f"{node.url}/m/enc/v1")
        assert len(scoped.post("/embeddings", body={"input": "the"}, cast_to=object)["data"]) == 1  # type: ignore[index]
        tokens: Any = client.with_options(base_url=node.url).post(
            "/tokenize", body={"model": "enc", "prompt": "the sky"}, cast_to=object
        )
        assert tokens["tokens"] == [2, 5, 6, 3]


def test_documents_are_ordered_as_transformers_scores_them(node: Node) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer

    folder = node.folder / "models" / "rank"
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    documents = [" ".join(words) for words in permutations(("the", "sky", "is", "blue"), 3)]
    logits = []
    for document in documents:
        pair = tokenizer.encode("why is the sky blue", document)
        with torch.inference_mode():
            logits.append(model(input_ids=torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0, 0])
    wanted = torch.sigmoid(torch.stack(logits)).tolist()
    assert max(wanted) - min(wanted) > 0.02, "the scores are too alike to tell anything"
    with node.openai() as client:
        told: Any = client.post(
            "/rerank", body={"model": "rank", "query": "why is the sky blue", "documents": documents}, cast_to=object
        )
        assert [each["index"] for each in told["results"]] == sorted(range(len(wanted)), key=lambda at: -wanted[at])
        for each in told["results"]:
            assert each["relevance_score"] == pytest.approx(wanted[each["index"]], abs=2e-4)
            assert each["document"]["text"] == documents[each["index"]]
        assert told["usage"]["total_tokens"] == len(documents) * 11
        many: Any = client.post(
            "/rerank", body={"model": "rank", "query": "why", "documents": documents * 20, "top_n": 3}, cast_to=object
        )
        assert len({round(each["relevance_score"], 5) for each in many["results"]}) == 1
        with pytest.raises(openai.BadRequestError, match="enc makes embeddings; it scores no documents") as raised:
            client.post("/rerank", body={"model": "enc", "query": "a", "documents": ["b"]}, cast_to=object)
        assert raised.value.param == "model"
        with pytest.raises(openai.BadRequestError, match=r"documents\[1\] has 44 tokens with its query, 12 more than the 32"):
            client.post("/rerank", body={"model": "rank", "query": "a", "documents": ["b", "the " * 40]}, cast_to=object)


def test_encoders_and_others_make_room_for_each_other(tmp_path: Path) -> None:
    make_encoder(tmp_path / "models" / "enc", num_layers=14, hidden=256)
    make_model(tmp_path / "models" / "gen", weights_bytes=40 << 20, max_position_embeddings=256)
    flags = ["--max-num-batched-tokens", "256"]
    with Node(tmp_path, runner="torch", devices=["cpu=76MiB"], flags=flags) as node, node.openai() as client:
        first = vectors(client.embeddings.create(model="enc", input="the sky", encoding_format="float"))
        assert [row["name"] for row in node.ps()] == ["enc"]
        client.completions.create(model="gen", prompt="x", max_tokens=3)
        assert [row["name"] for row in node.ps()] == ["gen"]
        again = vectors(client.embeddings.create(model="enc", input="the sky", encoding_format="float"))
        assert np.array_equal(first, again)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_close_to_float32(node: Node, dtype: str) -> None:
    texts = ["the sky is blue", "why", "the sky"]
    with node.openai() as client:
        exact = vectors(client.embeddings.create(model="enc", input=texts, encoding_format="float"))
        close = vectors(client.embeddings.create(model=f"enc-{dtype}", input=texts, encoding_format="float"))
    assert np.abs(close - exact).max() > 0, "computed in float32"
    assert np.abs((exact * close).sum(axis=1) - 1).max() < 1e-3


def test_a_killed_engine_costs_no_embedding(node: Node) -> None:
    with node.openai() as client:
        one, other = (
            vectors(client.embeddings.create(model=name, input="the sky " * 15, encoding_format="float"))[0]
            for name in ("deep", "dec")
        )

        def ask(number: int) -> np.ndarray:
            name = "dec" if number % 4 == 0 else "deep"
            return vectors(client.embeddings.create(model=name, input=["the sky " * 15] * 10, encoding_format="float"))

        def num_resubmitted() -> float:
            (line,) = [line for line in node.get("/metrics")[1].splitlines() if "resubmi" in line and line[0] != "#"]
            return float(line.split()[-1])

        for _ in range(4):
            with ThreadPoolExecutor(20) as pool:
                asked = [pool.submit(ask, number) for number in range(20)]
                node.wait_for(
                    lambda now=asked: any(row["queued"] or row["active"] for row in node.ps()) or all(each.done() for each in now),
                    "work",
                )
                for pid in node.engine_pids():
                    os.kill(pid, signal.SIGKILL)
                answers = [each.result() for each in asked]
            if num_resubmitted() > 0:
                break
            # on a busy machine all of them may have been answered before the kill
        many = vectors(client.embeddings.create(model="deep", input=["the sky"] * 600, encoding_format="float"))
        assert num_resubmitted() > 0
    assert many.shape == (600, 256)
    for number, answer in enumerate(answers):
        wanted = one if number % 4 else other
        assert answer.shape == (10, len(wanted))
        assert np.allclose(answer, wanted, atol=1e-4)
