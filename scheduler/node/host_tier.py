"""Keeps the account of the host tier: equal slots of host memory that the daemon owns, and what each of them holds.

A slot is free, in transit (granted to a load or an eviction under way, which may write it), or holds weights or saved KV. Slots
that a load reads from are lent to it: they are given to no other use until the load has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

Slots = tuple[int, ...]


@dataclass(slots=True)
class HostCopy:
    """One model's copy of one kind (weights or KV) in slots of host memory. fingerprint: identifies the only checkpoint for which
    the copy is valid. num_bytes: its size."""

    fingerprint: str
    slots: Slots
    num_bytes: int
    lent: int = 0  # id of the placement whose load reads it; 0: none
    void: bool = False  # whether its slots are to be freed once no load reads it


@dataclass(slots=True)
class KeptWeights(HostCopy):
    checksums: tuple[int, ...] = ()  # those of the shares by rank, or that of a whole model


@dataclass(slots=True)
class SavedKV(HostCopy):
    index: bytes = b""  # the engine's index: which tokens of which tenants
    num_tokens: int = 0


@dataclass(slots=True)
class Transit:
    """Slots that were granted to one load or eviction of `model`, which may write them until its grant ends."""

    model: str
    slots: Slots


class HostTierAccount:
    """The account of the host tier's slots, which are numbered from 0. At any time each slot is in exactly one of these states:
    free, in transit, holding weights, or holding KV."""

    __slots__ = ("_free", "kv", "num_slots", "revision", "transit", "weights")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.weights: dict[str, KeptWeights] = {}
        self.kv: dict[str, SavedKV] = {}
        self.transit: dict[int, Transit] = {}  # placement id -> the slots granted to it
        self.revision = 0  # counts the changes of what the slots hold

    @property
    def num_free(self) -> int:
        return len(self._free)

    def counts(self) -> dict[str, int]:
        """Returns how many slots are "free", in "transit", or hold "weights" or "kv"."""
        return {
            "free": len(self._free),
            "transit": sum(len(one.slots) for one in self.transit.values()),
            "weights": sum(len(one.slots) for one in self.weights.values()),
            "kv": sum(len(one.slots) for one in self.kv.values()),
        }

    def copies(self) -> list[tuple[str, HostCopy]]:
        """Returns (model, copy) for each copy of weights or KV in host memory. Void copies are included: copies that were dropped
        while a load reads them."""
        return [*self.weights.items(), *self.kv.items()]

    def grant(self, placement_id: int, model: str, num_slots: int) -> Slots:
        """Takes num_slots free slots, lowest first, and returns them. The placement's load or eviction may write these slots until
        `end_grant` is called. Raises ValueError if there are too few, or if the placement has slots already."""
        if num_slots > len(self._free):
            raise ValueError(f"{num_slots} slots asked for {model}, {len(self._free)} are free")
        if placement_id in self.transit:
            raise ValueError(f"placement {placement_id} has slots already")
        slots = tuple(self._free.pop() for _ in range(num_slots))
        if slots:
            self.revision += 1
            self.transit[placement_id] = Transit(model, slots)
        return slots

    def end_grant(self, placement_id: int, keep: Slots = ()) -> None:
        """Ends the grant of a placement's slots, if it has any. keep: those of the slots that hold weights or KV; they stay taken,
        and the caller must record them by a call of `hold` right after this one. All other slots become free. Raises ValueError for
        a slot in `keep` that was not granted."""
        granted = self.transit.pop(placement_id, None)
        slots = granted.slots if granted is not None else ()
        kept = set(keep)
        if not kept <= set(slots):
            raise ValueError(f"placement {placement_id} was not granted slots {sorted(kept - set(slots))}")
        self._put_back(tuple(slot for slot in slots if slot not in kept))

    def hold(self, model: str, copy: HostCopy) -> None:
        """Records that the slots `copy.slots` hold the model's weights or KV. These slots must have been granted to a load or
        eviction that has ended and kept them (`end_grant`), or found when the daemon started."""
        self.revision += 1
        if isinstance(copy, SavedKV):
            self.kv[model] = copy
        elif isinstance(copy, KeptWeights):
            self.weights[model] = copy

    def found(self, model: str, copy: HostCopy) -> bool:
        """Records a copy that an earlier daemon left in host memory. Returns False, and records nothing, if its slots do not exist
        or are not free, or if the model has a copy of this kind already."""
        if not copy.slots or model in (self.kv if isinstance(copy, SavedKV) else self.weights):
            return False
        wanted = set(copy.slots)
        if len(wanted) < len(copy.slots) or not wanted <= set(self._free):
            return False
        self._free = [slot for slot in self._free if slot not in wanted]
        self.hold(model, copy)
        return True

    def valid_copies(self) -> list[tuple[str, HostCopy]]:
        """Returns (model, copy) for each copy that a load may use. Void copies are left out: copies that were dropped and whose
        slots are kept only until the load that reads them has ended."""
        return [(model, copy) for model, copy in self.copies() if not copy.void]

    def drop_weights(self, model: str) -> None:
        """Drops the copy of a model's weights, if there is one. Its slots become free at once, or, if a load reads them, when the
        load has ended."""
        self._drop(self.weights, model)

    def drop_kv(self, model: str) -> None:
        self._drop(self.kv, model)

    def _drop(self, kind: dict[str, KeptWeights] | dict[str, SavedKV], model: str) -> None:
        copy = kind.get(model)
        if copy is None:
            return
        self.revision += 1
        if copy.lent:
            copy.void = True
            return
        del kind[model]
        self._put_back(copy.slots)

    def lend(self, model: str, placement_id: int) -> None:
        """Records that the load of this placement reads the copies of a model's weights and KV. Their slots are not given to others
        until `returned` is called."""
        for kind in (self.weights, self.kv):
            if (copy := kind.get(model)) is not None:
                copy.lent = placement_id

    def returned(self, model: str) -> None:
        """Records that no load reads the copies of a model's weights and KV any more. Slots of a copy that was dropped meanwhile
        become free."""
        for kind in (self.weights, self.kv):
            copy = kind.get(model)
            if copy is not None:
                copy.lent = 0
                if copy.void:
                    self._drop(kind, model)

    def _put_back(self, slots: Slots) -> None:
        self._free.extend(reversed(slots))

    def validate(self) -> None:
        """Raises AssertionError unless each slot is recorded exactly once: as free, granted, or part of one copy."""
        places = [*self._free, *(slot for one in self.transit.values() for slot in one.slots)]
        places += [slot for _, copy in self.copies() for slot in copy.slots]
        assert len(places) == len(set(places)), "host tier: a slot is in two places"
        assert set(places) == set(range(self.num_slots)), "host tier: slots are lost"
        for model, copy in self.copies():
            assert copy.slots, f"host tier: an empty copy of {model}"
            assert not copy.void or copy.lent, f"host tier: a copy of {model} that was given up is still there"
