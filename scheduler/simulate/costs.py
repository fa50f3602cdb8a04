"""Models the costs of a simulated node by bandwidths and rates, each of which can be measured on a real node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.node.events import ModelFacts
from scheduler.node.settings import SchedulerSettings
from scheduler.simulate.steps import StepSeconds


@dataclass(slots=True, frozen=True)
class ModelCosts:
    """Measured costs of one model's loads and steps. They replace those that are computed from the model's bytes; None: not
    measured."""

    disk_load_s: float | None = None
    host_load_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    decode_s_per_sequence: float | None = None
    prefill_step_s: float | None = None


@dataclass(slots=True, frozen=True)
class Costs:
    """The costs of one device. The defaults are those of a data-centre GPU with one NVMe drive. models: model name -> measured
    costs of this model, which replace computed ones.

    A step reads the weights once, and takes decode_s_per_sequence for each sequence that decodes. A prompt's token takes two
    floating-point operations for each parameter, that is, one for each byte of 16-bit weights."""

    disk_bytes_per_s: float = 6.5e9
    copy_bytes_per_s: float = 25e9
    load_overhead_s: float = SchedulerSettings().load_overhead_s
    evict_s: float = 0.02
    memory_bytes_per_s: float = 2e12
    flops_per_s: float = 3e14
    decode_overhead_s: float = 0.002
    decode_s_per_sequence: float = 5e-5
    prefill_step_s: float = 0.0
    models: Mapping[str, ModelCosts] = field(default_factory=dict)

    def of(self, name: str) -> ModelCosts:
        return self.models.get(name, _NOT_MEASURED)

    def disk_load_s(self, facts: ModelFacts) -> float:
        """Returns the seconds of a load from disk: the measured ones if there are any, else computed ones. Reading and copying
        overlap, so the slower of the two determines a computed result."""
        known = self.of(facts.costs_name).disk_load_s
        if known is not None:
            return known
        return self.load_overhead_s + facts.weights_bytes / min(self.disk_bytes_per_s, self.copy_bytes_per_s)

    def host_load_s(self, facts: ModelFacts) -> float:
        known = self.of(facts.costs_name).host_load_s
        return self.load_overhead_s + self.host_copy_s(facts) if known is None else known

    def host_copy_s(self, facts: ModelFacts) -> float:
        """Returns how many of the seconds of a load from host memory (host_load_s) the copy itself takes."""
        known = self.of(facts.costs_name).host_load_s
        seconds = facts.weights_bytes / self.copy_bytes_per_s
        return seconds if known is None else min(seconds, known)

    def step_seconds(self, facts: ModelFacts) -> StepSeconds:
        known = self.of(facts.costs_name)
        fixed, each = known.decode_step_s, known.decode_s_per_sequence
        rate, prompt = known.prefill_tokens_per_s, known.prefill_step_s
        return StepSeconds(
            self.decode_overhead_s + facts.weights_bytes / self.memory_bytes_per_s if fixed is None else fixed,
            self.decode_s_per_sequence if each is None else each,
            self.prefill_step_s if prompt is None else prompt,
            facts.weights_bytes / self.flops_per_s if rate is None else 1 / rate,
        )

    def without_loads(self) -> Costs:
        """Returns the same costs, except that loads and evictions take no time."""
        models = {name: replace(known, disk_load_s=0.0, host_load_s=0.0) for name, known in self.models.items()}
        endless = float("inf")
        return replace(self, disk_bytes_per_s=endless, copy_bytes_per_s=endless, load_overhead_s=0.0, evict_s=0.0, models=models)


_NOT_MEASURED = ModelCosts()
