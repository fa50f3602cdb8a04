"""Records that outlive the process that writes them, wherever it is killed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from daemon.process import account, kept_records
from daemon.process.kept_records import PAGE, KeptRecords


def again(records: KeptRecords) -> KeptRecords:
    """Returns the records as the next process finds them."""
    return KeptRecords(os.dup(records._fd))


def content(records: KeptRecords) -> dict[int, tuple[bytes, bytes]]:
    return {place: (records.read(place), records.read_room(place).rstrip(b"\0")) for place in records}


def memory_bytes(records: KeptRecords) -> int:
    return 512 * os.fstat(records._fd).st_blocks


@pytest.mark.parametrize("seed", range(20))
def test_random_changes_are_found_by_the_next_process(seed: int) -> None:
    draw = random.Random(seed)
    records, expected = KeptRecords(), {}
    for _ in range(80):
        action = draw.random()
        if action < 0.5 or not expected:
            data, room = draw.randbytes(draw.choice([0, 1, 40, PAGE - 44, PAGE, 3 * PAGE])), draw.choice([0, 5, 5 * PAGE])
            expected[records.add(data, room)] = [data, bytearray(room)]
        elif action < 0.8:
            place = draw.choice(list(expected))
            room = expected[place][1]
            at = draw.randrange(len(room) + 1)
            data = draw.randbytes(draw.randrange(len(room) - at + 1))
            records.write_room(place, at, data)
            room[at : at + len(data)] = data
        else:
            place = draw.choice(list(expected))
            records.remove(place)
            del expected[place]
        if draw.random() < 0.1:
            records = again(records)
        assert content(records) == {place: (data, bytes(room).rstrip(b"\0")) for place, (data, room) in expected.items()}
    for place in list(expected):
        records.remove(place)
    assert memory_bytes(records) <= PAGE
    assert list(again(records)) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_writes", range(12))
def test_a_process_that_is_killed_leaves_what_was_whole(num_writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed at each of its writes, and in the middle of it."""
    for part in (0, 1, 20):
        records, left = KeptRecords(), num_writes
        whole: dict[int, tuple[bytes, bytes]] = {}
        begun: set[int] = set()

        def write(fd: int, data: bytes, offset: int, part: int = part) -> None:
            nonlocal left
            if not left:
                account.write_at(fd, data[:part], offset)
                raise Killed
            left -= 1
            account.write_at(fd, data, offset)

        monkeypatch.setattr(kept_records, "write_at", write)
        try:
            for data in (b"first" * 2000, b"second", b"third"):
                place = records.add(data, 100)
                whole[place] = data, b""
                records.write_room(place, 0, b"more")
                whole[place] = data, b"more"
            begun = {min(whole)}
            records.remove(min(whole))
        except Killed:
            pass
        monkeypatch.setattr(kept_records, "write_at", account.write_at)
        if records._fd < 0:
            continue
        found = content(again(records))
        for place, (data, room) in whole.items():
            if place not in begun:
                assert found[place][0] == data
                assert found[place][1] in (room, b"more"[:part])
        assert set(found) <= set(whole)


def test_content_does_not_pass_for_a_record() -> None:
    """A removed record whose pages were not given back holds bytes that look like a record's, of another file or this one."""
    other = KeptRecords()
    place = other.add(b"content")
    records = KeptRecords()
    forged = os.pread(other._fd, PAGE, place)
    data = bytes(PAGE - kept_records._HEAD_BYTES) + forged + bytes(10)
    records.add(data)
    account.write_at(records._fd, bytes(kept_records._HEAD_BYTES), PAGE)
    assert list(again(records)) == []


def test_no_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    records = KeptRecords()
    first = records.add(b"first")

    def full(fd: int, data: bytes, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_records, "write_at", full)
    with pytest.raises(OSError, match="No space"):
        records.add(b"second")
    monkeypatch.undo()
    assert records.read(records.add(b"third")) == b"third"
    assert [again(records).read(place) for place in again(records)] == [b"first", b"third"]
    assert records.read(first) == b"first"


def test_a_memfd_is_made_when_it_is_needed() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    records = [KeptRecords() for _ in range(50)]
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
    assert [list(each) for each in records] == [[]] * 50
