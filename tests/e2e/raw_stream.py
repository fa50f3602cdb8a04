"""Requests over plain sockets, followed in threads: what a client sees byte by byte, over whatever happens to the node."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.e2e.node import SAFETY_S, Node

Event = dict[str, Any]


class RawStream:
    """One request and its answer. events: the JSON objects of an answer that is a stream, else its whole body, in `answers`'s
    order. stamps: when each came. error: why the answer is not whole. It may send several requests on its connection, one after
    the other."""

    def __init__(self, node: Node, path: str, body: Mapping[str, Any], num_requests: int = 1, key: str = "") -> None:
        self.path, self.error = path, ""
        self.answers: list[list[Event]] = []
        self.stamps: list[float] = []
        self.statuses: list[int] = []
        self.request_ids: list[str | None] = []
        self._url = node.url.removeprefix("http://")
        self._body, self._num_requests = json.dumps(body).encode(), num_requests
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            connection = http.client.HTTPConnection(self._url, timeout=SAFETY_S)
            for _ in range(self._num_requests):
                connection.request("POST", self.path, self._body, self._headers)
                response = connection.getresponse()
                self.statuses.append(response.status)
                self.request_ids.append(response.getheader("X-Request-Id"))
                self.answers.append([])
                self._read(response)
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _read(self, response: http.client.HTTPResponse) -> None:
        for line in response:
            line = line.removeprefix(b"data: ").strip()
            if line.startswith(b"{"):
                self.answers[-1].append(json.loads(line))
                self.stamps.append(time.monotonic())

    @property
    def events(self) -> list[Event]:
        """Those of all answers."""
        return [event for answer in self.answers for event in answer]

    def wait_for_events(self, number: int) -> None:
        end = time.monotonic() + SAFETY_S
        while len(self.events) < number and self._thread.is_alive():
            assert time.monotonic() < end, "no events"
            time.sleep(0.002)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> RawStream:
        self._thread.join(1.5 * SAFETY_S)
        assert not self._thread.is_alive(), f"{self.path} hangs"
        assert not self.error, f"{self.path}: {self.error}"
        return self

    def gap_s(self) -> float:
        """Returns the longest time between two events."""
        return max((after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)), default=0.0)
