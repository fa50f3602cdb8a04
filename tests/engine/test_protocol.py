"""Messages survive any split of the stream into pieces, and the journal never shows half a step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import protocol
from engine.protocol import (
    JOURNAL_BYTES,
    Abort,
    AdapterSource,
    BringAdapter,
    Configure,
    FrameReader,
    FromEngine,
    RetireAdapter,
    Submit,
    ToEngine,
    TokensOut,
    encode,
    read_journal,
    write_journal,
)
from scheduler.batch import plan
from tests.engine.engine_process import load_message, null_configure, submit_message

MESSAGES: list[Any] = [
    null_configure(),
    load_message("/models/m"),
    submit_message(1, max_tokens=3, stop_token_ids=[4], output=[1, 2]),
    Abort([1, 2]),
    BringAdapter("m", AdapterSource("a", "/a", "print")),
    RetireAdapter("m", AdapterSource("a", "/a", "print")),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_any_split(sizes: list[int]) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    reader, received, start = FrameReader(ToEngine), [], 0
    for size in [*sizes, len(stream)]:
        received += list(reader.feed(stream[start : start + size]))
        start += size
    assert received == MESSAGES


def test_a_step_of_200_rows_is_small() -> None:
    frame = encode(TokensOut("m", 1, 0.01, list(range(1000, 1200)), [70_000] * 200))
    assert len(frame) < 200 * 9
    assert next(FrameReader(FromEngine).feed(frame)).request_ids[-1] == 1199


def test_unknown_messages_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        list(FrameReader(ToEngine).feed(encode(TokensOut("m", 1, 0.0, [], []))))


def test_messages_are_immutable() -> None:
    message = submit_message(1)
    with pytest.raises(AttributeError):
        message.request_id = 2  # type: ignore[misc]
    assert isinstance(message, Submit)
    assert isinstance(null_configure(), Configure)


def test_finish_codes_are_the_schedulers() -> None:
    names = ("FINISH_NONE", "FINISH_STOP", "FINISH_LENGTH", "FINISH_ABORT")
    assert [getattr(plan, name) for name in names] == [getattr(protocol, name) for name in names]


def test_journal() -> None:
    journal = bytearray(JOURNAL_BYTES)
    assert read_journal(journal) == ()
    write_journal(journal, np.array([5, 1 << 40], np.int64))
    assert read_journal(journal) == (5, 1 << 40)
    write_journal(journal, np.zeros(0, np.int64))
    assert read_journal(journal) == ()
    write_journal(journal, np.arange(5000, dtype=np.int64))
    assert len(read_journal(journal)) == 4096
