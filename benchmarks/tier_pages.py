"""Measures the seconds a GiB that the pages of a host tier take: populated, as an engine on a GPU does before it page-locks them
(engine/memory/host_registration.py), and put into huge pages, as an idle engine prepares slots (HostTier.prepare), where nothing
has touched them and where they were populated. JSON lines: all rounds and the least of them, because others may use the machine.

usage: python -m benchmarks.tier_pages [--gib 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

from benchmarks.run import machine
from engine.memory import host_registration, mappings
from engine.memory.host_tier import HostTier

SLOT_BYTES = 16 << 20  # a chunk's of a node with a GPU


def populate(tier: HostTier) -> int:
    """Makes all pages as register() does. Returns 0, the bytes that are put into huge pages. Raises MemoryError."""
    address, num_bytes = tier.span
    size = host_registration.POPULATED_BYTES
    if not all(mappings.populate(at, size) for at in range(address, address + num_bytes, size)):
        raise MemoryError("the system refuses to provide the pages")
    return 0


def collapse(tier: HostTier) -> int:
    """Prepares all slots. Returns the bytes that are in huge pages then."""
    return sum(tier.prepare(slot) for slot in range(tier.num_slots))


# What is done to the pages of a new tier, one after the other, each with its name.
TIERS: tuple[dict[str, Callable[[HostTier], int]], ...] = (
    {"populated": populate, "collapsed after that": collapse},
    {"collapsed": collapse},
)


def turn(num_slots: int) -> dict[str, tuple[float, int]]:
    """Returns for each name the seconds, and the bytes in huge pages."""
    found = {}
    for works in TIERS:
        tier = made(num_slots)
        for name, work in works.items():
            began_s = time.perf_counter()
            huge_bytes = work(tier)
            found[name] = time.perf_counter() - began_s, huge_bytes
        mappings.release(*tier.span)
    return found


def made(num_slots: int) -> HostTier:
    fd = os.memfd_create("tier", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_slots * SLOT_BYTES)
    return HostTier(fd, num_slots, SLOT_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tier_pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    turns = [turn((options.gib << 30) // SLOT_BYTES) for _ in range(options.rounds)]
    for name in turns[0]:
        seconds = [round(each[name][0] / options.gib, 3) for each in turns]
        line = {"benchmark": "tier_pages", "kernel": os.uname().release, "gib": options.gib, "pages": name, "s_a_gib": seconds}
        line |= {"least_s_a_gib": min(seconds), "huge_of_all": min(each[name][1] for each in turns) / (options.gib << 30)}
        print(json.dumps(machine() | line), flush=True)


if __name__ == "__main__":
    main()
