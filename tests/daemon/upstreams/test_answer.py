"""Answers of other servers: the name is exchanged, tokens are counted, all else stays as it came, in pieces of any size."""

from __future__ import annotations

import json

import pytest

from daemon.contracts import Generation, ReportedUsage
from daemon.errors import HearthError
from daemon.upstreams.answer import MAX_EVENT_BYTES, Answer, AnswerStream
from engine.protocol import SamplingParams
from tests.daemon.api.fakes import entry


class _NoSink:
    def tokens(self, ids: object, finish: int) -> None: ...

    def failed(self, error: HearthError) -> None: ...


def generation() -> Generation:
    return Generation(entry("big"), [], SamplingParams(max_tokens=0), _NoSink(), reported=ReportedUsage())


def stream(shows_usage: bool = False) -> tuple[AnswerStream, Generation]:
    made = generation()
    return AnswerStream("gpu2:8000", "big", made, shows_usage), made


def chunk(text: str, finish: str | None = None, **more: object) -> str:
    return json.dumps({"model": "there", "choices": [{"delta": {"content": text}, "finish_reason": finish}], **more})


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
FRAMES = [
    chunk('"model":"there"\n'),
    chunk("b", "length", extra={"model": "there", "pi": 3.140}),
    json.dumps({"choices": [], "usage": USAGE}),
]


def test_a_stream_in_pieces_of_any_size() -> None:
    sent = "".join(f"data: {frame}\r\n\r\n" for frame in FRAMES) + ": a comment\r\n\r\ndata: [DONE]\r\n\r\n"
    for size in (1, 2, 3, 7, 50, 10_000):
        made, counted = stream()
        parts = [made.feed(sent.encode()[at : at + size]) for at in range(0, len(sent), size)]
        got = b"".join(parts).decode().split("\n\n")
        assert got[2:] == [": a comment", "data: [DONE]", ""]
        first, second = (json.loads(event.removeprefix("data: ")) for event in got[:2])
        assert (first["model"], first["choices"][0]["delta"]["content"]) == ("big", '"model":"there"\n')
        assert second["model"] == "big"
        assert '"extra": {"model": "there", "pi": 3.14}' in got[1].replace('":', '": ').replace("  ", " "), "values stay"
        assert all(part == b"" or part.endswith(b"\n\n") for part in parts), "whole events only"
        assert (made.is_over, made.outcome, made.ended()) == (True, "length", b"")
        assert (counted.num_prompt_tokens, counted.num_output_tokens, counted.num_cached) == (7, 2, 3)


def test_usage_is_shown_to_those_who_asked() -> None:
    made, _ = stream(shows_usage=True)
    assert b'"usage"' in made.feed(f"data: {FRAMES[2]}\n\n".encode())
    made, _ = stream()
    assert made.feed(f"data: {chunk('a', usage=None)}\n\n".encode()).count(b"usage") == 0
    assert b'"prompt_tokens"' in made.feed(f"data: {chunk('a', usage=USAGE)}\n\n".encode()), "it belongs to an event with text"


def test_tokens_are_estimated_until_the_usage_comes() -> None:
    made, counted = stream()
    made.feed("".join(f"data: {chunk('a')}\n\n" for _ in range(5)).encode())
    assert counted.num_output_tokens == 5
    made.feed(f"data: {FRAMES[2]}\n\n".encode())
    assert counted.num_output_tokens == 2


def test_events_of_several_lines_and_other_fields() -> None:
    made, _ = stream()
    out = made.feed(b'event: x\nid: 1\ndata: {"model": "there",\ndata: "choices": []}\n\n')
    assert out == b'event: x\nid: 1\ndata: {"model":"big","choices":[]}\n\n'


def test_a_server_without_done() -> None:
    made, _ = stream()
    made.feed(f"data: {chunk('a', 'stop')}\n\ndata: {chunk('')}".encode())
    assert made.ended().endswith(b"data: [DONE]\n\n")
    assert made.outcome == "stop"


def test_an_error_of_the_server_ends_the_stream() -> None:
    made, _ = stream()
    error = b'data: {"error": {"message": "out of memory"}}\n\n'
    assert made.feed(error + b"data: {}\n\n") == error
    assert made.has_failed


@pytest.mark.parametrize(
    "sent", [b"data: {not json}\n\n", b"data: [1]\n\n", b"data: " + b"[" * 100_000 + b"\n\n", b"data: \xff\n\n"]
)
def test_rubbish_is_named(sent: bytes) -> None:
    made, _ = stream()
    good = f"data: {chunk('a')}\n\n".encode()
    assert b'"a"' in made.feed(good + sent + good), "what came before it is good"
    assert made.broken is not None
    assert (made.broken.code, made.broken.status) == ("upstream_invalid", 502)
    assert "gpu2:8000" in made.broken.message


def test_an_end_in_the_middle() -> None:
    made, _ = stream()
    made.feed(f"data: {chunk('a')}\n\n".encode())
    assert made.ended() == b""
    assert made.broken is not None
    assert "before the answer was whole" in made.broken.message


def test_a_last_event_that_cannot_be_read() -> None:
    made, _ = stream()
    made.feed(f"data: {chunk('a', 'stop')}\n\ndata: {{not json".encode())
    assert made.ended() == b"", "no [DONE] before the error"
    assert not made.is_over
    assert made.broken is not None
    assert "no JSON object" in made.broken.message


def test_an_endless_event() -> None:
    made, _ = stream()
    for _ in range(16):
        made.feed(bytes(MAX_EVENT_BYTES // 16))
    assert made.broken is None
    made.feed(b"x")
    assert made.broken is not None
    assert "16 MiB" in made.broken.message


def test_a_whole_answer_keeps_its_bytes() -> None:
    counted = generation()
    made = Answer("gpu2:8000", "big", counted, False)
    body = b'{"model": "there", "choices": [{"finish_reason": "stop", "n": 1.50}], "usage": %b}' % json.dumps(USAGE).encode()
    assert b'[{"finish_reason": "stop", "n": 1.50}]' in made.whole(body), "a value is the bytes that came"
    assert (counted.num_prompt_tokens, counted.num_output_tokens, made.outcome) == (7, 2, "stop")


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"choices": 5}', b'{"choices": [1]}'])
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(HearthError) as caught:
        Answer("gpu2:8000", "big", generation(), False).whole(body)
    assert caught.value.code == "upstream_invalid"
