"""Connects ranks by gloo in the place of NCCL (engine.cuda.collectives), for interpreted kernels. Counts the exchanges."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from engine.cuda.collectives import ID_BYTES

# torch's stubs lack FileStore here and the options of gloo's group
_TORCH: Any = distributed
LIMIT = timedelta(seconds=60)


class Gloo:
    """An engine.cuda.collectives.Connects. The id of a group is the name of a file, in which the ranks find each other."""

    def new_id(self) -> bytes:
        fd, path = tempfile.mkstemp(prefix="gloo-")
        os.close(fd)
        assert len(path) < ID_BYTES
        return path.encode().ljust(ID_BYTES, b"\0")

    def connect(self, group_id: bytes, rank: int, size: int) -> GlooGroup:
        path = group_id.rstrip(b"\0").decode()
        store = _TORCH.FileStore(path, size)
        device = _TORCH.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = _TORCH.ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], LIMIT
        return GlooGroup(_TORCH.ProcessGroupGloo(store, rank, size, options), store, Path(path))

    def give_up(self) -> None:
        """Does nothing: gloo waits until LIMIT, and looks for the others only now and then."""


class GlooGroup:
    """An engine.cuda.collectives.Collectives. Its calls return when the exchange has ended or was aborted. path: the file in which
    the ranks have found each other."""

    def __init__(self, group: Any, store: Any, path: Path) -> None:
        self._group, self._store, self._path = group, store, path
        self._aborted = threading.Event()
        self.num_exchanges = 0

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Does nothing, because all is set up."""

    def sum(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self._wait(self._group.allreduce([x]))

    def share_first(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self._wait(self._group.broadcast(x, 0))

    def gather(self, part: Tensor, out: Tensor) -> None:
        assert part.is_contiguous()
        assert out.is_contiguous()
        self._wait(self._group.allgather(list(out.unbind()), part))

    def abort(self) -> None:
        self._aborted.set()
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        pass

    def _wait(self, work: Any) -> None:
        self.num_exchanges += 1
        while not work.is_completed() and not self._aborted.is_set():
            time.sleep(1e-5)
        if not self._aborted.is_set():
            try:
                work.wait()
            except RuntimeError:  # the other rank is gone, for which NCCL would wait
                assert self._aborted.wait(LIMIT.total_seconds())
