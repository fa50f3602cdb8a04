"""Looking names up, with name servers that answer and such that do not."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import aiohttp
import pytest

from daemon.process import resolver
from daemon.process.resolver import DaemonThreadResolver
from daemon.traces import exporter
from daemon.upstreams.upstreams import Upstreams
from tests.daemon.no_thread import no_thread
from tests.daemon.traces.test_exporter import Sending


async def test_a_name_that_is_there() -> None:
    found = await DaemonThreadResolver().resolve("localhost", 80, socket.AF_INET)
    assert [(each["hostname"], each["host"], each["port"], each["family"]) for each in found] == [
        ("localhost", "127.0.0.1", 80, socket.AF_INET)
    ]


async def test_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="too long"):
        await DaemonThreadResolver().resolve("x" * 64 + ".invalid", 80)

    def unknown(*about: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(resolver.socket, "getaddrinfo", unknown)
    with pytest.raises(socket.gaierror):
        await DaemonThreadResolver().resolve("nobody.invalid", 80)


async def test_a_name_server_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked = threading.Event(), []

    def hang(*about: object) -> list[object]:
        asked.append(threading.current_thread())
        go.wait(60)
        return []

    monkeypatch.setattr(resolver.socket, "getaddrinfo", hang)
    monkeypatch.setattr(exporter, "SEND_EVERY_S", 0.01)
    monkeypatch.setattr(exporter, "CLOSE_S", 0.05)
    made = Sending("http://collector.invalid:4318")
    made.add()
    async with asyncio.timeout(60):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await made.exporter.close()
    assert (made.counts.num_dropped, len(asked), asked[0].daemon) == (2, 1, True)
    go.set()
    await asyncio.to_thread(asked[0].join, 60)


async def test_one_for_which_there_is_no_thread() -> None:
    asked = DaemonThreadResolver()
    with no_thread(), pytest.raises(OSError, match="localhost: thread looking up a name"):
        await asked.resolve("localhost", 80, socket.AF_INET)
    assert len(await asked.resolve("localhost", 80, socket.AF_INET)) == 1, "the next one does not wait for it"


async def test_names_that_hang_keep_no_other_upstream_from_being_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    go, look_up, num_hanging = threading.Event(), socket.getaddrinfo, 40  # more than an event loop has threads for look-ups

    def hang(host: str, *about: Any) -> Any:
        if host.startswith("hangs"):
            go.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(host, *about)

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    server, upstreams = await asyncio.start_server(answer, "127.0.0.1", 0), Upstreams()
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None)
    asking = [
        asyncio.ensure_future(upstreams.session.get(f"http://hangs-{at}.invalid/", timeout=timeout)) for at in range(num_hanging)
    ]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            port = server.sockets[0].getsockname()[1]
            async with upstreams.session.get(f"http://localhost:{port}/", timeout=timeout) as response:
                assert response.status == 204
        assert not any(one.done() for one in asking)
    finally:
        go.set()
        await asyncio.gather(*asking, return_exceptions=True)
        await upstreams.close()
        server.close()
