"""Responses in the background: through OpenAI's client, their events, what ends them, and what the next daemon makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from daemon.access.admission import Access
from daemon.access.keys import Keys
from daemon.access.tenant import Key, Tenant
from daemon.api.response_store import StoredResponse
from daemon.contracts import Generation
from daemon.errors import NotNow, ServerFault
from daemon.process.kept_records import KeptRecords
from engine.protocol import FINISH_LENGTH
from tests.daemon.api.fakes import Node, Script, entry, serve, text_script
from tests.daemon.api.test_responses import CALL, GOOD, PARSERS, TOOLS, client, items

REPLY = b"Once upon a time"
BACKGROUND: dict[str, Any] = {**GOOD, "background": True}
LATER_S = 0.02


def slowly(reply: bytes = REPLY, delay_s: float = LATER_S, stop_at: int = -1) -> Callable[[Generation], Script]:
    """Returns a script of a token each `delay_s`, which goes on after the tokens that there are. stop_at: it makes so many only."""

    def script(generation: Generation) -> Script:
        steps: Script = []
        for at, step in enumerate(text_script(reply)):
            if at == stop_at:
                return [*steps, 100.0]
            if at >= len(generation.output):
                steps += [delay_s, step]
        return steps

    return script


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it has not come about")


async def ended(opened: openai.AsyncOpenAI, public_id: str) -> Any:
    """Returns the response once it is over."""
    for _ in range(2000):
        found = await opened.responses.retrieve(public_id)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.005)
    raise AssertionError("it does not end")


async def events_of(node: Node, public_id: str, after: int | None = None) -> list[dict[str, Any]]:
    """Returns the rest of a response's events, as JSON."""
    query = "stream=true" + ("" if after is None else f"&starting_after={after}")
    async with aiohttp.ClientSession() as http, http.get(f"{node.url}/v1/responses/{public_id}?{query}") as answer:
        assert answer.status == 200
        return [msgspec.json.decode(line[6:]) async for line in answer.content if line.startswith(b"data: ")]


def copied(records: KeptRecords) -> KeptRecords:
    """Returns records as a process that is killed now leaves them, whatever this one still does."""
    fd = os.memfd_create("copy")
    size = os.fstat(records._fd).st_size if records._fd >= 0 else 0
    os.pwrite(fd, os.pread(records._fd, size, 0) if size else b"", 0)
    return KeptRecords(fd)


async def test_the_official_client_polls_one() -> None:
    async with serve(slowly()) as node, client(node) as opened:
        begun = await opened.responses.create(**BACKGROUND)
        assert (begun.status, begun.background, begun.output, begun.error) == ("queued", True, [], None)
        assert begun.model == "org/tiny"
        seen = set()
        while (found := await opened.responses.retrieve(begun.id)).status != "completed":
            seen.add((found.status, found.output_text))
            await asyncio.sleep(LATER_S / 4)
        assert found.output_text == REPLY.decode()
        assert found.usage is not None
        assert found.usage.output_tokens == len(REPLY) + 1
        partial = {text for status, text in seen if status == "in_progress"}
        assert len(partial) > 3, "no text while it was in the making"
        assert all(REPLY.decode().startswith(text) for text in partial)
        follows = await opened.responses.create(**{**GOOD, "previous_response_id": begun.id})
        assert bytes(node.requests.submitted[-1].prompt) == b"hi" + REPLY + b"hi"
        assert follows.background is False
        await opened.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await opened.responses.retrieve(begun.id)


async def test_a_broken_off_stream_is_gone_on_with() -> None:
    async with serve(slowly(CALL.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        stream = await opened.responses.create(**BACKGROUND, tools=TOOLS, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                await stream.close()
                break
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        public_id = seen[0].response.id
        rest = [event async for event in await opened.responses.retrieve(public_id, stream=True, starting_after=4)]
        assert [event.sequence_number for event in [*seen, *rest]] == list(range(5 + len(rest)))
        done = rest[-1].response
        assert (rest[-1].type, [item[0] for item in items(done)]) == ("response.completed", ["function_call"])
        assert not node.requests.cancelled
        whole = await events_of(node, public_id)  # it is over
        assert [each["sequence_number"] for each in whole] == list(range(5 + len(rest)))
        assert "".join(each["delta"] for each in whole if each["type"].endswith(".delta")) == done.output[0].arguments
        assert await events_of(node, public_id, len(whole) + 3) == whole[-1:]
        assert (await opened.responses.retrieve(public_id)).output == done.output


async def test_a_silent_stream_has_comments() -> None:
    async with serve(slowly(b"a", 0.15)) as node, aiohttp.ClientSession(node.url) as http:
        node.settings.sse_comment_every_s = 0.03
        async with http.post("/v1/responses", json={**BACKGROUND, "stream": True}) as answer:
            text = await answer.text()
    assert 2 < text.count(": waiting\n\n") < 20
    assert text.count("response.completed") == 2


async def test_a_client_that_stops_reading_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(store_bytes=64 << 20) as node:
        assert node.background is not None
        events = (b'data: "%b"\n\n' % (b"x" * 100_000)) * 300
        node.background._stored.add(StoredResponse("resp_1", "", "", b"m", b"{}", False, events=events))
        node.settings.request_timeout_s = 0.2

        server = node.runner.server
        assert server is not None

        def received() -> int:
            """Returns how much arrives at a client that reads nothing until the server has left it."""
            with socket.create_connection((node.host, node.port), 20) as client:
                client.sendall(b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
                for is_there in (True, False):
                    until_s = time.monotonic() + 20
                    while bool(server.connections) != is_there:
                        assert time.monotonic() < until_s, "it never came" if is_there else "it is not left"
                        time.sleep(0.01)
                num_bytes = 0
                with contextlib.suppress(ConnectionResetError):
                    while data := client.recv(1 << 20):
                        num_bytes += len(data)
                return num_bytes

        assert 0 < await asyncio.to_thread(received) < len(events)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_is_refused_before_it_is_in_the_background(stream: bool) -> None:
    async with serve(slowly()) as node, aiohttp.ClientSession(node.url) as http:
        for changes, status, told in (
            ({"store": False}, 400, "background: a response that is made in the background is stored"),
            ({"model": "oak"}, 404, "oak"),
            ({"input": "x" * 5000}, 400, "input"),
            ({"previous_response_id": "resp_x"}, 400, "previous_response_id"),
        ):
            async with http.post("/v1/responses", json=BACKGROUND | {"stream": stream} | changes) as answer:
                assert (answer.status, told in (await answer.json())["error"]["message"]) == (status, True)
        node.requests.refusal = NotNow("overloaded", "full", status=429)
        async with http.post("/v1/responses", json=BACKGROUND | {"stream": stream}) as answer:
            assert (answer.status, (await answer.json())["error"]["message"]) == (429, "full")
        assert node.background is not None
        assert (node.background._by_id, list(node.background.records)) == ({}, [])
    async with (
        serve(slowly(), store_bytes=0) as node,
        aiohttp.ClientSession(node.url) as http,
        http.post("/v1/responses", json=BACKGROUND) as answer,
    ):
        assert (answer.status, "stored_responses_bytes" in await answer.text()) == (400, True)


async def test_it_is_cancelled() -> None:
    async with serve(slowly()) as node, client(node) as opened, aiohttp.ClientSession(node.url) as http:
        begun = await opened.responses.create(**BACKGROUND, stream=True)
        first = await anext(aiter(begun))
        await until(lambda: len(node.requests.submitted[0].output) >= 3)
        for _ in range(2):
            cancelled = await opened.responses.cancel(first.response.id)
            assert (cancelled.status, cancelled.error, len(cancelled.output_text) > 1) == ("cancelled", None, True)
        assert [event.type async for event in begun][-1] == "response.output_text.delta"  # it just ends
        assert node.requests.cancelled[:1] == node.requests.submitted
        assert (await opened.responses.retrieve(first.response.id)) == cancelled
        assert node.background is not None
        assert list(node.background.records) == []
        with pytest.raises(openai.BadRequestError, match="has failed or was cancelled"):
            await opened.responses.create(**GOOD, previous_response_id=first.response.id)
        other = await opened.responses.create(**BACKGROUND)
        with pytest.raises(openai.BadRequestError, match="still in the making"):
            await opened.responses.create(**GOOD, previous_response_id=other.id)
        await opened.responses.delete(other.id)
        for path, status in ((f"{other.id}/cancel", 404), ("resp_x/cancel", 404)):
            async with http.post(f"/v1/responses/{path}") as answer:
                assert answer.status == status
        plain = await opened.responses.create(**GOOD)
        with pytest.raises(openai.BadRequestError, match="only responses with background: true"):
            await opened.responses.cancel(plain.id)


async def test_who_asks_for_events_badly_is_told() -> None:
    async with serve(slowly(b"a")) as node, client(node) as opened, aiohttp.ClientSession(node.url) as http:
        begun = await opened.responses.create(**BACKGROUND)
        for query, told in (
            ("stream=maybe", "stream: 'maybe' is neither true nor false"),
            ("stream=true&starting_after=x", "starting_after: 'x' is no sequence_number"),
            ("stream=true", "stream: only responses that were made with background and stream"),
        ):
            for _ in range(2):  # in the making, and finished
                async with http.get(f"/v1/responses/{begun.id}?{query}") as answer:
                    assert (answer.status, told in await answer.text()) == (400, True)
                await ended(opened, begun.id)


async def test_what_it_is_made_from_is_listed_while_it_is_made_and_when_it_is_cancelled() -> None:
    async with serve(slowly()) as node, client(node) as opened:
        first = await opened.responses.create(**GOOD)
        begun = await opened.responses.create(**BACKGROUND | {"input": "on"}, previous_response_id=first.id)
        found = [(await opened.responses.input_items.list(begun.id)).data]
        await opened.responses.cancel(begun.id)
        found.append((await opened.responses.input_items.list(begun.id)).data)
        for items_of in found:
            assert [item.content[0].text for item in items_of] == ["on", REPLY.decode(), "hi"]  # type: ignore[union-attr]


async def test_one_that_fails_says_so() -> None:
    def failing(generation: Generation) -> Script:
        return [*text_script(b"Once")[:-1], ServerFault("aborted", "the engine gave the request up")]

    def at_once(generation: Generation) -> Script:
        return [LATER_S, ServerFault("aborted", "no engine")]

    for script, text, told in ((failing, "Once", "the engine gave the request up"), (at_once, "", "no engine")):
        async with serve(script) as node, client(node) as opened:
            events = [event async for event in await opened.responses.create(**BACKGROUND, stream=True)]
            assert events[-1].type == "response.failed"
            assert [event.sequence_number for event in events] == list(range(len(events)))
            found = await opened.responses.retrieve(events[0].response.id)
            assert found == events[-1].response
            assert (found.status, found.output_text, found.error.message) == ("failed", text, told)  # type: ignore[union-attr]


async def test_a_client_that_goes_before_it_knows_the_id_takes_it_along() -> None:
    async with serve(slowly()) as node, aiohttp.ClientSession(node.url) as http:
        waits, goes_on = asyncio.Event(), asyncio.Event()
        encode = node.text.encode_chat

        async def slow(*args: Any) -> Any:
            waits.set()
            await goes_on.wait()
            return await encode(*args)

        node.text.encode_chat = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(http.post("/v1/responses", json=BACKGROUND))
        await waits.wait()
        asking.cancel()
        assert node.background is not None
        background = node.background
        await until(lambda: not background._by_id)
        goes_on.set()
        assert node.requests.submitted == []


def access_of(*names: str) -> Access:
    tenants = {name: Tenant(name) for name in names}
    return Access(Keys(tenants, {hashlib.sha256(f"{name}-key".encode()).digest(): Key(tenants[name]) for name in names}))


async def test_each_tenant_has_its_own() -> None:
    async with (
        serve(slowly(), access=access_of("a", "b")) as node,
        client(node, "a-key") as mine,
        client(node, "b-key") as others,
    ):
        begun = await mine.responses.create(**BACKGROUND)
        for refused in (others.responses.retrieve, others.responses.cancel, others.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await refused(begun.id)
        assert (await ended(mine, begun.id)).output_text == REPLY.decode()


# ---- the daemon is killed


async def killed_at(
    num_tokens: int, reply: bytes = REPLY, **options: Any
) -> tuple[tuple[KeptRecords, KeptRecords], str, list[Any]]:
    """Returns what a daemon leaves that is killed after so many tokens, the response's id, and the events its client has seen."""
    script = slowly(reply, 0.0, num_tokens)
    async with serve(script, models=[entry(**PARSERS)], **options) as node, aiohttp.ClientSession(node.url) as http:
        headers = {"Authorization": "Bearer a-key"}
        body = {**BACKGROUND, "stream": True, "tools": TOOLS}
        async with http.post("/v1/responses", json=body, headers=headers) as answer:
            first = msgspec.json.decode((await answer.content.readuntil(b"\n\n")).split(b"data: ")[1])
            await until(lambda: len(node.requests.submitted[0].output) >= num_tokens)
            assert node.background is not None
            seen = next((run.events for run in node.background._by_id.values()), [])
            events = [msgspec.json.decode(event.split(b"data: ")[1]) for event in seen]
            left = copied(node.background._stored._records), copied(node.background.records)
            return left, first["response"]["id"], events


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return msgspec.json.decode(re.sub(rb'"completed_at":[0-9]+', b'"completed_at":null', msgspec.json.encode(events)))


@pytest.mark.parametrize("reply", [REPLY, CALL.encode(), b"<think>why\n</think>\n\nBecause."], ids=["text", "call", "thinking"])
async def test_the_next_daemon_makes_the_same_events(reply: bytes) -> None:
    """Wherever the one before it was killed. The client's sequence numbers go on counting, and the text is the same."""
    num_tokens = len(reply) + 1
    places = sorted({0, 1, 2, num_tokens // 2, num_tokens - 2, num_tokens - 1})
    whole: dict[str, list[Any]] = {}
    for place in places:
        left, public_id, seen = await killed_at(place, reply)
        async with serve(slowly(reply, 0.0), models=[entry(**PARSERS)], records=left) as node, client(node) as opened:
            found = await events_of(node, public_id)
            assert without_times(found[: len(seen)]) == without_times(seen)
            assert len(node.requests.submitted[0].output) == num_tokens
            assert node.requests.submitted[0].num_resumed == place
            assert [each["sequence_number"] for each in found] == list(range(len(found)))
            assert (await opened.responses.retrieve(public_id)).status == "completed"
            follows = await opened.responses.create(**GOOD, previous_response_id=public_id)
            assert follows.status == "completed"
            whole[re.sub("(resp|call|fc|msg|rs)_[0-9A-Za-z]+|[0-9]{10}", "", str(without_times(found)))] = found
    assert len(whole) == 1, "the events differ by the place of the kill"


async def test_a_finished_one_is_still_there_after_a_kill() -> None:
    async with serve(slowly(b"abc", 0.0)) as node, client(node) as opened:
        begun = await opened.responses.create(**BACKGROUND, stream=True)
        events = [event async for event in begun]
        done = events[-1].response
        assert node.background is not None
        left = copied(node.background._stored._records), copied(node.background.records)
    async with serve(records=left) as node, client(node) as opened:
        assert await opened.responses.retrieve(done.id) == done
        assert len(await events_of(node, done.id)) == len(events)
        assert node.requests.submitted == []


async def test_one_that_was_stored_is_not_made_again() -> None:
    """The daemon was killed after it had stored the response, and before it forgot how it was made."""
    (_, making), public_id, _ = await killed_at(3)
    async with serve(slowly(b"abc", 0.0), records=(KeptRecords(), copied(making))) as node, client(node) as opened:
        await ended(opened, public_id)
        assert node.background is not None
        stored = copied(node.background._stored._records)
    async with serve(slowly(), records=(stored, making)) as node:
        assert node.requests.submitted == []
        assert list(making) == []


async def test_one_of_all_its_tokens_ends() -> None:
    """The daemon was killed after the last token that the request may have, before it was told that this is the end."""

    def cut(generation: Generation) -> Script:
        rest = REPLY[len(generation.output) : 5]
        return [*(([value], 0) for value in rest), 10.0 if not generation.num_resumed else ([], FINISH_LENGTH)]

    async with serve(cut) as node, client(node) as opened:
        begun = await opened.responses.create(**BACKGROUND, max_output_tokens=5)
        await until(lambda: len(node.requests.submitted[0].output) == 5)
        assert node.background is not None
        left = copied(node.background._stored._records), copied(node.background.records)
    async with serve(cut, records=left) as node, client(node) as opened:
        found = await ended(opened, begun.id)
        assert (found.status, found.output_text) == ("incomplete", REPLY[:5].decode())
        assert node.requests.submitted[0].num_resumed == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"models": [entry(fingerprint="other", **PARSERS)], "access": access_of("a")}, "that name leads to another model now"),
        ({"models": [entry("org/oak", aliases=("oak",))], "access": access_of("a")}, "tiny"),
        ({"access": access_of("b")}, "key"),
    ],
    ids=["another model", "no model", "revoked key"],
)
async def test_what_the_next_daemon_cannot_go_on_with_has_failed(options: dict[str, Any], told: str) -> None:
    left, public_id, seen = await killed_at(4, access=access_of("a"))
    async with serve(slowly(), records=left, **options) as node:
        assert node.background is not None
        store = node.background._stored
        await until(lambda: store.knows("a", public_id))
        stored = store.get("a", public_id)
        shown = msgspec.json.decode(stored.shown)
        assert (shown["id"], shown["status"], told in shown["error"]["message"]) == (public_id, "failed", True)
        last = stored.events.split(b"data: ")[-1]
        assert msgspec.json.decode(last)["response"] == shown
        assert list(node.background.records) == []
        assert len(seen) > 3


async def test_records_of_another_version_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    records = KeptRecords()
    records.add(b"\xc1")
    stored = KeptRecords()
    stored.add(b"\xc1")
    async with serve(records=(stored, records)) as node, client(node) as opened:
        assert (await opened.responses.create(**GOOD)).status == "completed"
        assert (len(list(records)), len(list(stored))) == (0, 1)
    assert "another version of hearthd began it" in caplog.text
