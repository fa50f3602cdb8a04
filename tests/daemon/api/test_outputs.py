"""n, log-probabilities, echo and what bends the choice of tokens, by the official client; a fake engine tells what it was asked."""

from __future__ import annotations

import json

import openai
import pytest

from daemon.api.generation import prompt_first
from daemon.api.generation.sampling import nth
from engine.protocol import SamplingParams
from tests.daemon.api.fakes import EOS, VOCAB, entry, logprobs_of, serve

MESSAGES = [{"role": "user", "content": "hello"}]
WORLD, ACUTE, QUOTED, SMILE = 258, 259, 260, 261  # fakes.WORDS


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


@pytest.fixture
async def client(node):
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def bytes_of(content):
    return bytes(byte for each in content for byte in each.bytes)


async def test_what_bends_the_choice_of_tokens_reaches_the_engine(client, node):
    await client.completions.create(
        model="tiny",
        prompt="abc",
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"5": -100, "7": 3.5},
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2},
    )
    params = node.requests.submitted[0].params
    assert (params.presence_penalty, params.frequency_penalty, params.min_p) == (0.5, -1.0, 0.1)
    assert (params.repetition_penalty, params.logit_bias, params.logprobs) == (1.2, {5: -100.0, 7: 3.5}, -1)
    await client.chat.completions.create(model="tiny", messages=MESSAGES)
    plain = node.requests.submitted[1].params
    assert plain == SamplingParams(plain.max_tokens, seed=plain.seed)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_gives_so_many_choices_of_one_prompt(client, node, stream):
    for seed in (11, 11, None):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=seed, max_tokens=2, **options)
        if stream:
            chunks = [chunk async for chunk in answer]
            texts = [
                "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == at)
                for at in range(3)
            ]
            assert texts == ["ol"] * 3
            usage = chunks[-1].usage
        else:
            assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "ol"), (1, "ol"), (2, "ol")]
            usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 6)
    seeds = [generation.params.seed for generation in node.requests.submitted]
    assert seeds[:3] == seeds[3:6], "a seed makes all of them repeat themselves"
    assert len(set(seeds)) == 6
    assert seeds[0] == 11
    assert len({id(generation.prompt) for generation in node.requests.submitted[:3]}) == 1, "the prompt is encoded once"


async def test_n_for_several_prompts_and_best_of(client):
    answer = await client.completions.create(model="tiny", prompt=["abc", "de"], n=2, best_of=2, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "c"), (1, "c"), (2, "e"), (3, "e")]
    assert answer.usage.prompt_tokens == 5
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="tiny", prompt="abc", n=2, best_of=3)
    assert (error.value.param, error.value.code) == ("best_of", "unsupported_parameter")


async def test_too_many_sequences_are_refused_with_the_arithmetic():
    async with serve(models=[entry(max_sequences=8)]) as node, openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="x") as client:
        with pytest.raises(
            openai.BadRequestError, match="n: 128 for 9 prompts makes 1152 sequences, more than the 1024 that one request may have"
        ):
            await client.completions.create(model="tiny", prompt=["a"] * 9, n=128)
        answer = await client.completions.create(model="tiny", prompt=["a", "b", "c"], n=3)
        assert [choice.text for choice in answer.choices] == [*"aaabbbccc"], "more than max_sequences queue, as prompts do"
    async with (
        serve(models=[entry(max_sequences=2000)]) as node,
        openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="x") as client,
    ):
        await client.completions.create(model="tiny", prompt=["a"] * 12, n=100, max_tokens=1)


def test_seeds_of_siblings():
    params = SamplingParams(5, seed=-3)
    seeds = [nth(params, number).seed for number in range(128)]
    assert seeds[0] == -3
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**63 for seed in seeds[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client, node, stream):
    node.requests.script = lambda _: [
        ([97], 0),
        ([WORLD], 0),
        ([ACUTE], 0),
        ([0xF0], 0),
        ([0x9F], 0),
        ([0x98], 0),
        ([0x80], 0),
        ([EOS], 1),
    ]
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=9, stream=stream
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        content = []
        for chunk in chunks:
            told = chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
            assert "".join(each.token for each in told) == (chunk.choices[0].delta.content or "")
            content += told
    else:
        text, content = answer.choices[0].message.content, answer.choices[0].logprobs.content
        assert answer.choices[0].logprobs.refusal is None
    assert text == "a world" + "é" + "\U0001f600"
    assert "".join(each.token for each in content) == text
    assert bytes_of(content) == text.encode()
    assert [each.token for each in content] == ["a", " world", "é", "", "", "", "\U0001f600"]
    assert content[1].logprob == pytest.approx(logprobs_of(WORLD, 0)[0])
    assert [(each.token, each.logprob) for each in content[1].top_logprobs] == [
        (" world", content[1].logprob),
        ("é", pytest.approx(content[1].logprob - 1)),
    ]
    assert content[3].bytes == [0xF0]
    assert node.requests.submitted[0].params.logprobs == 2


async def test_logprobs_without_alternatives_and_plain_requests(client):
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content] == [[]] * 5
    assert (await client.chat.completions.create(model="tiny", messages=MESSAGES)).choices[0].logprobs is None
    answer = await client.completions.create(model="tiny", prompt="abc", logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs is None
    assert len(answer.choices[0].logprobs.token_logprobs) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_cut_by_a_stop_string_are_in_no_logprobs(client, node, stream):
    node.requests.script = lambda _: [([97], 0), ([98], 0), ([257], 0), ([WORLD], 0), ([99], 0), ([100], 0), ([101], 0), ([102], 0)]
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, stop=["rldcd", "never"], stream=stream
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        content = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    else:
        text, content = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert text == "abHello wo"
    assert [each.token for each in content] == ["a", "b", "Hello", " wo"]
    assert bytes_of(content) == text.encode()


async def test_what_never_became_a_character_is_in_the_logprobs_too(client, node):
    node.requests.script = lambda _: [([0xF0], 0), ([0x9F], 0), ([97], 0), ([0xC3], 2)]
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "".join(each.token for each in content) == "\ufffda\ufffd"
    assert [each.token for each in content] == ["", "\ufffd", "a", "\ufffd"]
    assert bytes_of(content) == b"\xf0\x9fa\xc3"


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client, node, stream):
    node.requests.script = lambda _: [([97], 0), ([WORLD], 0), ([0xC3], 0), ([0xA9], 0), ([EOS], 1)]
    answer = await client.completions.create(model="tiny", prompt="abc", logprobs=3, stream=stream, max_tokens=9)
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    else:
        text, told = answer.choices[0].text, [answer.choices[0].logprobs]
    tokens = [token for each in told for token in each.tokens]
    offsets = [offset for each in told for offset in each.text_offset]
    top = [alternatives for each in told for alternatives in each.top_logprobs]
    values = [value for each in told for value in each.token_logprobs]
    assert text == "a worldé" == "".join(tokens)
    assert tokens == ["a", " world", "", "é", ""], "the end id has an entry, and no text"
    assert offsets == [0, 1, 7, 7, 8]
    assert top[0] == {"a": values[0], "b": values[0] - 1, "c": values[0] - 2}
    assert top[2]["bytes:\\xc3"] == values[2]
    assert top[4]["<eos>"] == values[4]
    assert values == [pytest.approx(logprobs_of(token_id, 0)[0]) for token_id in (97, WORLD, 0xC3, 0xA9, EOS)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abcé", [97, 98, 99, ACUTE]])
async def test_echo(client, node, prompt, stream):
    answer = await client.completions.create(model="tiny", prompt=prompt, echo=True, max_tokens=2, stop="c", stream=stream)
    if stream:
        text = "".join([chunk.choices[0].text async for chunk in answer])
    else:
        text = answer.choices[0].text
        assert answer.choices[0].logprobs is None
    # the fake says the prompt backwards
    assert text.startswith("abcé")
    assert len(text) > 4
    assert node.requests.submitted[0].params.prompt_logprobs == -1


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_as_evaluation_tools_ask(client, node, stream, max_tokens):
    prompts = [[97, 98, WORLD], [100]]
    answer = await client.completions.create(
        model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234, stream=stream
    )
    choices = {at: {"text": "", "tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []} for at in (0, 1)}
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                add(choices[choice.index], choice)
    else:
        for choice in answer.choices:
            add(choices[choice.index], choice)
        assert answer.usage.completion_tokens == 2 * max_tokens
        assert answer.usage.prompt_tokens == 4
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    first = choices[0]
    ids = [97, 98, WORLD, WORLD][: 3 + max_tokens]
    assert first["text"] == "ab world" + " world" * max_tokens == "".join(first["tokens"])
    assert first["token_logprobs"] == [None, *[pytest.approx(logprobs_of(token_id, 0)[0]) for token_id in ids[1:]]]
    assert first["text_offset"] == [0, 1, 2, 8][: len(ids)]
    assert first["top_logprobs"] == [
        None,
        *[{token: value} for token, value in zip(first["tokens"][1:], first["token_logprobs"][1:], strict=True)],
    ]
    assert choices[1]["tokens"] == ["d"] * (1 + max_tokens)
    params = node.requests.submitted[0].params
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (1, 1, 1)
    assert not params.prompt_ranks


def add(seen, choice):
    seen["text"] += choice.text
    if choice.logprobs is not None:
        for name in ("tokens", "token_logprobs", "text_offset"):
            seen[name] += getattr(choice.logprobs, name)
        seen["top_logprobs"] += choice.logprobs.top_logprobs or [None] * len(choice.logprobs.tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompts_logprobs_are_told_piece_by_piece_and_the_same(client, monkeypatch, stream):
    prompt = [(97, WORLD, ACUTE, 0xC3, 0xA9)[at % 5] for at in range(3000)] + [0xC3]  # it ends within a character
    turns = []
    render_more = prompt_first.render_more
    monkeypatch.setattr(prompt_first, "render_more", lambda trail: (turns.append(1), render_more(trail)))
    answers = []
    for numbers in (100, 1 << 30):
        monkeypatch.setattr(prompt_first, "NUMBERS_AT_ONCE", numbers)
        turns.clear()
        answer = await client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=3, seed=1, stream=stream
        )
        choice = {"text": "", "tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        if stream:
            async for chunk in answer:
                for each in chunk.choices:
                    add(choice, each)
        else:
            add(choice, answer.choices[0])
        answers.append(choice)
        assert len(turns) == (1 if numbers > 100 else 3001 // 51 + 1)
    assert answers[0] == answers[1]
    assert len(answers[0]["tokens"]) == 3004
    assert answers[0]["text"] == "".join(answers[0]["tokens"])
    assert answers[0]["text_offset"] == [len("".join(answers[0]["tokens"][:at])) for at in range(3004)]


async def test_large_answers_are_valid_json(client, node):
    node.requests.script = lambda _: [([token_id], 0) for token_id in range(VOCAB) if token_id != EOS] + [([], 2)]
    answer = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=20, max_tokens=400
    )
    content = json.loads(answer.content)["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [20] * (VOCAB - 1)
    assert b"".join(bytes(each["bytes"]) for each in content).startswith(bytes(range(256)))
