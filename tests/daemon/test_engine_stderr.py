"""What an engine writes to its standard error reaches the log, and its pipe is closed once."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from daemon.engines import engine_stderr
from daemon.engines.engine_stderr import EngineStderr


class Watched(io.FileIO):
    """A file that notes whether its descriptor was still open when it was closed."""

    was_open: bool | None = None

    def close(self) -> None:
        if self.was_open is None:
            try:
                os.fstat(self.fileno())
                self.was_open = True
            except OSError:
                self.was_open = False
        super().close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine on the daemon's kind of event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "hearthd.engine"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is logged sets no event
            await asyncio.sleep(0.001)


def test_lines_have_the_level_that_they_begin_with(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        ours, theirs = os.pipe()
        stream = os.fdopen(ours, "rb")
        EngineStderr(stream, "cpu:0")
        os.write(theirs, b"WARNING sl")
        os.write(theirs, b"ow\nTraceback:\n\n  in f\nERROR no mem")
        await until(lambda: len(logged(caplog)) == 3)
        os.close(theirs)
        await until(lambda: stream.closed)

    run(main)
    assert logged(caplog) == [("WARNING", "slow"), ("INFO", "Traceback:"), ("INFO", "  in f"), ("ERROR", "no mem")]


def test_the_descriptor_is_closed_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fails with a transport of uvloop: it closes the descriptor, and then the file, whose number may be another file's by then."""
    seen = []

    async def main() -> None:
        for ends_first in (True, False):
            ours, theirs = os.pipe()
            stream = Watched(ours, "rb")
            lines = EngineStderr(stream, "cpu:0")
            if ends_first:
                os.close(theirs)
                await until(lambda stream=stream: stream.closed)  # type: ignore[misc]
            lines.close()
            lines.close()
            seen.append((stream.closed, stream.was_open))
            if not ends_first:
                os.close(theirs)

    run(main)
    assert seen == [(True, True), (True, True)]


def test_the_last_lines_are_read_at_the_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold the pipe open, so the end of the data is not waited for, nor is all of it read."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(engine_stderr, "READ_BYTES", 8)
    monkeypatch.setattr(engine_stderr, "LAST_BYTES", 16)

    async def main() -> None:
        ours, theirs = os.pipe()
        lines = EngineStderr(os.fdopen(ours, "rb"), "cpu:0")
        os.write(theirs, b"one\ntwo\nthree\nfour\nfive\n")
        lines.close()
        os.close(theirs)

    run(main)
    assert [text for _, text in logged(caplog)] == ["one", "two", "three", "fo"]


def test_a_line_without_an_end_is_logged_in_parts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(engine_stderr, "LINE_BYTES", 10)

    async def main() -> None:
        ours, theirs = os.pipe()
        EngineStderr(os.fdopen(ours, "rb"), "cpu:0")
        for _ in range(4):
            num_before = len(logged(caplog))
            os.write(theirs, b"x" * 11)
            await until(lambda num_before=num_before: len(logged(caplog)) == num_before + 1)  # type: ignore[misc]
        os.close(theirs)

    run(main)
    assert logged(caplog) == [("INFO", "x" * 11)] * 4
