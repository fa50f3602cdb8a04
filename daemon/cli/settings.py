"""Implements `hearth config`, which shows the settings that the daemon uses, and where each is set."""

from __future__ import annotations

import argparse
import json
from typing import Any

from daemon.cli.client import Client
from daemon.cli.table import table


def config(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth config`: shows the settings that a flag or the file has set, or with --all every setting of the node."""
    rows = client.get("/control/v1/config")
    shown = [row for row in rows if row["source"] or options.all]
    if options.json:
        print(json.dumps(shown, indent=1))
        return
    print(table(("KEY", "VALUE", "SET BY", "RELOAD"), [_row(row) for row in shown]) if shown else "no setting is set")
    if num_others := len(rows) - len(shown):
        print(f"\n{num_others} others have their defaults; `hearth config --all` shows them")
    if any(row["waits"] for row in shown):
        print("\n(*) the file has another value, which needs a restart")


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    value = json.dumps(row["value"], ensure_ascii=False) + (" (*)" if row["waits"] else "")
    return (row["key"], value, row["source"] or "default", row["reload"])
