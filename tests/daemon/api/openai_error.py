"""What every refusal looks like."""

from __future__ import annotations

import json


def check_error(status: int, body: str, param: str | None = None) -> dict[str, object]:
    assert 400 <= status < 500, body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error
