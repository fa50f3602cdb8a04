"""Makes the value of X-Request-Id for a request: the value that the client has sent, shortened and without characters other than
letters, digits and a few marks, or a random value if nothing remains of it."""

from __future__ import annotations

import os
import re

MAX_CHARACTERS = 128
_OTHER = re.compile(r"[^A-Za-z0-9._:@/+=-]")


def request_id(header: str | None) -> str:
    kept = _OTHER.sub("", header[: 4 * MAX_CHARACTERS])[:MAX_CHARACTERS] if header else ""
    return kept or os.urandom(12).hex()
