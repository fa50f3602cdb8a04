"""/tokenize and /detokenize: vLLM's shapes, fields by name, the model in the body or the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon.process.long_tasks import LongTasks
from daemon.text.service import TextService
from tests.daemon.api.fakes import entry, serve
from tests.daemon.api.openai_error import check_error
from tests.daemon.text.tokenizers_made import CHATML, byte_fallback, byte_level, checkpoint

MESSAGES = [{"role": "user", "content": "The fox, é😀"}]


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, json.loads(await answer.text())


async def test_shapes(http):
    body = {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": None}
    assert await post(http, "/tokenize", model="tiny", prompt="ab") == (200, body)
    assert await post(http, "/m/org/tiny/tokenize", prompt="ab") == (200, body)
    assert await post(http, "/m/org%2Ftiny/tokenize", model="other", messages=[{"role": "user", "content": "ab"}]) == (200, body)
    assert await post(http, "/tokenize", model="tiny", prompt="ab", return_token_strs=True) == (
        200,
        body | {"token_strs": ["a", "b"]},
    )
    assert await post(http, "/detokenize", model="tiny", tokens=[97, 98]) == (200, {"prompt": "ab"})
    assert await post(http, "/m/org/tiny/detokenize", tokens=[]) == (200, {"prompt": ""})


async def test_a_large_body_is_read_in_the_helper(http, node):
    status, body = await post(http, "/tokenize", model="tiny", prompt="a" * 200_000)
    assert (status, body["count"], node.text.num_parsed) == (200, 200_000, 1)
    status, body = await post(http, "/detokenize", model="tiny", tokens=[97] * 100_000)
    assert (status, len(body["prompt"]), node.text.num_parsed) == (200, 100_000, 2)


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a\0"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": None}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": ""}, "model"),
    ],
)
async def test_bad_fields_are_named(http, path, changes, param):
    async with http.post(path, json={"model": "tiny"} | changes) as answer:
        assert answer.status == 400
        check_error(answer.status, await answer.text(), param)


async def test_other_refusals(http):
    assert (await post(http, "/tokenize", model="no", prompt="a"))[0] == 404
    assert (await post(http, "/m/no/detokenize", tokens=[1]))[0] == 404
    async with http.get("/tokenize") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


@pytest.fixture
async def service():
    service = TextService(LongTasks())
    yield service
    await service.close()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
async def test_a_real_tokenizer(service, tmp_path: Path, make: Any):
    tokenizer = make()
    folder = checkpoint(tmp_path / "tiny", tokenizer, chat_template=CHATML, eos_token="<|end|>")
    model = entry(path=str(folder), vocab_size=tokenizer.get_vocab_size() + 3)
    async with serve(models=[model]) as node:
        for name in ("tokenize", "detokenize", "parse_body"):
            setattr(node.text, name, getattr(service, name))
        async with aiohttp.ClientSession(node.url) as http:
            for text in ("The fox, é😀", "", "The fox " * 15_000):
                expected = tokenizer.encode(text)
                status, body = await post(http, "/tokenize", model="tiny", prompt=text, return_token_strs=True)
                assert (status, body["tokens"], body["token_strs"]) == (200, expected.ids, expected.tokens)
                assert body["count"] == len(expected.ids)
                _, back = await post(http, "/detokenize", model="tiny", tokens=body["tokens"])
                assert back["prompt"] == tokenizer.decode(expected.ids, skip_special_tokens=False)
            _, chat = await post(http, "/tokenize", model="tiny", messages=MESSAGES)
            rendered = "<|start|>user\nThe fox, é😀<|end|>\n<|start|>assistant\n"
            assert chat["tokens"] == tokenizer.encode(rendered, add_special_tokens=False).ids
            _, back = await post(http, "/detokenize", model="tiny", tokens=chat["tokens"])
            assert back["prompt"] == tokenizer.decode(chat["tokens"], skip_special_tokens=False)
            status, error = await post(http, "/detokenize", model="tiny", tokens=[1, 100_000])
            assert (status, error["error"]["param"]) == (400, "tokens[1]")
            status, body = await post(http, "/detokenize", model="tiny", tokens=[model.vocab_size - 1])
            assert (status, body) == (200, {"prompt": ""})


async def test_special_tokens_are_added_on_demand(service, tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", begin)])
    model = entry(path=str(checkpoint(tmp_path / "tiny", tokenizer, chat_template="{{ messages[0].content }}")))
    plain = tokenizer.encode("The fox", add_special_tokens=False).ids
    async with serve(models=[model]) as node:
        node.text.tokenize = service.tokenize
        async with aiohttp.ClientSession(node.url) as http:
            for options, added in (({}, True), ({"add_special_tokens": False}, False)):
                _, body = await post(http, "/tokenize", model="tiny", prompt="The fox", **options)
                assert body["tokens"] == [begin] * added + plain
            for options, added in (({}, False), ({"add_special_tokens": True}, True)):
                _, body = await post(http, "/tokenize", model="tiny", messages=[{"role": "user", "content": "The fox"}], **options)
                assert body["tokens"] == [begin] * added + plain
