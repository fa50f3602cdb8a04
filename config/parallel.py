"""Interprets and checks the setting `parallel`, which splits a model over several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from config.device_names import KINDS, host_of, kind_of
from config.schema import ModelConfig, ParallelConfig

AUTO = "auto"  # the fewest devices that hold the model
MOST_RANKS = 64
MOST_COPIES = 16  # of experts, for each device and layer
ONE_HOST = "a model whose matrices are divided uses the devices of this host only"
STAGES = "each stage is on devices of one host, and the last one on devices of this host"
SPECULATORS = ("auto", "none", "prompt-lookup")  # allowed for a split model, where auto means prompt lookup


def num_ranks(settings: ModelConfig) -> int:
    """Returns the number of devices over which the settings split the model: 1 for a whole model. It is also 1 for parallel =
    "auto", because the division is then chosen later: the fewest devices that hold the model."""
    return how.num_devices if isinstance(how := settings.parallel, ParallelConfig) else 1


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of devices grouped by kind: "cpu" or "cuda" -> names. Kinds without a device are left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (kind := kind_of(name)) in KINDS:
            found.setdefault(kind, []).append(name)
    return found


def hold(names: Iterable[str], how: ParallelConfig) -> bool:
    """Returns whether the devices are enough to hold one copy of a model that is split as `how` says. Each pipeline stage needs all
    its devices on one host, and the last stage needs them on this machine; a model without a pipeline counts as one stage, the
    last. names: the names of devices, all of one kind."""
    return _num_groups(names, how) > 0


def _num_groups(names: Iterable[str], how: ParallelConfig) -> int:
    """Returns how many copies of a model the devices can hold at most, if each copy is split as `how` says and no two copies use
    the same device. names: the names of devices, all of one kind. The rule must be the same as in
    scheduler.node.groups.most_groups."""
    stage_size = how.tensor * how.expert
    stages = {host: number // stage_size for host, number in Counter(map(host_of, names)).items()}
    return min(stages.get("", 0), sum(stages.values()) // how.pipeline)


def num_places(settings: ModelConfig, devices: Sequence[str]) -> int:
    """Returns how many copies of a model there can be at most on the devices that its settings allow, no two of them on the same
    device. The setting `replicas` is ignored. A model with parallel = "auto" counts as whole. devices: names of the node's devices,
    those of other hosts included."""
    kinds = [kind for kind in KINDS if kind not in _refused(settings)]
    there = by_kind(settings.devices or devices)
    how = settings.parallel if isinstance(settings.parallel, ParallelConfig) else ParallelConfig()
    return sum(_num_groups(there.get(kind, ()), how) for kind in kinds)


def named_devices(settings: ModelConfig, devices: Sequence[str]) -> str:
    """Returns the words by which messages say on which devices a model may be: "devices names cpu:0" if its settings name devices,
    else "the node has cpu:0, cpu:1". devices: names of the node's devices."""
    return f"devices names {', '.join(settings.devices)}" if settings.devices else f"the node has {', '.join(devices) or 'none'}"


def problem(settings: ModelConfig, devices: Sequence[str], refused: Mapping[str, str] | None = None) -> str:
    """Returns why a model cannot be split over devices as its settings ask; "" if it can, or if it is not split. devices: names of
    the node's devices, those of other hosts included. refused: kind of devices -> why the model's files do not allow that kind."""
    how, ranks = settings.parallel, num_ranks(settings)
    if ranks == 1 or not isinstance(how, ParallelConfig):
        return ""
    if settings.isolate:
        return "does not go with isolate = true: an isolated model has a part of one device"
    if settings.speculator not in SPECULATORS:
        return f"does not go with speculator = {settings.speculator!r}: allowed beside it are {', '.join(SPECULATORS)}"
    if ranks > MOST_RANKS:
        return f"{_asked(settings)} asks for {ranks} devices; a model is split over {MOST_RANKS} at most"
    reasons = _refused(settings) | dict(refused or {})
    kinds, why = [kind for kind in KINDS if kind not in reasons], "; ".join(reasons.values())
    if not kinds:
        return f"{_asked(settings)} is possible on no kind of device: {why}"
    named = settings.devices or devices
    there = by_kind(named)
    if any(hold(there.get(kind, ()), how) for kind in kinds):
        return ""
    needed = f"{ranks} devices of one kind" if len(kinds) > 1 else f"{ranks} {kinds[0]} devices"
    rule = f"; {ONE_HOST if how.pipeline == 1 else STAGES}" if any(map(host_of, named)) else ""
    return f"{_asked(settings)} needs {needed}{f' ({why})' if why else ''}, and {named_devices(settings, devices)}{rule}"


def _refused(settings: ModelConfig) -> dict[str, str]:
    """Returns the kinds of devices that a model's settings rule out: kind -> reason. Kinds that are allowed are left out."""
    if settings.kv_cache_dtype == "auto":
        return {}
    return {"cpu": f"kv_cache_dtype = {settings.kv_cache_dtype!r} is not built for cpu devices"}


def problem_of_copies(settings: ModelConfig) -> str:
    """Returns why the setting `expert_copies` is refused for a model, or "" if it is allowed. The setting needs a model whose
    experts are divided among devices, because only these experts can have copies."""
    how = settings.parallel
    if settings.expert_copies and not (isinstance(how, ParallelConfig) and how.expert > 1):
        return "needs parallel = { expert = 2 } or more beside it: only experts that are divided among devices have copies"
    return ""


def _asked(settings: ModelConfig) -> str:
    """Returns the division of a model over devices for which its settings ask, as text for messages: `tensor = 2, pipeline = 2`.
    settings.parallel must be a ParallelConfig."""
    assert isinstance(settings.parallel, ParallelConfig)
    return keys_text(settings.parallel)


def keys_text(how: ParallelConfig) -> str:
    """Returns a division of a model over devices as text: `tensor = 2, pipeline = 2`. Kinds of division that are not used (1) are
    left out."""
    kinds = (("tensor", how.tensor), ("expert", how.expert), ("pipeline", how.pipeline))
    return ", ".join(f"{name} = {number}" for name, number in kinds if number > 1)
