"""Captures steps with prompt chunks as CUDA graphs, in the sizes of mixed_steps.py. A graph is kept only if the device replays it
in no more time than the host takes to launch the same step without a graph. So padding makes no step slower, whatever the model and
the GPU.

Sizes are captured in idle time. If a model is never idle, a size is captured once enough steps have needed it. graph_room.py bounds
the number of graphs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.cuda.graph_room import GraphRoom
from engine.cuda.graphs import StepGraph, StepGraphs, StepOutputs, let_go
from engine.cuda.mixed_steps import MixedSize
from engine.cuda.sequences import Staging

log = logging.getLogger("engine")

# Steps without a fitting graph before it is captured between steps. A capture takes as long as some ten of these steps.
STEPS_BEFORE_CAPTURE = 16
REPLAYS = 3  # replays that are measured; the fastest counts, since an idle device is slow at first


def pays(device_s: float, launch_s: float) -> bool:
    """Returns whether a graph is worth keeping. device_s: the seconds in which the device replays it. launch_s: the seconds in
    which the host launches the same step without it."""
    return device_s <= launch_s


class MixedGraphs(StepGraphs[MixedSize]):
    """The CUDA graphs of one model's steps with prompt chunks. sizes: the possible sizes, the smallest first."""

    def __init__(
        self,
        step: Callable[[dict[str, Tensor]], StepOutputs],
        staging: Staging,
        device: torch.device,
        sizes: Sequence[MixedSize],
        room: GraphRoom | None = None,
        replaying: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(step, staging, device, room=room, replaying=replaying)
        self._sizes = tuple(sizes)
        self._without_gain: set[MixedSize] = set()
        self._needed: Counter[MixedSize] = Counter()  # how often each size was needed and not captured

    def none(self) -> MixedGraphs:
        """Returns a MixedGraphs without sizes, so that every step launches its kernels one by one."""
        return MixedGraphs(self._step, self._staging, self._device, (), replaying=self._replaying)

    def missing(self) -> list[MixedSize]:
        """Returns the sizes that are not captured yet and may be captured now, the smallest first."""
        if not self._sizes or not self._room.is_free():
            return []
        return [size for size in self._sizes if size not in self.captured and self._is_allowed(size)]

    def size_for(self, num_tokens: int, num_rows: int, num_tiles: int) -> MixedSize | None:
        """Returns the smallest captured size that holds a step of num_tokens tokens, num_rows rows and num_tiles query tiles; None
        if there is none."""
        held = num_tokens, num_rows, num_tiles
        return next((size for size in self._sizes if size.holds(*held) and size in self.captured), None)

    def needed(self, num_tokens: int, num_rows: int, num_tiles: int) -> MixedSize | None:
        """Returns the size whose graph should be captured before a step of num_tokens tokens, num_rows rows and num_tiles query
        tiles runs; None: no graph should be captured now. A size is captured only if more than STEPS_BEFORE_CAPTURE steps lacked
        its graph; each call counts one such step."""
        for size in self._sizes:
            if size.holds(num_tokens, num_rows, num_tiles) and self._is_allowed(size):
                if size in self.captured:
                    return None
                self._needed[size] += 1
                return size if self._needed[size] > STEPS_BEFORE_CAPTURE and self._room.is_free_for_a_step() else None
        return None

    def capture(self, size: MixedSize, padding: Mapping[str, Any]) -> bool:
        """Captures a graph for steps of this size. Returns whether there is one now; False: there is no room or memory, or the
        graph saves no time. If it saves no time, neither this size nor a larger one is tried again: a larger step takes the device
        longer, while the host launches it as fast as a smaller one."""
        self._needed.pop(size, None)
        if not super().capture(size, padding):
            return False
        graph = self.captured[size]
        device_s = self._replay_s(graph)
        if pays(device_s, graph.launch_s):
            return True
        log.info(
            "steps of %s have no graph: the device takes %.1f ms for one, the host %.1f ms to launch it",
            self._named(size),
            device_s * 1e3,
            graph.launch_s * 1e3,
        )
        larger = [other for other in self._sizes if other.num_rows >= size.num_rows and other.num_tokens >= size.num_tokens]
        self._without_gain.update(larger)
        let_go([self.captured.pop(other) for other in larger if other in self.captured])
        return False

    def _is_allowed(self, size: MixedSize) -> bool:
        return size not in self._without_gain and not self.is_refused(size)

    def _replay_s(self, graph: StepGraph) -> float:
        """Returns the seconds in which the device replays a graph that was just captured; 0 if there is no device."""
        if self._device.type != "cuda":
            return 0.0
        graph.graph.replay()  # the first replay uploads the graph to the device
        seconds = []
        for _ in range(REPLAYS):
            started, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
            started.record()
            graph.graph.replay()
            done.record()
            done.synchronize()
            seconds.append(float(started.elapsed_time(done)) / 1e3)
        return min(seconds)

    def _named(self, size: MixedSize) -> str:
        return f"up to {size.num_tokens} tokens of {size.num_rows} rows"
