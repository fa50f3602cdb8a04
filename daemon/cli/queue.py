"""`hearth queue`: who waits for what."""

from __future__ import annotations

import argparse
import json

from daemon.cli.client import Client
from daemon.cli.table import duration, table


def queue(client: Client, options: argparse.Namespace) -> None:
    rows = client.get("/control/v1/queue")
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("nothing waits")
    else:
        lines = [
            (
                f"req-{row['request']}",
                row["id"],
                row["model"],
                str(row["position"]),
                duration(row["waiting_s"]),
                row["tenant"] or "-",
            )
            for row in rows
        ]
        print(table(("REQUEST", "ID", "MODEL", "POSITION", "WAITING", "TENANT"), lines, frozenset({3, 4})))
