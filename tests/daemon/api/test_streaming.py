"""Streams through a real server: grammar, errors, disconnects."""

from __future__ import annotations

import aiohttp
import pytest

from tests.daemon.api.fakes import serve, text_script
from tests.daemon.api.sse_events import events, text_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_chat_streams_with_the_role_first_and_done_last(http):
    async with (
        serve(lambda _: text_script("Grüße, 😀!".encode())) as node,
        http.post(f"{node.url}/v1/chat/completions", json=CHAT) as answer,
    ):
        body = await answer.text()
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        assert answer.headers["X-Request-Id"]
    data, comments, done = events(body)
    assert text_of(data) == "Grüße, 😀!"
    assert done
    assert not comments
    assert {chunk["object"] for chunk in data} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in data} == {"org/tiny"}
    assert len(data) >= len("Grüße, 😀!")  # the first tokens may share a chunk while the status line goes out


async def test_the_connection_serves_again_after_a_stream(http):
    async with serve(lambda _: text_script(b"abc")) as node:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            ports = set()
            for _ in range(3):
                async with session.post(f"{node.url}/v1/chat/completions", json=CHAT) as answer:
                    ports.add(answer.connection.transport.get_extra_info("sockname"))
                    assert text_of(events(await answer.text())[0]) == "abc"
            assert len(ports) == 1
