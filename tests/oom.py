"""Reads when the kernel ends a process for want of memory."""

from __future__ import annotations

from pathlib import Path


def oom_score_adj(pid: int) -> int:
    """Returns what is added to a process's share of memory, in thousandths: of two, the kernel ends that with the higher sum."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
