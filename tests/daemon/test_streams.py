"""The sinks by themselves: what a token costs in writes, and what happens when the client is behind."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.api.endpoints.chat import CHAT_FORMAT
from daemon.api.generation.answer_format import AnswerHead
from daemon.contracts import Generation
from daemon.errors import HearthError, NotNow
from daemon.streams.stream import Collector, CollectorGroup, Stream, StreamGroup, Text
from daemon.streams.stream_clock import StreamClock
from daemon.streams.stream_parts import Channel
from daemon.text.detokenizer import decode
from engine.protocol import FINISH_ABORT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, SamplingParams
from tests.daemon.api.fakes import EOS, VOCAB, byte_table, entry
from tests.daemon.api.sse_events import events, text_of

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Connection:
    """Transport and aiohttp protocol in one."""

    def __init__(self) -> None:
        self.writing_paused = False
        self.writes: list[bytes] = []
        self.aborted = False
        self.closed = False

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.writes.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True

    def body(self) -> str:
        """Checks the chunked encoding: every write is whole chunks, the first one behind the head, and none of them is the last
        chunk but at the end."""
        out = b""
        assert self.writes[0].startswith(HEAD)
        for at, data in enumerate(self.writes):
            data = data.removeprefix(HEAD) if at == 0 else data
            if at == len(self.writes) - 1:
                data = data.removesuffix(b"0\r\n\r\n")
            while data:
                size, _, rest = data.partition(b"\r\n")
                length = int(size, 16)
                assert length
                assert rest[length : length + 2] == b"\r\n"
                out += rest[:length]
                data = rest[length + 2 :]
        return out.decode()


class Rig:
    """One streamed chat."""

    def __init__(self, stops: tuple[str, ...] = (), num_sequences: int = 1, **clock: float) -> None:
        self.cancelled: list[int] = []
        self.table = byte_table()
        self.clock = StreamClock(lambda: clock.get("comment_every_s", 5.0), lambda: clock.get("stall_timeout_s", 600.0))
        generations = [Generation(entry(), [1, 2], SamplingParams(9), sink=None) for _ in range(num_sequences)]
        shape = CHAT_FORMAT.stream(AnswerHead("chatcmpl-x", 1, "m", generations))
        self.connection: Connection | None = Connection()
        self.group = StreamGroup(shape, self.clock, self.cancelled.append, self.connect)
        for at in range(num_sequences):
            text = Text(self.table, frozenset({EOS}), stops, 0)
            self.group.streams.append(Stream(self.group, at, self.table, shape.frames(at), text))
        self.stream = self.group.streams[0]
        self.clock.add(self.group)

    def connect(self) -> Channel | None:
        return Channel(self.connection, self.connection, HEAD, True) if self.connection is not None else None


async def test_a_token_is_one_write_and_nothing_else():
    rig = Rig()
    rig.stream.tokens([257], FINISH_NONE)
    assert len(rig.connection.writes) == 1  # the head, the role and the first token
    for token_id in (258, 259, 260, 261, 97) * 2:
        rig.stream.tokens([token_id], FINISH_NONE)
    assert len(rig.connection.writes) == 11
    rig.stream.tokens([EOS], FINISH_STOP)
    assert len(rig.connection.writes) == 12
    assert rig.group.done.done()
    data, _, done = events(rig.connection.body())
    assert text_of(data) == "Hello" + (' worldé"quoted"\n😀a' * 2)
    assert done
    assert rig.stream.num_tokens == 12


async def test_a_response_of_one_step_is_one_write():
    rig = Rig()
    assert not rig.group.is_open
    rig.stream.tokens([257, 258], FINISH_LENGTH)
    assert len(rig.connection.writes) == 1
    assert rig.connection.writes[0].endswith(b"\r\n0\r\n\r\n")
    data, _, done = events(rig.connection.body())
    assert text_of(data) == "Hello world"
    assert done


async def test_a_client_that_is_gone_before_the_first_token_is_written_nothing():
    rig = Rig()
    rig.connection = None
    rig.stream.tokens([257], FINISH_NONE)
    assert rig.group.done.done()
    assert not rig.group.is_open
    await asyncio.sleep(0)
    assert rig.cancelled == [0]
    assert rig.clock._timer is None


async def test_a_client_that_is_behind_gets_its_text_in_one_event_later():
    rig = Rig()
    rig.stream.tokens([257], FINISH_NONE)
    rig.connection.writing_paused = True
    for _ in range(1000):
        rig.stream.tokens([97], FINISH_NONE)
    assert len(rig.connection.writes) == 1
    rig.connection.writing_paused = False
    rig.stream.tokens([98], FINISH_NONE)
    assert len(rig.connection.writes) == 2
    rig.stream.tokens([99], FINISH_NONE)  # and is back on the fast path
    assert len(rig.connection.writes) == 3
    rig.connection.writing_paused = True
    rig.stream.tokens([100], FINISH_NONE)
    rig.stream.tokens([], FINISH_LENGTH)
    assert not rig.group.done.done()
    rig.connection.writing_paused = False
    await asyncio.wait_for(rig.group.done, 5)  # the clock looks after it
    data, _, done = events(rig.connection.body())
    assert text_of(data) == "Hello" + "a" * 1000 + "bcd"
    assert done
    assert rig.clock._timer is None  # nothing is open: nothing wakes


async def test_a_stop_string_cancels_even_while_the_client_is_behind():
    rig = Rig(stops=("END",))
    rig.stream.tokens([97], FINISH_NONE)
    rig.connection.writing_paused = True
    for value in b"xxENDyy":
        rig.stream.tokens([value], FINISH_NONE)
    assert rig.cancelled == [0]
    rig.connection.writing_paused = False
    await asyncio.wait_for(rig.group.done, 5)
    assert text_of(events(rig.connection.body())[0]) == "axx"


async def test_a_stalled_client_is_dropped():
    rig = Rig(stall_timeout_s=0.05)
    rig.stream.tokens([97], FINISH_NONE)
    rig.connection.writing_paused = True
    rig.stream.tokens([98], FINISH_NONE)
    await asyncio.wait_for(rig.group.done, 5)
    assert rig.connection.aborted
    assert rig.cancelled


async def test_a_closed_transport_ends_the_stream_quietly():
    rig = Rig()
    rig.stream.tokens([97], FINISH_NONE)
    rig.stream.tokens([97], FINISH_NONE)
    rig.connection.closed = True
    rig.stream.tokens([97], FINISH_NONE)
    assert rig.group.done.done()
    assert rig.cancelled == [], "not within the step, where a cancel means a stop string"
    await asyncio.sleep(0)
    assert rig.cancelled == [0]
    rig.stream.tokens([97], FINISH_NONE)
    rig.stream.failed(NotNow("busy", "x"))
    rig.group.comment()


async def test_ids_beyond_the_vocabulary_read_as_nothing():
    rig = Rig()
    rig.stream.tokens([97], FINISH_NONE)
    rig.stream.tokens([VOCAB + 1000], FINISH_NONE)
    rig.stream.tokens([98], FINISH_NONE)
    rig.stream.tokens([VOCAB + 5, 99], FINISH_LENGTH)
    assert text_of(events(rig.connection.body())[0]) == "abc"
    assert rig.stream.num_tokens == 5


@pytest.mark.parametrize("at_start", [True, False])
async def test_a_failure_ends_all_sequences_of_a_response(at_start):
    rig = Rig(num_sequences=2)
    error = NotNow("load_timeout", "late")
    if not at_start:
        rig.stream.tokens([97], FINISH_NONE)
    rig.group.streams[1].failed(error)
    assert rig.group.error is error
    assert sorted(rig.cancelled) == [0, 1]
    rig.stream.tokens([98], FINISH_NONE)
    if at_start:
        assert rig.group.done.done()
        assert not rig.connection.writes
    else:
        data, _, done = events(rig.connection.body())
        assert data[-1]["error"]["code"] == "load_timeout"
        assert not done


async def test_an_abort_is_never_a_silent_end():
    rig = Rig()
    rig.stream.tokens([97], FINISH_NONE)
    rig.stream.tokens([], FINISH_ABORT)
    data, _, done = events(rig.connection.body())
    assert data[-1]["error"]["code"] == "aborted"
    assert not done


async def test_a_silent_stream_is_commented_on_a_busy_one_is_not():
    rig = Rig(comment_every_s=0.6)
    rig.stream.tokens([97], FINISH_NONE)
    for _ in range(40):
        rig.stream.tokens([97], FINISH_NONE)
        await asyncio.sleep(0.02)
    assert ": waiting" not in rig.connection.body()
    for _ in range(600):
        await asyncio.sleep(0.05)
        if rig.connection.body().count(": waiting\n\n") == 2:
            break
    else:
        raise AssertionError(rig.connection.body())
    rig.group.close()
    assert rig.clock._timer is None


STEPS = st.lists(st.tuples(st.lists(st.integers(0, VOCAB + 1), max_size=3), st.booleans()), max_size=25)


@given(STEPS, st.lists(st.sampled_from(["Hello", " w", "é", "ab", '"', "a\ufffd"]), max_size=2), st.integers(0, 25))
@settings(max_examples=300, deadline=None)
async def test_whatever_the_steps_pauses_and_stops_the_text_is_the_same(steps, stops, open_at):
    """Against the plain way: decode everything, then cut at the first stop string."""
    rig = Rig(stops=tuple(stops))
    for at, (ids, paused) in enumerate(steps):
        if at == open_at:
            rig.group.open()
        rig.connection.writing_paused = paused
        rig.stream.tokens(ids, FINISH_NONE)
    rig.connection.writing_paused = False
    rig.stream.tokens([], FINISH_LENGTH)
    rig.group.poll()  # what the clock does for a client that was behind when its stop string came
    text = decode(rig.table, [token_id for ids, _ in steps for token_id in ids])
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    data, _, done = events(rig.connection.body())
    assert done
    assert text_of(data) == text[:cut]
    assert data[-1]["choices"][0]["finish_reason"] == ("length" if cut == len(text) else "stop")
    rig.group.close()


async def test_a_collector_answers_when_all_are_done():
    cancelled: list[int] = []
    group = CollectorGroup(cancelled.append)
    for at, stops in enumerate([(), ("b",)]):
        group.collectors.append(Collector(group, at, Text(byte_table(), frozenset({EOS}), stops, 0)))
    first, second = group.collectors
    first.tokens([97, 0xC3], FINISH_NONE)
    second.tokens([97, 98, 99], FINISH_NONE)
    assert cancelled == [1]
    assert not group.done.done()
    first.tokens([0xA9, EOS], FINISH_STOP)
    assert group.done.done()
    assert ("".join(first.parts), first.reason, first.num_tokens) == ("aé", "stop", 4)
    assert ("".join(second.parts), second.reason, second.num_tokens) == ("a", "stop", 2)


def test_an_error_event_is_one_line():
    shape = CHAT_FORMAT.stream(AnswerHead("x", 1, "m", []))
    event = shape.error(HearthError("x", "two\nlines"))
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["message"] == "two\nlines"
    assert event.count(b"\n") == 2
