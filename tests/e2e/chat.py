"""Streams followed in threads, for tests that disturb a node while it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import openai

from tests.e2e.node import SAFETY_S, Node


class Stream:
    """One streamed completion. text, finish_reason, error are set when it has ended; num_chunks grows as it runs. hang_up: what
    has come is enough."""

    def __init__(self, node: Node, model: str, prompt: str, max_tokens: int, **options: Any) -> None:
        self.text, self.error, self.finish_reason, self.num_chunks = "", "", "", 0
        self.stamps: list[float] = []
        self.usage: dict[str, Any] = {}  # where it was asked for
        key = options.pop("key", "unused")
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        options = {"temperature": 0, "seed": 1, **options}
        self._hung_up = False
        self._thread = threading.Thread(target=self._run, args=(node, model, prompt, max_tokens, extra, options, key), daemon=True)
        self._thread.start()

    def _run(
        self, node: Node, model: str, prompt: str, max_tokens: int, extra: dict[str, Any], options: dict[str, Any], key: str
    ) -> None:
        try:
            with node.openai(key) as client:
                stream = client.completions.create(
                    model=model, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=extra, **options
                )
                for chunk in stream:
                    for choice in chunk.choices:
                        self.text += choice.text
                        self.finish_reason = choice.finish_reason or self.finish_reason
                    if chunk.usage is not None:
                        self.usage = chunk.usage.model_dump()
                    self.num_chunks += 1
                    self.stamps.append(time.monotonic())
                    if self._hung_up:
                        break
        except openai.OpenAIError as error:
            self.error = str(error) or type(error).__name__

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
