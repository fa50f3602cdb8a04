"""What the registry knows of one model's name."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.models.entry import ModelEntry
from loader import catalog
from loader.model_shape import Division, ModelShape
from scheduler.node import events

_WHOLE = Division(1)


@dataclass(slots=True, frozen=True)
class Registered:
    """One model name. entry: None while the folder is not a usable model; `problem` says why."""

    checkpoint: catalog.Checkpoint
    facts: events.ModelFacts
    entry: ModelEntry | None
    dtype: str
    problem: str
    quantize: str = ""  # "int8" if the layers' matrices are quantised
    kv_cache_dtype: str = ""  # "fp8", or empty: keys and values are kept in dtype
    shape: ModelShape | None = None  # what is loaded: the checkpoint's shape, or that with its predictor
    division: Division = _WHOLE  # among how many devices
    replicas: tuple[events.ModelFacts, ...] = ()  # of further replicas
