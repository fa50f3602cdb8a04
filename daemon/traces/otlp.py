"""Spans in the JSON form of OTLP (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): keys in lowerCamelCase, ids in
hexadecimal digits, 64-bit integers as decimal strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

Value = str | bool | int | float | Sequence[str]
INTERNAL, SERVER = 1, 2  # SpanKind
_ERROR = 2  # StatusCode
MAX_CHARACTERS = 1024  # the most in one text value


class Event(NamedTuple):
    """Something that happened at one moment of a span. unix_ns: Unix time in nanoseconds."""

    unix_ns: int
    name: str
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """A finished span. kind: INTERNAL or SERVER. start_ns, end_ns: Unix time in nanoseconds. trace_id, span_id, parent_id: in
    hexadecimal digits; parent_id is "" for a root span. error: why it failed, None if it did not. state: the value of the W3C
    header tracestate, "" for none. links: trace and span ids of related spans."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: Sequence[Event] = ()
    error: str | None = None
    state: str = ""
    links: Sequence[tuple[str, str]] = ()


_encoder = msgspec.json.Encoder()


def encoded(spans: Sequence[Span]) -> bytes:
    """Returns the spans as JSON objects separated by commas, without the brackets of an array."""
    return b",".join([_json(_span(span)) for span in spans])


def request(resource: bytes, scope: bytes, spans: Sequence[bytes]) -> bytes:
    """Returns the body of an export request. resource, scope: results of `resource_json` and `scope_json`. spans: results of
    `encoded`, one for each group of spans."""
    head = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":%b,"spans":[' % (resource, scope)
    return head + b",".join(spans) + b"]}]}]}"


def resource_json(attributes: Mapping[str, Value]) -> bytes:
    return _json({"attributes": _attributes(attributes)})


def scope_json(name: str, version: str) -> bytes:
    return _json({"name": name, "version": version})


def num_rejected(answer: bytes) -> tuple[int, str]:
    """Returns how many spans of an accepted request the collector rejected, and why; (0, "") for an answer that cannot be read.
    answer: the body of the collector's response."""
    try:
        told = msgspec.json.decode(answer)["partialSuccess"]
        return max(0, int(told.get("rejectedSpans", 0))), str(told.get("errorMessage", ""))
    except (ValueError, KeyError, TypeError, AttributeError):  # ValueError includes msgspec's
        return 0, ""


def _span(span: Span) -> dict[str, Any]:
    written: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        written["parentSpanId"] = span.parent_id
    if span.state:
        written["traceState"] = span.state
    if span.events:
        written["events"] = [
            {"timeUnixNano": str(event.unix_ns), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ]
    if span.links:
        written["links"] = [{"traceId": trace_id, "spanId": span_id} for trace_id, span_id in span.links]
    if span.error is not None:
        written["status"] = {"code": _ERROR, "message": span.error}
    return written


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value if len(value) <= MAX_CHARACTERS else value[:MAX_CHARACTERS]}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(each) for each in value]}}


def _json(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a client's header may hold text that cannot be encoded as UTF-8
        return _encoder.encode(_printable(value))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value
