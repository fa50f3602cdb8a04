"""The NVIDIA driver, as its management library tells."""

from __future__ import annotations

import os
from dataclasses import dataclass

from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding

MIN_CUDA = 12000  # what the driver must speak, as NVML writes 12.0


@dataclass(slots=True, frozen=True)
class Driver:
    """cuda: 1000 x major + 10 x minor. names: of the GPUs."""

    version: str
    cuda: int
    names: tuple[str, ...]


def driver(found: Driver | str, wants_gpu: bool, has_uvm: bool) -> Finding:
    """found: or why there is none. has_uvm: /dev/nvidia-uvm is there."""
    if isinstance(found, str):
        if not wants_gpu:
            return Finding("driver", OK, f"no GPU ({found}); none is configured")
        return Finding("driver", FAIL, found, "install NVIDIA's driver, or configure no cuda device")
    text = f"{found.version}, CUDA {found.cuda // 1000}.{found.cuda % 1000 // 10}, {', '.join(found.names) or 'no GPU'}"
    if not found.names and wants_gpu:
        return Finding("driver", FAIL, text, "the driver sees no GPU: nvidia-smi, journalctl -k")
    if found.cuda < MIN_CUDA:
        return Finding("driver", FAIL if wants_gpu else WARN, text, "upgrade to a driver for CUDA 12 or newer")
    if found.names and not has_uvm:
        change = "systemctl enable --now nvidia-persistenced, or nvidia-modprobe -u"
        return Finding("driver", WARN, text + ", /dev/nvidia-uvm is missing", change)
    return Finding("driver", OK, text)


def find_driver(wants_gpu: bool) -> Finding:
    return driver(_ask(), wants_gpu, os.path.exists("/dev/nvidia-uvm"))


def _ask() -> Driver | str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    try:
        names = tuple(
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(pynvml.nvmlDeviceGetCount())
        )
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlSystemGetCudaDriverVersion()), names)
    except pynvml.NVMLError as error:
        return str(error)
    finally:
        pynvml.nvmlShutdown()
