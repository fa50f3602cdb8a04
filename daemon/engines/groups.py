"""Stands between the node scheduler, for which a model that is split over several devices is one placement, and the engines, each
of which loads and evicts a share of its own.

A Load becomes a LoadModel to each member, an Evict an EvictModel, and the members' answers become one answer. A member that has
failed to load has the others evict their shares before the failure is told. A member that has died counts as having answered
everything.

No member may wait for another one that will not come: the group's flag is broken before any member is told to leave, and as soon as
one has died. What a broken group computes is worthless, and nothing of it is used: its requests run again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from daemon.process.logs import fields
from engine import protocol
from engine.exchange import GroupForm, RegionSizes, region_bytes
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, LoadStreams, SetLease
from scheduler.node import actions
from scheduler.node.groups import joined

log = logging.getLogger("hearthd.engine")
Answer = LoadProgress | LoadStreams | LoadDone | LoadFailed | Evicted
CLOSED_KEPT = 256  # ends of groups that are remembered; later messages about them are ignored


class Regions(Protocol):
    """The exchange memory as this file sees it (daemon/engines/exchange_memory.py)."""

    def number(self, device: str) -> int: ...

    def allocate(self, num_bytes: int) -> int: ...

    def free(self, offset: int) -> None: ...

    def break_group(self, offset: int) -> None: ...


class _Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    BROKEN = "broken"  # a member has died; the scheduler is about to evict the others
    FAILING = "failing"  # a member could not load; the others were told to leave for it
    LEAVING = "leaving"  # as the scheduler wants it


@dataclass(slots=True)
class _Group:
    """One placement of a split model. devices: by rank. holding: those that may still use its region. leaving: those of them that
    were told to evict their share and have not answered. failure: the first member that could not load, and what it said."""

    placement_id: int
    model: str
    devices: tuple[str, ...]
    region_offset: int
    holding: set[str]
    phase: _Phase = _Phase.LOADING
    leaving: set[str] = field(default_factory=set)
    loaded: dict[str, LoadDone] = field(default_factory=dict)
    progress: dict[str, LoadProgress] = field(default_factory=dict)
    failure: tuple[str, LoadFailed] | None = None

    @property
    def name(self) -> str:
        """What stands for its devices where one device has its name."""
        return joined(self.devices)


class Groups:
    """All placements of split models. send: passes a message to a device's engine. lease_of: returns the lease that a device's
    engine was last told. block_tokens: of KV blocks. regions: None where the node has no devices to split a model over. tell: gets
    the one answer of all members, with the joined name of their devices, or with that of the first one that could not load."""

    def __init__(
        self,
        send: Callable[[str, protocol.Message], None],
        lease_of: Callable[[str], int],
        block_tokens: int,
        regions: Regions | None,
        tell: Callable[[str, Answer], None],
    ) -> None:
        self._send, self._lease_of, self._block_tokens, self._regions = send, lease_of, block_tokens, regions
        self._tell = tell
        self._groups: dict[int, _Group] = {}  # by placement
        self._closed: deque[int] = deque(maxlen=CLOSED_KEPT)

    def knows(self, placement_id: int) -> bool:
        """Returns whether the placement is, or was, of a split model."""
        return placement_id in self._groups or placement_id in self._closed

    def models_on(self, device: str) -> set[str]:
        """Returns the split models of which the device holds a share."""
        return {group.model for group in self._groups.values() if device in group.holding}

    # ---- what the scheduler wants

    def load(self, action: actions.Load, message: LoadModel, form: GroupForm) -> None:
        """Sends the members their LoadModels. message: the leader's, without its group. Raises OSError where there is no exchange
        memory (left)."""
        if self._regions is None:
            raise OSError("this node has fewer than two cpu devices to split a model over")
        leases = action.leases
        numbers = [self._regions.number(device) for device in leases]
        num_stages, of_model = form.division.num_stages, (message.max_sequences, message.max_model_len)
        sizes = RegionSizes(len(leases), *of_model, self._block_tokens, form.num_kv_groups, num_stages, form.handed_bytes)
        num_bytes = region_bytes(sizes)
        offset = self._regions.allocate(num_bytes)
        devices = tuple(leases)
        self._groups[action.placement_id] = _Group(action.placement_id, action.model, devices, offset, set(devices))
        for rank, (device, lease_chunks) in enumerate(leases.items()):
            group = protocol.Group(rank, numbers, offset, num_bytes, form.division.expert_parts, num_stages, form.handed_bytes)
            self._send(device, msgspec.structs.replace(message, lease_chunks=lease_chunks, group=group))

    def evict(self, action: actions.Evict) -> None:
        """Sends EvictModels to the members that hold a share still, and tells Evicted once all have answered: at once if none does.
        It takes the place of a failure that has not been told yet."""
        leases = action.leases
        group = self._groups.get(action.placement_id)
        held = set() if group is None else group.holding
        for device, lease_chunks in leases.items():
            if device not in held or (group is not None and device in group.leaving):
                self._send(device, SetLease(lease_chunks=lease_chunks))
        if group is None:
            self._tell(joined(leases), Evicted(action.placement_id, action.model))
            return
        if unlisted := held - leases.keys():
            log.error("an eviction leaves out %s", joined(sorted(unlisted)), extra=fields(model=group.model))
        group.phase = _Phase.LEAVING
        self._leave(group, leases)
        self._close_if_empty(group)

    # ---- what engines say

    def answer(self, device: str, message: Answer) -> None:
        """Takes a message about a placement of a split model. Those that come too late are ignored."""
        group = self._groups.get(message.placement_id)
        if group is None or device not in group.holding:
            return
        match message:
            case LoadProgress():
                group.progress[device] = message
                if group.phase is _Phase.LOADING:
                    self._tell(group.name, _sum_of_progress(group))
            case LoadDone():
                group.loaded[device] = message
                if group.phase is _Phase.LOADING and len(group.loaded) == len(group.devices):
                    group.phase = _Phase.READY
                    self._tell(group.name, _joined_load(group))
            case LoadFailed():
                self._failed(group, device, message)
            case Evicted():
                if device in group.leaving:
                    self._gone(group, device)
                    self._close_if_empty(group)
            case LoadStreams():
                pass  # its prompts wait until all shares are there

    def break_with(self, device: str) -> None:
        """Breaks the groups that a device belongs to whose engine has ended, so that the others stop waiting for it."""
        for group in self._groups.values():
            if device in group.holding:
                self._break(group)

    def engine_down(self, device: str) -> list[tuple[str, Answer]]:
        """Counts a dead engine as having answered. It is called before the scheduler hears of the death, and returns what is to be
        told to the scheduler afterwards: the names of devices, and their answer. Told before, it would place the model again, on an
        engine that is dead."""
        self.break_with(device)
        answers = []
        for group in [group for group in self._groups.values() if device in group.holding]:
            self._gone(group, device)
            if group.phase in (_Phase.LOADING, _Phase.READY):
                group.phase = _Phase.BROKEN
            if (answer := self._closed_with(group)) is not None:
                answers.append(answer)
        return answers

    # ---- parts of these

    def _failed(self, group: _Group, device: str, message: LoadFailed) -> None:
        if device in group.leaving or device in group.loaded:
            return  # the answer to its EvictModel follows; or it makes no sense
        self._gone(group, device)
        if group.phase is _Phase.LOADING:
            group.failure = device, msgspec.structs.replace(message, error=f"{message.error} (on {device})")
            group.phase = _Phase.FAILING
            self._leave(group, {})
        self._close_if_empty(group)

    def _leave(self, group: _Group, leases: dict[str, int]) -> None:
        """Tells all members that hold a share still to evict it. leases: the new ones; those of other devices stay."""
        self._break(group)
        for device in group.devices:
            if device in group.holding and device not in group.leaving:
                group.leaving.add(device)
                lease_chunks = leases[device] if device in leases else self._lease_of(device)
                self._send(device, EvictModel(group.placement_id, group.model, lease_chunks))

    def _gone(self, group: _Group, device: str) -> None:
        group.holding.discard(device)
        group.leaving.discard(device)

    def _close_if_empty(self, group: _Group) -> None:
        """Closes the group, and tells what there is to tell, if no member is left that could use its region."""
        if (answer := self._closed_with(group)) is not None:
            self._tell(*answer)

    def _closed_with(self, group: _Group) -> tuple[str, Answer] | None:
        """Closes the group if no member is left that could use its region. Returns what there is to tell then."""
        if group.holding:
            return None
        assert self._regions is not None
        del self._groups[group.placement_id]
        self._closed.append(group.placement_id)
        self._regions.free(group.region_offset)
        if group.phase is _Phase.FAILING:
            return group.failure
        if group.phase is _Phase.LEAVING:
            return group.name, Evicted(group.placement_id, group.model)
        return None

    def _break(self, group: _Group) -> None:
        assert self._regions is not None
        self._regions.break_group(group.region_offset)


def _sum_of_progress(group: _Group) -> LoadProgress:
    """Returns how far all members are together. While one of them waits for its kernels (bytes_total 0) the group does. One that
    has not told anything yet is taken to have as much to load as another."""
    told = list(group.progress.values())
    if not all(one.bytes_total for one in told):
        return LoadProgress(group.placement_id, 0, 0)
    untold = len(group.devices) - len(told)
    total = sum(one.bytes_total for one in told) + untold * max(one.bytes_total for one in told)
    return LoadProgress(group.placement_id, sum(one.bytes_done for one in told), total)


def _joined_load(group: _Group) -> LoadDone:
    """Returns the load as one: it took as long as the slowest member's, and read what all have read."""
    parts = [group.loaded[device] for device in group.devices]
    return LoadDone(
        group.placement_id,
        group.model,
        seconds=max(part.seconds for part in parts),
        bytes_read=sum(part.bytes_read for part in parts),
        copy_seconds=max(part.copy_seconds for part in parts),
        map_seconds=max(part.map_seconds for part in parts),
        read_as="; ".join(dict.fromkeys(part.read_as for part in parts if part.read_as)),
        kernels_seconds=max(part.kernels_seconds for part in parts),
    )
