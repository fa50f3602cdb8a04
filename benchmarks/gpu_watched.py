"""A program under a tool (a sanitizer, a profiler) that is ended with all that it started when its time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from benchmarks.server import ROOT


def watched(command: Sequence[str], limit_s: float, **variables: str) -> tuple[str, int | None]:
    """Runs a command with these environment variables. Returns what it wrote, and its exit code; None if it was ended after
    limit_s."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **variables)
    code: int | None = None
    with tempfile.TemporaryFile() as output:  # no pipe: a process that does not end would keep it open
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for the driver may not end
                process.wait(2.0)
        output.seek(0)
        return output.read().decode(errors="replace"), code
