"""Models that are split over GPUs: exchanges between the ranks, by themselves and in graphs, how long they take and what of the
device's memory they take; logits of models in shares and in stages against the whole model's; how fast they decode; and a rank that
is killed while the other one waits for it, in an exchange or for the states of a stage. Ranks are processes that see one GPU each,
as engines do. One JSON line each.

With one GPU this shows what one can: NCCL with a single rank; graphs of a share that hold NCCL's calls; two ranks on the same GPU,
which NCCL does not join, so that they exchange through the host; and a pipeline of two stages on it, which need no NCCL, until one
of them is killed. What needs two is named as skipped.

usage: python -m benchmarks.gpu_split [--tiny]: --tiny interpreted on the CPU, with gloo in the place of NCCL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_ranks import HOST, NCCL, Rank, RankProcesses, RanksFailed, visible_devices
from benchmarks.gpu_split_exchanges import abort, connections, prepare_abort, sums, wait_for_lost
from benchmarks.gpu_split_models import (
    decode_share,
    decode_whole_on,
    mirrored_logits,
    share_logits,
    stage_logits,
    wait_for_lost_stage,
    whole_logits,
)
from loader.sizes.gpu_sizing import COMMUNICATOR_BYTES, PEER_REGION_BYTES

# What hearthd reckons with for a connection of a rank.
SMALL = tuple(kib << 10 for kib in (8, 16, 32, 64, 128, 256))  # of sums, in bytes: up to what GPUs map from each other
SIZES = (*SMALL, 1 << 20, 32 << 20)
MODELS = (("llama", 1), ("mixture", 1), ("mixture", 2))  # name, expert_parts
MAPPED = "memory that the ranks map from each other"
GRAPH_ROWS = 256
CONTEXT, NUM_STEPS = 1024, 100  # of decoding
DECODE_LIMIT_S = 200.0  # kernels may have to be compiled
WAITS_S = 0.5  # for which a rank waits in an exchange before the other one is killed


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_split"} | figures), flush=True)


class Group:
    """The processes of a group, started anew after they have failed."""

    def __init__(self, visible: list[str], device: str, through: str) -> None:
        self._parts = (visible, device, through)
        self.through, self.size, self.captures = through, len(visible), device == "cuda" and through == NCCL
        self.failed = False
        self._processes: RankProcesses | None = None

    def does(self, what: str, work: Callable[[RankProcesses], None], ends: bool = False) -> None:
        """Does one thing. One that fails is told, and keeps no other from being done. ends: the processes are of no use
        afterwards."""
        try:
            if self._processes is None:
                began_s = time.perf_counter()
                self._processes = RankProcesses(*self._parts)
                self._processes.run(Rank.give_up)
                tell(what="started", ranks=self.size, through=self.through, seconds=round(time.perf_counter() - began_s, 1))
            work(self._processes)
            if ends:
                self.end()
            else:
                self._processes.run(Rank.give_up)
        except RanksFailed as error:
            self.failed = True
            print(error, file=sys.stderr, flush=True)
            tell(what="failed", which=what, ranks=self.size, through=self.through, why=str(error).strip().splitlines()[-1])
            self.end()

    def end(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None


def exchanges(ranks: RankProcesses, through: str) -> None:
    for again in (False, True):
        told = ranks.run(connections)
        (released_s, *_) = ranks.run(Rank.give_up)
        mib = max(one["mib"] for one in told)
        tell(
            what="exchanges",
            ranks=ranks.size,
            through=through,
            version=told[0]["version"],
            maps=sum(one["joined"] for one in told),  # ranks whose small sums go through memory that they map from each other
            again=again,  # the second connection of the same processes
            connect_s=max(one["connect_s"] for one in told),
            connected_mib=max(one["connected_mib"] for one in told),
            mib=mib,
            of_reckoned=round(mib * 2**20 / (COMMUNICATOR_BYTES + PEER_REGION_BYTES), 3),
            wrong=sum(one["wrong"] for one in told),
            replays=told[0]["replays"],
            wrong_replays=sum(one["wrong_replays"] for one in told),
            released_s=round(released_s, 3),
        )


def aborts(ranks: RankProcesses) -> None:
    for beside_graph in (False, True):
        ranks.run(prepare_abort)
        told = ranks.run(abort, beside_graph)
        tell(
            what="abort",
            ranks=ranks.size,
            beside_graph=beside_graph,
            ended_beside_graph=[one["ended_beside_graph"] for one in told],
            seconds=max(one["seconds"] for one in told),
            hung=sum(one["hung"] for one in told),
        )


def logits_of(ranks: RankProcesses, through: str, name: str, expert_parts: int, graph_rows: int) -> None:
    ranks.start(whole_logits, name, ranks=[0])
    (whole,) = ranks.results([0])
    told = ranks.run(share_logits, name, expert_parts, graph_rows)
    (released_s, *_) = ranks.run(Rank.give_up)
    _check_graphs(graph_rows, told[0][1])
    tell(
        what="logits",
        model=name,
        expert_parts=expert_parts,
        through=through,
        graphs=told[0][1],
        difference=max(_difference(one, whole) for one, _ in told),
        largest=round(max(float(np.abs(one).max()) for one in whole), 2),
        released_s=round(released_s, 3),
    )


def stages_logits(ranks: RankProcesses, name: str, graph_rows: int) -> None:
    ranks.start(whole_logits, name, ranks=[0])
    (whole,) = ranks.results([0])
    told = ranks.run(stage_logits, name, graph_rows)
    (released_s, *_) = ranks.run(Rank.give_up)
    for _, num_graphs in told:
        _check_graphs(graph_rows, num_graphs)
    tell(
        what="logits of a pipeline",
        model=name,
        stages=ranks.size,
        graphs=[num_graphs for _, num_graphs in told],
        difference=_difference(told[0][0], whole),
        largest=round(max(float(np.abs(one).max()) for one in whole), 2),
        released_s=round(released_s, 3),
    )


def mirrored(ranks: RankProcesses, name: str) -> None:
    found = []
    for graph_rows in (0, GRAPH_ROWS):
        found += ranks.run(mirrored_logits, name, graph_rows)
        (released_s,) = ranks.run(Rank.give_up)
    (eager, _), (in_graphs, num_graphs) = found
    _check_graphs(GRAPH_ROWS, num_graphs)
    tell(
        what="graphs of a share alone",
        model=name,
        graphs=num_graphs,
        difference=_difference(in_graphs, eager),
        released_s=round(released_s, 3),
    )


def _check_graphs(graph_rows: int, num_graphs: int) -> None:
    """Raises RanksFailed if a share has not run as it should: in graphs or, without graph_rows, in none."""
    if bool(graph_rows) != bool(num_graphs):
        raise RanksFailed(f"the share captured {num_graphs} graphs of up to {graph_rows} rows")


def _difference(found: list[Any], wanted: list[Any]) -> float:
    """Returns the largest difference; infinity where one is not finite."""
    largest = float(np.max([np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)]))
    return float(f"{largest:.3g}") if np.isfinite(largest) else float("inf")


def sum_times(ranks: RankProcesses, through: str, sizes: tuple[int, ...]) -> None:
    small = tuple(num_bytes for num_bytes in sizes if num_bytes in SMALL)
    plain, *_ = ranks.run(sums, sizes, False)
    ranks.run(Rank.give_up)
    mapped, *_ = ranks.run(sums, small, True)
    for way, told in ((through, plain), (MAPPED, mapped)):
        for each in told:
            tell(what="sum", ranks=ranks.size, through=way, **each)
    if not mapped:
        tell(what="skipped", why="these GPUs do not reach each other's memory; the log of a rank says why")
    for one, other in zip(plain, mapped, strict=False):
        tell(what="small sum", ranks=ranks.size, kib=one["kib"], of_plain=round(other["us"] / one["us"], 3))


def decoding(
    ranks: RankProcesses, name: str, context: int, num_steps: int, graph_rows: int, whole_ms: list[float], staged: bool
) -> None:
    """whole_ms: what a step of the whole model takes, once it was measured."""
    own, *_ = ranks.run(decode_share, name, context, num_steps, graph_rows, staged, limit_s=DECODE_LIMIT_S)
    ranks.run(Rank.give_up)
    title = "decode of a pipeline" if staged else "decode of a share"
    tell(what=title, model=name, ranks=ranks.size, context=context, **own)
    if not whole_ms:
        ranks.start(decode_whole_on, name, context, num_steps, ranks=[0])
        whole_ms += ranks.results([0], DECODE_LIMIT_S)
    what = "decode in stages" if staged else "decode"
    tell(what=what, model=name, ms=own["ms"], whole_ms=whole_ms[0], faster=round(whole_ms[0] / own["ms"], 3))


def lose_one(ranks: RankProcesses, captured: bool) -> None:
    """Kills the last rank while the first one waits for it in an exchange."""
    tell(what="rank killed", ranks=ranks.size, captured=captured, goes_on_s=_killed_s(ranks, wait_for_lost, captured))


def lose_stage(ranks: RankProcesses, graph_rows: int) -> None:
    """Kills the first stage of a pipeline while the last one, rank 0, waits for its states."""
    goes_on_s = _killed_s(ranks, wait_for_lost_stage, graph_rows)
    tell(what="stage killed", stages=ranks.size, captured=bool(graph_rows), goes_on_s=goes_on_s)


def _killed_s(ranks: RankProcesses, waiting: Callable[..., tuple[float, bool]], *arguments: Any) -> float:
    """Kills the last rank while the first one waits for it in `waiting`. The group's flag is set then, as the daemon does when it
    sees that an engine has ended. Returns the seconds until the first one's stream went on."""
    ranks.start(waiting, *arguments)
    ranks.results(range(1, ranks.size))
    ranks.await_word(0)
    time.sleep(WAITS_S)
    waited = not ranks.has_told(0)
    ranks.kill(ranks.size - 1)
    killed_s = time.monotonic()
    ranks.broken[0] = 1
    ((ended_s, right),) = ranks.results([0])
    if not (waited and right):
        raise RanksFailed(f"the first rank {'computed wrongly afterwards' if waited else 'did not wait for the last one'}")
    return float(round(ended_s - killed_s, 3))


def pipelines(group: Group, graph_rows: tuple[int, ...]) -> None:
    """Compares the logits of each model in stages with those of the whole one, and kills a stage. graph_rows: the most rows of
    graphs, by turns."""
    for name in dict.fromkeys(name for name, _ in MODELS):
        for rows in graph_rows:
            group.does("logits of a pipeline", partial(stages_logits, name=name, graph_rows=rows))
    for rows in graph_rows:
        group.does("a stage killed", partial(lose_stage, graph_rows=rows), ends=True)


def across(group: Group, tiny: bool) -> None:
    """Does everything that ranks on GPUs of their own show."""
    forms = (False, True)[: 1 + group.captures]  # of work: without graphs, with graphs
    group.does("exchanges", partial(exchanges, through=group.through))
    for name, expert_parts in MODELS[:: 2 if tiny else 1]:  # interpreted, each takes seconds
        for in_graphs in forms:
            rows, through = GRAPH_ROWS * in_graphs, group.through
            group.does("logits", partial(logits_of, through=through, name=name, expert_parts=expert_parts, graph_rows=rows))
    pipelines(group, (0,) if tiny else (0, GRAPH_ROWS))
    group.does("sums", partial(sum_times, through=group.through, sizes=SIZES[:1] if tiny else SIZES))
    group.does("aborts", aborts)
    for captured in forms:
        group.does("a rank killed", partial(lose_one, captured=captured), ends=True)
    name, context, num_steps, rows = ("tiny", 20, 2, 0) if tiny else ("8b", CONTEXT, NUM_STEPS, GRAPH_ROWS)
    decode = partial(decoding, name=name, context=context, num_steps=num_steps, graph_rows=rows, whole_ms=[])
    for what, staged in (("decode", False), ("decode in stages", True)):
        group.does(what, partial(decode, staged=staged))


def on_one(visible: str) -> bool:
    """Does everything that one GPU shows. Returns whether something failed."""
    alone, two = Group([visible], "cuda", NCCL), Group([visible] * 2, "cuda", HOST)
    alone.does("exchanges", partial(exchanges, through=NCCL))
    alone.does("aborts", aborts)
    for name in dict.fromkeys(name for name, _ in MODELS):
        alone.does("graphs of a share alone", partial(mirrored, name=name))
    alone.end()
    for name, expert_parts in MODELS:
        two.does("logits", partial(logits_of, through=HOST, name=name, expert_parts=expert_parts, graph_rows=0))
    pipelines(two, (0, GRAPH_ROWS))
    two.end()
    tell(
        what="skipped",
        why="this machine has one GPU, and two are needed for exchanges between GPUs and their times, for split models with NCCL, "
        "for how fast shares and stages decode, and for a rank of a share that is killed",
    )
    return alone.failed or two.failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_split", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpreted on the CPU, with gloo in the place of NCCL")
    if parser.parse_args().tiny:
        group = Group([""] * 2, "cpu", HOST)
    elif torch.cuda.device_count() < 2:
        sys.exit(on_one(visible_devices(1)[0]))
    else:
        group = Group(visible_devices(2), "cuda", NCCL)
    across(group, tiny=not group.captures)
    group.end()
    sys.exit(group.failed)


if __name__ == "__main__":
    main()
