"""Exchanges through the host, for ranks that NCCL cannot join: several on one GPU, or on the CPU with interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.cuda.collectives import Collectives
from tests.engine.gloo import Gloo


class ThroughHost:
    """An engine.cuda.collectives.Connects."""

    def new_id(self) -> bytes:
        return Gloo().new_id()

    def connect(self, group_id: bytes, rank: int, size: int) -> HostGroup:
        return HostGroup(Gloo().connect(group_id, rank, size))

    def give_up(self) -> None:
        Gloo().give_up()


class HostGroup:
    """An engine.cuda.collectives.Collectives whose calls return when the exchange has ended. group: exchanges tensors of the
    host."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Does nothing, because all is set up."""

    def sum(self, x: Tensor) -> None:
        copy = x.cpu()
        self._group.sum(copy)
        x.copy_(copy)

    def share_first(self, x: Tensor) -> None:
        copy = x.cpu()
        self._group.share_first(copy)
        x.copy_(copy)

    def gather(self, part: Tensor, out: Tensor) -> None:
        copies = torch.empty(out.shape, dtype=out.dtype)
        self._group.gather(part.cpu(), copies)
        out.copy_(copies)

    def abort(self) -> None:
        self._group.abort()

    def release(self) -> None:
        self._group.release()
