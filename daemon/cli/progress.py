"""Shows progress bars, only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


def byte_bar() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, transient=True)


@contextmanager
def byte_progress(name: str, total_bytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar while its block runs, and yields a function to call with the number of bytes done since the last call.
    name: the bar's title. total_bytes: the bytes at its end. shown: whether to show it at all."""
    if not shown:
        yield lambda num_bytes: None
        return
    with byte_bar() as progress:
        task = progress.add_task(name, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def show(name: str, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines of the daemon's answer to a load unchanged, and shows the progress that they report as a bar. name: the
    model's name."""
    with byte_bar() as progress:
        task = progress.add_task(f"{name}: waiting", total=None)
        for line in lines:
            if line.get("event") == "load_progress":
                if line["bytes_total"]:
                    progress.update(task, completed=line["bytes_done"], total=line["bytes_total"], description=f"{name}: loading")
                else:
                    progress.update(task, description=f"{name}: waits for its kernels")
            elif line.get("event") == "state":
                progress.update(task, description=f"{name}: {line['new']}")
            yield line
