"""Devices named on the command line, against the machine's memory and made-up GPUs."""

from __future__ import annotations

import pytest

from config.devices import CUDA_LEFT_BYTES, GpuMemory, NoGpus, device_budgets
from config.load import ConfigError, load
from config.schema import NodeConfig

GIB = 1 << 30
GPUS = [GpuMemory(0, "GPU-3f1a-77", 80 * GIB), GpuMemory(1, "GPU-3f1b-78", 140 * GIB)]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu=64MiB", "cpu:0=64MiB"], "cpu:0 is named twice"),
        (["cpu=1MiB"], "at least 8 chunks"),
        (["cpu=600MiB", "cpu:1=600MiB"], "together are 1.2 GiB, the machine has 1.0 GiB"),
        (["cuda:2"], r"'cuda:2': no GPU is '2'; the driver has 0 \(GPU-3f1a-77\), 1 \(GPU-3f1b-78\)"),
        (["cuda:GPU-3f1"], "more than one GPU is 'GPU-3f1'"),
        (["cuda:0", "cuda:GPU-3f1a"], "'cuda:GPU-3f1a' is the same GPU as cuda:0, GPU-3f1a-77"),
        (["cuda:0=81GiB"], "the budget is 81.0 GiB, the GPU has 80.0 GiB"),
        (["cuda:0=64MiB"], "at least 8 chunks of chunk_bytes, 128.0 MiB"),
        (["cuda:0=120%"], "must be a percentage above 0"),
    ],
)
def test_device_errors(devices: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device_budgets(load(None, {"device": devices}), GIB, gpus=lambda: GPUS)


def test_no_device_is_half_of_the_machine() -> None:
    (device,) = device_budgets(NodeConfig(), GIB)
    assert (device.name, device.budget_bytes) == ("cpu:0", GIB // 2)
    (device,) = device_budgets(load(None, {"device": ["cpu:1=25 %"]}), GIB)
    assert (device.name, device.budget_bytes) == ("cpu:1", GIB // 4)


def test_gpus_by_number_and_by_uuid_leave_room_for_the_driver() -> None:
    config = load(None, {"device": ["cuda", "cuda:gpu-3f1b=50%", "cpu=512MiB"]})
    assert [(one.name, one.budget_bytes, one.uuid) for one in device_budgets(config, GIB, gpus=lambda: GPUS)] == [
        ("cuda:0", 80 * GIB - CUDA_LEFT_BYTES, "GPU-3f1a-77"),
        ("cuda:gpu-3f1b", 70 * GIB, "GPU-3f1b-78"),
        ("cpu:0", GIB // 2, ""),
    ]


def test_slices_and_gpus_that_others_use() -> None:
    gpus = [
        GpuMemory(0, "GPU-a", 80 * GIB, unusable="it is divided by MIG; name a slice: MIG-1"),
        GpuMemory(0, "MIG-1", 10 * GIB, is_slice=True),
        GpuMemory(1, "GPU-b", 80 * GIB, taken_bytes=30 * GIB),
        GpuMemory(2, "GPU-c", 80 * GIB, taken_bytes=79 * GIB),
    ]

    def budgets(*devices: str) -> list[int]:
        return [one.budget_bytes for one in device_budgets(load(None, {"device": list(devices)}), GIB, gpus=lambda: gpus)]

    assert budgets("cuda:MIG-1", "cuda:1") == [10 * GIB - CUDA_LEFT_BYTES, 50 * GIB - CUDA_LEFT_BYTES]
    assert budgets("cuda:1=78GiB") == [78 * GIB], "a size that is given is taken at its word"
    with pytest.raises(ConfigError, match=r"'cuda:0': it is divided by MIG; name a slice: MIG-1"):
        budgets("cuda:0")
    with pytest.raises(ConfigError, match=r"at least 8 chunks .*; other processes hold 79\.0 GiB of 80\.0 GiB"):
        budgets("cuda:2")
    with pytest.raises(ConfigError, match=r"no GPU is '3'; the driver has 0 \(GPU-a\), MIG-1, 1 \(GPU-b\)"):
        budgets("cuda:3")


def test_without_a_driver_a_cuda_device_is_an_error_and_a_cpu_device_asks_nobody() -> None:
    def gpus() -> list[GpuMemory]:
        raise NoGpus("NVIDIA's driver cannot be asked: Driver Not Loaded")

    assert device_budgets(load(None, {"device": ["cpu=1GiB"]}), GIB, gpus=gpus)
    with pytest.raises(ConfigError, match="flags: device: 'cuda:0': NVIDIA's driver cannot be asked: Driver Not Loaded"):
        device_budgets(load(None, {"device": ["cuda:0"]}), GIB, gpus=gpus)


def test_a_node_with_a_gpu_has_other_defaults_unless_they_are_given() -> None:
    mixed = load(None, {"device": ["cpu=1GiB", "cuda=1GiB"]})
    assert (mixed.chunk_bytes, mixed.max_num_batched_tokens, mixed.turn_budget_ms) == (16 << 20, 4096, 5.0)
    assert load(None, {"device": ["cuda=1GiB"], "max_num_batched_tokens": "512"}).max_num_batched_tokens == 512
    assert load(None, {"device": ["cuda=1GiB"], "chunk_bytes": "4MiB"}).chunk_bytes == 4 << 20
    assert load(None, {"device": ["cpu=1GiB"]}).chunk_bytes == 2 << 20
