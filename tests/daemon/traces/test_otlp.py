"""The JSON form of OTLP, against the strict reader."""

from __future__ import annotations

import pytest

from daemon.traces import otlp
from daemon.traces.otlp import Event, Span
from tests.daemon.traces.otlp_schema import read

IDS = "5b8aa5a2d2c872e8321cf37308d69df2", "051581bf3cb55c13"
RESOURCE, SCOPE = otlp.resource_json({"service.name": "hearthd", "process.pid": 7}), otlp.scope_json("hearthd", "1")


def body(*spans: Span) -> bytes:
    return otlp.request(RESOURCE, SCOPE, [otlp.encoded([span]) for span in spans])


def test_all_of_a_span() -> None:
    attributes = {"a": "text", "b": True, "c": 1 << 62, "d": -1, "e": 0.5, "f": ["x", "y"], "g": "z" * 5000}
    events = [Event(3, "happened", {"why": "so"})]
    span = Span("chat m", 2, *IDS, "1" * 16, 1, 9, attributes, events, "broken", "k=v", [(IDS[0], "2" * 16)])
    plain = Span("queue", 1, IDS[0], "3" * 16, "", 2, 2, {})
    first, second = read(body(span, plain))
    assert first.attributes == attributes | {"g": "z" * otlp.MAX_CHARACTERS}
    assert (first.name, first.kind, first.trace_id, first.span_id, first.parent_id) == ("chat m", 2, *IDS, "1" * 16)
    assert (first.start_ns, first.end_ns, first.events) == (1, 9, [("happened", 3, {"why": "so"})])
    assert (first.status, first.state, first.links) == ({"code": 2, "message": "broken"}, "k=v", [(IDS[0], "2" * 16)])
    assert (second.parent_id, second.status, second.events, second.links, second.state) == ("", {}, [], [], "")
    assert first.resource == {"service.name": "hearthd", "process.pid": 7}


def test_what_is_no_unicode_does_not_stop_it() -> None:
    """aiohttp reads the bytes of a header that are no UTF-8 as surrogates."""
    (span,) = read(body(Span("n\udcff", 1, *IDS, "", 1, 2, {"user_agent.original": "curl\udcff\udcfe", "list": ["\udcff"]})))
    assert (span.name, span.attributes) == ("n?", {"user_agent.original": "curl??", "list": ["?"]})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"{}", (0, "")),
        (b"", (0, "")),
        (b"\xff rubbish", (0, "")),
        (b"[1]", (0, "")),
        (b'{"partialSuccess": null}', (0, "")),
        (b'{"partialSuccess": {"rejectedSpans": "many"}}', (0, "")),
        (b'{"partialSuccess": {"rejectedSpans": "-3"}}', (0, "")),
        (b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}', (3, "too old")),
        (b'{"partialSuccess": {"rejectedSpans": 3}}', (3, "")),
    ],
)
def test_partial_success(answer: bytes, told: tuple[int, str]) -> None:
    assert otlp.num_rejected(answer) == told


def test_the_reader_is_strict() -> None:
    good = body(Span("queue", 1, *IDS, "", 1, 2, {"n": 5}))
    for old, new in (
        (b'"traceId"', b'"trace_id"'),
        (b'"kind":1', b'"kind":"SPAN_KIND_INTERNAL"'),
        (b'"intValue":"5"', b'"intValue":5'),
        (IDS[0].encode(), b"W4ql" * 6),
        (b'"startTimeUnixNano":"1"', b'"startTimeUnixNano":1'),
    ):
        assert old in good
        with pytest.raises(AssertionError):
            read(good.replace(old, new))
