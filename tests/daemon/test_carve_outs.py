"""What is set aside for isolated models, and who may live where afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.schema import DeviceBudget, ModelConfig, NodeConfig
from daemon.engines.carve_outs import Division, divide
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from loader.models.catalog import scan
from scheduler.node.events import ModelFacts, ModelRegistered
from scheduler.node.ledger import size_of
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.node.settings import SchedulerSettings
from tests.e2e.checkpoints import make_model
from tests.e2e.test_embeddings import make_encoder

MIB = 1 << 20
CHUNK = 2 * MIB


def config_of(folder: Path, **models: ModelConfig) -> NodeConfig:
    return NodeConfig(models_dir=str(folder), models=models, chunk_bytes=CHUNK)


def divided(config: NodeConfig, *devices: DeviceBudget) -> Division:
    found = scan(config.models_dir) if Path(config.models_dir).is_dir() else {}
    return divide(config, devices or (DeviceBudget("cpu:0", 256 * MIB),), NodeState(""), found)


def total_bytes(division: Division) -> int:
    return sum(device.budget_bytes for device in division.devices)


async def test_by_default_it_is_what_the_model_takes_and_nobody_else_may_go_there(tmp_path: Path) -> None:
    make_model(tmp_path / "org" / "a", max_position_embeddings=1 << 17)
    make_model(tmp_path / "b")
    config = config_of(tmp_path, **{"org/a": ModelConfig(isolate=True)})
    division = divided(config)
    assert division.problems == {}
    shared, own = division.devices
    assert (shared.name, own.name, own.hardware, own.model) == ("cpu:0", "cpu:0/org/a", "cpu:0", "org/a")
    assert total_bytes(division) == 256 * MIB, "set aside out of the budget, not beside it"

    scheduler = NodeScheduler(SchedulerSettings(chunk_bytes=CHUNK), {one.name: one.budget_bytes for one in division.devices})
    registry = Registry(config, division.devices, NodeState(""), division.problems)
    facts = {}
    for change in await registry.rescan():
        scheduler.handle(change)
        assert isinstance(change, ModelRegistered)
        facts[change.facts.name] = change.facts
    scheduler.validate()
    assert (facts["org/a"].devices, facts["b"].devices) == (("cpu:0/org/a",), ("cpu:0",))
    assert {view.name: view.state for view in scheduler.snapshot()} == {"org/a": "cold", "b": "cold"}
    alone = Registry(config_of(tmp_path), [DeviceBudget("cpu:0", 256 * MIB)], NodeState(""))
    await alone.rescan()
    length = alone.models["org/a"].facts.max_model_len
    assert facts["org/a"].max_model_len == length, "its default is a share of the whole device, not of its own small part"
    room = next(view for view in scheduler.devices() if view.name == own.name)
    size = scheduler._node.models["org/a"].size
    assert size.chunks + size.work_space_chunks == room.total_chunks, "neither too small nor larger than needed"


def test_a_floor_or_a_size_may_be_larger(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    plain = divided(config_of(tmp_path, a=ModelConfig(isolate=True))).devices[1].budget_bytes
    floor = divided(config_of(tmp_path, a=ModelConfig(isolate=True, kv_floor_tokens=1 << 16))).devices[1].budget_bytes
    given = divided(config_of(tmp_path, a=ModelConfig(isolate=True, isolate_bytes="99MiB"))).devices[1].budget_bytes
    assert plain < floor
    assert given == 100 * MIB, "whole chunks, no fewer bytes than were asked for"


def test_a_size_is_set_aside_before_the_files_are_there(tmp_path: Path) -> None:
    division = divided(config_of(tmp_path, later=ModelConfig(isolate=True, isolate_bytes=64 * MIB)))
    assert [device.budget_bytes for device in division.devices] == [192 * MIB, 64 * MIB]
    missing = divided(config_of(tmp_path / "nowhere", later=ModelConfig(isolate=True)))
    assert len(missing.devices) == 1
    assert "they were not there. Restart hearthd, or set isolate_bytes" in missing.problems["later"]


@pytest.mark.parametrize(("budget_mib", "fits"), [(81, True), (80, True), (79, False)])
def test_the_device_keeps_eight_chunks(tmp_path: Path, budget_mib: int, fits: bool) -> None:
    config = config_of(tmp_path, a=ModelConfig(isolate=True, isolate_bytes=64 * MIB))
    division = divided(config, DeviceBudget("cpu:0", budget_mib * MIB))
    assert (len(division.devices) == 2) is fits
    if not fits:
        assert 'models."a".isolate: 64.0 MiB cannot be set aside: cpu:0 has 79.0 MiB left' in division.problems["a"]
        assert total_bytes(division) == budget_mib * MIB


async def test_without_room_it_is_not_served_and_says_why(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    config = config_of(tmp_path, a=ModelConfig(isolate=True, isolate_bytes="1GiB"))
    division = divided(config)
    registry = Registry(config, division.devices, NodeState(""), division.problems)
    (change,) = await registry.rescan()
    assert isinstance(change, ModelRegistered)
    assert "1.0 GiB cannot be set aside" in change.facts.unusable, "it does not fall back to its neighbours' engine"
    assert change.facts.unusable.endswith("or the model a smaller isolate_bytes"), "max_model_len does not change it"


def test_the_roomiest_allowed_device_is_divided(tmp_path: Path) -> None:
    devices = [DeviceBudget("cpu:0", 128 * MIB), DeviceBudget("cpu:1", 256 * MIB)]
    isolated = ModelConfig(isolate=True, isolate_bytes=100 * MIB)
    division = divided(config_of(tmp_path, a=isolated, b=isolated), *devices)
    assert [one.name for one in division.devices] == ["cpu:0", "cpu:1", "cpu:1/a", "cpu:1/b"]
    held = ModelConfig(isolate=True, isolate_bytes=100 * MIB, devices=["cpu:0"])
    assert [one.name for one in divided(config_of(tmp_path, a=held), *devices).devices] == ["cpu:0", "cpu:0/a", "cpu:1"]


def test_on_a_gpu_the_new_process_takes_its_context_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, a=ModelConfig(isolate=True, isolate_bytes=1 << 30))
    shared, own = divided(config, DeviceBudget("cuda:0", 8 << 30, "GPU-a")).devices
    assert (own.uuid, own.hardware, own.budget_bytes) == ("GPU-a", "cuda:0", 1 << 30)
    assert shared.budget_bytes == 11 << 29, "1 GiB for the model, 1.5 GiB for the context of its engine and what it loads"


MIXED = (DeviceBudget("cuda:0", 8 << 30, "GPU-a"), DeviceBudget("cpu:0", 256 * MIB))


async def facts_of(config: NodeConfig, division: Division) -> ModelFacts:
    """What the scheduler is told of the only model."""
    (change,) = await Registry(config, division.devices, NodeState(""), division.problems).rescan()
    assert isinstance(change, ModelRegistered)
    return change.facts


async def test_an_encoder_gets_a_part_of_a_cpu_device(tmp_path: Path) -> None:
    """Though the GPU has more room."""
    make_encoder(tmp_path / "enc")
    config = config_of(tmp_path, enc=ModelConfig(isolate=True))
    division = divided(config, *MIXED)
    assert [one.name for one in division.devices] == ["cuda:0", "cpu:0", "cpu:0/enc"]
    facts = await facts_of(config, division)
    assert (facts.devices, facts.unusable) == (("cpu:0/enc",), "")
    size = size_of(facts, CHUNK)
    assert (size.chunks + size.work_space_chunks) * CHUNK == division.devices[2].budget_bytes


async def test_a_part_that_was_set_aside_on_the_wrong_kind_of_device_is_told(tmp_path: Path) -> None:
    """Before the files were there, nobody knew that it is an encoder; of the model with fp8 KV it was asked for so."""
    config = config_of(tmp_path, enc=ModelConfig(isolate=True, isolate_bytes="64MiB"))
    division = divided(config, *MIXED)
    assert [one.name for one in division.devices] == ["cuda:0", "cuda:0/enc", "cpu:0"]
    make_encoder(tmp_path / "enc")
    told = (await facts_of(config, division)).unusable
    assert 'models."enc".isolate: its part was set aside on cuda:0, and encoders are not built for cuda devices' in told
    settings = ModelConfig(isolate=True, isolate_bytes="64MiB", kv_cache_dtype="fp8", devices=["cpu:0"])
    make_model(tmp_path / "only" / "m")
    config = config_of(tmp_path / "only", m=settings)
    told = (await facts_of(config, divided(config, *MIXED))).unusable
    assert told.endswith("this model may live on cpu:0")
