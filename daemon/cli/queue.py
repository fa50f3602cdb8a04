"""Implements `hearth queue`, which lists the requests that wait, and the text workers' jobs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from daemon.cli.client import Client
from daemon.cli.table import duration, size, table


def queue(client: Client, options: argparse.Namespace) -> None:
    rows = client.get("/control/v1/queue")
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("nothing waits")
    else:
        lines = [_text(row) if row["for"] == "text" else _turn(row) for row in rows]
        print(table(("REQUEST", "ID", "MODEL", "POSITION", "WAITING", "TENANT"), lines, frozenset({3, 4})))


def _turn(row: dict[str, Any]) -> tuple[str, ...]:
    waiting = duration(row["waiting_s"])
    return f"req-{row['request']}", row["id"], row["model"], str(row["position"]), waiting, row["tenant"] or "-"


def _text(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the line of the table for a job of a text worker. It does not name a request, because the daemon does not know to
    which one the job belongs."""
    return f"({row['work']}, {size(row['bytes'])})", "", row["model"] or "-", "-", duration(row["waiting_s"]), row["tenant"] or "-"
