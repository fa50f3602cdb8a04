"""What the virtual machine reports, a JSON object a line, and what is printed of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(slots=True, frozen=True)
class Result:
    """part, name: which check. why: what it shows. ok: None where it was left out. detail: what was seen, or what went wrong."""

    part: str
    name: str
    why: str
    ok: bool | None
    took_s: float
    detail: str

    @property
    def word(self) -> str:
        return {True: "ok", False: "FAILED", None: "left out"}[self.ok]

    def line(self) -> str:
        """One line to read."""
        return f"{self.word:8} {self.part}: {self.why} ({self.took_s:.0f} s)" + (f": {self.detail}" if self.detail else "")

    def to_json(self) -> str:
        return json.dumps({"check": asdict(self)})


def parse(line: str) -> Result | None:
    """Returns the result that a line holds, None for one that holds something else or was cut off."""
    try:
        told = json.loads(line)
        return Result(**told["check"])
    except (ValueError, KeyError, TypeError):
        return None


def has_ended(line: str) -> bool:
    """Returns whether a line says that the checks of a boot are all done."""
    try:
        return bool(json.loads(line).get("end"))
    except (ValueError, AttributeError):
        return False


def table(results: Sequence[Result]) -> str:
    """Returns the rows of a page's table."""
    cells = [(one.part, one.why, f"{one.word}{': ' if one.detail else ''}{one.detail}", f"{one.took_s:.0f} s") for one in results]
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
    return "\n".join(["| part | what it shows | result | took |", "|---|---|---|---|", *rows])
