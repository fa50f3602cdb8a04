"""Keeps the account of a device's memory, in chunks. All decisions are based on this account. The free memory that the driver
reports is only compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.node.events import ModelFacts
from scheduler.node.groups import HERE, by_rank, host_of, kind_of

MIB = 1024 * 1024


@dataclass(slots=True, frozen=True)
class Size:
    """The size, in chunks, of one copy of a model, or of one share of a split model, on a device. All models of a device share one
    work space, which has the size of the largest that any of them needs."""

    weights_chunks: int
    kv_chunks: int
    work_space_chunks: int

    @property
    def chunks(self) -> int:
        """Chunks of weights and reserved KV, which this copy alone holds."""
        return self.weights_chunks + self.kv_chunks


NOTHING = Size(0, 0, 0)


def size_of(facts: ModelFacts, chunk_bytes: int) -> Size:
    """Returns how many chunks a model takes on a device. Weights and work space are rounded up to chunks. Reserved KV is that of
    one request of max_model_len tokens (or of kv_floor_tokens, if larger), rounded up, plus one chunk because blocks do not end
    where chunks do."""
    return Size(
        weights_chunks=-(-facts.weights_bytes // chunk_bytes),
        kv_chunks=-(-kv_reserved_bytes(facts) // chunk_bytes) + 1,
        work_space_chunks=-(-facts.work_space_bytes // chunk_bytes),
    )


def kv_reserved_bytes(facts: ModelFacts) -> int:
    return facts.kv_reserved_bytes or max(facts.kv_floor_tokens, facts.max_model_len) * facts.kv_bytes_per_token


def amount(num_bytes: int) -> str:
    """Returns a number of bytes as text, such as `12345678 bytes (11.8 MiB)`."""
    return f"{num_bytes} bytes ({num_bytes / MIB:.1f} MiB)"


def arithmetic(facts: ModelFacts, chunk_bytes: int, budgets: dict[str, int]) -> str:
    """Returns a text that shows why a model fits on none of the devices, or its shares on too few: what it needs, and for each
    device what it has. budgets: device name -> budget in bytes."""
    size = size_of(facts, chunk_bytes)
    each = f"{'at most ' if facts.kv_reserved_bytes else ''}{facts.kv_bytes_per_token} bytes"
    weights, kv, work = (n * chunk_bytes for n in (size.weights_chunks, size.kv_chunks, size.work_space_chunks))
    stages = f" in {facts.num_stages} stages" if facts.num_stages > 1 else ""
    share = f"it is split over {facts.num_ranks} devices of one kind{stages} (parallel), each with " if facts.is_split else ""
    lines = [
        f"{share}weights {amount(weights)} + reserved KV {amount(kv)} for {max(facts.kv_floor_tokens, facts.max_model_len)} tokens"
        f" of {each} + work space {amount(work)} = {amount(weights + kv + work)}"
        f", in chunks of {chunk_bytes} bytes"
    ]
    num_roomy: dict[str, int] = {}  # kind of device, and its host if that is another one -> how many have room for a share
    is_lent = False
    for device in sorted(budgets, key=by_rank):
        budget = budgets[device]
        kind = kind_of(device)
        if facts.is_split and not kind:
            lines.append(f"{device} is set aside for one model and holds no share")
            continue
        if (host := host_of(device)) != HERE and facts.num_stages == 1:
            lines.append(f"{device} is another host's and holds stages of pipelines alone")
            continue
        if host != HERE:
            is_lent, kind = True, f"{kind} on {host}"
        usable = budget // chunk_bytes * chunk_bytes
        over = weights + kv + work - usable
        num_roomy[kind] = num_roomy.get(kind, 0) + (over <= 0)
        lines.append(f"{device} has {amount(usable)}: {'fits' if over <= 0 else f'{amount(over)} too little'}")
    if facts.is_split:
        counts = ", ".join(f"{num} of kind {kind}" for kind, num in num_roomy.items()) or "none"
        size_of_stage = f"{facts.num_ranks // facts.num_stages} for each stage, on one host, that of the last one on this"
        lines.append(f"{facts.num_ranks} are needed{f' ({size_of_stage})' if is_lent else ''}, a share fits on {counts}")
    return "; ".join(lines)


class DeviceLedger:
    """The account of one device. At all times

        lease = total - work space - sum(weights + reserved KV of each copy) - chunks promised to placements under way

    where the lease is what the engine may use as KV for any of its models beyond their reserves."""

    __slots__ = ("_held", "held_chunks", "promised", "total_chunks", "work_space_chunks")

    def __init__(self, total_chunks: int) -> None:
        self.total_chunks = total_chunks
        self.work_space_chunks = 0
        self.held_chunks = 0
        self._held: dict[str, Size] = {}
        self.promised: dict[int, tuple[int, int]] = {}  # placement id -> (chunks, work space)

    @property
    def held(self) -> dict[str, Size]:
        return self._held

    @property
    def lease_chunks(self) -> int:
        """The device's lease: how many chunks the engine may use as KV beyond the models' reserves. It is 0 if promises and copies
        together exceed the device, which can happen while victims still hold chunks that a placement is to get."""
        return max(0, self.total_chunks - self.work_space_chunks - self.held_chunks - self.promised_chunks)

    @property
    def promised_chunks(self) -> int:
        return sum(chunks for chunks, _ in self.promised.values())

    def room_for(self, placement_id: int) -> int:
        """Returns how many chunks all copies and the work space may take together if a given placement is carried out: the device's
        total minus the chunks promised to other placements. placement_id: 0 for no placement."""
        return self.total_chunks - sum(chunks for other, (chunks, _) in self.promised.items() if other != placement_id)

    def promise(self, placement_id: int, chunks: int, work_space_chunks: int) -> None:
        self.promised[placement_id] = (max(0, chunks), work_space_chunks)

    def withdraw(self, placement_id: int) -> None:
        self.promised.pop(placement_id, None)

    def required_work_space(self) -> int:
        """Returns the largest work space, in chunks, that any copy on the device or any placement under way needs."""
        return max(
            max((size.work_space_chunks for size in self._held.values()), default=0),
            max((work for _, work in self.promised.values()), default=0),
        )

    def raise_work_space(self, chunks: int) -> bool:
        """Enlarges the work space to `chunks`, out of chunks that nothing uses, for a model that was registered or placed. Returns
        whether it was enlarged; False if it is large enough already or there is no room now."""
        extra = chunks - self.work_space_chunks
        if extra <= 0 or extra > self.lease_chunks:
            return False
        self.work_space_chunks = chunks
        return True

    def has_room(self, placement_id: int, size: Size) -> bool:
        """Returns whether a model of this size, which the placement of this id is to bring, fits on the device now, beside all
        copies on the device and all chunks promised to other placements. Copies that are being evicted still count, with their work
        space, until they are gone."""
        others = [promise for other, promise in self.promised.items() if other != placement_id]
        works = (*(one.work_space_chunks for one in self._held.values()), *(work for _, work in others), size.work_space_chunks)
        return self.held_chunks + size.chunks + sum(chunks for chunks, _ in others) + max(works) <= self.total_chunks

    def hold(self, model: str, size: Size) -> None:
        """Records that a model's copy holds its chunks from now on. If too few are free, a work space that is larger than any copy
        needs is reduced. Raises ValueError if the model has a copy already, or if the copy does not fit."""
        if model in self._held:
            raise ValueError(f"{model} is held already")
        self._held[model] = size
        self.held_chunks += size.chunks
        required = self.required_work_space()
        room = self.total_chunks - self.held_chunks - self.promised_chunks
        self.work_space_chunks = max(required, min(self.work_space_chunks, room))
        if self.work_space_chunks > room:
            raise ValueError(
                f"{model} overdraws its device: {self.held_chunks} held + {self.promised_chunks} promised"
                f" + {self.work_space_chunks} work space > {self.total_chunks} chunks"
            )

    def release(self, model: str) -> None:
        self.held_chunks -= self._held.pop(model).chunks

    def clear(self) -> None:
        """Empties the account, because the engine's memory is gone. The work space stays reserved for the next engine."""
        self._held.clear()
        self.promised.clear()
        self.held_chunks = 0
