"""Fields that change prompts and what they share, through the whole node with a real checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

LONG = "hello there, this is a prompt of a few blocks. " * 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("fields")
    make_model(folder / "models" / "oak", seed=1)
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu:0=64MiB"], runner="torch", flags=flags) as running:
        yield running


def cached(client: openai.OpenAI, prompt: str = LONG, **extra: object) -> int:
    told = client.completions.create(model="oak", prompt=prompt, max_tokens=1, extra_body=extra)
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    return told.usage.prompt_tokens_details.cached_tokens or 0


def test_requests_share_prefixes_only_with_their_salt(client: openai.OpenAI) -> None:
    assert cached(client, cache_salt="a") == 0
    assert cached(client, cache_salt="b") == 0
    assert cached(client) == 0
    shared = cached(client, cache_salt="a")
    assert shared > 0
    assert cached(client, cache_salt="b") == shared
    assert cached(client) == shared


def test_a_message_is_continued_as_a_completion_would(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sky is"}]
    settings: Any = {"model": "oak", "temperature": 0, "max_tokens": 12}
    extra = {"continue_final_message": True, "ignore_eos": True}
    chat = client.chat.completions.create(messages=messages, extra_body=extra, logprobs=True, **settings)
    told: Any = client.with_options(base_url=str(client.base_url).removesuffix("/v1/")).post(
        "/tokenize", body={"model": "oak", "messages": messages, "continue_final_message": True}, cast_to=object
    )
    text = client.completions.create(prompt=told["tokens"], extra_body={"ignore_eos": True}, **settings)
    assert chat.choices[0].message.content == text.choices[0].text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == told["count"]
    stream = client.chat.completions.create(messages=messages, extra_body=extra, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text.choices[0].text


def test_the_end_of_a_prompt_gives_what_it_gives_alone(client: openai.OpenAI) -> None:
    settings: Any = {"model": "oak", "temperature": 0, "max_tokens": 8}
    ids = list(range(20, 60))
    kept = client.completions.create(prompt=ids, extra_body={"truncate_prompt_tokens": 10}, **settings)
    alone = client.completions.create(prompt=ids[-10:], **settings)
    assert kept.choices[0].text == alone.choices[0].text
    assert kept.usage is not None
    assert kept.usage.prompt_tokens == 10


def test_a_model_without_tokens_for_it_fills_no_gap(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix: the tokenizer of oak has no tokens") as raised:
        client.completions.create(model="oak", prompt="def f(", suffix="return x")
    assert raised.value.param == "suffix"


def test_a_salt_goes_with_its_request_to_the_next_engine(node: Node, client: openai.OpenAI) -> None:
    prompt = "computed again behind its own salt only " * 6
    stream = client.completions.create(
        model="oak", prompt=prompt, max_tokens=1200, stream=True, extra_body={"cache_salt": "C", "ignore_eos": True}
    )
    next(iter(stream))
    (pid,) = node.engine_pids()
    os.kill(pid, signal.SIGKILL)
    assert sum(len(chunk.choices) for chunk in stream) > 0, "the request goes on in another engine"
    assert cached(client, prompt, cache_salt="D") == 0
    assert cached(client, prompt) == 0
    assert cached(client, prompt, cache_salt="C") > 0
