"""The rules for `parallel`, which splits a model over several devices."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from config.schema import ModelConfig, ParallelConfig

AUTO = "auto"  # the fewest devices that hold the model
MOST_RANKS = 64
KINDS = ("cpu",)  # kinds of devices over which models are split
SPECULATORS = ("auto", "none", "prompt-lookup")  # allowed for a split model, where auto means prompt lookup


def num_ranks(settings: ModelConfig) -> int:
    """Returns the number of devices over which the settings split the model. It is 1 for a whole model, and for parallel = "auto",
    in whose place `split_over` puts a division."""
    return how.num_devices if isinstance(how := settings.parallel, ParallelConfig) else 1


def fit_for_shares(settings: ModelConfig, devices: Sequence[str]) -> list[str]:
    """Returns the names of the devices over which the model may be split: those that its settings allow (all if they name none), as
    far as they are cpu devices. devices: names of the node's devices."""
    return [name for name in settings.devices or devices if name.partition(":")[0] in KINDS]


def split_over(settings: ModelConfig, devices: Sequence[str], how: ParallelConfig) -> ModelConfig:
    """Returns a model's settings with `how` in place of parallel = "auto". Its `devices` keeps only devices of the kinds over which
    models can be split (cpu). devices: names of the node's devices."""
    named = fit_for_shares(settings, devices) if settings.devices else []
    return replace(settings, parallel=how, devices=named)


def problem(settings: ModelConfig, devices: Sequence[str]) -> str:
    """Returns why a model cannot be split over devices as its settings ask, or "" if it can or is not split. devices: names of the
    node's devices."""
    ranks = num_ranks(settings)
    if ranks == 1:
        return ""
    if settings.isolate:
        return "does not go with isolate = true: an isolated model has a part of one device"
    if settings.kv_cache_dtype != "auto":
        return f"does not go with kv_cache_dtype = {settings.kv_cache_dtype!r}: it is for cuda devices, and models are split on cpu"
    if settings.speculator not in SPECULATORS:
        return f"does not go with speculator = {settings.speculator!r}: allowed beside it are {', '.join(SPECULATORS)}"
    if others := [name for name in settings.devices if name.partition(":")[0] not in KINDS]:
        return f"models are split on cpu devices so far, and devices names {others[0]}"
    if ranks > MOST_RANKS:
        return f"{_asked(settings)} asks for {ranks} devices; a model is split over {MOST_RANKS} at most"
    where = fit_for_shares(settings, devices)
    if len(where) < ranks:
        has = f"devices names {', '.join(where)}" if settings.devices else f"the node has {', '.join(where) or 'no cpu device'}"
        return f"{_asked(settings)} needs {ranks} cpu devices, and {has}"
    return ""


def _asked(settings: ModelConfig) -> str:
    """Returns how the settings divide the model over devices, as text for messages: `tensor = 2, pipeline = 2`. settings.parallel
    must be a ParallelConfig."""
    assert isinstance(settings.parallel, ParallelConfig)
    return told(settings.parallel)


def told(how: ParallelConfig) -> str:
    """Returns a division of a model over devices as text: `tensor = 2, pipeline = 2`. Kinds of division that are not used (1) are
    left out."""
    kinds = (("tensor", how.tensor), ("expert", how.expert), ("pipeline", how.pipeline))
    return ", ".join(f"{name} = {number}" for name, number in kinds if number > 1)
