"""Defines the result of one check of `hearth doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """The result of one check. check: what was checked. level: ok; warn: it works, but more slowly or not completely; fail: it does
    not work. found: what was found. change: what to do, "" if nothing."""

    check: str
    level: str
    found: str
    change: str = ""
