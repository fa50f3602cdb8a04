"""What a proxy makes of a lender that hangs: connections to it live, and nothing comes."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from engine.exchange import Exchange, Membership, make_exchange
from engine.protocol import JOURNAL_BYTES, AdapterSource, RetireAdapter, encode
from engine.remote import proxy
from engine.remote.frames import BEAT_EVERY_S, MISSED_BEATS, Beat, Frame, Lent, ToLender, ToProxy
from engine.remote.proxy import Ended, Proxy
from engine.remote.wire import SILENT_S, Wire, WireClosed
from engine.serve.channel import Channel

SAFETY_S = 20.0


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """The proxy's and the lender's end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Wire(socket.create_connection(server.getsockname()), ToProxy)
        theirs = Wire(server.accept()[0], ToLender)
    yield ours, theirs
    ours.close()
    theirs.close()


def end_of_proxy(wires: tuple[Wire, Wire], frames: list[Frame], told: bytes) -> str:
    """Runs a proxy whose lender sends these frames, then nothing more and takes nothing, and returns why it ended. told: what the
    daemon tells it."""
    ours, theirs = wires
    doorbells = [os.eventfd(0), os.eventfd(0)]
    exchange = Exchange(make_exchange(2), doorbells)
    daemon, sock = socket.socketpair()
    ended: list[str] = []

    def run() -> None:
        try:
            Proxy(ours, "b", "/models", Channel(sock), mmap.mmap(-1, JOURNAL_BYTES), Membership(exchange, 1, doorbells[1])).run()
        except Ended as error:
            ended.append(str(error))

    def tell() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the proxy ends before it has taken all
            daemon.sendall(told)

    runs, tells = Thread(target=run, daemon=True), Thread(target=tell, daemon=True)
    runs.start()
    tells.start()
    for frame in frames:
        theirs.send(frame)
    runs.join(SAFETY_S)
    assert ended, "it waits without limit"
    sock.close()
    tells.join(SAFETY_S)
    daemon.close()
    for fd in doorbells:
        os.close(fd)
    exchange.close()
    return ended[0]


@pytest.mark.parametrize("num_bytes", [0, 64 << 20], ids=["nothing to send", "more to send than the connection takes"])
def test_a_lender_that_hangs_ends_the_proxy(wires: tuple[Wire, Wire], num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MISSED_BEATS", 0.25)
    beat = Beat(0.0, 0.0, -1.0, 0)
    told = encode(RetireAdapter("a", AdapterSource("b", "x" * (1 << 20), ""))) * (num_bytes >> 20)
    assert end_of_proxy(wires, [Lent(), beat, beat], told) == "the connection to host b has ended: nothing has come for 0.25 s"


def test_silence_before_the_first_beat_is_no_silence(wires: tuple[Wire, Wire]) -> None:
    """The engine is being started, which has a limit of its own."""
    ours, theirs = wires
    theirs.send(Lent())
    assert isinstance(ours.receive(), Lent)
    assert ours._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)


def test_what_has_come_is_received_before_the_silence_counts(wires: tuple[Wire, Wire]) -> None:
    ours, theirs = wires
    for _ in range(3):
        theirs.send(Lent())
    ours.limit_silence(0.25)
    for _ in range(3):
        assert isinstance(ours.receive(), Lent)
    with pytest.raises(WireClosed, match=r"^nothing has come for 0\.25 s$"):
        ours.receive()


def test_a_lender_that_hangs_is_found_before_the_connection_counts_as_lost() -> None:
    assert MISSED_BEATS * BEAT_EVERY_S < SILENT_S
