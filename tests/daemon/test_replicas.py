"""What the registry makes of the key `replicas`."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.load import ConfigError, load
from config.parallel import num_places
from config.schema import DeviceBudget, ModelConfig, NodeConfig, ParallelConfig
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from scheduler.node import events
from scheduler.node.groups import most_groups, pools
from scheduler.node.replica_names import REPLICA_AT
from tests.e2e.checkpoints import make_model

MIB = 1 << 20
DEVICES = [DeviceBudget(f"cpu:{number}", 32 * MIB) for number in range(4)]


def registry_of(folder: Path, num_devices: int = 4, **models: ModelConfig) -> Registry:
    config = NodeConfig(models_dir=str(folder), models=models, chunk_bytes=64 << 10, dtype="float32")
    return Registry(config, DEVICES[:num_devices], NodeState(""))


async def replicas_of(folder: Path, settings: ModelConfig, num_devices: int = 4) -> list[events.ModelFacts]:
    changes = await registry_of(folder, num_devices, m=settings).rescan()
    return [change.facts for change in changes if isinstance(change, events.ModelRegistered)]


async def test_each_replica_is_registered_behind_its_model(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    first, second, third = await replicas_of(tmp_path, ModelConfig(replicas=3, pinned=True, max_model_len=256))
    assert [first.name, second.name, third.name] == ["m", "m#2", "m#3"]
    assert (first.replica_of, second.replica_of) == ("", "m")
    assert (first.pinned, second.pinned) == (True, False)
    assert (second.weights_bytes, second.fingerprint) == (first.weights_bytes, first.fingerprint)
    assert second.replica_at == 0


@pytest.mark.parametrize(
    ("settings", "num_devices", "number"),
    [
        (ModelConfig(), 4, 1),
        (ModelConfig(replicas=8), 4, 4),
        (ModelConfig(replicas="auto"), 3, 3),
        (ModelConfig(replicas="auto"), 1, 1),
        (ModelConfig(replicas="auto", devices=["cpu:1", "cpu:3"]), 4, 2),
        (ModelConfig(replicas="auto", parallel=ParallelConfig(tensor=2)), 4, 2),
        (ModelConfig(replicas=2, parallel=ParallelConfig(tensor=2)), 3, 1),
    ],
)
async def test_there_are_no_more_replicas_than_devices_for_them(
    tmp_path: Path, settings: ModelConfig, num_devices: int, number: int
) -> None:
    make_model(tmp_path / "m")
    found = await replicas_of(tmp_path, settings, num_devices)
    assert len(found) == number
    assert {one.replica_at for one in found[1:]} <= {REPLICA_AT if settings.replicas == "auto" else 0}


@pytest.mark.parametrize("number", [1, 2])
async def test_requests_know_whether_their_model_may_have_replicas(tmp_path: Path, number: int) -> None:
    make_model(tmp_path / "m")
    registry = registry_of(tmp_path, m=ModelConfig(replicas=number))
    await registry.rescan()
    assert registry.resolve("m").has_replicas == (number > 1)


async def test_a_reload_adds_and_removes_replicas(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    registry = registry_of(tmp_path, m=ModelConfig(replicas=3))
    await registry.rescan()
    assert registry.replicas("m") == ["m", "m#2", "m#3"]
    config = NodeConfig(models_dir=str(tmp_path), models={"m": ModelConfig(replicas=2)}, chunk_bytes=64 << 10, dtype="float32")
    (gone,) = await registry.rescan(config)
    assert isinstance(gone, events.ModelRemoved)
    assert gone.model == "m#3"


async def test_a_replica_is_loaded_from_its_model_s_files(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    registry = registry_of(tmp_path, m=ModelConfig(replicas=2))
    await registry.rescan()
    assert registry.source("m#2") == registry.source("m") is not None
    assert registry.layout_id("m#2") == registry.layout_id("m") != ""
    assert not registry.knows("m#2"), "clients name the model"


async def test_a_folder_may_have_the_name_of_a_replica(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    make_model(tmp_path / "m#2", seed=2)
    registry = registry_of(tmp_path, m=ModelConfig(replicas=3))
    changes = await registry.rescan()
    names = [change.facts.name for change in changes if isinstance(change, events.ModelRegistered)]
    assert sorted(names) == ["m", "m#2", "m#3"]
    source = registry.source("m#2")
    assert source is not None
    assert source.path.endswith("m#2")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("replicas = 0", "must be from 1 to 64"),
        ("replicas = 65", "must be from 1 to 64"),
        ('replicas = "many"', """'many' must be a whole number or "auto"$"""),
        ("replicas = 2\nisolate = true", "does not go with isolate"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "hearthd.toml"
    path.write_text(f'[models."m"]\n{line}\n')
    with pytest.raises(ConfigError, match=told):
        load(str(path), {})


FOUR = '["cpu:0=64MiB", "cpu:1=64MiB", "cuda:0", "cpu:0@b=64MiB"]'


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("replicas = 3", ""),
        ("replicas = 4", "4 is too many: the node has cpu:0, cpu:1, cuda:0, cpu:0@b, where there is room for 3, each on"),
        ('replicas = 3\ndevices = ["cpu:0", "cuda:0"]', "3 is too many: devices names cpu:0, cuda:0, where there is room for 2"),
        ('replicas = 2\nkv_cache_dtype = "fp8"', "2 is too many: the node has .*, where there is room for 1"),
        ("replicas = 2\nparallel = { tensor = 2 }", "2 is too many: the node has .*, where there is room for 1, each on devices"),
        ("replicas = 1\nparallel = { tensor = 2 }", ""),
        ("replicas = 2\nparallel = { pipeline = 2 }", "2 is too many"),
        ('replicas = 3\nparallel = "auto"', ""),
        ('replicas = "auto"', ""),
    ],
)
def test_more_replicas_than_places_for_them_are_refused(tmp_path: Path, lines: str, told: str) -> None:
    path = tmp_path / "hearthd.toml"
    (tmp_path / "key").write_text("k")
    path.write_text(f'device = {FOUR}\n[hosts.b]\naddress = "10.0.0.2:7100"\nkey_file = "key"\n[models."org/m"]\n{lines}\n')
    if not told:
        load(str(path), {})
        return
    with pytest.raises(ConfigError, match=rf'hearthd.toml:\d+: models."org/m".replicas: {told}'):
        load(str(path), {})


@pytest.mark.parametrize("how", [None, ParallelConfig(2), ParallelConfig(pipeline=2), ParallelConfig(2, pipeline=2)])
def test_the_settings_allow_what_the_scheduler_finds_devices_for(how: ParallelConfig | None) -> None:
    names = [*(f"cpu:{number}" for number in range(5)), "cuda:0", "cuda:1", *(f"cpu:{number}@b" for number in range(3))]
    settings = ModelConfig(parallel=how)
    split = (1, 1) if how is None else (how.num_devices, how.pipeline)
    assert num_places(settings, names) == sum(most_groups(pool, *split) for pool in pools(names, *split))


async def test_a_model_tells_which_replicas_its_files_do_not_allow(tmp_path: Path) -> None:
    """A model of four replicas by its settings that is split by "auto" over two devices each."""
    make_model(tmp_path / "m")
    registry = registry_of(tmp_path, m=ModelConfig(replicas=4, parallel=ParallelConfig(2)))
    await registry.rescan()
    note = "of replicas = 4, only 2 are possible on the devices that can run it"
    assert registry.models["m"].notes[-1] == note
    assert note in registry.describe("m")
