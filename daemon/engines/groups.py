"""Loads and evicts models that are split over several devices. The node scheduler treats such a model as one placement, but each
engine loads and evicts its own share of it.

The engines of one split model are a group, and each of them is a member of it. A Load becomes a LoadModel for each member, an Evict
an EvictModel, and the members' answers become one answer. If one member fails to load, the others evict their shares before the
failure is reported. A member that has died is not waited for. If the model will be loaded again, because a member has died or could
not load, the other members leave their weights in memory.

A member must never wait for a member that does not take part in the step any more. So the group is marked as broken as soon as a
member has died, and before any member is told to evict its share. Results of a broken group are never used: its requests run again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from daemon.process.logs import fields
from engine import protocol
from engine.exchange import GroupForm, RegionSizes, region_bytes
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, LoadStreams, SetLease
from scheduler.node import actions
from scheduler.node.groups import by_rank, host_of, joined

log = logging.getLogger("hearthd.engine")
Answer = LoadProgress | LoadStreams | LoadDone | LoadFailed | Evicted
CLOSED_KEPT = 256  # placements of closed groups that are remembered; later messages about them are ignored


class Regions(Protocol):
    """The methods of ExchangeMemory (daemon/engines/exchange_memory.py) that this module uses."""

    def number(self, device: str) -> int: ...

    def allocate(self, num_bytes: int) -> int: ...

    def free(self, offset: int) -> None: ...

    def break_group(self, offset: int) -> None: ...


class _Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    BROKEN = "broken"  # a member has died; the scheduler is about to evict the others
    FAILING = "failing"  # a member could not load, so the others were told to leave
    LEAVING = "leaving"  # the scheduler has evicted the model


@dataclass(slots=True)
class _Group:
    """One placement of a split model, with the engines that hold its shares: its members. devices: the members' devices, by rank.
    region_offset: where the model's region begins in the memory that engines share.

    holding: the members that may still use the region. leaving: the members in `holding` that were told to evict their share (the
    part of the model on their device) and have not answered.

    loaded: device -> the member's LoadDone. progress: device -> the member's last LoadProgress. failure: the device of the first
    member that could not load, and its LoadFailed."""

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
        """The joined names of the devices that hold the split model. It identifies the placement, as the device's name does for a
        model that is not split."""
        return joined(self.devices)


class Groups:
    """Loads and evicts all split models. The engines that hold the shares of one of them are a group.

    send: passes a message to a device's engine. lease_of: returns the lease, in chunks, that was last sent to a device's engine.
    block_tokens: tokens in a KV block. regions: allocates, for each group, a region of the memory that engines share; None if the
    node has no devices to split a model over. tell: called with (devices, answer) for the scheduler: the joined names of a group's
    devices and their joint answer, or the name of one device and its LoadFailed."""

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
        self._groups: dict[int, _Group] = {}  # by placement id
        self._closed: deque[int] = deque(maxlen=CLOSED_KEPT)
        self._lost: set[str] = set()  # devices whose engines were killed and have not ended
        self._kept_regions: list[tuple[int, set[str]]] = []  # regions of closed groups (offset), and who of `_lost` was a member

    def knows(self, placement_id: int) -> bool:
        """Returns whether the placement belongs to a split model. Only present placements and the last CLOSED_KEPT that have ended
        are known."""
        return placement_id in self._groups or placement_id in self._closed

    def models_on(self, device: str) -> set[str]:
        """Returns the split models of which the device holds a share (the part of a model on one device)."""
        return {group.model for group in self._groups.values() if device in group.holding}

    # ---- what the scheduler wants

    def load(self, action: actions.Load, message: LoadModel, form: GroupForm) -> None:
        """Starts the load of a split model: sends a LoadModel to the engine of each of its devices (the members of its group).
        action: the scheduler's decision, with the lease of each device. message: the message for one member, to which its lease,
        its part of the host tier's slots and its place in the group are added. form: how the model is divided. Raises OSError if
        there is no memory that engines share, or no room in it."""
        if self._regions is None:
            raise OSError("this node has no two devices of one kind to split a model over")
        leases = action.leases
        numbers = [self._regions.number(device) for device in leases]
        num_stages, expert_parts = form.division.num_stages, form.division.expert_parts
        of_model = (message.max_sequences, message.max_model_len, self._block_tokens, form.num_kv_groups)
        sizes = RegionSizes(len(leases), *of_model, num_stages, form.handed_bytes, expert_parts)
        num_bytes = region_bytes(sizes)
        offset = self._regions.allocate(num_bytes)
        devices = tuple(leases)
        self._groups[action.placement_id] = _Group(action.placement_id, action.model, devices, offset, set(devices))
        hosts = [host_of(device) for device in devices] if any(map(host_of, devices)) else []
        for rank, (device, lease_chunks) in enumerate(leases.items()):
            of_form = (expert_parts, num_stages, form.handed_bytes, form.num_kv_groups, hosts, form.files_id)
            group = protocol.Group(rank, numbers, offset, num_bytes, *of_form, form.division.copies)
            of_member = msgspec.structs.replace(
                message,
                lease_chunks=lease_chunks,
                source_slots=_part(action.source_slots, rank, devices),
                checksum=action.checksums[rank] if action.checksums else 0,
                keep_slots=_part(action.keep_slots, rank, devices),
                group=group,
            )
            self._send(device, of_member)

    def evict(self, action: actions.Evict) -> None:
        """Carries out the scheduler's decision to evict a split model: sends an EvictModel to each engine that still holds its
        share (the part of the model on its device), and new leases to the other devices. Reports Evicted when all have answered, or
        at once if none holds a share. A failure to load that was not reported yet is dropped."""
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
            log.error("an eviction leaves out %s", joined(sorted(unlisted, key=by_rank)), extra=fields(model=group.model))
        comes_back, group.phase = group.phase is _Phase.BROKEN, _Phase.LEAVING
        self._leave(group, leases, comes_back)
        self._close_if_empty(group)

    # ---- what engines say

    def answer(self, device: str, message: Answer) -> None:
        """Handles a message from a device's engine about its share of a split model, and reports to the scheduler what all engines
        of the model together have reached. A message that comes too late is ignored."""
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
                pass  # the placement's prompts wait until all shares are loaded

    def engine_ended(self, device: str) -> None:
        """Handles the end of a device's engine process: marks the split models that include the device as broken, so that their
        other engines stop waiting for it. Frees the regions (parts of the engines' shared memory) that were kept because the engine
        had been killed and had not ended (engine_lost)."""
        self._break_with(device)
        self._lost.discard(device)
        kept, self._kept_regions = self._kept_regions, []
        for offset, members in kept:
            self._free(offset, members & self._lost)

    def engine_lost(self, device: str) -> None:
        """Handles an engine that was killed and does not end: marks its split models as broken. Their regions (parts of the
        engines' shared memory) stay allocated until engine_ended is called, because operations that wait in a driver may still read
        or write them."""
        self._lost.add(device)
        self._break_with(device)

    def _break_with(self, device: str) -> None:
        for group in self._groups.values():
            if device in group.holding:
                self._break(group)

    def engine_down(self, device: str) -> list[tuple[str, Answer]]:
        """Removes a dead engine from the groups of its split models, so that its answers are not waited for. Called before the
        scheduler learns of the death. Returns (devices, answer) for each split model whose joint answer is complete without this
        engine; devices: the joined names of its devices. The caller must pass the answers to the scheduler after the death, or the
        scheduler would place the model on the dead engine again."""
        self._break_with(device)
        answers = []
        for group in [group for group in self._groups.values() if device in group.holding]:
            self._gone(group, device)
            if group.phase in (_Phase.LOADING, _Phase.READY):
                group.phase = _Phase.BROKEN
            if (answer := self._closed_with(group)) is not None:
                answers.append(answer)
        return answers

    # ---- helpers of the methods above

    def _failed(self, group: _Group, device: str, message: LoadFailed) -> None:
        if device in group.leaving or device in group.loaded:
            return  # either the answer to its EvictModel follows, or the message makes no sense
        self._gone(group, device)
        if group.phase is _Phase.LOADING:
            group.failure = device, msgspec.structs.replace(message, error=f"{message.error} (on {device})")
            group.phase = _Phase.FAILING
            self._leave(group, {}, comes_back=not message.permanent)
        self._close_if_empty(group)

    def _leave(self, group: _Group, leases: dict[str, int], comes_back: bool) -> None:
        """Ends a split model: marks its group as broken, and sends an EvictModel to each engine that still holds its share (the
        part of the model on its device). leases: device -> its new lease in chunks; devices that are missing keep theirs.
        comes_back: whether the model will be loaded again soon. If so, the engines leave its weights in memory until the chunks are
        used for something else; otherwise they drop the weights."""
        self._break(group)
        for device in group.devices:
            if device in group.holding and device not in group.leaving:
                group.leaving.add(device)
                lease_chunks = leases[device] if device in leases else self._lease_of(device)
                self._send(device, EvictModel(group.placement_id, group.model, lease_chunks, comes_back=comes_back))

    def _gone(self, group: _Group, device: str) -> None:
        group.holding.discard(device)
        group.leaving.discard(device)

    def _close_if_empty(self, group: _Group) -> None:
        """Removes a split model's group, and reports its final answer to the scheduler, if no engine can use the model's region
        (part of the engines' shared memory) any more; otherwise does nothing."""
        if (answer := self._closed_with(group)) is not None:
            self._tell(*answer)

    def _closed_with(self, group: _Group) -> tuple[str, Answer] | None:
        """Removes a split model's group if no engine can use the model's region (part of the engines' shared memory) any more.
        Returns the answer that the scheduler must then get, as (joined names of the devices, message). Returns None if an engine
        can still use the region, or if there is nothing to report."""
        if group.holding:
            return None
        assert self._regions is not None
        del self._groups[group.placement_id]
        self._closed.append(group.placement_id)
        self._free(group.region_offset, self._lost.intersection(group.devices))
        if group.phase is _Phase.FAILING:
            return group.failure
        if group.phase is _Phase.LEAVING:
            return group.name, Evicted(group.placement_id, group.model)
        return None

    def _free(self, offset: int, lost: set[str]) -> None:
        """Frees the region of a split model: its part of the memory that engines share. offset: where the region begins. lost: the
        devices whose engines were killed and have not ended yet; the region is then freed only when they have ended."""
        assert self._regions is not None
        if lost:
            self._kept_regions.append((offset, lost))
        else:
            self._regions.free(offset)

    def _break(self, group: _Group) -> None:
        assert self._regions is not None
        self._regions.break_group(group.region_offset)


def _sum_of_progress(group: _Group) -> LoadProgress:
    """Returns the progress of a split model's load over all its engines: the sums of their bytes. An engine that waits for its
    kernels reports bytes_total 0; as long as one does, the result has bytes_total 0, too. An engine that has not reported yet is
    assumed to have as many bytes to load as the engine that reported the most."""
    told = [one for device, one in group.progress.items() if one.bytes_total or device not in group.loaded]
    if not all(one.bytes_total for one in told):
        return LoadProgress(group.placement_id, 0, 0)
    untold = len(set(group.devices) - group.progress.keys() - group.loaded.keys())
    total = sum(one.bytes_total for one in told) + untold * max((one.bytes_total for one in told), default=0)
    return LoadProgress(group.placement_id, sum(one.bytes_done for one in told), total)


def _part(slots: Sequence[int], rank: int, devices: tuple[str, ...]) -> list[int]:
    """Returns the slots of the host tier that one engine of a split model uses, out of those granted to the whole model. rank: the
    index of the engine's device in `devices`. devices: the devices of the model."""
    num = len(slots) // len(devices)
    return list(slots[rank * num : (rank + 1) * num])


def _joined_load(group: _Group) -> LoadDone:
    """Returns one LoadDone for a whole split model: the longest of its engines' durations, and the sum of the bytes that they have
    read."""
    parts = [group.loaded[device] for device in group.devices]
    return LoadDone(
        group.placement_id,
        group.model,
        seconds=max(part.seconds for part in parts),
        bytes_read=sum(part.bytes_read for part in parts),
        kept=all(part.kept for part in parts),
        checksums=[checksum for part in parts for checksum in part.checksums],
        source_rejected="; ".join(f"{part.source_rejected} (rank {at})" for at, part in enumerate(parts) if part.source_rejected),
        copy_seconds=max(part.copy_seconds for part in parts),
        map_seconds=max(part.map_seconds for part in parts),
        read_as="; ".join(dict.fromkeys(part.read_as for part in parts if part.read_as)),
        kernels_seconds=max(part.kernels_seconds for part in parts),
        adopted=any(part.adopted for part in parts),
    )
