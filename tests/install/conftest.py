from __future__ import annotations

from pathlib import Path

import pytest

from tests.install.environments import Environment, build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hearthd's own."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """An environment with hearthd in it, not to be changed."""
    environment = Environment.make(tmp_path_factory.mktemp("installed") / "environment")
    environment.install(wheel)
    return environment
