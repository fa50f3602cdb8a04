"""A strict reader of our event streams, for tests."""

from __future__ import annotations

import json
import re
from typing import Any

_EVENT = re.compile(r"(?:data: (?P<data>[^\n]*)|: (?P<comment>[^\n]*))\Z")


def events(body: str) -> tuple[list[Any], list[str], bool]:
    """(data events, comments, whether [DONE] came last). Fails on anything that is no such event."""
    assert body.endswith("\n\n"), f"cut off: {body[-80:]!r}"
    data: list[Any] = []
    comments: list[str] = []
    done = False
    for event in body[:-2].split("\n\n"):
        match = _EVENT.match(event)
        assert match is not None, f"not an event: {event!r}"
        assert not done, "something follows [DONE]"
        if match["comment"] is not None:
            comments.append(match["comment"])
        elif match["data"] == "[DONE]":
            done = True
        else:
            data.append(json.loads(match["data"]))
    return data, comments, done


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice; checks the grammar every stream keeps to."""
    parts, roles, reasons = [], [], []
    choices = [(at, choice) for at, chunk in enumerate(chunks) for choice in chunk.get("choices", ()) if choice["index"] == index]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for at, (_, choice) in enumerate(choices):
        assert "finish_reason" in choice
        reasons.append(choice["finish_reason"])
        if "delta" in choice:
            if "role" in choice["delta"]:
                roles.append(at)
            parts.append(choice["delta"].get("content", ""))
            if choice["finish_reason"] is not None:
                assert choice["delta"] == {}
        else:
            parts.append(choice["text"])
    assert all(reason is None for reason in reasons[:-1])
    assert reasons[-1] is not None
    if "delta" in choices[0][1]:
        assert roles == [0]
    return "".join(parts)
