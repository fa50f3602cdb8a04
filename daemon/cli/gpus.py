"""Implements `hearth gpus`, which shows what the driver reports about the machine's GPUs. It asks the driver through the daemon or
directly."""

from __future__ import annotations

import argparse
import json
from typing import Any

from daemon.cli.client import Client, CommandError
from daemon.cli.table import size, table
from daemon.errors import EXIT_NOT_FOUND

HEADER = ("GPU", "DEVICE", "NAME", "MEMORY USED", "BUDGET", "TEMPERATURE", "BUSY", "POWER", "MEMORY ERRORS", "FAULTS")


def gpus(client: Client, options: argparse.Namespace) -> None:
    try:
        rows = client.get("/control/v1/gpus")
    except CommandError as error:
        if error.error["code"] != "not_running":
            raise
        rows = _of_driver()
    print(json.dumps(rows, indent=1) if options.json else text(rows))


def _of_driver() -> list[dict[str, Any]]:
    """Returns the rows of `hearth gpus`, one for each GPU, asked directly from the driver because no daemon runs. Raises
    CommandError if there is no driver."""
    from config.devices import NoGpus
    from daemon.gpu.driver import Driver
    from daemon.gpu.inventory import rows_of

    try:
        return rows_of(Driver().gpus(), (), {})
    except NoGpus as error:
        raise CommandError(EXIT_NOT_FOUND, {"code": "not_found", "message": f"No GPUs: {error}.", "details": {}}) from None


def text(rows: list[dict[str, Any]]) -> str:
    """Returns the output of `hearth gpus`: a table with a line per GPU, then each GPU's problems and the processes that hold its
    memory. rows: the daemon's or the driver's report, one for each GPU."""
    if not rows:
        return "the driver sees no GPU"
    lines = [table(HEADER, [_row(row) for row in rows], frozenset({0, 3, 4, 5, 6, 7, 8}))]
    for row in rows:
        lines.append(f"\n{row['index']}: {row['uuid']}" + (f", a slice of {row['slice_of']}" if row["slice_of"] else ""))
        told = dict.fromkeys((row["problem"], row["unusable"] and f"not usable: {row['unusable']}", row["note"]))
        lines += [f"  {text}" for text in told if text]
        for one in row["processes"]:
            used = "unknown" if one["used_bytes"] is None else size(one["used_bytes"])
            lines.append(f"  pid {one['pid']} {one['name']}: {used}")
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    faults = "Xid " + ", ".join(map(str, row["xids"])) if row["xids"] else "-"
    return (
        str(row["index"]),
        row["device"] or "-",
        row["name"] or "-",
        f"{size(row['used_bytes'])} of {size(row['total_bytes'])}",
        size(row["budget_bytes"]) if row["device"] else "-",
        _told(row["temperature_c"], " °C"),
        _told(row["utilisation_percent"], " %"),
        _told(None if row["power_w"] is None else round(row["power_w"]), " W"),
        _told(row["ecc_errors"], ""),
        faults,
    )


def _told(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"
