"""What shall be done: the only output of the node scheduler. The dispatcher carries actions out in the order given."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, kw_only=True)
class Action:
    cause: str


@dataclass(slots=True, frozen=True)
class Refusal:
    """Why not, as a value. `code` is one of REFUSAL_CODES; `retry_after_s` is None where trying again is pointless."""

    code: str
    message: str
    retry_after_s: float | None = None
    details: dict[str, object] = field(default_factory=dict)


# code -> what it means; HTTP statuses and exit codes are mapped in daemon/errors.py
REFUSAL_CODES = {
    "model_not_found": "no such model",
    "model_too_large": "can never fit, with the arithmetic",
    "model_incomplete": "files missing or shorter than their header says",
    "model_disabled": "switched off by the operator",
    "model_failed": "the last load failed, or the model is quarantined",
    "model_draining": "the operator drains it",
    "node_draining": "the node is shutting down or draining",
    "queue_full": "max_queued reached",
    "would_not_fit": "pinned models leave no room",
    "wait_exceeded": "max_wait_s passed before it could run",
    "load_timeout": "the load missed its deadline",
    "crashed_twice": "the request was running in two engine crashes",
    "model_removed": "its folder is gone",
    "unloaded": "evicted by the operator",
    "busy": "another command holds the model",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Load(Action):
    placement_id: int
    model: str
    device: str
    weights_chunks: int
    kv_reserved_chunks: int
    lease_chunks: int  # the device's KV lease once it is in
    deadline_s: float  # seconds from now


@dataclass(slots=True, frozen=True, kw_only=True)
class Evict(Action):
    """The victim has no running request any more (drained), or the operator said now, or its load is rolled back. `placement_id`
    names the copy that goes (that of its Load); `EvictFinished` answers with it. Requests of the model that the engine aborts
    for it are queued again already: they are not to be reported as finished."""

    placement_id: int
    model: str
    device: str
    lease_chunks: int  # after it; the dispatcher passes it on


@dataclass(slots=True, frozen=True, kw_only=True)
class GrantLease(Action):
    """The lease has changed without a load or an eviction, or an engine has come up."""

    device: str
    lease_chunks: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Submit(Action):
    """Also after a crash: the dispatcher sends the prompt and what the client already has."""

    request_id: int
    model: str
    device: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Reject(Action):
    """The request ends here, whether it was queued or running."""

    request_id: int
    refusal: Refusal


@dataclass(slots=True, frozen=True, kw_only=True)
class AbortInEngine(Action):
    """A submitted request shall stop using the device; its client is already gone or told."""

    request_id: int
    device: str


@dataclass(slots=True, frozen=True, kw_only=True)
class RestartEngine(Action):
    """A load or a roll-back is stuck: kill and start again; EngineDown and EngineUp will follow."""

    device: str
    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class StateChanged(Action):
    """For logs, metrics, `hearth events` and persistence of pins."""

    model: str
    old: str
    new: str
    reason: str
    device: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class CommandDone(Action):
    """Answers the operator's event whose cause it carries; `refusal` None means it was done."""

    model: str
    refusal: Refusal | None = None
