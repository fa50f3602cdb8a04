"""Streams followed in threads, for tests that disturb a node while it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.e2e.node import SAFETY_S, Node
from tests.e2e.raw_stream import connect


class Stream:
    """One streamed completion, read without OpenAI's client, which takes ten times as long (test_openai_client.py tries that one).
    text, finish_reason, error are set when it has ended; num_chunks grows as it runs. hang_up: what has come is enough."""

    def __init__(self, node: Node, model: str, prompt: str, max_tokens: int, **options: Any) -> None:
        self.text, self.error, self.finish_reason, self.num_chunks = "", "", "", 0
        self.stamps: list[float] = []
        self.usage: dict[str, Any] = {}  # where it was asked for
        key = options.pop("key", "unused")
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0, "seed": 1}
        self._hung_up = False
        self._thread = threading.Thread(target=self._run, args=(node, body | options | extra, key), daemon=True)
        self._thread.start()

    def _run(self, node: Node, body: dict[str, Any], key: str) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            with contextlib.closing(connect(node)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
                response = connection.getresponse()
                if response.status != 200:
                    self.error = f"{response.status}: {json.loads(response.read())['error']['message']}"
                    return
                for line in response:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line.removeprefix(b"data: ")))
                    if self.error or line.startswith(b"data: [DONE]") or (self._hung_up and self.num_chunks):
                        return
                self.error = f"the stream ended after {self.num_chunks} chunks"
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.usage = chunk.get("usage") or self.usage
        self.num_chunks += 1
        self.stamps.append(time.monotonic())

    def wait_for_chunks(self, number: int) -> None:
        self._wait(lambda: self.num_chunks >= number)

    def wait_for_text(self, number: int) -> None:
        """Waits for so many characters, or the end."""
        self._wait(lambda: len(self.text) >= number)

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + SAFETY_S
        while not done() and self._thread.is_alive():
            assert time.monotonic() < end, "no tokens"
            time.sleep(0.002)

    def hang_up(self) -> Stream:
        """Closes the connection after the next chunk."""
        self._hung_up = True
        return self.join()

    def join(self) -> Stream:
        self._thread.join(1.5 * SAFETY_S)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()
