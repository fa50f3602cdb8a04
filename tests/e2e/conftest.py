"""What tests of the whole node share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.daemon.service_manager import NotifySocket
from tests.e2e.node import Node


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[openai.OpenAI]:
    """The official client of the module's own `node`."""
    with node.openai() as opened:
        yield opened


@pytest.fixture
def notify(tmp_path: Path) -> Iterator[NotifySocket]:
    """What a service manager listens to and keeps."""
    made = NotifySocket(tmp_path)
    yield made
    made.close()
