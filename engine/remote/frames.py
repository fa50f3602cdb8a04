"""Defines the frames that a proxy and a lender send each other.

The proxy takes the place of an engine on the daemon's host. The lender runs this engine on the host whose device is lent. Each pair
of them has one connection, and frames arrive in the order in which they were sent.
"""

from __future__ import annotations

import msgspec

BEAT_EVERY_S = 1.0  # seconds from one Beat to the next
# A lender that sends nothing for so many beats counts as hung. A TCP packet that was lost may take 6.2 s to come through, after the
# fifth time that it was sent again, and its beat may have been 1 s away.
MISSED_BEATS = 8


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all frames; the tag is the class name."""


class Told(Frame, frozen=True):
    """Messages of engine/protocol.py that are passed on between the daemon and the engine, in either direction. data: the messages,
    each with its length before it."""

    data: bytes


class States(Frame, frozen=True):
    """The states (activations) of the next step of a model's pipeline, from the stage on one host to the next stage on the other,
    in either direction. data: the bytes of the states, as engine/memory/stage_states.py lays them out."""

    placement_id: int
    data: memoryview


# ---- proxy -> lender


class Borrow(Frame, frozen=True):
    """The first frame: asks for an engine on a device, and is answered by Lent or Refused. device: its name on the lender's host,
    such as cpu:0. leader: identifies the daemon that borrows; devices lent to the same daemon can share steps. version:
    PROTOCOL_VERSION."""

    device: str
    leader: str
    version: int


class BeginShare(Frame, frozen=True):
    """Asks for the load of a device's share of a split model.
    message: the LoadModel message, with its length before it.
    folder: the model's folder, relative to the models folder.
    block_tokens: number of tokens in a KV block.
    token_bytes: bytes of the hidden states that a stage passes to the next, for each token of a step.
    receives: whether the previous stage is on another host, so that its states come as frames.
    sends: whether the next stage is on another host, so that states for it are sent as frames."""

    message: bytes
    folder: str
    block_tokens: int
    token_bytes: int
    receives: bool
    sends: bool


class Step(Frame, frozen=True):
    """The next step of a split model: its plan, and the contents of the plan's rows in the sequence table.
    number: the number of earlier steps of the model since its load.
    step_id, all_decode, drafted: the fields of scheduler.batch.plan.BatchPlan with these names.
    slots, num_computed, num_new, samples: the plan's arrays with these names, as bytes.
    columns, tokens, cells: the rows' contents (engine/remote/table_rows.py)."""

    placement_id: int
    number: int
    step_id: int
    all_decode: bool
    drafted: bool
    slots: bytes
    num_computed: bytes
    num_new: bytes
    samples: bytes
    columns: list[bytes]
    tokens: bytes
    cells: bytes


# ---- lender -> proxy


class Lent(Frame, frozen=True):
    """Answers Borrow: the engine is being started."""


class Refused(Frame, frozen=True):
    """Answers Borrow with a refusal, or ends the connection later. reason: one line for operators."""

    reason: str


class Beat(Frame, frozen=True):
    """The engine's last sign of life (engine/loop/pulse.py). It has ages instead of times, because the clocks of hosts differ.
    age_s: seconds since the sign of life; negative if there has been none. expected_s, doing: as in Pulse. first_age_s: seconds
    since Pulse.first_since_s; negative if that is 0.0."""

    age_s: float
    expected_s: float
    first_age_s: float
    doing: int


class Lines(Frame, frozen=True):
    """Lines that the lent engine has written to its standard error since the last such frame."""

    data: bytes


class GroupGone(Frame, frozen=True):
    """Reports that a split model was marked as broken on the lender's host, because it has lost a device."""

    placement_id: int


class EngineEnded(Frame, frozen=True):
    """The last frame of a connection: the engine has ended. reason: how it ended. running: the ids of the requests in its last,
    unfinished step."""

    reason: str
    running: list[int]


ToLender = Told | States | Borrow | BeginShare | Step
ToProxy = Told | States | Lent | Refused | Beat | Lines | GroupGone | EngineEnded
