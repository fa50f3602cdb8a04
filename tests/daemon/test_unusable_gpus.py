"""What hearthd's start and `hearth doctor` say of a GPU that no engine can run on: one clear line, whatever the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from daemon.cli.main import run
from daemon.main import main

Answers = dict[str, Any]
Capture = pytest.CaptureFixture[str]
OTHER = SimpleNamespace(pid=os.getpid(), usedGpuMemory=20 << 30)  # this process, which is no engine of hearthd


def prohibited(nvml: Answers) -> None:
    nvml["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_PROHIBITED


def exclusive(nvml: Answers) -> None:
    nvml["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    nvml["nvmlDeviceGetComputeRunningProcesses"] = []


def exclusive_and_held(nvml: Answers) -> None:
    exclusive(nvml)
    nvml["nvmlDeviceGetComputeRunningProcesses"] = [OTHER]


def divided(nvml: Answers) -> None:
    nvml["nvmlDeviceGetMigMode"] = [1, 1]
    no_slice = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    nvml["nvmlDeviceGetMigDeviceHandleByIndex"] = lambda _, number: no_slice if number else "slice"
    nvml["nvmlDeviceGetUUID"] = lambda of: "MIG-8c1" if of == "slice" else "GPU-a"
    nvml["nvmlDeviceGetName"] = lambda of: "H100 MIG 3g.40gb" if of == "slice" else "H100"
    nvml["nvmlDeviceGetComputeRunningProcesses"] = lambda of: []


def divided_exclusive_and_held(nvml: Answers) -> None:
    divided(nvml)
    nvml["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    nvml["nvmlDeviceGetComputeRunningProcesses"] = lambda of: [OTHER] if of == "slice" else []


def without_slices(nvml: Answers) -> None:
    nvml["nvmlDeviceGetMigMode"] = [1, 1]


def turing(nvml: Answers) -> None:
    nvml["nvmlDeviceGetCudaComputeCapability"] = [7, 5]


def old_driver(nvml: Answers) -> None:
    nvml["nvmlSystemGetCudaDriverVersion"] = nvml["nvmlSystemGetCudaDriverVersion_v2"] = 11040
    nvml["nvmlSystemGetDriverVersion"] = "470.256"


def no_nvml(nvml: Answers) -> None:
    nvml["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def no_driver(nvml: Answers) -> None:
    nvml["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


HELD = "its compute mode is Exclusive and others hold it: pid PID NAME 20.0 GiB; end them, or `nvidia-smi -i 0 -c DEFAULT`"
HINT = "libnvidia-ml.so.1 comes with the driver, and into a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
REFUSED: list[tuple[Callable[[Answers], None], str, str]] = [
    (prohibited, "cuda:0", "its compute mode is Prohibited: `nvidia-smi -i 0 -c DEFAULT` allows programs on it"),
    (exclusive_and_held, "cuda:0", HELD),
    (divided, "cuda:0", "it is divided by MIG; name a slice: MIG-8c1 (H100 MIG 3g.40gb, 78.0 GiB)"),
    (divided_exclusive_and_held, "cuda:MIG-8c1", HELD),
    (without_slices, "cuda:0", "MIG is enabled and has no slices: nvidia-smi mig -cgi"),
    (turing, "cuda:0", "its compute capability is 7.5: 8.0 or newer is needed (Ampere, Ada, Hopper, Blackwell)"),
    (old_driver, "cuda:0", "the driver 470.256 is for CUDA 11.4: 12.0 or newer is needed"),
]
NO_DRIVER: list[tuple[Callable[[Answers], None], str]] = [
    (no_nvml, f"NVIDIA's driver cannot be asked: NVML Shared Library Not Found; {HINT}"),
    (no_driver, "NVIDIA's driver cannot be asked: Driver Not Loaded"),
]


@pytest.fixture
def config(tmp_path: Path, nvml: Answers) -> Callable[[str], str]:
    """Returns a function that writes the settings of a node with one device, on a GPU of 78 GiB, and returns the file's path."""
    nvml["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=80 << 30, reserved=2 << 30, used=0)
    (tmp_path / "models").mkdir()

    def written(device: str) -> str:
        path = tmp_path / "node.toml"
        settings = {"models_dir": f"{tmp_path}/models", "cache_dir": f"{tmp_path}/cache", "listen": "127.0.0.1:0"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in {**settings, "device": [device]}.items()]
        path.write_text("\n".join(lines))
        return str(path)

    return written


def expected(text: str) -> str:
    return text.replace("PID", str(os.getpid())).replace("NAME", Path("/proc/self/comm").read_text().strip())


@pytest.mark.parametrize(("arrange", "device", "why"), REFUSED, ids=[one[0].__name__ for one in REFUSED])
def test_a_gpu_that_cannot_be_used_is_one_line(
    arrange: Callable[[Answers], None], device: str, why: str, nvml: Answers, config: Callable[[str], str], capsys: Capture
) -> None:
    arrange(nvml)
    path = config(device)
    line = f"{path}:4: device: '{device}': {expected(why)}"
    assert main(["--config", path]) == 2
    assert capsys.readouterr().err == f"hearthd: {line}\n"
    assert run(["doctor", "--config", path]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"hearth: {line}; correct it first\n")


@pytest.mark.parametrize(("arrange", "why"), NO_DRIVER, ids=[one[0].__name__ for one in NO_DRIVER])
def test_no_driver_is_one_line(
    arrange: Callable[[Answers], None], why: str, nvml: Answers, config: Callable[[str], str], capsys: Capture
) -> None:
    arrange(nvml)
    path = config("cuda:0")
    assert main(["--config", path]) == 2
    assert capsys.readouterr().err == f"hearthd: {path}:4: device: 'cuda:0': {why}\n"
    assert run(["doctor", "--config", path]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if " · driver: " in line]
    assert told == [f"fail · driver: {why} · install NVIDIA's driver, or configure no cuda device"]


USED = "0 B of 78.0 GiB used"
ALONE = "its compute mode is Exclusive: one process at a time, so no model can have an engine of its own there (isolate)"


@pytest.mark.parametrize(
    ("arrange", "device", "found"),
    [
        (divided, "cuda:MIG-8c1", f"ok   · cuda:MIG-8c1: H100 MIG 3g.40gb, {USED}"),
        (divided, "cuda:mig-8", f"ok   · cuda:mig-8: H100 MIG 3g.40gb, {USED}"),
        (exclusive, "cuda:0", f"warn · cuda:0: H200, {USED}; {ALONE} · nvidia-smi -i 0 -c DEFAULT"),
    ],
)
def test_a_gpu_that_can_be_used_starts(
    arrange: Callable[[Answers], None], device: str, found: str, nvml: Answers, config: Callable[[str], str], capsys: Capture
) -> None:
    arrange(nvml)
    path = config(device)
    assert main(["--config", path, "--check-config"]) == 0
    assert f"devices {device} 76.5 GiB" in capsys.readouterr().out
    run(["doctor", "--config", path])
    assert [line for line in capsys.readouterr().out.splitlines() if f" · {device}: " in line] == [found]
