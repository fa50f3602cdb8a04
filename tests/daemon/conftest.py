"""A service manager for tests of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.service_manager import NotifySocket


@pytest.fixture
def notify(tmp_path: Path) -> Iterator[NotifySocket]:
    """What a service manager listens to and keeps."""
    made = NotifySocket(tmp_path)
    yield made
    made.close()
