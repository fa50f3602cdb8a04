"""How readings of the settings ended after the start: counted, and the refusal that stands until one is applied."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass

from config.load import ConfigError
from daemon.errors import BadRequest

log = logging.getLogger("hearthd")


@dataclass(slots=True, frozen=True)
class RefusedReload:
    """Why what the files say now is not in use. since: Unix time of the first refusal since settings were last applied."""

    message: str
    file: str
    line: int  # from 1; 0 where none is known
    key: str
    since: float


class Reloads:
    """refused: None while the running settings are those of the last reading."""

    def __init__(self, counts: defaultdict[str, int]) -> None:
        """counts: of readings that were applied and refused, for the metrics."""
        self._counts = counts
        self.refused: RefusedReload | None = None

    def refuse(self, error: ConfigError) -> BadRequest:
        """Counts, logs and keeps the refusal; returns what the caller of the reload is told."""
        self._counts["refused"] += 1
        log.error("reload refused, the running settings stay: %s", error)
        since = round(time.time(), 3) if self.refused is None else self.refused.since
        self.refused = RefusedReload(str(error), error.source, error.line, error.key, since)
        details: dict[str, object] = {"file": error.source, "line": error.line, "key": error.key}
        return BadRequest("invalid_config", f"The running settings stay: {error}", details=details)

    def applied(self) -> None:
        self._counts["applied"] += 1
        self.refused = None

    def row(self) -> dict[str, object] | None:
        """For `hearth status --json`."""
        return None if self.refused is None else asdict(self.refused)
