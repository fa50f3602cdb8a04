"""Stages of a pipeline whose steps run as CUDA graphs compute what they compute without. All stages run in one thread, with
interpreted kernels, and a stand-in for a graph runs the captured step again, as a replay would.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda import graphs, stages
from engine.cuda.graph_room import GraphRoom
from engine.cuda.mixed_steps import MixedSize
from engine.cuda.share import CudaShare
from engine.protocol import SamplingParams
from scheduler.batch.plan import BatchPlan, write_sampling
from tests.engine.cuda_bench import INTERPRETED
from tests.engine.model_bench import MAX_LEN, plan
from tests.engine.rank_processes import Rank, RankGroup, ranks_here
from tests.engine.split_models import How, load_share, table_of, wait_for_leader
from tests.engine.stand_in_graphs import StandInGraph, put_in, remember_steps, stand_in_graphs

pytest.importorskip("triton")
pytestmark = INTERPRETED
__all__ = ["stand_in_graphs"]  # a fixture

LAUNCHED = How(gpu=True, num_stages=2, few_layers=True)
REPLAYED = replace(LAUNCHED, graph_rows=8)
MIXED = replace(REPLAYED, graph_tokens=16)
PROMPT, STEPS = 5, 3
PADDING_TOLERANCE = 1e-4
# Batches of sequences that decode at the same time. What computes products here may round those of padded steps otherwise.
BATCHES, PADDED = (range(2), range(4, 8)), (range(3), range(4, 9))
ROWS = [len(slots) for slots in BATCHES]


@dataclass
class Told:
    """What the last stage has told of a step: the bits of the logits of its rows, and their tokens."""

    logits: torch.Tensor
    ids: list[int]


class Pipeline:
    """A model whose stages are here. As many steps are under way as there are stages, of different sequences."""

    def __init__(self, how: How, family: str = "llama") -> None:
        self.ranks: list[Rank] = ranks_here(how.num_stages)
        shares = [load_share(own, family, "float32", how) for own in self.ranks]
        self.shares: list[CudaShare] = [share for share in shares if isinstance(share, CudaShare)]
        self.first, self.last = self.shares[-1], self.shares[0]
        for share in self.shares:
            remember_steps(share)
        self._logits: list[torch.Tensor] = []  # the latest that the last stage has computed
        model = self.last._loaded()
        logits_of = model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            self._logits = [logits_of(hidden)]
            return self._logits[0]

        model.logits = logits  # type: ignore[method-assign]
        self.table = table_of(self.last)
        for slot in range(len(self.table.request_id)):
            params = SamplingParams(max_tokens=60, temperature=0.8 * (slot % 2), top_p=0.9, seed=slot)
            write_sampling(self.table, slot, params, PROMPT, MAX_LEN)
        self._under_way: deque[BatchPlan] = deque()

    def launch(self, step: BatchPlan) -> None:
        """Runs the part of a step of all stages but the last."""
        for share in self.shares[:0:-1]:
            share.follow(step, self.table)
        self._under_way.append(step)

    def end(self) -> Told:
        """Runs the last stage's part of the oldest step under way. The tokens that it samples are those of the next step."""
        step = self._under_way.popleft()
        result = self.last.execute(step, self.table)
        slots, ends = step.slots[step.samples], (step.num_computed + step.num_new)[step.samples]
        self.table.tokens[slots, ends] = result.ids
        return Told(self._logits.pop()[: len(slots)] if len(slots) else torch.empty(0), result.ids.tolist())

    def run(self, *steps: BatchPlan) -> list[Told]:
        """Runs steps of different sequences, all of which are under way at the same time."""
        for step in steps:
            self.launch(step)
        return [self.end() for _ in steps]

    def prompts(self, batches: Sequence[range] = BATCHES) -> None:
        for slots in batches:
            self.run(plan(*((slot, 0, PROMPT) for slot in slots)))

    def decode(self, at: int, batches: Sequence[range] = BATCHES) -> list[Told]:
        """Runs a decode step of each batch. at: how many tokens every sequence has computed before."""
        return self.run(*(plan(*((slot, at, 1) for slot in slots)) for slots in batches))

    def decoded(self, batches: Sequence[range] = BATCHES) -> list[Told]:
        self.prompts(batches)
        return [told for at in range(PROMPT, PROMPT + STEPS) for told in self.decode(at, batches)]

    def release(self) -> None:
        for share in self.shares:
            share.release()

    @property
    def captured(self) -> list[list[int]]:
        return [sorted(share.graphs.captured) for share in self.shares]


def check_same(found: list[Told], expected: list[Told], tolerance: float = 0.0) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert own.ids == other.ids
        np.testing.assert_allclose(own.logits, other.logits, rtol=0, atol=tolerance)
    assert len({tuple(told.ids) for told in expected}) > 1


def is_same(found: list[Told], expected: list[Told]) -> bool:
    return all(torch.equal(own.logits, other.logits) for own, other in zip(found, expected, strict=True))


_expected: dict[tuple[str, int], list[Told]] = {}


def expected_of(family: str = "llama", num_stages: int = 2) -> list[Told]:
    """Returns what stages without graphs tell of decode steps."""
    if (family, num_stages) not in _expected:
        pipeline = Pipeline(replace(LAUNCHED, num_stages=num_stages), family)
        _expected[family, num_stages] = pipeline.decoded()
        assert not any(pipeline.captured)
        pipeline.release()
    return _expected[family, num_stages]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandInGraph]]:
    """Returns the graphs that were replayed so far."""
    replayed: list[StandInGraph] = []
    replay = StandInGraph.replay

    def counted(graph: StandInGraph) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(StandInGraph, "replay", counted)
    return replayed


@pytest.mark.parametrize(("family", "num_stages"), [("llama-biases", 3), ("qwen3.5", 2), ("gemma4", 2)])
def test_replayed_steps_are_those_that_are_launched(
    stand_in_graphs: SimpleNamespace, replays: list[StandInGraph], family: str, num_stages: int
) -> None:
    """To the last bit, with several steps under way; of three stages the second receives and sends."""
    expected = expected_of(family, num_stages)
    pipeline = Pipeline(replace(REPLAYED, num_stages=num_stages), family)
    for share in pipeline.shares:
        for rows in ROWS:
            assert share.capture(rows) == rows
    check_same(pipeline.decoded(), expected)
    assert len(replays) == num_stages * len(expected)
    assert pipeline.captured == [ROWS] * num_stages
    pipeline.release()
    assert not any(pipeline.captured)


def test_replayed_steps_may_be_padded(stand_in_graphs: SimpleNamespace, replays: list[StandInGraph]) -> None:
    plain = Pipeline(LAUNCHED)
    expected = plain.decoded(PADDED)
    plain.release()
    pipeline = Pipeline(REPLAYED)
    for share in pipeline.shares:
        for rows in (4, 8):
            share.capture(rows)
    check_same(pipeline.decoded(PADDED), expected, PADDING_TOLERANCE)
    assert len(replays) == 2 * len(expected)
    pipeline.release()


def test_stages_capture_when_they_lack_a_graph_for_the_second_time(
    stand_in_graphs: SimpleNamespace, replays: list[StandInGraph]
) -> None:
    """So some stages replay a step that others launch: each has graphs of its own."""
    expected, pipeline = expected_of(), Pipeline(REPLAYED)
    assert pipeline.first.capture(2) == 2
    check_same(pipeline.decoded(), expected)
    assert pipeline.captured == [ROWS, ROWS]
    assert len(replays) == 2 * len(expected) - 3, "all but the first step of 4 rows, and the last stage's first of 2"
    pipeline.release()


def test_what_is_captured_in_idle_time_passes_nothing_on(stand_in_graphs: SimpleNamespace, replays: list[StandInGraph]) -> None:
    """Captures happen between the stages' parts of steps that are under way."""
    expected, pipeline = expected_of(), Pipeline(REPLAYED)
    pipeline.prompts()
    found = []
    for at in range(PROMPT, PROMPT + STEPS):
        for slots in BATCHES:
            pipeline.launch(plan(*((slot, at, 1) for slot in slots)))
            for share in pipeline.shares:
                if share.num_uncaptured:
                    share.capture_next()
        found += [pipeline.end() for _ in BATCHES]
    check_same(found, expected)
    assert replays
    pipeline.release()


ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), RuntimeError("CUDA error: out of memory")]


@pytest.mark.parametrize(("error", "refuses"), list(zip(ERRORS, (0, 1), strict=True)), ids=["torch-last", "driver-first"])
def test_a_stage_whose_capture_is_aborted_launches_its_steps(
    stand_in_graphs: SimpleNamespace,
    replays: list[StandInGraph],
    caplog: pytest.LogCaptureFixture,
    error: RuntimeError,
    refuses: int,
) -> None:
    """Memory runs out behind the layers, when the captured step has received its states and left those that it passes on."""
    expected, pipeline = expected_of(), Pipeline(REPLAYED)
    share = pipeline.shares[refuses]
    computed, link = share._computed, share._links.stages
    assert link is not None

    def without_memory(*args: Any) -> Any:
        result = computed(*args)
        if link._in_place:
            raise error
        return result

    share._computed = without_memory  # type: ignore[method-assign]
    with caplog.at_level("WARNING", "engine"):
        check_same(pipeline.decoded(), expected)
    assert [line for line in caplog.messages if line.startswith("steps of 2 rows have no graph for 60 s")]
    assert pipeline.captured[refuses] == []
    assert pipeline.captured[1 - refuses] == ROWS
    assert replays
    pipeline.release()


def test_pipelines_on_the_same_engines_share_one_room(
    stand_in_graphs: SimpleNamespace, replays: list[StandInGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps alternate, and one is evicted and loaded again while the other one has a step under way. Graphs of all stages
    count in the room for graphs."""
    expected, of_other = expected_of(), expected_of("llama-biases")
    room = GraphRoom(6)
    monkeypatch.setattr(graphs, "_room", room)
    pipeline, other = Pipeline(REPLAYED), Pipeline(REPLAYED, "llama-biases")
    for one in (pipeline, other):
        one.prompts()
    found, found_of_other = [], []
    for at in range(PROMPT, PROMPT + STEPS):
        if at == PROMPT + 2:
            pipeline.launch(plan(*((slot, at, 1) for slot in BATCHES[0])))
            other.release()
            assert not any(other.captured)
            other = Pipeline(REPLAYED, "llama-biases")
            other.prompts()
            for again in range(PROMPT, at):
                other.decode(again)
            found.append(pipeline.end())
            found += pipeline.run(plan(*((slot, at, 1) for slot in BATCHES[1])))
        else:
            found += pipeline.decode(at)
        found_of_other += other.decode(at)
        assert room.num_graphs <= 6
    check_same(found, expected)
    check_same(found_of_other, of_other)
    assert room.num_graphs == 6
    assert pipeline.captured == [ROWS, ROWS]
    for one in (pipeline, other):
        one.release()
    assert room.num_graphs == 0


def run_with_late_sends(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Returns what a pipeline tells if the first stage's thread sends no states before the graph of the next step was replayed."""
    pipeline = Pipeline(REPLAYED)
    for share in pipeline.shares:
        for rows in ROWS:
            share.capture(rows)
    pipeline.prompts()
    found, may_send, wait = [], threading.Semaphore(0), stages._Buffer.wait

    def wait_longer(buffer: Any) -> None:
        if threading.current_thread().name == "stage":
            assert may_send.acquire(timeout=30.0)
        wait(buffer)

    monkeypatch.setattr(stages._Buffer, "wait", wait_longer)
    for at in range(PROMPT, PROMPT + STEPS):
        for slots in BATCHES:
            pipeline.launch(plan(*((slot, at, 1) for slot in slots)))
        for _ in BATCHES:
            may_send.release()
        found += [pipeline.end() for _ in BATCHES]
    monkeypatch.setattr(stages._Buffer, "wait", wait)
    pipeline.release()
    return found


def test_a_replay_leaves_alone_what_is_still_to_be_sent(stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(run_with_late_sends(monkeypatch), expected_of())


def test_a_send_from_the_memory_of_graphs_is_found(stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is planted: what is sent is read when the thread comes to it, by when the next replay has overwritten it."""

    def send_later(self: stages.DeviceStages, states: Any) -> None:
        buffer = self._free.get()
        parts = buffer.parts(states, self._num_tokens)
        num_tokens, wait = self._num_tokens, buffer.wait

        @torch.inference_mode()
        def copy_after_it() -> None:
            wait()
            for state, part in zip(states, parts, strict=True):
                part.copy_(state[:num_tokens])
            del buffer.wait

        buffer.wait = copy_after_it  # type: ignore[method-assign]
        self._filled.put(buffer)

    monkeypatch.setattr(stages.DeviceStages, "_send", send_later)
    assert not is_same(run_with_late_sends(monkeypatch), expected_of())


def test_a_replay_before_its_states_have_come_is_found(stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is planted: states are received behind the replay."""
    expected, pipeline = expected_of(), Pipeline(REPLAYED)
    for rows in ROWS:
        pipeline.last.capture(rows)
    pipeline.prompts()
    link = pipeline.last._links.stages
    assert link is not None
    monkeypatch.setattr(link, "pass_on", link.take)
    monkeypatch.setattr(link, "take", lambda: None)
    assert not is_same([told for at in range(PROMPT, PROMPT + STEPS) for told in pipeline.decode(at)], expected)
    pipeline.release()


def mixed_steps() -> list[BatchPlan]:
    """Returns steps in which some rows decode and others compute pieces of prompts, some of which do not sample."""
    return [
        plan((0, PROMPT, 1), (10, 0, 9), (11, 0, 5), samples=(True, False, True)),
        plan((1, PROMPT, 1), (4, PROMPT, 1), (12, 0, 6)),
        plan((0, PROMPT + 1, 1), (11, 5, 1), (10, 9, 7)),
        plan((13, 0, 16), samples=(False,)),
        plan((1, PROMPT + 1, 1), (13, 16, 2)),
    ]


def test_pieces_of_prompts_are_replayed_too(stand_in_graphs: SimpleNamespace, replays: list[StandInGraph]) -> None:
    """Products of padded steps may round otherwise. A stage pads as it likes, so one may have a graph and the other none."""
    plain = Pipeline(LAUNCHED)
    plain.prompts()
    expected = [told for step in mixed_steps() for told in plain.run(step)]
    plain.release()
    for which in ("both", "last", "first"):
        pipeline = Pipeline(MIXED)
        for share in pipeline.shares:
            assert share.mixed_graphs.missing() == [MixedSize(16, 16, next(iter(share.mixed_graphs._sizes)).num_tiles)]
            if which == "both" or share is getattr(pipeline, which):
                assert share.capture_mixed(share.mixed_graphs.missing()[0])
        pipeline.prompts()
        replays.clear()
        check_same([told for step in mixed_steps() for told in pipeline.run(step)], expected, PADDING_TOLERANCE)
        assert len(replays) == len(expected) * (2 if which == "both" else 1)
        pipeline.release()


def logits_of_ranks(own: Rank, how: How) -> tuple[list[np.ndarray], int]:
    """Returns the logits of decode steps of a rank of a stage of several, and how many of these steps it has replayed."""
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        share = load_share(own, "llama", "float32", how)
        assert isinstance(share, CudaShare)
        remember_steps(share)
        assert share._links.ranks is not None
        share._links.ranks._lock = threading.RLock()  # type: ignore[assignment]  # the stand-in launches exchanges in a replay
        share.capture(ROWS[0])
        table, replays = table_of(share), 0
        run = share.graphs.run

        def counted(*args: Any) -> Any:
            nonlocal replays
            replays += 1
            return run(*args)

        patch.setattr(share.graphs, "run", counted)
        found = []
        for number, step in enumerate([plan(*((slot, at, num) for slot in BATCHES[0])) for at, num in ((0, 5), (5, 1), (6, 1))]):
            wait_for_leader(own, how, number)
            if share._loaded().makes_logits:
                found.append(share.logits(step, table))
            else:
                share.follow(step, table)
            own.ended[0] += own.rank == 0
        return found, replays


def test_stages_of_several_ranks_replay_their_exchanges() -> None:
    group = RankGroup(4)
    plain = group.run(logits_of_ranks, [LAUNCHED] * 4)
    group.renew()
    replayed = group.run(logits_of_ranks, [REPLAYED] * 4)
    group.close()
    assert [number for _, number in plain + replayed] == [0] * 4 + [2] * 4
    for (own, _), (other, _) in zip(replayed[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(own, other)
    assert [logits for logits, _ in replayed[2:]] == [[], []]


def edited(how: How) -> tuple[list[list[int]], Pipeline]:
    """Returns the tokens of rows with penalties, biases and log-probabilities."""
    pipeline = Pipeline(how)
    for slot, settings in enumerate(({"repetition_penalty": 1.5}, {"logprobs": 2}, {"logit_bias": {7: 9.0}}, {})):
        params = SamplingParams(max_tokens=60, temperature=0.0, **settings)
        write_sampling(pipeline.table, slot, params, PROMPT, MAX_LEN)
    pipeline.prompts([range(4)])
    return [told.ids for at in range(PROMPT, PROMPT + STEPS) for told in pipeline.decode(at, [range(4)])], pipeline


def test_the_last_stage_samples_edited_rows_by_graphs(stand_in_graphs: SimpleNamespace, replays: list[StandInGraph]) -> None:
    expected, plain = edited(LAUNCHED)
    assert not replays
    found, pipeline = edited(REPLAYED)
    assert found == expected
    assert pipeline.last.edited_graphs.captured
    assert len(replays) > 2 * (STEPS - 1), "graphs of edited rows besides those of steps"
    for one in (plain, pipeline):
        one.release()


def test_the_memory_of_states_is_kept_and_counted(stand_in_graphs: SimpleNamespace) -> None:
    without, pipeline = Pipeline(LAUNCHED), Pipeline(MIXED)
    for plain, share in zip(without.shares, pipeline.shares, strict=True):
        link = share._links.stages
        assert link is not None
        assert link.kept_bytes == 2 * 16 * share.shape.hidden_size * 4
        assert share.kept_bytes == plain.kept_bytes + link.kept_bytes
    for one in (without, pipeline):
        one.release()
