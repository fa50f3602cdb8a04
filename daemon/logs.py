"""One line an event on stderr. Prompts, outputs and keys are never logged."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("hearthd")


class _Line(logging.Formatter):
    """`12:30:01.250 warning engine: text`; the date is left to the journal."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record, "%H:%M:%S")
        name = record.name.removeprefix("hearthd").lstrip(".")
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {name + ': ' if name else ''}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(level: str) -> None:
    """`level`: debug, info, warning or error; may be called again."""
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, _Line) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line())
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hearthd").setLevel(level.upper())
