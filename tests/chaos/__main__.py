"""Does to a node under load whatever may go wrong, and tells what its clients lost by it.

usage: python -m tests.chaos [--seconds 60] [--seed N] [--runner null|torch] [--clients N] [--only ACT,ACT] [--log FILE]

Each line says what was done, as it is done; the last one is a JSON object. The exit code is 1 if a request was lost that was ended
neither by its client nor by what ends connections (kill -9 of the daemon, a version that cannot read what is handed over), if an
answer had another text than on an undisturbed node, or if the daemon or an engine holds something at the end that it did not hold
at the beginning: memory, descriptors, mappings, threads, processes, chunks of a device.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.acts import ACTS, RESTART, Act
from tests.chaos.adapters import versions_loaded
from tests.chaos.cast import Cast
from tests.chaos.clients import MAX_TOKENS, Clients, Request, all_requests, ask
from tests.chaos.holdings import holdings, leaks, unexplained
from tests.chaos.world import World, started, versions_for

PAUSE_S = 0.4  # the longest between two acts
SHORT_S = 120.0  # a run that is shorter leaves acts out that may take as long
SHOWN_LINES = 40  # of the log, where something has leaked
TRACEBACK_LINES = 60  # from its beginning on, so that the error at its end is among them


def in_turn(acts: Sequence[Act], draw: random.Random) -> Iterator[Act]:
    """Yields acts in an order that is drawn: first each once, those that take long at the end, so that a short run has as many
    different ones as it has time for; and then each as often as its weight says before any comes again."""
    deck = list(acts)
    draw.shuffle(deck)
    yield from sorted(deck, key=lambda act: act.is_long)
    while True:
        deck = [act for act in acts for _ in range(act.weight)]
        draw.shuffle(deck)
        yield from deck


def answers(url: str, requests: Iterable[Request]) -> dict[Request, str]:
    requests = list(requests)
    with ThreadPoolExecutor(16) as threads:
        return dict(zip(requests, threads.map(lambda request: ask(url, request), requests), strict=True))


def _same_answers(url: str, expected: Mapping[Request, str]) -> list[str]:
    """Asks what takes little time once more, so that what is measured afterwards has computed the same; returns what is wrong."""
    few = [request for request in expected if request.max_tokens == min(MAX_TOKENS) and not request.is_background]
    told = answers(url, few)
    return [f"{request}: another text when all was over" for request, text in told.items() if text != expected[request]]


def run(
    folder: Path,
    seconds: float,
    seed: int,
    runner: str = "null",
    num_clients: int = 8,
    acts: Sequence[Act] = ACTS,
    say: Callable[[str], None] = print,
    kept_log: Path | None = None,
) -> dict[str, Any]:
    """Returns what happened: counts of acts and of requests, what was lost, what is held too much, and `faults`, which is empty if
    all is well. folder: an empty one for the node. kept_log: a file for the node's log; None: it is not kept."""
    draw, cast = random.Random(seed), Cast(runner)
    skipped = [] if cast.has_adapters else ["adapters and packed weights: the null runner has none"]
    chosen = [act for act in acts if cast.has_adapters or not act.of_adapters]
    acts = [act for act in chosen if seconds >= SHORT_S or not act.is_long] or chosen
    skipped += [f"{act.name}: a run of {seconds:g} s is too short" for act in chosen if act not in acts]
    versions = versions_for(folder, runner)
    with started(folder, runner, cast) as (node, means):
        told = answers(node.url, all_requests(cast.asked))
        of_versions = {}
        if cast.has_adapters:
            with versions_loaded(node.folder, node.url) as names:
                of_versions = answers(node.url, all_requests(names))
        expected = cast.expected(told | of_versions)
        of_own = {request: text for request, text in expected.items() if request.model in (*cast.models, *cast.adapters)}
        alike = cast.alike(told | of_versions)
        node.restart(RESTART)  # what a daemon takes over belongs to what it holds
        _same_answers(node.url, of_own)
        before = holdings(node, cast.models)
        clients = Clients(node.url, cast.names, expected, draw, num_clients)
        clients.faults += alike
        world = World(node, cast, clients, draw, means, versions)
        done, num_told = Counter[str](), 0
        begin_s = time.monotonic()
        for act in in_turn(acts, draw):
            if time.monotonic() - begin_s > seconds:
                break
            say(f"{time.monotonic() - begin_s:7.1f} s  {act.name}")
            act.do(world)
            done[act.name] += 1
            for fault in clients.faults[num_told:]:
                say(f"FAULT {fault}")
            num_told = len(clients.faults)
            assert node.notify is not None
            node.notify.read()
            time.sleep(draw.random() * PAUSE_S)
        world.join()
        clients.stop()
        seconds_taken = time.monotonic() - begin_s
        node.wait_for(node.has_all_engines, "engines at the end")
        clients.faults += _same_answers(node.url, of_own)
        clients.faults += unexplained(node)
        after = holdings(node, cast.models)
        log = node.log_text()
        if kept_log is not None:
            kept_log.write_text(log)
    leaked = leaks(before, after)
    if leaked:
        say("\n".join(log.splitlines()[-SHOWN_LINES:]))
    faults = [*clients.faults, *leaked]
    tracebacks = [part.strip().splitlines()[:TRACEBACK_LINES] for part in log.split("Traceback (most recent call last)")[1:]]
    faults += ["a traceback in the log: " + "\n".join(lines) for lines in tracebacks]
    for fault in faults[num_told:]:
        say(f"FAULT {fault}")
    return {
        "chaos": runner,
        "seed": seed,
        "seconds": round(seconds_taken, 1),
        "acts": dict(done),
        "skipped": [*means.skipped, *skipped],
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
    parser.add_argument("--log", type=Path, metavar="FILE", help="where to keep the node's log")
    options = parser.parse_args()
    acts = [act for act in ACTS if not options.only or act.name in options.only.split(",")]
    if not acts:
        parser.error(f"--only: {options.only!r} is none of {', '.join(act.name for act in ACTS)}")
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    print(f"seed {seed}, {options.seconds:g} s, runner {options.runner}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hearth-chaos-") as folder:
        told = partial(print, flush=True)
        said = run(Path(folder), options.seconds, seed, options.runner, options.clients, acts, told, options.log)
    print(json.dumps(said))
    sys.exit(bool(said["faults"]))


if __name__ == "__main__":
    main()
