"""Accepting within what descriptors allow."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from daemon.http import acceptor
from daemon.http.acceptor import Acceptor, Bounds, Crowd, Protocols, Refusal, Room
from daemon.http.client_addresses import NUM_REFUSED, ClientAddresses, client_of
from daemon.process import shortage

SAFETY_S = 60.0
ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
TOO_MANY = ANSWER.replace(b"503 Service Unavailable", b"429 Too Many Requests")
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

    def __init__(
        self, listener: Listener, bounds: Bounds, addresses: ClientAddresses | None = None, serve: Protocols | None = None
    ) -> None:
        self.num_made = self.num_lost = 0
        crowd = Crowd(addresses, self.crowded) if addresses is not None else None
        self.acceptor = Acceptor(listener, serve or self.greeter, self.refusal, bounds, crowd)

    def greeter(self, closed: Callable[[], None]) -> asyncio.BaseProtocol:
        self.num_made += 1
        return Greeter(partial(self.lost, closed))

    def refusal(self, closed: Callable[[], None]) -> Refusal:
        self.num_made += 1
        return Refusal(ANSWER, partial(self.lost, closed))

    def crowded(self, closed: Callable[[], None]) -> Refusal:
        self.num_made += 1
        return Refusal(TOO_MANY, partial(self.lost, closed))

    def lost(self, closed: Callable[[], None]) -> None:
        self.num_lost += 1
        closed()

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


class Holder(asyncio.Protocol):
    """Says nothing and stays."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()


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


# ---- connections of one client


@contextlib.asynccontextmanager
async def held(listener: Listener, number: int) -> AsyncIterator[None]:
    """So many connections that say nothing."""
    pairs = [await asyncio.open_connection(*listener.getsockname()) for _ in range(number)]
    try:
        yield
    finally:
        for _, writer in pairs:
            writer.close()


async def test_one_client_has_so_many_connections_and_no_more(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    limit = 0
    addresses = ClientAddresses(lambda: limit)

    async def num_open(number: int) -> None:
        await until(lambda: addresses.num_open() == number)

    async with Served(listener, ENOUGH, addresses, Holder):
        async with held(listener, 5):
            await num_open(5)  # any number
            limit = 3  # what is open stays
            assert [await ask(listener) for _ in range(3)] == 3 * [TOO_MANY]
            await num_open(5)
        await num_open(0)
        async with held(listener, 3):
            await num_open(3)
            assert await ask(listener) == TOO_MANY
        await num_open(0)
        async with held(listener, 1):
            await num_open(1)
        await num_open(0)
    assert [record.getMessage() for record in caplog.records] == [
        "refused connections: 1, the last from 127.0.0.1, which has max_connections_per_address (3) open"
    ]


async def test_refusals_do_not_fill_the_descriptors_either(listener: Listener) -> None:
    addresses = ClientAddresses(lambda: 1)
    async with Served(listener, ENOUGH, addresses, Holder):
        async with held(listener, 1 + NUM_REFUSED):
            await until(lambda: addresses.num_open() == 1 + NUM_REFUSED)
            assert await ask(listener, b"") == b""
        await until(lambda: addresses.num_open() == 0)


async def test_clients_of_unix_sockets_are_not_counted(tmp_path: Path) -> None:
    with Listener(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "s"))
        async with Served(sock, ENOUGH, ClientAddresses(lambda: 1)), asyncio.timeout(SAFETY_S):
            pairs = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(3)]
            assert [await reader.read() for reader, _ in pairs] == 3 * [b"served"]
            for _, writer in pairs:
                writer.close()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%lo", "fe80::2%lo", False),
    ],
)
def test_who_counts_as_one_client(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) is same


async def test_what_was_accepted_before_the_stop_is_connected_soon(listener: Listener) -> None:
    served = Served(listener, ENOUGH)
    async with served as accepting:
        with socket.create_connection(listener.getsockname(), SAFETY_S):
            async with asyncio.timeout(SAFETY_S):
                while not accepting._connecting:  # noqa: ASYNC110
                    await asyncio.sleep(0)  # it is there for a few turns of the loop only
            accepting.stop()
            await accepting.connected(SAFETY_S)
            assert served.num_made == 1
            assert not accepting._connecting
