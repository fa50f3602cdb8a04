"""Fields that change prompts and what they share, through the whole node with a real checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

LONG = "hello there, this is a prompt of a few blocks. " * 4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("fields")
    make_model(folder / "models" / "oak", seed=1)
    with (
        Node(folder, devices=["cpu:0=64MiB"], runner="torch", flags=["--dtype", "float32", "--threads", "1"]) as node,
        node.openai() as opened,
    ):
        yield opened


def cached(client: openai.OpenAI, **extra: object) -> int:
    told = client.completions.create(model="oak", prompt=LONG, max_tokens=1, extra_body=extra)
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
