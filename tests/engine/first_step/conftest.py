"""Fixtures: one small model, an engine that loads it, and the model's answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.protocol import LoadDone
from tests.engine.first_step.bench import Bench
from tests.engine.model_bench import make_checkpoint
from tests.kernel_cache import warm


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm()
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Returns a copy of the model's folder that the test may damage."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(folder, monkeypatch)
    yield made
    made.allow(99)


@pytest.fixture
def wanted(bench: Bench) -> list[int]:
    """Returns the tokens with which a model that is already loaded answers PROMPT."""
    bench.load()
    bench.until(LoadDone)
    bench.submit(1)
    (tokens,) = bench.until_answered(1)
    bench.evict()
    return tokens
