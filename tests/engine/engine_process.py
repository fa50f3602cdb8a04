"""Runs an engine process at the end of a socketpair, for tests."""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.exchange import Exchange, RegionSizes, first_region, make_exchange, region_bytes
from engine.protocol import (
    JOURNAL_BYTES,
    Configure,
    EngineReady,
    FrameReader,
    FromEngine,
    LoadModel,
    Message,
    RequestFailed,
    SamplingParams,
    Stats,
    Submit,
    TokensOut,
    encode,
    read_journal,
)
from engine.serve.channel import wait_until

ROOT = Path(__file__).parents[2]
SAFETY_TIMEOUT_S = 60.0


def null_configure(**changes: Any) -> Configure:
    values: dict[str, Any] = {
        "device": "cpu:0",
        "num_chunks": 64,
        "chunk_bytes": 1 << 16,
        "work_space_bytes": 0,
        "max_num_batched_tokens": 256,
        "block_tokens": 16,
        "turn_budget_ms": 10.0,
        "threads": 1,
        "runner": "null",
        "null_step_ms": 1.0,
    }
    return Configure(**{**values, **changes})


def null_checkpoint(folder: Path, **faults: Any) -> str:
    """Creates a folder with the config.json that a null model needs, and returns its path. faults: the "hearthd_null" object in
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "hearthd_null": faults,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def load_message(path: str, model: str = "m", placement_id: int = 1, **changes: Any) -> LoadModel:
    values: dict[str, Any] = {
        "placement_id": placement_id,
        "model": model,
        "path": path,
        "dtype": "float32",
        "fingerprint": f"print of {model}",
        "weights_chunks": 4,
        "kv_reserved_chunks": 4,
        "lease_chunks": 16,
        "max_model_len": 256,
        "max_sequences": 32,
        "eos_token_ids": [300, 301],
    }
    return LoadModel(**{**values, **changes})


def submit_message(request_id: int, model: str = "m", prompt: list[int] | None = None, **changes: Any) -> Submit:
    params = {"max_tokens": 8, "seed": request_id}
    params.update({key: changes.pop(key) for key in list(changes) if key in SamplingParams.__struct_fields__})
    return Submit(request_id, model, prompt or [5, 6, 7], SamplingParams(**params), **changes)  # type: ignore[arg-type]


class Node:
    """What the engines of a node share: their exchange memory with one region after the other, and their doorbells."""

    def __init__(self, num_engines: int) -> None:
        self.fd = make_exchange(num_engines)
        self.doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(num_engines)]
        self.exchange = Exchange(self.fd, self.doorbells)
        self._end = first_region(num_engines)
        self._free: list[tuple[int, int]] = []

    def region(self, sizes: RegionSizes) -> tuple[int, int]:
        """Returns the offset and bytes of a region for a new group, an earlier one's if that was given back."""
        num_bytes = region_bytes(sizes)
        if (fitting := next((one for one in self._free if one[1] == num_bytes), None)) is not None:
            self._free.remove(fitting)
        region = fitting or (self._end, num_bytes)
        self._end = max(self._end, sum(region))
        self.exchange.clear(*region)
        return region

    def give_back(self, region: tuple[int, int]) -> None:
        self._free.append(region)

    def close(self) -> None:
        self.exchange.close()
        for fd in (self.fd, *self.doorbells):
            os.close(fd)


class EngineProcess:
    """An engine process, started as the daemon starts it. messages: everything received so far."""

    def __init__(
        self,
        configure: Configure,
        stderr: Path | None = None,
        node: Node | None = None,
        number: int = 0,
        module: str = "engine",
        arguments: Sequence[str] = (),
    ) -> None:
        """node, number: what the engine shares with others, and its number among them; None: nothing. module, arguments: what is
        run, and its further arguments."""
        self.sock, theirs = socket.socketpair()
        journal_fd = os.memfd_create("journal")
        os.ftruncate(journal_fd, JOURNAL_BYTES)
        self.journal = mmap.mmap(journal_fd, JOURNAL_BYTES)
        command = [
            sys.executable,
            "-P",
            "-m",
            module,
            "--channel-fd",
            str(theirs.fileno()),
            "--journal-fd",
            str(journal_fd),
            *arguments,
        ]
        fds = [theirs.fileno(), journal_fd]
        if node is not None:
            bells = ",".join(map(str, node.doorbells))
            command += ["--exchange-fd", str(node.fd), "--engine-number", str(number), "--doorbell-fds", bells]
            fds += [node.fd, *node.doorbells]
        self._stderr = open(stderr, "wb") if stderr else None  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=fds,
            stderr=self._stderr,
        )
        theirs.close()
        os.close(journal_fd)
        self._reader = FrameReader(FromEngine)
        self.messages: list[Any] = []
        self._output: dict[int, list[int]] = {}
        self._finished: dict[int, int] = {}
        self.send(configure)

    def __enter__(self) -> EngineProcess:
        self.wait_for(EngineReady)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.sock.close()
        try:
            self.process.wait(SAFETY_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.journal.close()
            if self._stderr:
                self._stderr.close()

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(encode(message) for message in messages))

    def receive(self, timeout_s: float) -> bool:
        """Receives the messages that have arrived. Returns False if none arrived for timeout_s or the engine has ended."""
        if not wait_until(self.sock, select.POLLIN, timeout_s):
            return False
        data = self.sock.recv(1 << 20)
        for message in self._reader.feed(data):
            self.messages.append(message)
            self._note(message)
        return bool(data)

    def until(self, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + SAFETY_TIMEOUT_S
        while not done():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"nothing came of it; received {self.messages[-5:]}"
            assert self.receive(left_s) or done(), f"the engine ended or fell silent; received {self.messages[-5:]}"

    def wait_for(self, kind: type[Message], number: int = 1) -> Any:
        self.until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def output(self) -> dict[int, list[int]]:
        """Returns the tokens of each request so far."""
        return self._output

    def finished(self) -> dict[int, int]:
        """Returns how requests ended: protocol.FINISH_*, or -1 for RequestFailed."""
        return self._finished

    def _note(self, message: Any) -> None:
        if isinstance(message, RequestFailed):
            self._finished[message.request_id] = -1
        elif isinstance(message, TokensOut):
            start = 0
            for request_id, count in zip(message.request_ids, message.counts or repeat(1), strict=False):
                self._output.setdefault(request_id, []).extend(message.ids[start : start + count])
                start += count
            pairs = zip(message.request_ids, message.finish, strict=False)
            self._finished.update({request_id: finish for request_id, finish in pairs if finish})

    def wait_finished(self, *request_ids: int) -> None:
        self.until(lambda: set(request_ids) <= self.finished().keys())

    def running(self) -> tuple[int, ...]:
        return read_journal(self.journal)

    def last_stats(self) -> Stats:
        stats: Stats = self.of(Stats)[-1]
        return stats


class Messages:
    """Stands in for engine.serve.channel.Channel and keeps the messages to the daemon."""

    backlog_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)
