"""The machine's own GPU driver, asked through daemon/gpu/nvml.py."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.gpu.inventory import Gpu, GpuFault, Inventory


class Driver:
    """The Inventory of this machine's GPUs, from NVIDIA's driver. NVIDIA's management library is loaded on first use."""

    def __init__(self) -> None:
        self._nvml: Inventory | None = None

    def gpus(self) -> Sequence[Gpu]:
        return self._loaded().gpus()

    def next_fault(self, timeout_s: float) -> GpuFault | None:
        return self._loaded().next_fault(timeout_s)

    def _loaded(self) -> Inventory:
        if self._nvml is None:
            from daemon.gpu.nvml import Nvml

            self._nvml = Nvml()
        return self._nvml
