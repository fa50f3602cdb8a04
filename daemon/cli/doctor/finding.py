"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """level: ok; warn: it works, but slower or not all of it; fail: it does not. change: what to do, "" where all is well."""

    check: str
    level: str
    found: str
    change: str = ""
