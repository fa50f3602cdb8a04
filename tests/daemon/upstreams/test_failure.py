"""Errors of other servers in this API's form."""

from __future__ import annotations

import json
import time
from email.utils import formatdate

import pytest

from daemon.upstreams.failure import passed_on

OPENAI = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, json.dumps(OPENAI), (400, "context_length_exceeded", "gpu2:8000: too long", "invalid_request_error", "messages")),
        (
            404,
            '{"object":"error","message":"none","code":404}',
            (404, "upstream_error", "gpu2:8000: none", "invalid_request_error", None),
        ),
        (422, '{"detail":[{"loc":["x"]}]}', (422, "upstream_error", 'gpu2:8000: [{"loc":["x"]}]', "invalid_request_error", None)),
        (500, "boom", (500, "upstream_error", "gpu2:8000: boom", "server_error", None)),
        (503, '{"error":"loading"}', (503, "upstream_error", "gpu2:8000: loading", "overloaded_error", None)),
        (502, "<html>", (502, "upstream_error", "gpu2:8000 answered with the status 502", "server_error", None)),
        (418, "\x00\xff" + "[" * 10_000, (418, "upstream_error", None, "invalid_request_error", None)),
        (401, json.dumps(OPENAI), (502, "upstream_denied", None, "server_error", None)),
        (302, "", (502, "upstream_invalid", None, "server_error", None)),
        (999, "", (502, "upstream_invalid", None, "server_error", None)),
    ],
)
def test_an_answer_that_is_an_error(status: int, body: str, expected: tuple[object, ...]) -> None:
    error = passed_on("gpu2:8000", status, None, body.encode())
    message = error.message if expected[2] is not None else None
    assert (error.status, error.code, message, error.type, error.param) == expected
    assert len(error.message) < 2100


def test_when_to_try_again() -> None:
    def wait_s(header: str | None) -> float | None:
        return passed_on("h", 429, header, b"").retry_after_s

    assert [wait_s("7"), wait_s("0"), wait_s("1e9"), wait_s("soon"), wait_s("nan"), wait_s(None)] == [7, 1, 3600, None, None, None]
    in_a_minute = wait_s(formatdate(time.time() + 60, usegmt=True))
    assert in_a_minute is not None
    assert 1 <= in_a_minute <= 61
