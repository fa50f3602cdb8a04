"""X-Request-Id: the client's own value if it is harmless, else a new one."""

from __future__ import annotations

import os
import re

MAX_CHARACTERS = 128
_OTHER = re.compile(r"[^A-Za-z0-9._:@/+=-]")


def request_id(header: str | None) -> str:
    kept = _OTHER.sub("", header[: 4 * MAX_CHARACTERS])[:MAX_CHARACTERS] if header else ""
    return kept or os.urandom(12).hex()
