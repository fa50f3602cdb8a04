"""CPU a streamed token costs in the daemon, from the sink to the socket: `python -m benchmarks.streams [--streams 200]
[--endpoint responses]`.

A real aiohttp server on uvloop, real sockets read by a child process; the sinks are called as the dispatcher does, one step for all
streams at a time. Prints one JSON line. `us_per_token` is this process's CPU time over all tokens; `us_per_token_write` the same
for nothing but the transport's write of a frame of that size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import time
from array import array
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

from daemon.api.app import make_app, make_runner
from daemon.contracts import Expectation, Generation, Resident
from daemon.models.entry import ModelEntry
from daemon.streams.stream import Stream
from daemon.text.jobs import TextFacts
from daemon.text.token_table import BYTE_LEVEL, PackedTable, TokenTable
from daemon.text.worker import body_reader
from engine.protocol import FINISH_LENGTH, FINISH_NONE

STEP_S = 0.01


# endpoint -> the body of a request for 4,096 tokens at most
BODIES: dict[str, dict[str, object]] = {
    "completions": {"prompt": "x", "max_tokens": 4096},
    "responses": {"input": "x", "max_output_tokens": 4096},
}


def read_all(address: tuple[str, int], num_streams: int, counted: object, endpoint: str = "completions") -> None:
    """The client: one process, blocking sockets, counts events without parsing them."""
    body = json.dumps({"model": "m", "stream": True} | BODIES[endpoint]).encode()
    head = b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % endpoint.encode()
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    selector = selectors.DefaultSelector()
    open_sockets = num_streams
    for _ in range(num_streams):
        client = socket.create_connection(address)
        client.sendall(head + body)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
    events = 0
    while open_sockets:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            events += data.count(b"data: {")
            if not data or data.endswith(b"\r\n0\r\n\r\n"):  # closed, or the last chunk
                selector.unregister(key.fileobj)
                open_sockets -= 1
    counted.send(events)  # type: ignore[attr-defined]


class Words:
    """1,000 tokens of five characters."""

    def __init__(self) -> None:
        blob = b"".join(b" w%03d" % at for at in range(1000))
        packed = PackedTable(BYTE_LEVEL, blob, array("I", range(0, 5001, 5)).tobytes(), bytes(1000))
        self._table = TokenTable(packed, 1000)

    async def encode(self, model: ModelEntry, text: bytes, *options: object, **more: object) -> list[array[int]]:
        return [array("i", [1]) for _ in msgspec.msgpack.decode(text)]

    async def encode_chat(self, model: ModelEntry, messages: bytes, *options: object) -> array[int]:
        return array("i", [1])

    async def facts(self, model: ModelEntry) -> TextFacts:
        return TextFacts()

    async def table(self, model: ModelEntry) -> TokenTable:
        return self._table

    async def parse_body(self, reader: str, body: bytes) -> tuple[bytes, bytes]:
        head, prompt = body_reader(reader)(body)
        return msgspec.msgpack.encode(head), prompt


class Models:
    entry = ModelEntry("m", "", (), 1 << 20, 1000, (), None, 0, "")

    def resolve(self, name: str, asker: object = None) -> ModelEntry:
        return self.entry

    def entries(self) -> list[ModelEntry]:
        return [self.entry]


class Steps:
    """RequestPort that plays steps for all streams at once."""

    def __init__(self) -> None:
        self.running: list[Generation] = []

    def submit(self, generation: Generation) -> None:
        self.running.append(generation)

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        return Expectation(0, lambda: None)

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        raise AssertionError("no stream asks for it")

    def cancel(self, generation: Generation) -> None:
        pass

    def forward(self, generation: Generation) -> None:
        raise AssertionError("no other server answers")

    def forwarded(self, generation: Generation, outcome: str) -> None:
        raise AssertionError("no other server answers")


class Settings:
    max_body_bytes = 1 << 20
    body_read_timeout_s = 10.0
    request_timeout_s = 600.0
    sse_comment_every_s = 5.0


class Health:
    def health(self) -> tuple[bool, dict[str, object]]:
        return True, {}

    ready = health

    async def probe(self, limit_s: float) -> tuple[bool, dict[str, object]]:
        return self.health()

    def num_open(self) -> int:
        return 0

    def residents(self) -> dict[str, Resident]:
        return {}

    def metrics(self, model: str | None = None) -> bytes:
        return b""


async def measure(num_streams: int, num_tokens: int, endpoint: str) -> dict[str, object]:
    steps = Steps()
    runner = make_runner(make_app(steps, cast(Any, Models()), cast(Any, Words()), Settings(), Health()), shutdown_timeout_s=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, listener).start()
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("fork").Process(
        target=read_all, args=(listener.getsockname(), num_streams, theirs, endpoint)
    )
    client.start()
    while len(steps.running) < num_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    sinks = [generation.sink for generation in steps.running]
    for sink in sinks:  # the status lines go out
        sink.tokens([0], FINISH_NONE)
    await asyncio.sleep(0.5)
    ids = [[at] for at in range(1000)]
    if isinstance(sinks[0], Stream):
        for each in ids:  # all tokens rendered once
            sinks[0]._table.render(each[0])
    start_s, sink_s = time.process_time(), 0.0
    wall_s = time.perf_counter()
    for step in range(num_tokens):
        before_s = time.thread_time()
        each = ids[step % 1000]
        for sink in sinks:
            sink.tokens(each, FINISH_NONE)
        sink_s += time.thread_time() - before_s
        await asyncio.sleep(max(0.0, wall_s + (step + 1) * STEP_S - time.perf_counter()))
    cpu_s = time.process_time() - start_s
    for sink in sinks:
        sink.tokens([], FINISH_LENGTH)
    events = await asyncio.to_thread(ours.recv)
    client.join()
    await runner.cleanup()
    total = num_streams * num_tokens
    return {
        "bench": "streams",
        "endpoint": endpoint,
        "streams": num_streams,
        "tokens": total,
        "events_per_token": round(events / total, 4),
        "us_per_token": round(cpu_s / total * 1e6, 2),
        "us_per_token_sink": round(sink_s / total * 1e6, 2),
        "cores": os.cpu_count(),
    }


async def measure_write(num_streams: int, num_tokens: int) -> float:
    """The floor: the same frames through bare transports."""
    body = b"f5\r\n" + b"x" * 245 + b"\r\n"
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    transports: list[asyncio.Transport] = []

    class Accept(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast(asyncio.Transport, transport))

    server = await loop.create_server(Accept, sock=listener)
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("fork").Process(target=read_all, args=(listener.getsockname(), num_streams, theirs))
    client.start()
    while len(transports) < num_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    start_s, wall_s = time.process_time(), time.perf_counter()
    for step in range(num_tokens):
        for transport in transports:
            transport.write(body)
        await asyncio.sleep(max(0.0, wall_s + (step + 1) * STEP_S - time.perf_counter()))
    cpu_s = time.process_time() - start_s
    for transport in transports:
        transport.close()
    await asyncio.to_thread(ours.recv)
    client.join()
    server.close()
    return round(cpu_s / (num_streams * num_tokens) * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--endpoint", choices=BODIES, default="completions")
    arguments = parser.parse_args()
    result = uvloop.run(measure(arguments.streams, arguments.tokens, arguments.endpoint))
    result["us_per_token_write"] = uvloop.run(measure_write(arguments.streams, arguments.tokens))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
