"""Shares device time between the tenants of one model: the tenant that has used least for its weight is served first.

A step's measured time is divided among its rows by their tokens and charged to their tenants. If a step has no room for all prompts
or rows, those of the tenants with the least time used come first. A tenant that floods the model therefore delays only its own
requests. A new tenant starts level with the least served one, and a tenant that has had little work is at most FORGIVEN_S behind
the others: unused time cannot be saved up. While one tenant is alone, nothing is charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.batch.plan import BatchPlan, FloatArray, IntArray, LongArray

FORGIVEN_S = 0.25


@dataclass(slots=True, frozen=True)
class TenantLoad:
    """The work that one tenant wants computed in a step. num_rows: sequences that decode. num_prompts: prompts that have begun or
    wait. share: the tenant's part of the device by weight (0 to 1), among the tenants that want something computed."""

    num_rows: int  # sequences that decode
    num_prompts: int  # prompts that wait or are being computed
    share: float = 1.0


class TenantTime:
    """The accounts of device time of a model's tenants, for sequences in num_slots slots. Seconds are device seconds, measured by
    the caller."""

    def __init__(self, num_slots: int) -> None:
        self._of_slot: IntArray = np.zeros(num_slots, np.int32)
        self._ran_at: LongArray = np.zeros(num_slots, np.int64)  # number of the last limited step that a row was in
        self._num_runs: LongArray = np.zeros(num_slots, np.int64)  # how many limited steps a row was in
        self._num_limited = 0
        self._index: dict[str, int] = {}
        self._num_sequences: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))  # free indexes of accounts
        self._used_s: FloatArray = np.zeros(num_slots, np.float64)  # seconds used by each tenant, divided by its weight
        self._weight: FloatArray = np.ones(num_slots, np.float64)

    def join(self, slot: int, tenant: str, weight: float) -> None:
        index = self._index.get(tenant)
        if index is None:
            least = min((float(self._used_s[other]) for other in self._index.values()), default=0.0)
            index = self._index[tenant] = self._free.pop()
            self._used_s[index] = least
            self._num_sequences[tenant] = 0
        self._weight[index] = weight
        self._num_sequences[tenant] += 1
        self._of_slot[slot] = index
        self._ran_at[slot] = self._num_runs[slot] = 0

    def leave(self, tenant: str) -> None:
        self._num_sequences[tenant] -= 1
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]
            self._free.append(self._index.pop(tenant))

    @property
    def several(self) -> bool:
        return len(self._index) > 1

    def charge(self, plan: BatchPlan, seconds: float) -> None:
        """Divides the seconds of a step among the tenants of its rows, by their tokens. Must be called while the step's sequences
        are still in their slots. Does nothing while only one tenant has sequences."""
        if not self.several:
            return
        tokens = np.bincount(self._of_slot[plan.slots], plan.num_new, len(self._used_s))
        self._used_s += tokens * (seconds / tokens.sum()) / self._weight
        active = list(self._index.values())
        used = self._used_s[active]
        self._used_s[active] = np.maximum(used, used.max() - FORGIVEN_S)

    def choose(self, slots: IntArray, most: int) -> IntArray:
        """Returns at most `most` of the slots: those of the least served tenants first, and of one tenant the sequences that have
        waited longest.

        If several sequences of a tenant last ran in the same step, those that have run in the fewest steps come first. (If they
        were taken in the order of slots, the sequences in the last slots would fall further and further behind.)"""
        if len(slots) <= most:
            return slots
        self._num_limited += 1
        order = np.lexsort((self._num_runs[slots], self._ran_at[slots], self._used_s[self._of_slot[slots]]))
        chosen = slots[order[:most]]
        self._ran_at[chosen] = self._num_limited
        self._num_runs[chosen] += 1
        return chosen

    def in_order(self, slots: IntArray) -> IntArray:
        """Returns the slots sorted by tenant, the least served first; the order within a tenant stays."""
        if not self.several or len(slots) < 2:
            return slots
        return slots[np.argsort(self._used_s[self._of_slot[slots]], kind="stable")]

    def comes_before(self, tenant: str, slot: int) -> bool:
        """Returns whether a tenant has used less time for its weight than the tenant of a slot; True for a tenant that has no
        account yet."""
        index = self._index.get(tenant)
        return index is None or bool(self._used_s[index] < self._used_s[self._of_slot[slot]])

    def loads(self, decode: IntArray, prefill: IntArray, waiting: Mapping[str, tuple[int, float]]) -> list[TenantLoad]:
        """Returns what each tenant wants computed in the next step. decode: slots of the sequences that decode. prefill: slots of
        the sequences with more than one token to compute. waiting: tenant -> (number of requests that wait, weight)."""
        if len(self._index) + len(waiting) < 2 or (len(self._index) == 1 and self._index.keys() == waiting.keys()):
            return [TenantLoad(len(decode), len(prefill) + sum(number for number, _ in waiting.values()))]
        rows = np.bincount(self._of_slot[decode], minlength=len(self._used_s))
        prompts = np.bincount(self._of_slot[prefill], minlength=len(self._used_s))
        weights = {tenant: float(self._weight[index]) for tenant, index in self._index.items()}
        weights |= {tenant: weight for tenant, (_, weight) in waiting.items()}
        total = sum(weights.values())
        loads = []
        for tenant, weight in weights.items():
            index = self._index.get(tenant)
            running = (0, 0) if index is None else (int(rows[index]), int(prompts[index]))
            loads.append(TenantLoad(running[0], running[1] + waiting.get(tenant, (0, 0.0))[0], weight / total))
        return loads
