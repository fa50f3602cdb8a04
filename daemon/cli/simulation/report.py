"""Shows the results of a simulation, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from daemon.cli.table import duration, size, table
from scheduler.simulate.compare import Comparison
from scheduler.simulate.outcome import Figures
from scheduler.simulate.simulation import SimulatedNode
from scheduler.simulate.trace import TraceRequest


class Progress:
    """A line that shows how far a simulation has come and overwrites itself. Writes nothing unless `file` is a terminal."""

    def __init__(self, file: TextIO) -> None:
        self._file = file if file.isatty() else None

    def show(self, policy: str, done: int, total: int) -> None:
        if self._file is not None:
            self._file.write(f"\r\x1b[K{policy}: {done} of {total} requests")
            self._file.flush()

    def end(self) -> None:
        if self._file is not None:
            self._file.write("\r\x1b[K")
            self._file.flush()


@dataclass(slots=True)
class Report:
    trace: Sequence[TraceRequest]
    node: SimulatedNode
    slo_s: float
    found: Comparison
    wall_s: float

    @property
    def simulated_s(self) -> float:
        return sum(figures.duration_s for figures in self.found.policies)

    def as_json(self) -> dict[str, Any]:
        return {
            "num_requests": len(self.trace),
            "trace_s": self.trace[-1].time_s - self.trace[0].time_s,
            "devices": dict(self.node.devices),
            "chunk_bytes": self.node.chunk_bytes,
            "host_tier_bytes": self.node.host_tier_bytes,
            "slo_s": self.slo_s,
            "fewest_loads": self.found.fewest_loads,
            "policies": [figures.as_json() for figures in self.found.policies],
            "num_events": self.found.num_events,
            "simulated_s": round(self.simulated_s, 3),
            "wall_s": round(self.wall_s, 3),
            "times_real_time": round(self.simulated_s / self.wall_s) if self.wall_s > 0 else None,
        }

    def text(self, per_model: bool) -> str:
        asked = len({request.model for request in self.trace})
        devices = ", ".join(f"{name} {size(budget)}" for name, budget in self.node.devices.items())
        if self.node.host_tier_bytes:
            devices += f", host tier {size(self.node.host_tier_bytes)}"
        first = f"{len(self.trace)} requests for {asked} models in {duration(self.trace[-1].time_s)} on {devices}"
        parts = [first, "", self._policies(), ""]
        parts.append(
            f"MISS: the model was not ready. WAIT: arrival to first token. SLO: first token within {self.slo_s:g} s; beside it the "
            f"worst model's. FROM HOST: loads that read no disk; READ: what the others read. PAUSED: a model was taken from its "
            f"device while requests ran. Loading on demand and in order takes {self.found.fewest_loads} loads at least (Belady)."
        )
        parts.append(f"{self.simulated_s / max(self.wall_s, 1e-9):,.0f} times faster than real time ({self.wall_s:.2f} s)")
        if per_model:
            parts += ["", *(self._models(figures) for figures in self.found.policies)]
        return "\n".join(parts)

    def _policies(self) -> str:
        waits = ("POLICY", "MISS", "MEAN WAIT", "P50", "P99", "SLO", "WORST MODEL")
        header = (*waits, "LOADS", "FROM HOST", "PAUSED", "READ", "REFUSED")
        return table(header, [_policy(figures) for figures in self.found.policies], frozenset({1, 2, 3, 4, 5, 7, 8, 9, 10, 11}))

    def _models(self, figures: Figures) -> str:
        header = (figures.policy.upper(), "REQUESTS", "MISS", "MEAN WAIT", "P99", "SLO")
        rows = [
            (
                name,
                str(one.num_requests),
                _percent(one.miss_rate),
                _seconds(one.mean_wait_s),
                _seconds(one.p99_wait_s),
                _percent(one.slo_attainment),
            )
            for name, one in figures.models.items()
        ]
        return table(header, rows, frozenset({1, 2, 3, 4, 5})) + "\n"


def _policy(figures: Figures) -> tuple[str, ...]:
    swaps = figures.swaps
    return (
        figures.policy,
        _percent(figures.miss_rate),
        _seconds(figures.mean_wait_s),
        _seconds(figures.p50_wait_s),
        _seconds(figures.p99_wait_s),
        _percent(figures.slo_attainment),
        f"{_percent(figures.worst_slo_attainment)} {figures.worst_model}",
        str(swaps.num_disk_loads + swaps.num_host_loads),
        str(swaps.num_host_loads),
        str(swaps.num_preemptions),
        size(swaps.disk_bytes),
        str(figures.num_refused),
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
