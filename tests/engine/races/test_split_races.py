"""Nothing races in random schedules of an engine with shares of split models, and faults of exchanges are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest

pytest.importorskip("triton")

from engine import exchange
from engine.cuda import backend, graphs, nccl, peers, ranks, share, stages
from tests.engine.races.device import TORCH, Here, Stream
from tests.engine.races.engine_run import run_of
from tests.engine.races.exchanges import sums_of_ranks
from tests.engine.races.split_run import STATES, RacingLink, SplitRun
from tests.engine.races.tensors import Torch

NUM_SEEDS = 14  # of each version of torch
MOST_SEEDS = 100  # in which a fault is found
# Fault -> a seed that finds it, tried first (test_races.py).
FINDS = {"order": 113, "send buffers": 20, "loads": 6, "launching": 5}
Fault = Callable[[SplitRun, pytest.MonkeyPatch], None]


@pytest.mark.parametrize("version", TORCH)
def test_nothing_races_beside_exchanges(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, others = Counter[str](), Counter[str]()
    for seed in range(NUM_SEEDS):
        run = run_of(seed, version, monkeypatch, kind=SplitRun)
        assert run.faults == [], f"seed {seed}"
        counts.update(run.device.counts)
        others.update(run.other.device.counts)
    exchanges = ("a sum of ranks", "sum", "broadcast", "gather")
    for what in (*exchanges, "norm", "replayed a sum of ranks", "replayed broadcast", "replayed gather", "unmapping"):
        assert counts[what] > 5, what
    for what in (*exchanges, "norm"):
        assert others[what] > 5, what


def test_a_seed_is_one_schedule_of_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (run_of(3, "2.12", monkeypatch, kind=SplitRun) for _ in range(2))
    for one, other in ((first.device, second.device), (first.other.device, second.other.device)):
        assert one.counts == other.counts
        assert [stream.clock for stream in one.streams] == [stream.clock for stream in other.streams]


class GivenUpBesideALoad(SplitRun):
    """A run in which a group's regions are given up while another group's load waits in an exchange, until the loop goes on: the
    other rank comes to that exchange behind a step in which this engine's loop takes part."""

    def _run(self, num_actions: int) -> None:
        loading, goes_on = self.device.new_stream(), list[bool]()
        with Torch(Here(self.schedule)).cuda.stream(loading):
            regions = self.regions.DeviceRegions(2)

        def wait_for_loop(stream: Stream) -> None:
            self.schedule.wait(lambda: bool(goes_on), "the loop")

        load = self.schedule.thread(lambda: self.device.launch("broadcast", [], wait_for_loop, loading), name="load")
        load.start()
        self.schedule.wait(lambda: loading.is_busy, "an exchange of the load")
        regions.wait_for_steps()
        regions.close()
        goes_on.append(True)
        load.join()
        self._settle()


def test_no_group_is_given_up_behind_another_ones_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_of(0, "2.12", monkeypatch, kind=GivenUpBesideALoad).faults == []


# ---- faults that are put in


def sums_with(old: str, new: str) -> Fault:
    """Returns what puts a fault into the text of the kernel of small sums."""

    def put_in(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers, "triton_peers", sums_of_ranks(run.peer_memory, (old, new)))

    return put_in


def exchanges_have_a_stream_of_their_own(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's exchanges are launched on another stream than the kernels whose results they exchange."""
    own = {device: device.new_stream() for device in (run.device, run.other.device)}
    where = nccl.NcclGroup._where

    def beside(self: Any) -> Any:
        return where(self)[0], own[run.schedule.host.device].cuda_stream

    monkeypatch.setattr(nccl.NcclGroup, "_where", beside)


def steps_are_not_posted_at_once(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader adds its step to the queues of a group's engines one after the other, and another leader may do so in between."""

    def post(self: Any) -> bool:
        for number, queue in zip(self._members, self._queues, strict=True):
            run.note_posted(number, self._words[queue] + 1)
            self._words[queue + exchange._RING + self._words[queue] % exchange.QUEUE_ENTRIES] = self._region
            self._words[queue] += 1
            for _ in range(10):
                run.schedule.point()
        return not self._broken[0]

    monkeypatch.setattr(exchange.Poster, "post", post)


def shares_are_padded_as_they_have_graphs(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without graphs computes exactly the plan's rows."""
    columns = share.decode_columns

    def exact(plan: Any, table: Any, rows: Any, padded: int) -> Any:
        return columns(plan, table, rows, padded if run.schedule.host.device is run.device else len(plan.slots))

    monkeypatch.setattr(share, "decode_columns", exact)


def warm_ups_exchange(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank exchanges something in steps by which it warms up before a capture."""
    captured = graphs.StepGraphs._captured

    def exchanging(self: Any, padding: Any) -> Any:
        self._warming = nullcontext
        return captured(self, padding)

    monkeypatch.setattr(graphs.StepGraphs, "_captured", exchanging)


def leaders_do_not_wait_for_their_steps(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader plans the next step of the same sequences while followers may still read their rows."""
    monkeypatch.setattr(share.CudaShare, "execute", lambda self, *step: self.launch(*step))


def regions_are_unmapped_beside_sums(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.regions.DeviceRegions, "wait_for_steps", lambda self: None)


def ranks_are_tried_after_they_have_joined(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load may still sum through the ranks' memory when this is given up, as the group breaks."""
    tried, connect = ranks._try, ranks.connect

    def connected(*arguments: Any) -> Any:
        made = connect(*arguments)
        try:
            tried(made, arguments[-1])
        except BaseException:
            made.close()
            raise
        return made

    monkeypatch.setattr(ranks, "_try", lambda *_: None)
    monkeypatch.setattr(backend, "connect", connected)


def launches_do_not_look_at_the_connection(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.DeviceRanks, "launching", lambda self: nullcontext())


def shares_keep_their_graphs(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted share keeps its graphs, as whole models do."""
    monkeypatch.setattr(share.CudaShare, "drop_graphs", lambda self: None)


def split_models_load_at_once(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.loads_one_at_a_time = False


def states_are_sent_before_they_are_there(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage passes states on while their copy to the host may still be under way."""
    wait = stages._Buffer.wait

    def hasty(self: Any) -> None:
        if "stage" not in run.schedule.host.name:
            wait(self)

    monkeypatch.setattr(stages._Buffer, "wait", hasty)


def send_buffers_are_given_back_at_once(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is filled again while the thread that sends may still read it."""

    def send_filled(self: Any) -> None:
        while (buffer := self._filled.get()) is not None:
            buffer.wait()
            num_bytes = buffer.num_bytes
            self._free.put(buffer)
            self._sending.place[:num_bytes] = buffer.memory[:num_bytes].numpy()
            self._sending.send()

    monkeypatch.setattr(stages, "_NUM_BUFFERS", 0)  # of the one that is left each step has the same
    monkeypatch.setattr(stages.DeviceStages, "_send_filled", send_filled)


def states_are_taken_before_they_have_come(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RacingLink, "is_early", True)


def pipelines_have_one_place(run: SplitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps under way have their states in the same place between two stages."""
    monkeypatch.setattr(RacingLink, "num_places", 1)


BUFFER, WAITS = "a buffer of a region", "nothing goes on: "
FAULTS: list[tuple[str, Fault, str]] = [
    ("one buffer", sums_with("(call % 2) * LANES", "0 * LANES"), f"writes {BUFFER} that a sum of ranks on"),
    ("no wait", sums_with("while number < call:", "while number < 0:"), f"reads {BUFFER} that a sum of ranks on"),
    (
        "a wait for the call before",
        sums_with("while number < call:", "while number < call - 1:"),
        f"{BUFFER} that a sum of ranks on",
    ),
    ("own stream", exchanges_have_a_stream_of_their_own, "gather on stream"),
    ("order", steps_are_not_posted_at_once, WAITS),
    ("padding", shares_are_padded_as_they_have_graphs, "ranks of a group meet in different exchanges: "),
    ("warm-ups", warm_ups_exchange, WAITS),
    ("leaders", leaders_do_not_wait_for_their_steps, "writes a row of a group's table that a step on"),
    ("unmapping", regions_are_unmapped_beside_sums, "writes a mapping that a sum of ranks on"),
    ("trial", ranks_are_tried_after_they_have_joined, "writes a mapping that a sum of ranks on"),
    ("launching", launches_do_not_look_at_the_connection, "on a connection that was given up"),
    ("graphs", shares_keep_their_graphs, "waits for the end of graphs with exchanges"),
    ("loads", split_models_load_at_once, WAITS),
    ("sending", states_are_sent_before_they_are_there, "writes page-locked memory that copy on"),
    ("send buffers", send_buffers_are_given_back_at_once, "page-locked memory that"),
    ("taking", states_are_taken_before_they_have_come, f"{STATES} that"),
    ("places", pipelines_have_one_place, f"writes {STATES} that taking them on"),
]


@pytest.mark.parametrize(("name", "put_in", "fault"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_of_exchanges_is_found(name: str, put_in: Fault, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, None] = {}

    def changed(run: SplitRun, patches: pytest.MonkeyPatch) -> None:
        runs.append(run)
        put_in(run, patches)

    for seed in dict.fromkeys((FINDS.get(name, 0), *range(MOST_SEEDS))):
        runs: list[SplitRun] = []
        with suppress(Exception):  # what is wrong may also raise somewhere
            run_of(seed, "2.12", monkeypatch, changed, SplitRun)
        found |= dict.fromkeys(runs[0].faults)
        if any(fault in text for text in found):
            return
    pytest.fail(f"not among {list(found)}")
