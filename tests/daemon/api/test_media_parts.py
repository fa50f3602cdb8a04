"""Images, sound, video and files in a conversation are refused by path and type, by each endpoint that takes messages: no model is
given a prompt from which a part was left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon.api.fakes import serve
from tests.daemon.api.openai_error import check_error

TEXT = "What is this?"
IMAGE = "data:image/png;base64,aGk="
CHAT_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"type": "file", "file": {"file_id": "file-1"}},
    {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}},
    {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
    {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}},
]
RESPONSES_PARTS: list[dict[str, Any]] = [
    {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}},
    {"type": "input_file", "file_id": "file-1"},
    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="},
    {"type": "input_file", "file_url": "https://example.com/a.pdf"},
]
MESSAGES_PARTS: list[dict[str, Any]] = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}, "title": "a"},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}},
    {"type": "container_upload", "file_id": "file-1"},
]
Body = Callable[[dict[str, Any]], dict[str, Any]]
ASKED = {"role": "user", "content": "hi"}


def chat(role: str) -> Body:
    """Returns what makes a body of which the first message, of this role, has a text and then the part."""
    return lambda part: {"messages": [{"role": role, "content": [{"type": "text", "text": TEXT}, part]}, ASKED]}


def input_of(item: str) -> Body:
    """Returns what makes a body of /v1/responses whose first item has a text and then the part, in its field `item`."""

    def made(part: dict[str, Any]) -> dict[str, Any]:
        own = {"role": "user"} if item == "content" else {"type": "function_call_output", "call_id": "x"}
        return {"input": [own | {item: [{"type": "input_text", "text": TEXT}, part]}]}

    return made


def turn(within_result: bool) -> Body:
    """Returns what makes a body of /v1/messages whose one turn has a text and then the part, both within a tool's result or not."""

    def made(part: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "text", "text": TEXT}, part]
        if within_result:
            content = [{"type": "tool_result", "tool_use_id": "x", "content": content}]
        return {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}

    return made


PLACES: list[tuple[str, Body, str, list[dict[str, Any]]]] = [
    *[("/v1/chat/completions", chat(role), "messages[0].content[1].type", CHAT_PARTS) for role in ("user", "assistant", "tool")],
    ("/tokenize", chat("user"), "messages[0].content[1].type", CHAT_PARTS),
    ("/v1/responses", input_of("content"), "input[0].content[1].type", RESPONSES_PARTS),
    ("/v1/responses", input_of("output"), "input[0].output[1].type", RESPONSES_PARTS),
    ("/v1/messages", turn(False), "messages[0].content[1].type", MESSAGES_PARTS),
    ("/v1/messages", turn(True), "messages[0].content[0].content[1].type", MESSAGES_PARTS),
    ("/v1/messages/count_tokens", turn(False), "messages[0].content[1].type", MESSAGES_PARTS),
]


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


async def test_parts_that_are_no_text_are_refused_by_path_and_type(node, http):
    """Asks for whole and for streamed answers. The same conversation with a text in place of the part is answered, so the part is
    all that is refused."""
    for path, made, where, parts in PLACES:
        for part in parts:
            for more in ({}, {"stream": True}):
                async with http.post(path, json={"model": "tiny", **made(part), **more}) as answer:
                    told = await answer.text()
                    assert answer.status == 400, (path, part, told)
                    error = json.loads(told)["error"]
                    assert error["message"].startswith(f"{where}: {part['type']!r} "), (path, part, error)
                    if not path.startswith("/v1/messages"):  # Anthropic's errors have neither param nor code
                        assert check_error(answer.status, told, where)["code"] == "unsupported_parameter"
        async with http.post(path, json={"model": "tiny", **made({"type": "text", "text": "A word."})}) as answer:
            assert answer.status == 200, (path, await answer.text())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_spoken_answer_and_a_call_of_the_old_form_are_refused_by_name(node, http, path):
    for name, value in (("audio", {"id": "audio_1"}), ("function_call", {"name": "f", "arguments": "{}"})):
        for given, status in ((value, 400), (None, 200)):
            messages = [ASKED, {"role": "assistant", "content": "Hm.", name: given}, ASKED]
            async with http.post(path, json={"model": "tiny", "messages": messages}) as answer:
                told = await answer.text()
                assert answer.status == status, told
                if status == 400:
                    error = check_error(answer.status, told, f"messages[1].{name}")
                    assert error["code"] == "unsupported_parameter"
                    assert error["message"].startswith(f"messages[1].{name} is not supported")
