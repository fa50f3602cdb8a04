"""Requests over plain sockets, followed in threads: what a client sees byte by byte, over whatever happens to the node."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.e2e.node import SAFETY_S, Node

Event = dict[str, Any]


def connect(node: Node) -> http.client.HTTPConnection:
    address = node.url.partition("://")[2]
    if node.trusted is not None:
        return http.client.HTTPSConnection(address, timeout=SAFETY_S, context=node.trusted)
    return http.client.HTTPConnection(address, timeout=SAFETY_S)


class RawStream:
    """One request and its answer. body: None: it is a GET. events: the JSON objects of an answer that is a stream, or the one of an
    answer in one piece.
    status: of HTTP, 0 before it has come. error: why the answer is not whole."""

    def __init__(self, node: Node, path: str, body: Mapping[str, Any] | None = None) -> None:
        self.path, self.error, self.status = path, "", 0
        self.events: list[Event] = []
        self._node, self._body = node, None if body is None else json.dumps(body).encode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.closing(connect(self._node)) as connection:
                method = "GET" if self._body is None else "POST"
                connection.request(method, self.path, self._body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                self.status = response.status
                for line in response:
                    line = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"{"):
                        self.events.append(json.loads(line))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def wait_for_events(self, number: int) -> None:
        end = time.monotonic() + SAFETY_S
        while len(self.events) < number and self._thread.is_alive():
            assert time.monotonic() < end, "no events"
            time.sleep(0.002)

    def join(self, may_break: bool = False) -> RawStream:
        """Waits for the end of the answer. may_break: it need not be whole."""
        self._thread.join(1.5 * SAFETY_S)
        assert not self._thread.is_alive(), f"{self.path} hangs"
        if may_break:
            return self
        assert not self.error, f"{self.path}: {self.error}"
        return self
