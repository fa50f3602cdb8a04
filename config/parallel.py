"""The rules for `parallel`, which splits a model over several devices."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from config.schema import ModelConfig, ParallelConfig

AUTO = "auto"  # as few devices as hold the model
MOST_RANKS = 64
KINDS = ("cpu",)  # of devices that models are split over
SPECULATORS = ("auto", "none", "prompt-lookup")  # what may draft tokens for a split model; auto is then prompt lookup


def num_ranks(settings: ModelConfig) -> int:
    """Returns over how many devices the settings split the model; 1: it is whole, or "auto", for which `split_over` makes settings
    with a number."""
    return how.num_devices if isinstance(how := settings.parallel, ParallelConfig) else 1


def fit_for_shares(settings: ModelConfig, devices: Sequence[str]) -> list[str]:
    """Returns the devices that the model may be split over. devices: names of the node's devices."""
    return [name for name in settings.devices or devices if name.partition(":")[0] in KINDS]


def split_over(settings: ModelConfig, devices: Sequence[str], how: ParallelConfig) -> ModelConfig:
    """Returns the settings with a division in place of "auto". Devices that models are not split over are left out of them."""
    named = fit_for_shares(settings, devices) if settings.devices else []
    return replace(settings, parallel=how, devices=named)


def problem(settings: ModelConfig, devices: Sequence[str]) -> str:
    """Returns why a model cannot be split as its settings say, or "". devices: names of the node's devices."""
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
    """Returns what the table says, as it says it."""
    assert isinstance(settings.parallel, ParallelConfig)
    return told(settings.parallel)


def told(how: ParallelConfig) -> str:
    """Returns the keys of a table that divide a model, with their values."""
    kinds = (("tensor", how.tensor), ("expert", how.expert), ("pipeline", how.pipeline))
    return ", ".join(f"{name} = {number}" for name, number in kinds if number > 1)
