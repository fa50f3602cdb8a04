"""A loop that stands still is reported with the places of all threads, once, and so is that it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from daemon.process import stall_report
from daemon.process.stall_report import StallReport


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_report, "BEAT_S", 0.01)
    monkeypatch.setattr(stall_report, "STALL_S", 0.1)


def hold_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    end_s = time.monotonic() + 20
    while not any("thread" in record.getMessage() for record in caplog.records) and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0.2)


async def test_a_stall_is_reported_once_with_its_place(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(StallReport()):
        hold_the_loop(caplog)
        async with asyncio.timeout(20):
            while not any("goes on" in record.getMessage() for record in caplog.records):  # noqa: ASYNC110 - a line sets no event
                await asyncio.sleep(0.01)
    texts = [record.getMessage() for record in caplog.records]
    texts = texts[: next(at for at, text in enumerate(texts) if "goes on" in text) + 1]
    assert sum("has stood still for" in text for text in texts) == 1
    own = threading.current_thread().name
    (place,) = [text for text in texts if text.startswith(f"thread {own}: ")]
    assert "hold_the_loop (" in place
    assert "called by test_a_stall_is_reported_once_with_its_place (" in place
    assert not any(text.startswith("thread stall report") for text in texts)
    assert texts[-1].startswith("the event loop goes on after ")


def test_a_whole_process_that_was_stopped_reports_nothing(
    quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a look is left out where the thread itself woke too late. Its loop has had no time to turn either."""
    now_s, looks = [1000.0], []

    class Ended:
        num_waits = 0

        def wait(self, limit_s: float) -> bool:
            self.num_waits += 1
            now_s[0] += 60.0 if self.num_waits == 2 else limit_s
            return self.num_waits == 4

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    report = StallReport.__new__(StallReport)
    monkeypatch.setattr(report, "_ended", Ended(), raising=False)
    monkeypatch.setattr(report, "_look", looks.append)
    report._run()
    assert looks == pytest.approx([1000.01, 1060.02])


def test_without_a_thread_it_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="no room"):
            StallReport()

    def refuse(thread: object) -> None:
        raise MemoryError("thread stall report: no room")

    monkeypatch.setattr(stall_report.Thread, "start", refuse)
    asyncio.run(main())
