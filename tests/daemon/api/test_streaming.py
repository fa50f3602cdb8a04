"""Streams through a real server: grammar, errors, disconnects, slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest

from daemon.errors import NotNow, ServerFault
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from tests.daemon.api.fakes import EOS, Settings, entry, serve, text_script
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
    assert len(data) >= len("Grüße, 😀!")


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


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_who_asks_for_no_other_answer_is_closed_at_the_end(version):
    """HTTP/1.0 knows no chunks: there the connection's end is the body's."""
    async with serve(lambda _: text_script(b"abc")) as node:
        reader, writer = await asyncio.open_connection(node.host, node.port)
        body = json.dumps(CHAT)
        writer.write(
            f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: mine\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        answer = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
    head, _, rest = answer.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == f"HTTP/{version} 200 OK"
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["X-Request-Id"] == "mine"
    assert headers["Date"].endswith(" GMT")
    chunked = {"Transfer-Encoding": "chunked", "Connection": "close"}
    assert {name: headers.get(name) for name in chunked} == (chunked if version == "1.1" else dict.fromkeys(chunked))
    if version == "1.0":
        data, _, done = events(rest)
        assert text_of(data) == "abc"
        assert done
    else:
        assert rest.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")


async def post(http, node, path="/v1/chat/completions", **body):
    async with http.post(node.url + path, json=CHAT | body) as answer:
        return answer, await answer.text()


async def test_a_refusal_has_its_own_status(http):
    async with serve() as node:
        node.requests.refusal = NotNow("queue_full", "256 requests wait already", status=429, retry_after_s=2.2)
        for stream in (True, False):
            answer, body = await post(http, node, stream=stream)
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "3"
            assert json.loads(body)["error"]["code"] == "queue_full"


async def test_a_failure_before_the_first_token_has_its_own_status(http):
    async with serve(lambda _: [0.05, NotNow("load_timeout", "the load took too long", retry_after_s=1)]) as node:
        for stream in (True, False):
            answer, body = await post(http, node, stream=stream)
            assert answer.status == 503
            assert json.loads(body)["error"]["code"] == "load_timeout"


async def test_a_failure_in_mid_stream_is_an_event_without_done(http):
    async with serve(lambda _: [([97], FINISH_NONE), 0.05, ServerFault("crashed_twice", "gone")]) as node:
        answer, body = await post(http, node)
        data, _, done = events(body)
        assert answer.status == 200
        assert not done
        assert data[-1]["error"] == {"message": "gone", "type": "server_error", "param": None, "code": "crashed_twice"}
        assert node.requests.cancelled
        answer, body = await post(http, node, stream=False)
        assert (answer.status, json.loads(body)["error"]["code"]) == (500, "crashed_twice")


async def test_the_status_line_waits_for_the_first_token_but_not_for_ever(http, monkeypatch):
    monkeypatch.setattr("daemon.streams.stream_clock.HOLD_STATUS_S", 0.15)
    loop = asyncio.get_running_loop()
    async with serve(lambda _: text_script(b"late", delay_s=0.6), Settings(sse_comment_every_s=0.1)) as node:
        start_s = loop.time()
        async with http.post(f"{node.url}/v1/chat/completions", json=CHAT) as answer:
            held_s = loop.time() - start_s
            body = await answer.text()
    data, comments, done = events(body)
    assert 0.14 < held_s < 0.6
    assert set(comments) == {"waiting"}
    assert len(comments) >= 3
    assert body.startswith(": waiting\n\n")
    assert text_of(data) == "late"
    assert done


async def test_a_late_failure_after_the_status_line_is_an_event(http, monkeypatch):
    monkeypatch.setattr("daemon.streams.stream_clock.HOLD_STATUS_S", 0.05)
    async with serve(lambda _: [0.2, NotNow("load_timeout", "too long", retry_after_s=1)]) as node:
        answer, body = await post(http, node)
    data, _, done = events(body)
    assert (answer.status, len(data), done) == (200, 1, False)
    assert data[0]["error"]["code"] == "load_timeout"


async def test_a_silence_in_mid_stream_is_filled_with_comments(http):
    script = [([97], FINISH_NONE), 2.0, ([98], FINISH_NONE), ([EOS], FINISH_STOP)]
    async with serve(lambda _: script, Settings(sse_comment_every_s=0.1)) as node:
        _, body = await post(http, node)
    data, comments, _ = events(body)
    assert len(comments) >= 2
    assert text_of(data) == "ab"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[60.0], [([97], FINISH_NONE)] * 3 + [60.0]], ids=["waiting", "running"])
async def test_a_disconnect_cancels_at_once(stream, script):
    async with serve(lambda _: script) as node:
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(post(session, node, stream=stream))
            async with asyncio.timeout(5):
                while not node.requests.submitted:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert not node.requests.cancelled
            asking.cancel()
        async with asyncio.timeout(5):
            await node.requests.cancel_event.wait()
        assert {each.request_id for each in node.requests.cancelled} == {1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (b"hello</end>more", "</end>", "hello"),
        (b"hello</en></end>x", ["</end>", "zzz"], "hello</en>"),
        (b"aaab tail", ["aab"], "a"),
        (b"never found <", ["</end>"], "never found <"),
        ("für 😀 alle".encode(), ["😀"], "für "),
        (b"stop at once", ["s"], ""),
    ],
)
async def test_stop_strings_never_leak(http, text, stop, expected, stream):
    async with serve(lambda _: text_script(text)) as node:
        _, body = await post(http, node, stop=stop, stream=stream, stream_options={"include_usage": True} if stream else None)
        found = len(expected.encode()) < len(text)
        assert bool(node.requests.cancelled) == found
    if stream:
        data, _, done = events(body)
        assert done
        usage = data.pop()["usage"]
        assert text_of(data) == expected
        assert data[-1]["choices"][0]["finish_reason"] == "stop"
        so_far = ""
        for chunk in data:
            so_far += chunk["choices"][0]["delta"].get("content", "")
            assert expected.startswith(so_far)
    else:
        answer = json.loads(body)
        usage = answer["usage"]
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
    stops = [stop] if isinstance(stop, str) else stop
    ends = [text.find(each.encode()) + len(each.encode()) for each in stops if each.encode() in text]
    assert usage["completion_tokens"] == (min(ends) if found else len(text) + 1)


async def test_stop_strings_wait_for_min_tokens(http):
    async with serve(lambda _: text_script(b"a.b.c.d")) as node:
        _, body = await post(http, node, stop=".", min_tokens=3, max_tokens=10)
    assert text_of(events(body)[0]) == "a.b"


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
async def test_characters_cut_between_tokens_arrive_whole(http, cut):
    text = "é😀日本 e\u0301 ok"
    raw = list(text.encode())
    script = [(raw[at : at + cut], FINISH_NONE) for at in range(0, len(raw), cut)] + [([], FINISH_LENGTH)]
    async with serve(lambda _: script) as node:
        _, body = await post(http, node)
    data, _, _ = events(body)
    assert text_of(data) == text
    assert "\ufffd" not in body
    assert data[-1]["choices"][0]["finish_reason"] == "length"


async def test_an_unfinished_character_at_the_end_becomes_one_mark(http):
    async with serve(lambda _: [([*b"a", 0xF0, 0x9F], FINISH_NONE), ([], FINISH_LENGTH)]) as node:
        _, body = await post(http, node)
    assert text_of(events(body)[0]) == "a\ufffd"


async def test_usage_comes_last_and_null_before(http):
    async with serve(lambda generation: text_script(b"abc")) as node:
        _, body = await post(http, node, stream_options={"include_usage": True})
        data, _, done = events(body)
        assert done
        assert all(chunk["usage"] is None for chunk in data[:-1])
        assert data[-1]["choices"] == []
        expected = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
        assert data[-1]["usage"] == expected
        _, body = await post(http, node, stream_options={"include_usage": True, "continuous_usage_stats": True})
        data, _, _ = events(body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in data]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert text_of(data[:-1]) == "abc"


async def test_batched_prompts_stream_side_by_side(http):
    async with serve() as node:
        body = {
            "model": "tiny",
            "prompt": ["abc", "defg", "h"],
            "stream": True,
            "max_tokens": 9,
            "stream_options": {"include_usage": True},
        }
        async with http.post(f"{node.url}/v1/completions", json=body) as answer:
            data, _, done = events(await answer.text())
    assert done
    assert data[-1]["usage"]["completion_tokens"] == 3 + 4 + 1 + 3
    assert [text_of(data[:-1], index) for index in range(3)] == ["cba", "gfed", "h"]
    assert {chunk["object"] for chunk in data} == {"text_completion"}


@contextlib.asynccontextmanager
async def raw_stream(node, version="1.1", limit=2**16, **body):
    """The bare connection a stream comes on."""
    reader, writer = await asyncio.open_connection(node.host, node.port, limit=limit)
    payload = json.dumps(CHAT | body).encode()
    writer.write(
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_http_1_0_streams_until_the_connection_closes():
    async with serve(lambda _: text_script(b"old client")) as node, raw_stream(node, "1.0") as reader:
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    assert "chunked" not in head.lower()
    data, _, done = events(body)
    assert text_of(data) == "old client"
    assert done


async def test_a_slow_reader_holds_no_memory_and_misses_nothing():
    num_tokens = 120_000
    sinks = []

    def script(generation):
        sinks.append(generation.sink)
        return [([97 + at % 26], FINISH_NONE) for at in range(num_tokens)] + [([], FINISH_LENGTH)]

    async with serve(script, models=[entry(max_model_len=1 << 20)]) as node, raw_stream(node, limit=4096) as reader:
        async with asyncio.timeout(60):
            while not (node.requests.submitted and len(node.requests.submitted[0].output) == num_tokens):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stream = sinks[0]
        transport = stream._group._transport
        assert stream._group.behind_since_s is not None
        assert transport.get_write_buffer_size() < 100_000  # one event a token would be 27 MB
        assert len({id(piece) for piece in stream._pending}) < 100  # the table's own bytes, not copies
        async with asyncio.timeout(60):
            body = (await read_chunked(reader)).decode()
    data, _, done = events(body)
    assert done
    assert text_of(data) == "".join(chr(97 + at % 26) for at in range(num_tokens))


async def read_chunked(reader):
    while (await reader.readuntil(b"\r\n")) != b"\r\n":
        pass
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return bytes(body)


async def test_a_client_that_stops_reading_is_cancelled_after_the_time_limit():
    def script(generation):
        return [([97], FINISH_NONE)] * 60_000 + [30.0]

    async with (
        serve(script, Settings(request_timeout_s=0.5), models=[entry(max_model_len=1 << 20)]) as node,
        raw_stream(node, limit=4096) as reader,
    ):
        async with asyncio.timeout(30):
            await node.requests.cancel_event.wait()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await read_chunked(reader)


async def test_chunks_are_well_formed_on_the_wire():
    async with serve(lambda _: text_script('naïve\n"quoted" \\ tab\t'.encode())) as node, raw_stream(node) as reader:
        body = (await asyncio.wait_for(read_chunked(reader), 10)).decode()
    assert text_of(events(body)[0]) == 'naïve\n"quoted" \\ tab\t'
