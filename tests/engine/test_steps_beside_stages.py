"""While the steps of a pipeline are in other stages, the engine that leads it runs steps of its other models. The engine's loop is
stepped by hand, each test plays the stage before it, and each step counts as a millisecond."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.loads import LoadTask
from engine.contracts.steps import StepResult
from engine.exchange import Membership, RegionSizes
from engine.loop.worker import Engine
from engine.memory.group_region import open_region
from engine.memory.stage_link import StageLink
from engine.null.runner import NullRunner
from engine.protocol import EMBED, JOURNAL_BYTES, EmbeddingsOut, Group, SamplingParams, Submit, TokensOut, read_journal
from engine.serve.served_models import Place
from scheduler.batch.turns import Turns
from tests.engine import engine_process
from tests.engine.engine_process import Messages, load_message, null_checkpoint, null_configure, submit_message
from tests.engine.test_embeddings import FakeEncoder
from tests.engine.test_groups import expected

MANY = 20  # passes of the loop
PIPELINE, OWN = "pipeline", "own"


class Leader:
    """An engine that leads a pipeline of two stages and serves a model of its own. ahead: it launches the latter's steps ahead."""

    def __init__(self, folder: Path, ahead: bool = False) -> None:
        self.node, self.configure = engine_process.Node(2), null_configure(null_step_ms=0.0)
        self.channel, self.page = Messages(), mmap.mmap(-1, JOURNAL_BYTES)
        self.runner = NullRunner(self.configure, exchange=self.node.exchange)
        member = Membership(self.node.exchange, 0, self.node.doorbells[0])
        self.engine = Engine(self.channel, self.page, self.configure, self.runner, None, membership=member)  # type: ignore[arg-type]
        place = self.node.region(RegionSizes(2, 32, 256, self.configure.block_tokens, num_stages=2))
        path = null_checkpoint(folder / PIPELINE)
        groups = [Group(rank, [0, 1], *place, num_stages=2) for rank in range(2)]
        self._add(load_message(path, PIPELINE, group=groups[0], kv_reserved_chunks=4, lease_chunks=16))
        self._add(load_message(null_checkpoint(folder / OWN, launches_ahead=ahead), OWN, lease_chunks=16))
        first_stage = open_region(self.node.exchange, load_message(path, PIPELINE, group=groups[1]), self.configure.block_tokens)
        assert first_stage.link is not None
        self.first_stage = first_stage.link

    def _add(self, spec: Any) -> None:
        models = self.engine.models
        models.set_lease(spec.lease_chunks)
        place = models.take_place(spec)
        hosted = self.runner.load(LoadTask(spec, place.weights, lambda *_: None, lambda: False))
        models.add(models.make(spec, hosted, place))

    def ask(self, model: str, request_id: int, num_tokens: int) -> None:
        self.engine._handle(submit_message(request_id, model, max_tokens=num_tokens, ignore_eos=True))

    def turn(self) -> None:
        self.engine._turn(self.engine.models.busy())

    def turns(self, num: int = MANY) -> None:
        for _ in range(num):
            self.turn()

    def tokens(self, request_id: int) -> list[int]:
        outs = [out for out in self.channel.sent if isinstance(out, TokensOut) and request_id in out.request_ids]
        return [out.ids[out.request_ids.index(request_id)] for out in outs]  # no token was drafted, so each has one

    @property
    def num_posted(self) -> int:
        """Number of steps that the first stage was told of."""
        num, queue = 0, self.node.exchange.queue(1)
        while queue.take() is not None:
            num += 1
        return num

    def close(self) -> None:
        os.close(self.engine.lifecycle.fileno())
        self.node.close()


@pytest.fixture(params=[False, True], ids=["own steps", "own steps ahead"])
def leader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    def sleep(link: StageLink, line: Any) -> None:
        raise AssertionError("the leader waits for the other stage")

    charge = Turns.charge
    monkeypatch.setattr(StageLink, "_sleep", sleep)
    monkeypatch.setattr(Turns, "charge", lambda turns, model, seconds, turn_s=None: charge(turns, model, 1e-3, turn_s))
    made = Leader(tmp_path, request.param)
    yield made
    made.close()


def test_its_own_model_runs_while_the_only_stream_is_in_the_other_stage(leader: Leader) -> None:
    leader.ask(PIPELINE, 1, 3)
    leader.ask(OWN, 2, 100)
    for done in range(3):
        before = len(leader.tokens(2))
        leader.turns()
        assert leader.num_posted == 1, "the stream's next step"
        assert len(leader.tokens(2)) >= before + MANY - 2
        assert len(leader.tokens(1)) == done
        assert 1 not in read_journal(leader.page), "it would be blamed for the own model's steps"
        leader.first_stage.send()
        leader.turns(2)
        assert len(leader.tokens(1)) == done + 1, "its turn comes once its states are here"
    leader.turns()
    assert leader.tokens(1) == expected(1, 3, 3)
    assert leader.tokens(2) == expected(2, 3, len(leader.tokens(2)))


def test_each_stage_has_a_step_while_its_own_model_runs(leader: Leader) -> None:
    leader.ask(OWN, 3, 200)
    for request_id in (1, 2):
        leader.ask(PIPELINE, request_id, 8)
    while not leader.tokens(2):  # beside another busy model a step has one prompt
        leader.turns(3)
        leader.first_stage.send()
    leader.turns()
    assert [len(step.plan.slots) for step in leader.engine._under_way if step.served.share is not None] == [1, 1]
    assert leader.num_posted
    for _ in range(4):
        before = [len(leader.tokens(request_id)) for request_id in (1, 2, 3)]
        leader.turns()
        after = [len(leader.tokens(request_id)) for request_id in (1, 2, 3)]
        assert after[:2] == before[:2]
        assert after[2] >= before[2] + MANY - 2
        leader.first_stage.send()
        leader.turns(3)
        assert len(leader.tokens(1)) + len(leader.tokens(2)) == sum(before[:2]) + 1
        assert leader.num_posted == 1, "as many are under way as there are stages"


def test_texts_are_embedded_while_its_stream_is_in_the_other_stage(leader: Leader) -> None:
    models = leader.engine.models
    models.add_encoder(load_message("", "encoder"), FakeEncoder(), Place(models.chunks.hold(0), models.chunks.hold(0)))
    leader.ask(PIPELINE, 1, 3)
    leader.turn()
    leader.engine._handle(Submit(2, "encoder", [1, 1], SamplingParams(1), task=EMBED))
    leader.turn()
    assert [out.request_ids for out in leader.channel.sent if isinstance(out, EmbeddingsOut)] == [[2]]


def test_a_fault_in_its_part_would_be_blamed_on_its_requests(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    share, blamed = leader.engine.models.by_name[PIPELINE].share, []
    assert share is not None
    execute = share.execute

    def noted(*args: Any) -> StepResult:
        blamed.append(read_journal(leader.page))
        return execute(*args)

    monkeypatch.setattr(share, "execute", noted)
    leader.ask(PIPELINE, 1, 3)
    leader.ask(OWN, 2, 100)
    leader.turns()
    leader.first_stage.send()
    leader.turns(2)
    (ids,) = blamed
    assert 1 in ids
    assert (2 in ids) == (leader.engine.models.by_name[OWN].ahead is not None), "those of a step that may be running still"


def test_a_broken_group_ends_its_steps_while_its_own_model_runs(leader: Leader) -> None:
    leader.ask(PIPELINE, 1, 3)
    leader.ask(OWN, 2, 100)
    leader.turns()
    served = leader.engine.models.by_name[PIPELINE]
    assert served.share is not None
    leader.node.exchange.break_group(served.share.region.offset)
    leader.turns(3)
    assert served.is_broken
    assert not any(step.served is served for step in leader.engine._under_way)


def test_where_nothing_else_runs_it_waits_for_the_other_stage(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageLink, "_sleep", lambda link, line: leader.first_stage.send())
    leader.ask(PIPELINE, 1, 5)
    while leader.engine.models.busy():
        leader.turn()
    assert leader.tokens(1) == expected(1, 3, 5)
