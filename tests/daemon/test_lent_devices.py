"""Devices that other hosts lend: what a node sets up for them, and what it leaves to their hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from config.schema import DeviceBudget, HostConfig, ModelConfig, NodeConfig, ParallelConfig
from daemon.cli.doctor import memory
from daemon.cli.doctor import settings as doctor_settings
from daemon.engines.carve_outs import divide
from daemon.engines.fork_client import ForkServer, threads_per_engine
from daemon.engines.workers import LentBy
from daemon.gpu.inventory import why_no_memory
from daemon.node.node import NodeParts
from daemon.process import installation
from daemon.record.state import NodeState
from loader.models.catalog import scan
from tests.daemon.test_gpus import Scripted
from tests.e2e.checkpoints import make_model

MIB, GIB = 1 << 20, 1 << 30
CORES = len(os.sched_getaffinity(0))
HERE, LENT, LENT_GPU = DeviceBudget("cpu:0", 64 * MIB), DeviceBudget("cpu:0@b", 64 * MIB), DeviceBudget("cuda:1@b", 8 * GIB)


def test_they_take_no_cores_and_no_fork_server_of_this_machine() -> None:
    assert threads_per_engine(NodeConfig(), [HERE, LENT, DeviceBudget("cpu:1@b", 64 * MIB)]) == CORES
    gpu = DeviceBudget("cuda:0", GIB, "GPU-a")
    assert ForkServer.ahead(NodeConfig(), [gpu, LENT]) is None


async def test_the_parts_of_a_node_for_them(tmp_path: Path) -> None:
    """Whatever is memory or processes of this machine is not for them: weights that outlive an engine, the host tier, the fork
    server, the watch of GPUs. Engines are told the device's name on its own host."""
    make_model(tmp_path / "models" / "whole")
    make_model(tmp_path / "models" / "pipe")
    pipeline = ModelConfig(max_model_len=256, parallel=ParallelConfig(pipeline=2))
    config = NodeConfig(
        models_dir=str(tmp_path / "models"),
        state_dir=str(tmp_path),
        chunk_bytes=2 * MIB,
        host_tier_bytes=4 * MIB,
        adopt_weights=True,
        stored_responses_bytes=0,
        hosts={"b": HostConfig("10.0.0.2:7100", "/etc/hearthd/b.key")},
        models={"pipe": pipeline, "whole": ModelConfig(devices=["cpu:0", "cpu:0@b"])},
    )
    node = NodeParts(config, [HERE, LENT, LENT_GPU], NodeState(""))
    await node.rescan()
    here, lent, gpu = (node.workers[name] for name in ("cpu:0", "cpu:0@b", "cuda:1@b"))
    assert [one._forks for one in (here, lent, gpu)] == [node.forks, None, None]
    assert here._lent_by is None
    models = str(tmp_path / "models")
    assert gpu._lent_by == LentBy("b", "10.0.0.2:7100", "/etc/hearthd/b.key", "cuda:1", models)
    assert here._left is not None
    assert [one._left for one in (lent, gpu)] == [None, None]
    assert [one._host_tier_fd for one in (here, lent, gpu)] == [node.host_memory.fd, -1, -1]
    assert [one._gpu for one in (lent, gpu)] == ["", ""]
    assert node.gpu_watch._devices == []
    told = [one._spec().configure() for one in (here, lent, gpu)]
    assert [one.device for one in told] == ["cpu:0", "cpu:0", "cuda:1"]
    assert [one.threads for one in told] == [CORES, 0, 0], "how many cores there are is known there alone"
    assert [one.host_tier_slots for one in told] == [2, 0, 0]
    facts = {name: found.facts for name, found in node.registry.models.items()}
    assert (facts["pipe"].num_stages, facts["pipe"].devices) == (2, ("cpu:0", "cpu:0@b"))
    assert facts["whole"].work_space_bytes > facts["pipe"].work_space_bytes, "or this says nothing"
    assert [one.work_space_bytes for one in told] == [facts["whole"].work_space_bytes, facts["pipe"].work_space_bytes, 0]
    assert told[2].kernels == [], "nothing may live on that GPU, because this machine has none"
    assert node.exchange is not None
    node.exchange.close()
    node.host_memory.close()
    await node.forks.end()
    await node.scanner.close()


def test_isolated_models_have_parts_of_this_machines_devices(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    isolated = ModelConfig(isolate=True, isolate_bytes=8 * MIB)
    config = NodeConfig(models_dir=str(tmp_path), models={"a": isolated}, chunk_bytes=2 * MIB)
    large = DeviceBudget("cpu:0@b", GIB)
    division = divide(config, [large, HERE], NodeState(""), scan(config.models_dir))
    assert [one.name for one in division.devices] == ["cpu:0@b", "cpu:0", "cpu:0/a"]
    small = divide(config, [large, DeviceBudget("cpu:0", 16 * MIB)], NodeState(""), scan(config.models_dir))
    assert "cpu:0 has 16.0 MiB left, of which it keeps" in small.problems["a"]
    assert "cpu:0@b" not in small.problems["a"]


def test_packages_for_them_are_needed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "is_there", lambda package: package == installation.TORCH)
    found = [one.package for one in installation.of_devices(["cpu:0@b", "cuda:0@b"])]
    assert found == []
    assert [one.package for one in installation.of_devices(["cpu:0", "cuda:0@b"])] == [installation.NUMBA]


def test_memory_that_their_host_cannot_give_is_told_of_that_host() -> None:
    text = why_no_memory(Scripted("no driver"), LENT_GPU, "cuMemCreate failed")
    assert text == "the host b cannot give 8.0 GiB (cuMemCreate failed)"


def test_the_doctor_leaves_them_to_their_hosts(tmp_path: Path) -> None:
    budgets = {"cpu:0": 12 * GIB, "cpu:0@b": 100 * GIB, "cuda:0@b": 80 * GIB}
    assert memory.budgets(budgets, 0, 32 * GIB).found == "cpu:0 12.0 GiB of 32.0 GiB"
    alone = memory.needed_bytes({"cpu:0": 12 * GIB}, 0, 2)
    assert memory.needed_bytes(budgets, 0, 2) == alone
    path = tmp_path / "node.toml"
    path.write_text(
        'device = ["cpu:0=64MiB", "cpu:0@b=64MiB", "cuda:0@b=8GiB"]\n[hosts.b]\naddress = "10.0.0.2:7100"\nkey_file = "b.key"\n'
    )
    found = doctor_settings.settings(None, str(path), GIB, Scripted("no driver"))  # type: ignore[arg-type]
    assert (found.wants_gpu, found.uuids) == (False, {})
    assert list(found.budgets) == ["cpu:0", "cpu:0@b", "cuda:0@b"]
