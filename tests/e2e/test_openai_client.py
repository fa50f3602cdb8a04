"""The official client against real models: sync, async, streamed; sampling, stop strings, usage, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("client")
    make_model(folder / "models" / "org" / "oak", seed=1)
    make_model(folder / "models" / "elm", seed=2, architecture="Qwen3ForCausalLM")
    config = '[models."org/oak"]\naliases = ["gpt-4o-mini"]\n'
    flags = ["--dtype", "float32"]
    with Node(folder, devices=["cpu:0=96MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


MESSAGES = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.mark.parametrize("model", ["org/oak", "elm", "gpt-4o-mini"])
def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    options = {"model": "elm", "messages": MESSAGES, "max_tokens": 40, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1


async def test_async_client_many_at_once_same_seed_same_text_alone_and_in_a_batch(node: Node) -> None:
    async with node.async_openai() as client:

        async def ask(seed: int) -> str:
            answer = await client.completions.create(
                model="elm", prompt="the weights", max_tokens=40, seed=seed, temperature=1.0, extra_body={"ignore_eos": True}
            )
            return str(answer.choices[0].text)

        alone = [await ask(seed) for seed in range(4)]
        together = await asyncio.gather(*[ask(seed % 4) for seed in range(32)])
    assert len(set(alone)) == 4, "different seeds should differ"
    assert together == [alone[seed % 4] for seed in range(32)]


def test_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    prompt = "a prompt that is long enough to fill several blocks of key-value memory, and then some more"
    first = client.completions.create(model="elm", prompt=prompt, max_tokens=4, temperature=0)
    again = client.completions.create(model="elm", prompt=prompt, max_tokens=4, temperature=0)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens
    assert again.choices[0].text == first.choices[0].text


def test_batched_and_token_id_prompts(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="elm", prompt=["one", "two", "one"], max_tokens=8, temperature=0)
    assert [choice.index for choice in texts.choices] == [0, 1, 2]
    assert texts.choices[0].text == texts.choices[2].text
    ids = client.completions.create(model="elm", prompt=[list(b"one"), list(b"two")], max_tokens=8, temperature=0)
    assert (
        ids.choices[1].text
        == client.completions.create(model="elm", prompt=list(b"two"), max_tokens=8, temperature=0).choices[0].text
    )


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    options = {"model": "elm", "prompt": "abc", "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options).choices[0].text  # type: ignore[call-overload]
    stop = whole[10:13]
    cut = client.completions.create(**options, stop=stop)  # type: ignore[call-overload]
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].text for c in client.completions.create(**options, stop=stop, stream=True) if c.choices)  # type: ignore[call-overload]
    assert streamed == cut.choices[0].text


def test_min_tokens_holds_the_end_back(client: openai.OpenAI) -> None:
    lengths = []
    for seed in range(12):
        answer = client.completions.create(
            model="elm", prompt="x", max_tokens=30, temperature=2.0, seed=seed, extra_body={"min_tokens": 30}
        )
        assert answer.usage is not None
        lengths.append(answer.usage.completion_tokens)
    assert lengths == [30] * 12


def test_errors_have_their_class_and_name_their_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="elm", messages=MESSAGES, temperature=3)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unbuilt:
        client.chat.completions.create(model="elm", messages=MESSAGES, extra_body={"suffix": "x"})  # type: ignore[arg-type]
    assert unbuilt.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="elm", prompt="x" * 5000, max_tokens=10)
    assert long.value.code == "context_length_exceeded"
    assert "5000" in str(long.value)


def test_every_parameter_of_the_client_that_is_none_of_openais_products(client: openai.OpenAI) -> None:
    """What their generated tests send, without web search, moderation and suffix, and with placeholders made values."""
    common = {
        "frequency_penalty": -2,
        "presence_penalty": -2,
        "logit_bias": {"7": 0},
        "n": 1,
        "stop": "\n",
        "temperature": 1,
        "top_p": 1,
    }
    tool = {"type": "function", "function": {"name": "name", "parameters": {"foo": "bar"}, "strict": True}}
    chat = client.chat.completions.create(
        model="org/oak",
        messages=[{"role": "developer", "content": "string", "name": "name"}],
        audio={"format": "wav", "voice": "alloy"},
        function_call="none",
        functions=[{"name": "name", "parameters": {"foo": "bar"}}],
        logprobs=True,
        max_completion_tokens=4,
        max_tokens=4,
        metadata={"foo": "string"},
        modalities=["text"],
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "string"},
        prompt_cache_key="prompt-cache-key-1234",
        reasoning_effort="none",
        response_format={"type": "text"},
        safety_identifier="safety-identifier-1234",
        seed=-9007199254740991,
        service_tier="auto",
        store=True,
        tool_choice="none",
        tools=[tool],
        top_logprobs=0,
        user="user-1234",
        verbosity="low",
        **common,
    )  # type: ignore[call-overload]
    assert chat.choices[0].finish_reason in ("length", "stop")
    text = client.completions.create(
        model="org/oak", prompt="This is a test.", best_of=0, echo=True, logprobs=0, max_tokens=4, seed=0, user="u", **common
    )
    assert text.choices[0].text.startswith("This is a test.")


def test_models(client: openai.OpenAI) -> None:
    names = {model.id for model in client.models.list()}
    assert {"org/oak", "elm"} <= names
    assert client.models.retrieve("org/oak").id == "org/oak"


def test_model_in_the_path(node: Node) -> None:
    base = openai.OpenAI(base_url=node.url + "/m/org/oak/v1", api_key="unused", max_retries=0)
    with base as client:
        assert client.completions.create(model="", prompt="a", max_tokens=2).choices[0].finish_reason in ("length", "stop")
