"""Maps the HTTP statuses of the control API to the exit codes of `hearth`, one to one. Both sides use it."""

from __future__ import annotations

from daemon.errors import EXIT_BUSY, EXIT_DENIED, EXIT_NO_FIT, EXIT_NOT_FOUND, EXIT_NOT_SAVED, EXIT_USAGE

EXIT_FAULT = 1  # hearthd's own fault
STATUS_OF_EXIT = {
    EXIT_USAGE: 400,
    EXIT_DENIED: 403,
    EXIT_NOT_FOUND: 404,
    EXIT_NO_FIT: 409,
    EXIT_FAULT: 500,
    EXIT_BUSY: 503,
    EXIT_NOT_SAVED: 507,
}
EXIT_OF_STATUS = {status: code for code, status in STATUS_OF_EXIT.items()}
