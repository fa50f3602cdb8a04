"""Progress bars, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def byte_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, transient=True)


def show(name: str, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Passes the lines on and draws what they tell."""
    with byte_bar() as progress:
        task = progress.add_task(f"{name}: waiting", total=None)
        for line in lines:
            if line.get("event") == "load_progress":
                if line["bytes_total"]:
                    progress.update(task, completed=line["bytes_done"], total=line["bytes_total"], description=f"{name}: loading")
                else:
                    progress.update(task, description=f"{name}: kernels are being compiled, once a machine")
            elif line.get("event") == "state":
                progress.update(task, description=f"{name}: {line['new']}")
            yield line
