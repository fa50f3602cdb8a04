"""What tests of the API share. The daemon runs on uvloop, so they do."""

from __future__ import annotations

import aiohttp
import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def http(node):
    """A client of the module's own `node`."""
    async with aiohttp.ClientSession(node.url) as session:
        yield session
