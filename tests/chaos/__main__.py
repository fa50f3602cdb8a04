"""Does to a node under load whatever may go wrong, and tells what its clients lost by it.

usage: python -m tests.chaos [--seconds 60] [--seed N] [--runner null|torch] [--clients N] [--only ACT,ACT]

Each line says what was done, as it is done; the last one is a JSON object. The exit code is 1 if a request was lost that no client
and no kill -9 of the daemon has ended, if an answer had another text than on an undisturbed node, or if the node holds something
at the end that it did not hold at the beginning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.acts import ACTS, RESTART, Act
from tests.chaos.clients import Clients, all_requests, ask
from tests.chaos.world import DESCRIPTORS_SLACK, MODELS, World, holdings, started

PAUSE_S = 1.0  # the longest between two acts
NONE_OF = ("zombies", "chunks_in_use", "host_tier_bytes", "requests")
SAME_AS_BEFORE = ("engines",)


def run(
    folder: Path,
    seconds: float,
    seed: int,
    runner: str = "null",
    num_clients: int = 8,
    acts: Sequence[Act] = ACTS,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns what happened: counts of acts and of requests, what was lost, what is held too much, and `faults`, which is empty if
    all is well. folder: an empty one for the node."""
    draw = random.Random(seed)
    with started(folder, runner) as (node, state_disk):
        with ThreadPoolExecutor(16) as threads:
            requests = all_requests(MODELS)
            expected = dict(zip(requests, threads.map(lambda request: ask(node.url, request), requests), strict=True))
        node.restart(RESTART)  # what a daemon takes over belongs to what it holds
        before = holdings(node)
        clients = Clients(node.url, MODELS, expected, draw, num_clients)
        world = World(node, clients, draw, state_disk)
        done, num_told = Counter[str](), 0
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < seconds:
            (act,) = draw.choices(acts, [each.weight for each in acts])
            say(f"{time.monotonic() - begin_s:7.1f} s  {act.name}")
            act.do(world)
            done[act.name] += 1
            for fault in clients.faults[num_told:]:
                say(f"FAULT {fault}")
            num_told = len(clients.faults)
            assert node.notify is not None
            node.notify.read()
            time.sleep(draw.random() * PAUSE_S)
        clients.stop()
        node.wait_for(node.has_all_engines, "engines at the end")
        after = holdings(node)
        log = node.log_text()
    faults = [*clients.faults]
    faults += [f"at the end {name} is {after[name]}" for name in NONE_OF if after[name]]
    faults += [f"{name}: {before[name]} before, {after[name]} after" for name in SAME_AS_BEFORE if after[name] != before[name]]
    if after["descriptors"] > before["descriptors"] + DESCRIPTORS_SLACK:
        faults.append(f"descriptors of the daemon: {before['descriptors']} before, {after['descriptors']} after")
    faults += [f"a traceback in the log: {part.strip()[:2000]}" for part in log.split("Traceback (most recent call last)")[1:]]
    for fault in faults[num_told:]:
        say(f"FAULT {fault}")
    return {
        "chaos": runner,
        "seed": seed,
        "seconds": round(time.monotonic() - begin_s, 1),
        "acts": dict(done),
        "skipped": [] if state_disk else ["full state disk: a tmpfs can be mounted by root only"],
        "requests": dict(clients.counts),
        "longest_s": round(clients.longest_s, 2),
        "before": before,
        "after": after,
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats the order of acts; default: a new one, which is printed")
    parser.add_argument("--runner", choices=("null", "torch"), default="torch")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--only", default="", help="names of acts, separated by commas")
    options = parser.parse_args()
    acts = [act for act in ACTS if not options.only or act.name in options.only.split(",")]
    if not acts:
        parser.error(f"--only: {options.only!r} is none of {', '.join(act.name for act in ACTS)}")
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    print(f"seed {seed}, {options.seconds:g} s, runner {options.runner}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hearth-chaos-") as folder:
        said = run(Path(folder), options.seconds, seed, options.runner, options.clients, acts, lambda line: print(line, flush=True))
    print(json.dumps(said))
    sys.exit(bool(said["faults"]))


if __name__ == "__main__":
    main()
