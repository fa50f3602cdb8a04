"""The demo's story needs each model to fit on each of its devices, and no two of them together."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from config.schema import DeviceBudget, NodeConfig
from config.units import parse_bytes
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from demo.run import DEVICES, QUESTIONS
from scheduler.node.ledger import size_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("told", DEVICES)
async def test_each_model_fits_alone(told: str) -> None:
    name, budget = told.split("=")
    device = DeviceBudget(name, parse_bytes(budget))
    chunk_bytes = parse_bytes(NodeConfig(models_dir="").chunk_bytes)
    config = NodeConfig(models_dir=str(ROOT / "demo" / "models"), dtype="float32", chunk_bytes=chunk_bytes)
    registry = Registry(config, [device], NodeState(""))
    await registry.rescan()
    sizes = {model: size_of(registry.models[model].facts, chunk_bytes) for model in QUESTIONS}
    work_space = max(size.work_space_chunks for size in sizes.values())
    room = device.budget_bytes // chunk_bytes - work_space
    assert {model: size.chunks for model, size in sizes.items() if size.chunks > room} == {}, room
    assert {pair for pair in combinations(sizes, 2) if sum(sizes[model].chunks for model in pair) <= room} == set(), room
