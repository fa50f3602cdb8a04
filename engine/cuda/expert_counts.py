"""Reads from a GPU how many tokens each expert of a model has computed, without waiting for the model's steps."""

from __future__ import annotations

import torch

from engine.cuda.copies import EventFence
from engine.layers.expert_counts import ExpertCounts
from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import LongArray


class DeviceExpertCounts(ExpertCounts):
    """The counts of one model's experts on a GPU: how many tokens each has computed. The method `news` copies the counts to
    page-locked memory after the steps launched so far. With wait=True it waits for the copy. With wait=False it returns counts only
    if the copy has ended; otherwise a later call returns them."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self._is_cuda = device.type == "cuda"  # False where the kernels are interpreted
        self._copy = torch.empty(self._table.shape, dtype=torch.int64, pin_memory=self._is_cuda)
        self._copied: EventFence | None = None  # passed when the copy under way has ended; None: there is none

    def _on_host(self, wait: bool) -> LongArray | None:
        if not self._is_cuda:
            return super()._on_host(wait)
        fence, self._copied = self._copied, None
        if fence is None or wait:  # on one stream, so a copy that is under way ends before this one begins
            self._copy.copy_(self._table, non_blocking=True)
            fence = EventFence(torch.cuda.default_stream(self._table.device))
        if wait:
            fence.wait()
        elif not fence.done():
            self._copied = fence
            return None
        copied: LongArray = self._copy.numpy().copy()
        return copied
