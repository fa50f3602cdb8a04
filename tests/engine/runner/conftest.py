"""Fixtures: one small model and a runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.loading.runner import TorchRunner
from tests.engine.model_bench import make_checkpoint, make_memory, make_runner


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder, tie_word_embeddings=False)


@pytest.fixture
def folder(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """Returns a copy of the model's folder that the test may damage."""
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    arena = make_memory()
    yield make_runner(arena)
    arena.close()
