"""allowed_token_ids and bad_words: what reaches the engine, and what is refused by name."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from daemon.api.generation.bad_words import bad_word_ids
from daemon.errors import BadRequest
from daemon.process.long_tasks import LongTasks
from daemon.text.service import TextService
from tests.daemon.api.fakes import VOCAB, entry, serve
from tests.daemon.text.tokenizers_made import byte_fallback, byte_level, checkpoint

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "tiny", "prompt": "hello"},
}


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_engine_is_sent_ids_and_sequences(node, http, path):
    more = {"allowed_token_ids": [5, 7, 5], "bad_words": ["ab", " c", " ", "\n", "ab"], "n": 2}
    async with http.post(path, json={**BODIES[path], **more}) as answer:
        assert answer.status == 200, await answer.text()
    first, second = (generation.params for generation in node.requests.submitted)
    assert first.allowed_token_ids == second.allowed_token_ids == [5, 7, 5]
    words = [b"ab", b" ab", b"c", b" c", b" ", b"  ", b"\n", b" \n"]  # a word of blanks stands for itself
    assert first.bad_words == second.bad_words == [list(word) for word in words]
    for nothing in ({}, {"allowed_token_ids": None, "bad_words": None}, {"bad_words": []}):
        async with http.post(path, json={**BODIES[path], **nothing}) as answer:
            assert answer.status == 200
        assert not node.requests.submitted[-1].params.is_limited


async def test_words_are_encoded_without_special_tokens(node, http):
    asked = []
    encode = node.text.encode

    async def noted(model, text, add_special_tokens=True, field="prompt", **more):
        asked.append((add_special_tokens, field))
        return await encode(model, text, add_special_tokens, field, **more)

    node.text.encode = noted
    async with http.post(TEXT, json={**BODIES[TEXT], "bad_words": ["x"]}) as answer:
        assert answer.status == 200
    assert asked == [(True, "prompt"), (False, "bad_words")]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [1] * 4097, "allowed_token_ids"),
        ("allowed_token_ids", [1, VOCAB], "allowed_token_ids"),
        ("allowed_token_ids", [1, -1], "allowed_token_ids[1]"),
        ("allowed_token_ids", [2**31], "allowed_token_ids[0]"),
        ("allowed_token_ids", ["1"], "allowed_token_ids[0]"),
        ("allowed_token_ids", 1, "allowed_token_ids"),
        ("allowed_token_ids", {"1": 2}, "allowed_token_ids"),
        ("bad_words", "word", "bad_words"),
        ("bad_words", [""], "bad_words[0]"),
        ("bad_words", ["a", "x" * 129], "bad_words[1]"),
        ("bad_words", ["a", 1], "bad_words[1]"),
        ("bad_words", ["a", None], "bad_words[1]"),
        ("bad_words", [["a"]], "bad_words[0]"),
        ("bad_words", ["a"] * 257, "bad_words"),
        ("bad_words", ["a\0b"], "bad_words[0]"),
    ],
)
async def test_bad_values_are_refused_by_name(node, http, path, field, value, param):
    async with http.post(path, json={**BODIES[path], field: value}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert field in error["message"]
    assert not node.requests.submitted


async def test_the_most_that_is_allowed(node, http):
    more = {"allowed_token_ids": [*range(VOCAB)] * 15, "bad_words": ["x" * 128] * 256}
    async with http.post(TEXT, json={**BODIES[TEXT], **more}) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "llama 2"])
async def test_words_are_the_tokens_that_a_text_has_at_its_beginning_and_behind_a_space(tmp_path, tokenizer):
    model = entry(path=str(checkpoint(tmp_path / "m", tokenizer)))
    service = TextService(LongTasks())
    try:
        told = await bad_word_ids(service, model, ["The", "  fox", "a\n", "The"])
        assert await bad_word_ids(service, model, []) == []
    finally:
        await service.close()
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for word in ("The", "fox", "a\n") for text in (word, f" {word}")]
    assert told == [ids for at, ids in enumerate(wanted) if ids not in wanted[:at]]
    assert len(told) > 3


async def test_a_word_without_tokens_is_refused(node, http):
    async def silent(model, text, add_special_tokens=True, field="prompt", **more):
        return [array("i", list(each.strip("\u200b ").encode())) for each in msgspec.msgpack.decode(text)]

    node.text.encode = silent
    async with http.post(TEXT, json={**BODIES[TEXT], "bad_words": ["a", "\u200b"]}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "bad_words[1]")
    assert "no tokens" in error["message"]


async def test_only_a_prompt_is_not_limited(node, http):
    """max_tokens 0: the engine makes a token all the same, which nobody sees."""
    body = {**BODIES[TEXT], "echo": True, "max_tokens": 0, "allowed_token_ids": [5], "bad_words": ["x"]}
    async with http.post(TEXT, json=body) as answer:
        assert answer.status == 200
    assert not node.requests.submitted[0].params.is_limited


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_engines_names_the_field(node, http, stream):
    node.requests.script = lambda _: [BadRequest("no_token_left", "bad_words: nothing", param="bad_words")]
    async with http.post(TEXT, json={**BODIES[TEXT], "bad_words": ["x"], "stream": stream}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "no_token_left", "bad_words")
