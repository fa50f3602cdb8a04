"""The exporter against collectors that are well, slow, full, rude or gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from config import trace_endpoint
from daemon.process.long_tasks import LongTasks
from daemon.traces import exporter, otlp
from daemon.traces.exporter import Exporter
from daemon.traces.otlp import Span
from daemon.traces.span_counts import SpanCounts
from tests.daemon.traces.collector import Answer, Collector, answering, hang

RESOURCE = otlp.resource_json({"service.name": "hearthd"})


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "SEND_EVERY_S", 0.01)
    monkeypatch.setattr(exporter, "FIRST_PAUSE_S", 0.01)


class Sending:
    """An exporter that runs, and its collector."""

    def __init__(self, endpoint: str, retry_for_s: float = 60.0) -> None:
        self.counts = SpanCounts()
        self.exporter = Exporter(
            trace_endpoint.parse(endpoint), {"authorization": "Bearer secret"}, RESOURCE, self.counts, retry_for_s
        )
        self.tasks = LongTasks()
        self.tasks.start("sending", self.exporter.run)
        self._num = 0

    def add(self, num: int = 1) -> None:
        """Adds traces of two spans each."""
        for _ in range(num):
            self._num += 1
            ids = [f"{2 * self._num + at:016x}" for at in range(2)]
            spans = [Span("s", 1, f"{self._num:032x}", span_id, "", 1, 2, {}) for span_id in ids]
            self.exporter.add(otlp.encoded(spans), 2)

    async def until(self, sent: int, dropped: int = 0) -> None:
        async with asyncio.timeout(60):
            while (self.counts.num_sent, self.counts.num_dropped) != (sent, dropped):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def sending(*answers: Answer, retry_for_s: float = 60.0) -> AsyncIterator[tuple[Sending, Collector]]:
    collector = await Collector(*answers).start()
    made = Sending(collector.url, retry_for_s)
    try:
        yield made, collector
        assert not made.tasks.problems()
    finally:
        await made.exporter.close()
        await collector.stop()


async def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "SEND_EVERY_S", 600.0)  # only full batches go by themselves
    async with sending() as (made, collector):
        made.add(exporter.BATCH)
        await made.until(sent=2 * exporter.BATCH)
        assert collector.num_requests == 2
        assert collector.headers["Authorization"] == "Bearer secret"
        assert collector.headers["User-Agent"].startswith("hearthd/")
        made.add(3)
        await made.exporter.close()
    assert (len(collector.taken), made.counts.num_dropped) == (2 * exporter.BATCH + 6, 0)
    made.add()
    assert made.counts.num_dropped == 2, "after the end"


async def test_a_small_batch_waits_only_so_long() -> None:
    async with sending() as (made, collector):
        made.add()
        await collector.wait_for(lambda: len(collector.taken) == 2)


async def test_a_socket(tmp_path: Path) -> None:
    collector = await Collector().start(str(tmp_path / "c.sock"))
    made = Sending(collector.url)
    made.add()
    await made.until(sent=2)
    await made.exporter.close()
    await collector.stop()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_may_help_is_tried_again(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hearthd")
    async with sending(answering(status), answering(status, Retry_After="0"), answering(status, Retry_After="soon")) as (
        made,
        collector,
    ):
        made.add()
        await made.until(sent=2)
        assert collector.num_requests == 4
        assert made.exporter.problems() == []
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"traces cannot be sent to {collector.url}/v1/traces: it answers {status}",
        f"traces are sent to {collector.url}/v1/traces again; 0 spans were dropped so far",
    ]


async def test_retry_after_is_kept_and_given_up_where_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def noted(_: Exporter, wait_s: float) -> None:
        pauses.append(wait_s)

    monkeypatch.setattr(Exporter, "_pause", noted)
    async with sending(answering(503, Retry_After="7"), answering(503, Retry_After="3600")) as (made, collector):
        made.add()
        await made.until(sent=0, dropped=2)
        assert (collector.num_requests, pauses) == (2, [7.0])
        made.add()
        await made.until(sent=2, dropped=2)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 302])
async def test_what_does_not_help_is_not_tried_again(status: int) -> None:
    async with sending(answering(status, Location="/elsewhere")) as (made, collector):
        made.add()
        await made.until(sent=0, dropped=2)
        assert collector.num_requests == 1
        assert made.exporter.problems() == [
            f"traces cannot be sent to {collector.url}/v1/traces: it answers {status}; 2 spans were dropped"
        ]


async def test_it_may_take_a_part() -> None:
    async with sending(answering(200, b'{"partialSuccess":{"rejectedSpans":"1","errorMessage":"too old"}}')) as (made, _):
        made.add()
        await made.until(sent=1, dropped=1)
        assert "it rejects spans: too old" in made.exporter.problems()[0]


@pytest.mark.parametrize("body", [b"rubbish", b"\xff" * (1 << 20), b"[" * 100_000])
async def test_rubbish_beside_a_200(body: bytes) -> None:
    async with sending(answering(200, body, Content_Encoding="gzip")) as (made, _):
        made.add()
        await made.until(sent=2)


async def test_no_http_at_all(caplog: pytest.LogCaptureFixture) -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01 who are you?\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    made = Sending(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", retry_for_s=0.05)
    made.add()
    await made.until(sent=0, dropped=2)
    made.add()
    await made.until(sent=0, dropped=4)
    await made.exporter.close()
    server.close()
    assert not made.tasks.problems()
    assert len(caplog.records) == 1, "a line a minute"


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    made = Sending(url, retry_for_s=0.05)
    made.add()
    await made.until(sent=0, dropped=2)
    assert url in made.exporter.problems()[0]
    await made.exporter.close()


async def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "POST_S", 0.05)
    async with sending(hang) as (made, collector):
        made.add()
        await made.until(sent=2)
        assert collector.num_requests == 2


async def test_one_that_hangs_fills_no_memory_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "CLOSE_S", 0.05)
    monkeypatch.setattr(exporter, "MAX_QUEUED", 20)
    async with sending(hang) as (made, collector):
        made.add()
        await collector.wait_for(lambda: collector.num_requests == 1)
        made.add(30)
        assert (made.counts.num_dropped, made.exporter._num_queued) == (40, 20)
        await made.exporter.close()
        assert (made.counts.num_sent, made.counts.num_dropped) == (0, 62)
    assert [record.getMessage().partition(" spans")[0] for record in caplog.records] == ["traces: 2", "traces: 22"]
