"""What tests of the whole node share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.node import Node


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[openai.OpenAI]:
    """The official client of the module's own `node`."""
    with node.openai() as opened:
        yield opened
