"""Defines what a proxy and the lender of its engine send each other.

The proxy stands on the daemon's host in the place of the engine. The lender runs the engine on the host whose device is lent. Each
pair has one connection, and frames arrive in the order in which they were sent.
"""

from __future__ import annotations

import msgspec

BEAT_EVERY_S = 1.0  # seconds from one Beat to the next
# A lender that sends nothing for so many beats counts as hung. A TCP packet that was lost may take 6.2 s to come through, after the
# fifth time that it was sent again, and its beat may have been 1 s away.
MISSED_BEATS = 8


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames; the tag is the class name."""


class Told(Frame, frozen=True):
    """Messages of engine/protocol.py, each with its length before it, which are passed on between the daemon and the engine, in
    either direction."""

    data: bytes


class States(Frame, frozen=True):
    """The states (activations) of the next step of a model's pipeline, from the stage on one host to the next stage on the other,
    in either direction. data: the bytes of the states, as engine/memory/stage_states.py lays them out."""

    placement_id: int
    data: memoryview


# ---- proxy -> lender


class Borrow(Frame, frozen=True):
    """The first frame: asks for an engine on a device, and is answered by Lent or Refused. device: its name on the lender's host,
    such as cpu:0. leader: identifies the daemon, so that all devices lent to it can share steps. version: PROTOCOL_VERSION."""

    device: str
    leader: str
    version: int


class BeginShare(Frame, frozen=True):
    """Asks for the load of a device's share of a split model.
    message: the LoadModel message, with its length before it.
    folder: the model's folder, relative to the models folder.
    block_tokens: number of tokens in a KV block.
    token_bytes: the bytes of States for each token of a step.
    receives: whether the stage before is on another host, so that its states come as frames.
    sends: whether the stage after is on another host, so that states for it are sent as frames."""

    message: bytes
    folder: str
    block_tokens: int
    token_bytes: int
    receives: bool
    sends: bool


class Step(Frame, frozen=True):
    """The next step of a split model: its plan, and the contents of the plan's rows in the sequence table.
    number: how many steps of the model came before.
    step_id to drafted: fields of scheduler.batch.plan.BatchPlan.
    slots to samples: the plan's arrays, as bytes.
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
    """The engine's last sign of life (engine/loop/pulse.py), with ages in place of times, because clocks of hosts differ. age_s:
    seconds since it was given; negative: none was given yet. first_age_s: seconds since the pulse's first_since_s; negative: that
    is 0."""

    age_s: float
    expected_s: float
    first_age_s: float
    doing: int


class Lines(Frame, frozen=True):
    """Lines that the lent engine has written to its standard error since the last such frame."""

    data: bytes


class GroupGone(Frame, frozen=True):
    """A model's group has been marked as broken on the lender's host."""

    placement_id: int


class EngineEnded(Frame, frozen=True):
    """The last frame of a connection: the engine has ended. reason: how it ended. running: the ids of the requests in its last,
    unfinished step."""

    reason: str
    running: list[int]


ToLender = Told | States | Borrow | BeginShare | Step
ToProxy = Told | States | Lent | Refused | Beat | Lines | GroupGone | EngineEnded
