"""What is made of what a driver tells: who holds memory, faults, and NVML's answers with and without sensors."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from config.devices import NoGpus
from config.schema import DeviceBudget
from daemon.gpu import question
from daemon.gpu.inventory import Gpu, GpuFault, GpuProcess, holders, remarks, rows_of, why_no_memory
from daemon.gpu.nvml import Nvml
from daemon.gpu.question import GpuQuestion
from daemon.gpu.watch import GpuWatch
from tests.daemon.no_thread import no_thread

GIB = 1 << 30
DEVICE = DeviceBudget("cuda:0", 79 * GIB, "GPU-a")
HELD = (GpuProcess(7, "python", 3 * GIB), GpuProcess(8, "Xorg", None), GpuProcess(9, "trainer", 40 * GIB))


class Scripted:
    def __init__(self, gpus: Sequence[Gpu] | str, faults: Sequence[GpuFault] = ()) -> None:
        self._gpus = gpus
        self._faults: queue.Queue[GpuFault] = queue.Queue()
        for fault in faults:
            self._faults.put(fault)

    def gpus(self) -> Sequence[Gpu]:
        if isinstance(self._gpus, str):
            raise NoGpus(self._gpus)
        return self._gpus

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        try:
            return self._faults.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            raise NoGpus("no more is scripted") from None


def test_who_holds_the_memory_is_named_the_largest_first() -> None:
    gpu = Gpu(0, "GPU-a", "H100", 80 * GIB, 43 * GIB, processes=HELD)
    assert holders(gpu, {7}) == "pid 9 trainer 40.0 GiB, pid 8 Xorg ?"
    assert why_no_memory(Scripted([gpu]), DEVICE, "MemoryError: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") == (
        "the driver cannot give 79.0 GiB (MemoryError: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY): 37.0 GiB of 80.0 GiB are free, "
        "held by pid 9 trainer 40.0 GiB, pid 7 python 3.0 GiB, pid 8 Xorg ?"
    )
    many = Gpu(0, "GPU-a", "H100", 80 * GIB, processes=tuple(GpuProcess(pid, "x", pid) for pid in range(9)))
    assert holders(many).endswith("pid 4 x 4 B, 4 more")
    assert "no GPU-a any more" in why_no_memory(Scripted([]), DEVICE, "e")
    assert why_no_memory(Scripted("gone"), DEVICE, "e").endswith("who holds its memory is not known: gone")


def test_rows_say_which_gpus_are_the_nodes() -> None:
    first, second = rows_of([Gpu(0, "GPU-a", "x", 1), Gpu(1, "GPU-b", "x", 1)], [DEVICE], {"GPU-a": [31]})
    assert (first["device"], first["budget_bytes"], first["xids"]) == ("cuda:0", 79 * GIB, [31])
    assert (second["device"], second["budget_bytes"], second["xids"]) == ("", 0, [])


async def test_faults_are_told_on_the_loop_of_the_nodes_gpus_only() -> None:
    told: list[tuple[str, int]] = []
    faults = [GpuFault("GPU-a", 13), GpuFault("GPU-b", 79), GpuFault("GPU-a", 48), GpuFault("", 79)]
    last = asyncio.Event()

    def on_fault(device: DeviceBudget, fault: GpuFault) -> None:
        told.append((device.name, fault.xid))
        if len(told) == 3:
            last.set()

    watch = GpuWatch(Scripted([], faults), [DEVICE, DeviceBudget("cpu:0", 1)], on_fault)
    watch.start()
    async with asyncio.timeout(20):
        await last.wait()
    watch.stop()
    assert told == [("cuda:0", 13), ("cuda:0", 48), ("cuda:0", 79)], "a GPU that is not there any more is the lost one"
    assert watch.xids == {"GPU-a": [13, 48, 79], "GPU-b": [79]}
    assert [GpuFault("", xid).is_fatal for xid in (13, 31, 43, 48, 79, 119)] == [False, False, False, True, True, True]


async def test_a_driver_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "ANSWER_LIMIT_S", 0.2)
    answers, num_asked = threading.Event(), 0

    class Hanging(Scripted):
        def gpus(self) -> Sequence[Gpu]:
            nonlocal num_asked
            num_asked += 1
            answers.wait(60)
            return super().gpus()

    asked = GpuQuestion(Hanging([]))
    for _ in range(2):
        with pytest.raises(NoGpus, match=r"the driver does not answer within 0\.2 s"):
            await asked.ask()
    assert num_asked == 1
    answers.set()
    monkeypatch.setattr(question, "ANSWER_LIMIT_S", 60.0)
    assert list(await asyncio.gather(asked.ask(), asked.ask())) == [[], []]
    with pytest.raises(NoGpus, match="gone"):
        await GpuQuestion(Scripted("gone")).ask()


async def test_no_thread_to_listen_with(caplog: pytest.LogCaptureFixture) -> None:
    watch = GpuWatch(Scripted([], []), [DEVICE], lambda device, fault: None)
    with no_thread():
        watch.start()
    assert "faults of GPUs will not be told of: thread gpu faults: it did not begin" in caplog.text


def test_nvml_is_read_with_every_sensor(nvml: dict[str, Any]) -> None:
    held = (GpuProcess(1 << 30, "unknown", 40),)
    assert Nvml().gpus() == [Gpu(0, "GPU-a", "H200", 97, 40, 55, 93, 612.5, 0, 3, "", held)]
    nvml["nvmlDeviceGetRemappedRows"] = (0, 1, 1, 0)
    assert Nvml().gpus()[0].problem == "a bad memory row is taken out of use at the next reset"
    nvml["nvmlDeviceGetRemappedRows"] = (0, 1, 0, 1)
    assert "needs repair" in Nvml().gpus()[0].problem


def test_nvml_without_sensors_driver_or_gpu(nvml: dict[str, Any]) -> None:
    for name in ("UtilizationRates", "PowerUsage", "Temperature", "TotalEccErrors", "RemappedRows", "ComputeRunningProcesses"):
        nvml[f"nvmlDeviceGet{name}"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert Nvml().gpus() == [Gpu(0, "GPU-a", "H200", 97, 40)]
    nvml["nvmlDeviceGetUUID"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    (lost,) = Nvml().gpus()
    assert (lost.uuid, lost.problem) == ("", "GPU is lost")
    nvml["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(NoGpus, match="NVIDIA's driver cannot be asked: Driver Not Loaded"):
        Nvml().gpus()


def test_what_no_engine_can_run_on_is_told(nvml: dict[str, Any]) -> None:
    def unusable() -> str:
        (gpu,) = Nvml().gpus()
        assert gpu.memory.unusable == gpu.unusable
        return gpu.unusable

    assert unusable() == ""
    nvml["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert unusable() == "its compute mode is Prohibited: `nvidia-smi -i 0 -c DEFAULT` allows programs on it"
    nvml["nvmlDeviceGetCudaComputeCapability"] = [7, 5]
    assert "its compute capability is 7.5: 8.0 or newer is needed" in unusable()
    nvml["nvmlSystemGetCudaDriverVersion_v2"] = 11040
    assert unusable() == "the driver 580.1 is for CUDA 11.4: 12.0 or newer is needed"
    nvml["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(NoGpus, match=r"NVML Shared Library Not Found; libnvidia-ml\.so\.1 .*CAPABILITIES=compute,utility"):
        Nvml().gpus()


def test_slices_are_gpus_of_their_own(nvml: dict[str, Any]) -> None:
    def handle(_: str, number: int) -> Any:
        return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND) if number == 1 else f"slice {number}"

    nvml["nvmlDeviceGetMigMode"] = [1, 1]
    nvml["nvmlDeviceGetMigDeviceHandleByIndex"] = handle
    nvml["nvmlDeviceGetUUID"] = lambda of: "GPU-a" if of == "handle" else f"MIG-{of[-1]}"
    nvml["nvmlDeviceGetName"] = lambda of: "H100" if of == "handle" else "H100 MIG 1g.10gb"
    whole, first, second = Nvml().gpus()
    assert whole.unusable == "it is divided by MIG; name a slice: MIG-0 (H100 MIG 1g.10gb, 97 B), MIG-2 (H100 MIG 1g.10gb, 97 B)"
    assert [(one.index, one.uuid, one.slice_of, one.unusable) for one in (first, second)] == [
        (0, "MIG-0", "GPU-a", ""),
        (0, "MIG-2", "GPU-a", ""),
    ]
    assert first.memory.is_slice
    nvml["nvmlDeviceGetMigDeviceHandleByIndex"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    assert [gpu.unusable for gpu in Nvml().gpus()] == ["MIG is enabled and has no slices: nvidia-smi mig -cgi"]


async def test_a_fault_of_a_divided_gpu_is_one_of_its_slices() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    gpus = [Gpu(0, "GPU-a", "x", 1), Gpu(0, "MIG-1", "x", 1, slice_of="GPU-a"), Gpu(1, "GPU-b", "x", 1)]
    devices = [DeviceBudget("cuda:MIG-1", 1, "MIG-1"), DeviceBudget("cuda:1", 1, "GPU-b")]
    watch = GpuWatch(Scripted(gpus, [GpuFault("GPU-a", 48)]), devices, lambda device, fault: told.put_nowait(device.name))
    watch.start()
    async with asyncio.timeout(20):
        assert await told.get() == "cuda:MIG-1"
    watch.stop()
    assert told.empty()


def test_what_others_hold_is_told_and_engines_are_no_others(nvml: dict[str, Any]) -> None:
    engine = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()", "-m", "engine", "--channel-fd", "3"]
    with subprocess.Popen(engine, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = {process.pid: 50, os.getpid(): 7, 1 << 30: 11}  # an engine, another program, one that cannot be seen
        held = [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in used.items()]
        nvml["nvmlDeviceGetComputeRunningProcesses"] = held
        nvml["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        found = Nvml()
        (gpu,) = found.gpus()
        assert (gpu.taken_bytes, gpu.memory.taken_bytes) == (7, 7)
        first, second = remarks(found, [DeviceBudget("cpu:0", 1), DeviceBudget("cuda:0", 90, "GPU-a")])
        assert process.stdin is not None
        process.stdin.close()
    assert re.fullmatch(rf"cuda:0: others hold 7 B of 97 B: pid {os.getpid()} \S+ 7 B; its budget is 90 B", first)
    assert second.startswith("cuda:0: its compute mode is Exclusive: one process at a time")
    assert remarks(Scripted("no driver"), [DeviceBudget("cpu:0", 1)]) == []
    assert remarks(Scripted("no driver"), [DEVICE]) == ["no driver"]


def test_nvmls_events(nvml: dict[str, Any]) -> None:
    asked = Nvml()
    assert asked.next_fault(0.1) is None
    nvml["nvmlEventSetWait_v2"] = SimpleNamespace(device="handle", eventData=79)
    assert asked.next_fault(0.1) == GpuFault("GPU-a", 79)
    nvml["nvmlEventSetWait_v2"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert asked.next_fault(0.1) == GpuFault("", 79)
    nvml["nvmlEventSetWait_v2"] = pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
    with pytest.raises(NoGpus, match="Uninitialized"):
        asked.next_fault(0.1)
