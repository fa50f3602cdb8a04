"""A service manager and a GPU driver for tests of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tests.daemon.service_manager import NotifySocket


@pytest.fixture
def notify(tmp_path: Path) -> Iterator[NotifySocket]:
    """What a service manager listens to and keeps."""
    made = NotifySocket(tmp_path)
    yield made
    made.close()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """pynvml's functions as a table that a test may change; an exception is raised."""
    unsupported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetMigMode": unsupported,
        "nvmlDeviceGetMaxMigDeviceCount": 3,
        "nvmlDeviceGetMigDeviceHandleByIndex": unsupported,
        "nvmlDeviceGetComputeMode": pynvml.NVML_COMPUTEMODE_DEFAULT,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlSystemGetCudaDriverVersion": 13000,
        "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetUUID": "GPU-a",
        "nvmlDeviceGetName": "H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, reserved=3, used=40),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=10),
        "nvmlDeviceGetPowerUsage": 612_500,
        "nvmlDeviceGetTemperature": 55,
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (1, 2, 0, 0),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1 << 30, usedGpuMemory=40)],
        "nvmlEventSetCreate": "events",
        "nvmlDeviceRegisterEvents": unsupported,
        "nvmlEventSetWait_v2": pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT),
    }

    def answer(name: str) -> Any:
        def function(*arguments: Any, **__: Any) -> Any:
            found = answers[name](*arguments) if callable(answers[name]) else answers[name]
            if isinstance(found, Exception):
                raise found
            return found

        return function

    for name in answers:
        monkeypatch.setattr(pynvml, name, answer(name))
    return answers
