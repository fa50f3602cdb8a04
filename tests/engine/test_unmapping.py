"""The thread that unmaps chunks does everything it is given, in order, a few chunks at a time, and takes a share of the time unless
somebody waits.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

pytest.importorskip("triton")

from engine.cuda import unmapping
from engine.cuda.unmapping import CHUNKS_AT_A_TIME, Unmapping
from engine.memory.chunk_memory import DeviceUnusable

CHUNK = 8
BATCH_BYTES = CHUNK * CHUNKS_AT_A_TIME


def test_batches_are_whole_chunks_in_order() -> None:
    done: list[tuple[int, int]] = []
    made = Unmapping(lambda address, num_bytes: done.append((address, num_bytes)), CHUNK)
    made.add(4096, 2 * BATCH_BYTES + 3 * CHUNK)
    made.add(0, CHUNK)
    made.finish()
    whole = [(4096, BATCH_BYTES), (4096 + BATCH_BYTES, BATCH_BYTES)]
    assert done == [*whole, (4096 + 2 * BATCH_BYTES, 3 * CHUNK), (0, CHUNK)]


def test_nobody_waits_for_other_ranges() -> None:
    go, done = threading.Event(), list[int]()

    def unmap(address: int, num_bytes: int) -> None:
        assert go.wait(30)
        done.append(address)

    made = Unmapping(unmap, CHUNK)
    made.add(4096, CHUNK)
    made.wait_for(4096 - CHUNK, CHUNK)
    made.wait_for(4096 + CHUNK, CHUNK)
    assert not done
    go.set()
    made.wait_for(4096 - CHUNK, 3 * CHUNK)
    assert done == [4096]


def test_it_takes_its_share_of_the_time_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits ends the pause, and there are none until the ranges are done; the next ones are unmapped with pauses again."""
    monkeypatch.setattr(unmapping, "BACKGROUND_SHARE", 0.001)  # the pause after the first batch is 10 s
    began = threading.Event()

    def unmap(address: int, num_bytes: int) -> None:
        time.sleep(0.01)
        began.set()

    made = Unmapping(unmap, CHUNK)
    made.add(0, 5 * BATCH_BYTES)
    assert began.wait(30)
    started_s = time.monotonic()
    made.finish()
    assert time.monotonic() - started_s < 9, "it hurries"
    monkeypatch.setattr(unmapping, "BACKGROUND_SHARE", 0.25)
    made.add(0, 3 * BATCH_BYTES)
    started_s = time.monotonic()
    while made._thread is not None:
        time.sleep(0.001)
    assert time.monotonic() - started_s >= 0.1, "it has forgotten that somebody waited"


def test_threads_that_add_and_wait() -> None:
    """Ranges that come from several threads are each unmapped before whoever waits for them goes on."""
    mapped, wrong = set[int](), list[str]()

    def unmap(address: int, num_bytes: int) -> None:
        for place in range(address, address + num_bytes, CHUNK):
            mapped.remove(place)

    made = Unmapping(unmap, CHUNK)

    def work(number: int) -> None:
        choice = random.Random(number)
        begin, size = number << 20, 3 * CHUNK
        for _ in range(200):
            made.wait_for(begin, size)
            if mapped & set(range(begin, begin + size, CHUNK)):
                wrong.append(f"{number} went on before its range was unmapped")
            mapped.update(range(begin, begin + size, CHUNK))
            made.add(begin, size)
            if choice.random() < 0.2:
                time.sleep(0.0005)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made.finish()
    assert not wrong
    assert not mapped


def test_without_memory_for_a_thread_the_caller_unmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the range nor what is added later is left mapped, and nobody has to wait."""
    done: list[tuple[str, int]] = []
    made = Unmapping(lambda address, num_bytes: done.append((threading.current_thread().name, address)), CHUNK)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        made.add(4096, BATCH_BYTES + CHUNK)
        made.wait_for(4096, CHUNK)
    own = threading.current_thread().name
    assert done == [(own, 4096)]
    made.add(0, CHUNK)
    made.finish()
    assert done[1:] == [("unmapping", 0)]


def test_nothing_is_done_after_an_error() -> None:
    def unmap(address: int, num_bytes: int) -> None:
        raise MemoryError("no")

    made = Unmapping(unmap, CHUNK)
    made.add(0, CHUNK)
    while made._thread is not None:
        time.sleep(0.001)
    for call in (lambda: made.add(0, CHUNK), lambda: made.wait_for(0, CHUNK), made.finish):
        with pytest.raises(DeviceUnusable, match="unmapping chunks failed before: no"):
            call()
