"""Ollama's official client against a real node: text, formats, calls, streams, what is loaded, errors. Its
embeddings are in test_embeddings.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.e2e.test_embeddings import make_encoder

CITIES = ["Köln", 'a "b" }']
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("ollama")
    make_model(folder / "models" / "oak", seed=3)
    make_model(folder / "models" / "elm", seed=4)
    make_encoder(folder / "models" / "enc")
    with Node(folder, devices=["cpu=64MiB"], runner="null", null_step_ms=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[ollama.Client]:
    with ollama.Client(node.url) as opened:
        yield opened


def lines_of(told: Any) -> list[Any]:
    """Returns the objects of an answer, streamed or not."""
    return [told] if isinstance(told, ollama.ChatResponse | ollama.GenerateResponse) else list(told)


def check_end(last: Any) -> None:
    assert (last.done, last.model) == (True, "oak")
    assert last.done_reason in ("stop", "length")
    assert 1 <= last.eval_count <= 16
    assert 0 <= last.load_duration < last.total_duration
    assert 0 <= last.prompt_eval_duration + last.eval_duration < last.total_duration


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: ollama.Client, stream: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    lines = lines_of(client.chat("oak", messages, stream=stream, options={"num_predict": 16, "temperature": 0.7, "seed": 3}))
    assert {line.message.role for line in lines} == {"assistant"}
    check_end(lines[-1])
    assert lines[-1].prompt_eval_count == 1 + 2 + len("Be brief.") + 2 + len("hello") + 1
    again = lines_of(client.chat("oak:latest", messages, options={"num_predict": 16, "temperature": 0.7, "seed": 3}))
    assert "".join(line.message.content for line in lines) == again[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_generate(client: ollama.Client, stream: bool) -> None:
    for raw, num_prompt in ((False, 1 + 1 + 5 + 1 + 1), (True, 5)):
        lines = lines_of(client.generate("oak", "hello", raw=raw, stream=stream, options={"num_predict": 16}))
        check_end(lines[-1])
        assert lines[-1].prompt_eval_count in (num_prompt, num_prompt + 1)  # a tokenizer may begin a raw prompt with a token


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_a_schema(client: ollama.Client, stream: bool) -> None:
    lines = lines_of(client.chat("oak", HELLO, format=SCHEMA, stream=stream, options={"num_predict": 200}))
    assert isinstance(json.loads("".join(line.message.content for line in lines))["sure"], bool)
    lines = lines_of(client.generate("oak", "hi", format=SCHEMA, stream=stream, options={"num_predict": 200}))
    assert isinstance(json.loads("".join(line.response for line in lines))["sure"], bool)


def test_what_there_is_and_what_is_loaded(node: Node, client: ollama.Client) -> None:
    assert client.generate("oak").done_reason == "load"
    found = {model.model: model for model in client.list().models}
    assert set(found) == {"oak", "elm", "enc"}
    details: Any = found["oak"].details
    assert (details.format, details.family, details.quantization_level) == ("safetensors", "llama", "F32")
    assert details.parameter_size.endswith("K")
    assert found["oak"].size
    (loaded,) = [model for model in client.ps().models if model.model == "oak"]
    assert (loaded.size or 0) >= found["oak"].size
    assert loaded.size_vram == 0
    assert "elm" not in [model.model for model in client.ps().models]
    told = client.show("oak")
    assert told.capabilities == ["completion"]
    assert told.modelinfo["llama.context_length"] == 2048  # type: ignore[index]
    assert client.show("enc").capabilities == ["embedding"]
    assert node.get("/api/version")[0] == 200


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat("nobody", HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"^format") as bad:
        list(client.chat("oak", HELLO, format={"type": "nonsense"}, stream=True))
    assert bad.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat is not supported"):
        client.generate("oak", "hi", options={"mirostat": 1})
