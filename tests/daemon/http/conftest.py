"""The daemon runs on uvloop, so its tests do."""

from __future__ import annotations

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}
