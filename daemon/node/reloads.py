"""Counts how reloads of the settings ended, and keeps the last refusal until settings are applied again."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass

from config.load import ConfigError
from daemon.errors import BadRequest
from daemon.record.audit_log import AuditLog

log = logging.getLogger("hearthd")


@dataclass(slots=True, frozen=True)
class RefusedReload:
    """The last refusal of a reload, for which the settings files on disk cannot be applied. message: the error. file, line, key:
    the place of the error; line 0: unknown. since: Unix time of the first refusal since settings were last applied."""

    message: str
    file: str
    line: int  # from 1; 0 if unknown
    key: str
    since: float


class Reloads:
    """Counts reloads of the settings by how they ended. refused: the last refusal, None if the last reload was applied."""

    def __init__(self, counts: defaultdict[str, int], audit: AuditLog) -> None:
        """counts: the numbers of reloads, by the keys "applied" and "refused", for the metrics; updated here. audit: the log in
        which refusals are recorded."""
        self._counts, self._audit = counts, audit
        self.refused: RefusedReload | None = None

    def refuse(self, error: ConfigError) -> BadRequest:
        """Records that a reload was refused because of `error`: counts, logs and keeps the refusal. Returns the error for whoever
        asked for the reload. The audit log's file is reopened even so, because a program that has rotated the file asks for a
        reload."""
        self._counts["refused"] += 1
        log.error("reload refused, the running settings stay: %s", error)
        since = round(time.time(), 3) if self.refused is None else self.refused.since
        self.refused = RefusedReload(str(error), error.source, error.line, error.key, since)
        details: dict[str, object] = {"file": error.source, "line": error.line, "key": error.key}
        message = f"The running settings stay: {error}"
        self._audit.write("reload", "invalid_config", message=message)
        self._audit.reopen()
        return BadRequest("invalid_config", message, details=details)

    def applied(self) -> None:
        self._counts["applied"] += 1
        self.refused = None

    def row(self) -> dict[str, object] | None:
        """Returns the last refusal for `hearth status --json`; None if the last reload was applied."""
        return None if self.refused is None else asdict(self.refused)
