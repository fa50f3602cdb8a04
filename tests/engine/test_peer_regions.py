"""engine/cuda/peer_regions.py on a stand-in for the driver, of which each rank has its own, as engines do."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

from engine.cuda.kernels.triton_peers import REGION_BYTES
from tests.engine import cuda_stand_in


@pytest.fixture
def driver() -> cuda_stand_in.Driver:
    return cuda_stand_in.Driver()


@pytest.fixture
def peer_regions(driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    cuda_stand_in.install(monkeypatch, driver)
    monkeypatch.setitem(sys.modules, "engine.cuda.peer_regions", ModuleType("engine.cuda.peer_regions"))
    del sys.modules["engine.cuda.peer_regions"]
    module = importlib.import_module("engine.cuda.peer_regions")
    monkeypatch.setattr(module, "torch", cuda_stand_in.Torch(driver))
    return module


def gone(driver: cuda_stand_in.Driver) -> bool:
    return not (driver.mapped or driver.reserved or driver.held_bytes)


def test_each_rank_has_all_regions_beginning_with_its_own(peer_regions: Any, driver: cuda_stand_in.Driver) -> None:
    ranks = [peer_regions.DeviceRegions(3) for _ in range(3)]
    size = ranks[0].num_bytes
    assert size >= REGION_BYTES
    assert size % cuda_stand_in.GRANULARITY == 0
    handles = [each.export() for each in ranks]
    for rank, each in enumerate(ranks):
        each.all[0, :8] = 10 + rank
        for step in (2, 1):
            each.map(step, handles[(rank + step) % 3])
    for handle in handles:
        os.close(handle)
    for rank, each in enumerate(ranks):
        assert each.all.shape == (3, size)
        assert [int(region[0]) for region in each.all] == [10 + (rank + step) % 3 for step in range(3)]
        assert int(each.all[0, 8:].sum()) == 0
    assert len(driver.mapped) == 9
    assert driver.accessible == set(driver.mapped)
    ranks[1].close()
    assert int(ranks[0].all[1, 0]) == 11, "memory that another rank has mapped stays"
    ranks[0].close()
    ranks[2].close()
    assert gone(driver)


def test_only_steps_are_waited_for_and_only_when_asked_for(
    peer_regions: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions, waits = peer_regions.DeviceRegions(2), list[int]()
    synchronize = cuda_stand_in.Event.synchronize

    def wait(event: cuda_stand_in.Event) -> None:
        waits.append(len(driver.mapped))
        synchronize(event)

    monkeypatch.setattr(cuda_stand_in.Event, "synchronize", wait)
    regions.wait_for_steps()
    assert waits == [1]
    regions.close()
    assert waits == [1]
    assert gone(driver)


def test_a_device_without_memory_keeps_nothing(peer_regions: Any, driver: cuda_stand_in.Driver) -> None:
    driver.limit_bytes = 1
    with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        peer_regions.DeviceRegions(2)
    assert gone(driver)


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_the_device_does_not_reach_is_released(
    peer_regions: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    one, other = peer_regions.DeviceRegions(2), peer_regions.DeviceRegions(2)

    def refuse(*arguments: Any) -> Any:
        return (cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE,)

    refuse.__name__ = refused
    handle = other.export()
    with monkeypatch.context() as patch:
        patch.setattr(driver, refused, refuse)
        with pytest.raises(RuntimeError, match=f"{refused}: CUDA_ERROR_INVALID_VALUE"):
            one.map(1, handle)
    os.close(handle)
    one.close()
    other.close()
    assert gone(driver)
