"""A process without memory for one more thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from loader.threads import Thread


@contextlib.contextmanager
def no_thread() -> Iterator[None]:
    """Within it no thread of loader/threads.py can be started."""

    def refused(thread: Thread) -> None:
        raise MemoryError(f"thread {thread.name}: it did not begin within 1 s, as where no memory is left")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Thread, "start", refused)
        yield
