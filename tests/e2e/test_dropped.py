"""Clients that open many requests and go: the next one is answered at once, and what the gone ones held is free again."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e import processes
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

MODEL, NUM_REQUESTS, CONTEXT = "oak", 48, 1024
NEXT_S = 1.0  # the bar for the request after them, beside what one takes that comes after nobody
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": True}}]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefill": {"messages": [{"role": "user", "content": "x" * (CONTEXT // 2)}]},
    "n": {"n": 4},
    "grammar": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("dropped")
    make_model(folder / "models" / MODEL, max_position_embeddings=CONTEXT)
    config = f'[models.{MODEL}]\ntool_parser = "hermes"\n'
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu=64MiB"], runner="torch", config=config, flags=flags) as running:
        ask(running)  # loaded, and its kernels compiled
        yield running


def body(kind: str, number: int) -> bytes:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": f"{number} and more"}], "max_tokens": CONTEXT // 4}
    return json.dumps(fields | {"ignore_eos": True, "stream": number % 2 == 0} | KINDS[kind]).encode()


async def open_and_drop(node: Node, kind: str, number: int, stay_s: float) -> str:
    """The status it had when it went: "" for none."""
    address = urlsplit(node.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = body(kind, number)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    sent = data if number % 8 else data[:-9]  # some go before their body is complete
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + sent)
    got = b""
    try:
        async with asyncio.timeout(stay_s):
            got = await reader.readline()
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        pass
    if number % 2:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()
    return got.decode()[9:12]


def ask(node: Node) -> None:
    with node.openai() as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "next"}], max_tokens=1)


def spent_on(work: Callable[[Node], None], node: Node) -> tuple[float, float]:
    """Returns (seconds by the clock, those for which the node computed), the first without those for which others did."""
    assert node.process is not None
    spent = processes.Spent(node.process.pid)
    work(node)
    return spent.unhindered_s(), spent.computed_s()


def row(node: Node) -> dict[str, Any]:
    return next(each for each in node.json("ps") if each["name"] == MODEL)


def device_kv_used(node: Node) -> float:
    lines = node.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("hearth_device_kv_used_bytes{"))


@pytest.mark.parametrize("stay_s", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
async def test_many_opened_and_dropped_at_once(node: Node, kind: str, stay_s: float) -> None:
    alone = await asyncio.to_thread(spent_on, ask, node)
    kinds = list(KINDS) if kind == "mixed" else [kind]
    chosen = [kinds[number % len(kinds)] for number in range(NUM_REQUESTS)]
    seen = await asyncio.gather(*(open_and_drop(node, each, at, stay_s) for at, each in enumerate(chosen)))
    assert set(seen) <= {"", "200", "429"}
    next_one = await asyncio.to_thread(spent_on, ask, node)
    for next_s, alone_s in zip(next_one, alone, strict=True):
        assert next_s <= NEXT_S + 3 * max(0.0, alone_s)

    def all_free() -> bool:
        state = row(node)
        return (state["active"], state["queued"], state["kv_bytes"]) == (0, 0, 0)

    await asyncio.to_thread(node.wait_for, all_free, f"all free after {kind}")


def test_nothing_is_left_of_them(node: Node) -> None:
    """After the tests above: no connection, no block outside the prefix cache, which goes with the model, and one engine still."""
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    node.wait_for(
        lambda: not [each for each in daemon.net_connections("tcp") if each.status == "ESTABLISHED"], "all connections closed"
    )
    status = node.json("status")
    assert (status["engine_restarts"], status["healthy"]) == (0, True)
    assert node.cli("unload", MODEL).returncode == 0
    node.wait_for(lambda: device_kv_used(node) == 0, "no KV in use")
    assert "Traceback" not in node.log_text()
