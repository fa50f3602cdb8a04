"""Defines the actions, which are the only output of the node scheduler. The dispatcher carries them out in the order given."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, kw_only=True)
class Action:
    cause: str


@dataclass(slots=True, frozen=True)
class Refusal:
    """The reason why a request or a command is refused. code: one of REFUSAL_CODES. message: for people. retry_after_s: in how many
    seconds it is worth trying again; None: never, or no time is known."""

    code: str
    message: str
    retry_after_s: float | None = None
    details: dict[str, object] = field(default_factory=dict)


# code -> what it means; HTTP statuses and exit codes are mapped in daemon/errors.py
REFUSAL_CODES = {
    "model_not_found": "no such model",
    "model_too_large": "can never fit, with the arithmetic",
    "model_unusable": "its files or settings are of a kind that is not served",
    "model_incomplete": "files missing or shorter than their header says",
    "model_disabled": "switched off by the operator",
    "model_failed": "the last load failed, or the model is quarantined",
    "model_draining": "the operator drains it",
    "node_draining": "the operator drains the node",
    "server_restarting": "the daemon is stopping",
    "queue_full": "max_queued reached",
    "would_not_fit": "pinned models leave no room; ahead of requests: nor do models that are used",
    "wait_exceeded": "max_wait_s passed before it could run",
    "load_timeout": "the load missed its deadline",
    "crashed_twice": "the request was running in two engine crashes",
    "model_removed": "its folder is gone",
    "unloaded": "evicted by the operator",
    "busy": "another command holds the model",
    "not_kept": "no copy of its weights is in host memory",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Load(Action):
    placement_id: int
    model: str
    device: str
    weights_chunks: int
    kv_reserved_chunks: int
    lease_chunks: int  # the device's KV lease once the model is loaded
    further: tuple[tuple[str, int], ...] = ()  # for a split model: its other devices, by rank, and the lease of each
    deadline_s: float  # seconds from now
    fingerprint: str = ""  # identifies the files to load
    # Slots of the host tier that hold the weights, in order; empty: they are read from disk. These and keep_slots are for a split
    # model as many for each of its devices, one device's after the other's, by rank.
    source_slots: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()  # of the weights in source_slots: those of the shares by rank, or that of a whole model
    keep_slots: tuple[int, ...] = ()  # slots of the host tier to copy the weights to while they are read
    kv_slots: tuple[int, ...] = ()  # slots with KV saved at an eviction, to be restored
    kv_index: bytes = b""
    reason: str = ""  # one of LOAD_REASONS
    expert_copies: tuple[tuple[tuple[int, ...], ...], ...] = ()  # further experts of each device (events.ExpertCopies.table)

    @property
    def leases(self) -> dict[str, int]:
        """Returns the devices onto which the model is loaded, by rank, each with its KV lease once the model is loaded: the number
        of chunks that its engine may use for KV beyond the models' reserves."""
        return _leases(self)


# why a model comes to a device -> what it means
LOAD_REASONS = {
    "request": "requests wait for it",
    "resumed": "requests that ran before wait for it to come back",
    "operator": "hearth load, or ahead of requests (warm)",
    "pinned": "it is pinned",
    "replica": "another replica of it has requests, and there was free memory for one more",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Evict(Action):
    """Evicts a copy of a model from its devices: the model has drained, is paused or was unloaded by the operator, or its load is
    rolled back.

    `placement_id` identifies the copy: it is the id of its Load action, and the event EvictFinished names it. The engine aborts the
    model's requests. The scheduler has already queued them again, so they must not be reported as finished."""

    placement_id: int
    model: str
    device: str
    lease_chunks: int  # the device's KV lease after the eviction; the dispatcher tells the engine
    further: tuple[tuple[str, int], ...] = ()  # as in Load, but only devices that still hold a share
    save_slots: tuple[int, ...] = ()  # slots of the host tier to save its KV in
    reason: str = ""  # one of leave_rules.EVICT_REASONS
    to: str = "cold"  # its state afterwards: cold or warm
    age_s: float = 0.0  # seconds since it became ready

    @property
    def leases(self) -> dict[str, int]:
        """Returns the devices from which the model is evicted, by rank, each with its KV lease after the eviction: the number of
        chunks that its engine may use for KV beyond the models' reserves."""
        return _leases(self)


def _leases(action: Load | Evict) -> dict[str, int]:
    return {action.device: action.lease_chunks, **dict(action.further)}


# why a model leaves a device -> what it means; leave_rules.py adds those of its rules
EVICT_REASONS = {
    "room": "another model needs the room, and it was idle or had drained",
    "preempted": "another model needs the room, and its requests wait until it is back",
    "kv": "it was idle, and another model's requests waited for KV or an adapter's room",
    "operator": "hearth unload, or it was switched off",
    "share_lost": "it was split over several devices, and the engine of one of them died",
    "rolled_back": "its load missed its deadline or is not wanted any more",
    "removed": "its folder is gone",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestsPaused(Action):
    """Reports that a model is evicted from its device although it has running requests, those in request_ids. They wait in the
    model's queue with their streams open, and are submitted again with their output once the model is back."""

    model: str
    request_ids: tuple[int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class GrantLease(Action):
    """Sends the engine of a device its KV lease (the chunks that it may use for KV beyond its models' reserves). Used if the lease
    has changed without a load or an eviction, or if the engine is new."""

    device: str
    lease_chunks: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Submit(Action):
    """Submits a request to an engine, for the first time, or again after the request was paused or its engine died: the dispatcher
    sends the prompt and the output that the client already has."""

    request_id: int
    model: str
    device: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Reject(Action):
    """Ends a request, whether it was queued or running, and gives its client the reason."""

    request_id: int
    refusal: Refusal


@dataclass(slots=True, frozen=True, kw_only=True)
class AbortInEngine(Action):
    """Stops a submitted request in its engine, because its client has gone or has been given the outcome already."""

    request_id: int
    device: str


@dataclass(slots=True, frozen=True, kw_only=True)
class RestartEngine(Action):
    """Kills and restarts the engine of a device because an eviction or a roll-back is stuck. The events EngineDown and EngineUp
    will follow."""

    device: str
    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class StateChanged(Action):
    """Reports a model's new state, for logs, metrics, `hearth events` and the storage of pins."""

    model: str
    old: str
    new: str
    reason: str
    device: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class CommandDone(Action):
    """Answers the operator's command whose id is `cause`. refusal: why it was not carried out; None: it was."""

    model: str
    refusal: Refusal | None = None
