"""Defines the states of a model in an engine, from its load to its eviction, and the jobs that run for the model in other threads.

LOADING ──> STREAMING ──> LOADED ──> SERVED ──> LEAVING ──> gone
   └───────────┴─────────────┴──────────┘

States may be skipped, as the lower line shows, and a model may be gone after every state. From SERVED, only encoders and the shares
of split models whose steps another engine leads are gone without LEAVING, because they have no KV to save.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.lifecycle.first_step import FirstStep
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.loads import Load
from engine.protocol import EvictModel
from engine.serve.served_models import ServedModel


class State(Enum):
    """The states of a model between its load and its eviction.

    LOADING: its load runs; the model itself does not exist yet.
    STREAMING: its load runs, and the model exists: its first step may run as soon as its first weights and its saved KV are in the
    device's memory.
    LOADED: its load has ended, but its saved KV is still being copied back or its first step still runs.
    SERVED: it takes requests, and its steps share the device with those of other models.
    LEAVING: it takes no more requests, and its KV is being saved."""

    LOADING = "loading"
    STREAMING = "streaming"
    LOADED = "loaded"
    SERVED = "served"
    LEAVING = "leaving"


class Job(Enum):
    """The kinds of jobs that a thread does for a model. LOAD: loads its weights. RESTORE: copies its saved KV back to the device.
    STEP: runs its first step. SAVE: copies its KV to the host tier."""

    LOAD = "load"
    RESTORE = "restore"
    STEP = "step"
    SAVE = "save"


# state -> states that may follow; a model that is gone has no Life
FOLLOWERS = {
    State.LOADING: {State.STREAMING, State.LOADED, State.SERVED},
    State.STREAMING: {State.LOADED, State.SERVED},
    State.LOADED: {State.SERVED},
    State.SERVED: {State.LEAVING},
    State.LEAVING: set[State](),
}


@dataclass(slots=True, eq=False)
class Life:
    """One model on the device, from its LoadModel to its end.
    load: its load, kept after the load has ended. load_runs: whether the load has not ended yet.
    served: the model, once it exists; None for an encoder, and for a share of a split model whose steps another engine leads.
    first: its first step, if one may run while weights arrive.
    restore, save: the transfers of its KV from and to the host tier, while they run.
    evictions: the EvictModel messages to answer when the model is gone."""

    load: Load
    state: State = State.LOADING
    load_runs: bool = True
    served: ServedModel | None = None
    first: FirstStep | None = None
    restore: KVTransfer | None = None
    save: KVTransfer | None = None
    evictions: list[EvictModel] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.load.task.spec.model

    @property
    def jobs(self) -> set[Job]:
        """The jobs that run for this model."""
        runs = {
            Job.LOAD: self.load_runs,
            Job.RESTORE: self.restore is not None,
            Job.STEP: self.first is not None and self.first.running,
            Job.SAVE: self.save is not None,
        }
        return {job for job, is_running in runs.items() if is_running}

    def enter(self, state: State) -> None:
        """Puts the model into a state. Raises RuntimeError if the state may not follow the current one (FOLLOWERS)."""
        if state not in FOLLOWERS[self.state]:
            raise RuntimeError(f"model {self.name}: {state.value} cannot follow {self.state.value}")
        self.state = state

    def validate(self) -> None:
        """Checks that the model's jobs and fields fit its state. Raises AssertionError if they do not. For tests."""
        jobs, at = self.jobs, f"{self.name}, {self.state.value}, {sorted(job.value for job in self.jobs)}"
        match self.state:
            case State.LOADING:
                assert jobs == {Job.LOAD}, at
                assert self.served is None, at
            case State.STREAMING:
                assert Job.LOAD in jobs, at
                assert Job.SAVE not in jobs, at
                assert self.first is not None, at
            case State.LOADED:
                assert jobs in ({Job.RESTORE}, {Job.STEP}), at
                assert (self.first is None) == (Job.RESTORE in jobs), at
            case State.SERVED:
                assert not jobs, at
                assert not self.evictions, at
            case State.LEAVING:
                assert jobs == {Job.SAVE}, at
                assert self.evictions, at
        if self.state is not State.LOADING and self.served is not None:
            assert self.load.hosted is not None or self.load_runs or Job.RESTORE in jobs, at
        assert self.first is None or self.state in (State.STREAMING, State.LOADED), at
