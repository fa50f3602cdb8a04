"""Accepting within what descriptors allow."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator

import pytest

from daemon import acceptor, shortage
from daemon.acceptor import Acceptor, Bounds, Refusal, Room

SAFETY_S = 60.0
ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
ENOUGH = Bounds(1 << 30, 1 << 30)
NONE_SERVED = Bounds(0, 1 << 30)
PAUSED_AFTER_EACH = Bounds(0, 0)


class Listener(socket.socket):
    """Its first calls of accept fail with these errors."""

    failures: tuple[int, ...] = ()
    num_calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_calls += 1
        if self.failures:
            number, *rest = self.failures
            self.failures = tuple(rest)
            raise OSError(number, "as the test wants it")
        return super().accept()


class Served:
    """An acceptor in front of protocols that are counted: each test ends with all of its connections closed."""

    def __init__(self, listener: Listener, bounds: Bounds) -> None:
        self.num_made = self.num_lost = 0
        self.acceptor = Acceptor(listener, self.greeter, self.refusal, bounds)

    def greeter(self) -> asyncio.BaseProtocol:
        self.num_made += 1
        return Greeter(self.lost)

    def refusal(self, closed: Callable[[], None]) -> Refusal:
        self.num_made += 1

        def lost() -> None:
            self.lost()
            closed()

        return Refusal(ANSWER, lost)

    def lost(self) -> None:
        self.num_lost += 1

    async def __aenter__(self) -> Acceptor:
        self.acceptor.start(16)
        return self.acceptor

    async def __aexit__(self, *_: object) -> None:
        self.acceptor.stop()
        await until(lambda: self.num_lost == self.num_made)


class Greeter(asyncio.Protocol):
    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"served")
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(acceptor, "SHORTAGE", shortage.Shortage())
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


async def ask(listener: Listener, request: bytes = b"GET / HTTP/1.1\r\n\r\n") -> bytes:
    """All that comes back until the server closes."""
    async with asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


async def test_with_room_connections_are_served(listener: Listener) -> None:
    async with Served(listener, ENOUGH) as one:
        assert await asyncio.gather(*(ask(listener, b"") for _ in range(8))) == 8 * [b"served"]
        one.stop()
        assert listener.fileno() == -1
        one.stop()


async def test_a_refused_client_gets_its_answer_though_it_sends_a_long_body_first(listener: Listener) -> None:
    async with Served(listener, NONE_SERVED):
        assert await ask(listener, b"POST / HTTP/1.1\r\n\r\n" + bytes(8 << 20)) == ANSWER


async def test_accepting_goes_on_as_refused_clients_leave(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 10 * SAFETY_S)
    async with Served(listener, PAUSED_AFTER_EACH):
        assert [await ask(listener) for _ in range(3)] == 3 * [ANSWER]
        assert await asyncio.gather(*(ask(listener) for _ in range(3))) == 3 * [ANSWER]


async def test_a_refused_client_that_says_nothing_is_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "REFUSED_FOR_S", 0.01)
    async with Served(listener, NONE_SERVED):
        assert await ask(listener, b"") == b""


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
async def test_a_failing_accept_pauses_and_is_told_once(
    listener: Listener, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    listener.failures = 20 * (error,)
    caplog.set_level(logging.WARNING)
    async with Served(listener, ENOUGH):
        assert await ask(listener, b"") == b"served", "the listener is not lost"
    assert len(caplog.records) == 1
    assert "pauses in accepting (as the test wants it)" in caplog.text
    assert "LimitNOFILE=" in caplog.text


async def test_while_it_pauses_it_takes_no_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 10 * SAFETY_S)
    listener.failures = 1000 * (errno.EMFILE,)
    async with Served(listener, ENOUGH):
        with socket.create_connection(listener.getsockname()):
            await until(lambda: listener.num_calls > 0)
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert listener.num_calls == 1


async def test_who_went_before_it_was_accepted_stops_nobody(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    listener.failures = (errno.ECONNABORTED,)
    async with Served(listener, ENOUGH):
        assert await ask(listener, b"") == b"served"
    assert not caplog.records


@pytest.mark.parametrize("limit", [64, 256, 1024, 524288])
def test_clients_leave_room_to_watchers_and_those_to_operators(limit: int) -> None:
    room = Room(limit)
    numbers = [room.clients.refused_from, room.clients.pause_from, room.watchers.refused_from, room.operators.refused_from]
    assert numbers == sorted(set(numbers))
    assert numbers[0] >= limit // 2
    assert numbers[-1] == limit
    assert limit - numbers[1] >= 16, "for the text helper, engines and files"
