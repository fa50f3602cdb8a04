"""Keeps the evicted models of a GPU until they return. Their CUDA graphs and block tables stay on the device, so that another load
of the same weights to the same addresses uses them again. The memory that all evicted models keep is bounded.
"""

from __future__ import annotations

import logging
import threading

from engine.cuda.model import CudaModel

log = logging.getLogger("engine")

MOST_KEPT_BYTES = 64 << 20  # an eighth of what torch may keep besides the work space (work_space.KEPT_BYTES)


class KeptModels:
    """The models of a GPU, loaded or evicted: for each name the latest model, with the identity of its load (what must be equal for
    a later load to use the model again). Safe for several threads, because each load runs in a thread of its own. most_bytes: the
    most device memory that evicted models may keep together."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._models: dict[str, tuple[object, CudaModel]] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> CudaModel | None:
        """Returns the latest model of this name. Returns None if none was loaded, or if it was dropped."""
        known = self._models.get(name)
        return None if known is None else known[1]

    def restored(self, name: str, identity: object) -> CudaModel | None:
        """Makes the evicted model of this name usable again, and returns it, if it was made for a load with the same identity.
        Otherwise drops it and returns None."""
        with self._lock:
            known = self._models.get(name)
            if known is not None and known[0] == identity:
                known[1].restore()
                return known[1]
        self.give_up(name)
        return None

    def add(self, name: str, identity: object, model: CudaModel) -> None:
        """Keeps a model that was just loaded. If evicted models then keep more than most_bytes, those evicted longest ago are
        dropped."""
        with self._lock:
            self._models[name] = identity, model
        self._give_up_evicted(self._most_bytes)

    def give_up(self, name: str) -> None:
        """Drops the model of this name with its graphs, if there is one, so that its next load makes a new one."""
        with self._lock:
            known = self._models.pop(name, None)
        if known is not None:
            known[1].drop_graphs()

    def give_up_evicted(self) -> None:
        """Drops all evicted models with their graphs, so that their next loads make new ones."""
        self._give_up_evicted(-1)

    def _give_up_evicted(self, most_bytes: int) -> None:
        """Drops evicted models with their graphs, beginning with those evicted longest ago, until the remaining ones keep at most
        most_bytes."""
        with self._lock:
            evicted = sorted(
                ((evicted_s, name) for name, (_, model) in self._models.items() if (evicted_s := model.evicted_s) is not None),
                reverse=True,
            )
            kept_bytes = 0
            for _, name in evicted:
                model = self._models[name][1]
                kept_bytes += model.kept_bytes
                if kept_bytes > most_bytes:
                    log.info("%s: graphs and block tables of its last load are given up", name)
                    del self._models[name]
                    model.drop_graphs()
