"""A grammar process writes masks where the engine reads them, and the engine page-locks those of the first rows for as long as it
has the process. Low rows are given out first, so that the masks of a step lie close together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.grammar.messages import Advance, Draft, Open, Opened, Ready, Start
from engine.grammar.row_masks import LockedMasks, holds_any
from engine.protocol import SamplingParams
from engine.serve import grammar_port
from engine.serve.constraints import Constraints, ModelGrammars
from engine.serve.grammar_port import GrammarPort
from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model


class Locks:
    """Page-locks masks and notes which."""

    def __init__(self) -> None:
        self.locked, self.unlocked = list[LockedMasks](), list[LockedMasks]()

    def lock_masks(self, bits: Any) -> LockedMasks | None:
        self.locked.append(LockedMasks(bits))
        return self.locked[-1]

    def unlock_masks(self, locked: LockedMasks) -> None:
        self.unlocked.append(locked)


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def port(tmp_path: Path, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarPort]:
    monkeypatch.setattr(grammar_port, "MOST_LOCKED", 2)
    folder = make_model(tmp_path / "m")
    port = GrammarPort(VOCAB_SIZE, 3, 4, locks)
    port.send(Open(str(folder), VOCAB_SIZE, [END_ID], 3, 4))
    assert port.receive() == [Opened("")]
    yield port
    port.close()


def test_first_masks_lie_one_after_the_other_and_those_behind_drafts_behind_them(port: GrammarPort, locks: Locks) -> None:
    """The request in row 1 has masks of its own behind each drafted token."""
    for row, grammar in enumerate(("regex:[x-z]", "regex:[ab]cd[0-9]e", "regex:[lm]")):
        port.send(Start(row + 1, row, grammar, []))
        assert port.receive() == [Ready([row + 1], {})]
    port.send(Advance([2], [ord("a")], [], {}))
    assert port.receive() == [Ready([2], {2: Draft([ord("c"), ord("d")], [True, True])})]

    def letters(mask: Any) -> str:
        return "".join(chr(token) for token in range(128) if holds_any(mask, [token]))

    assert [letters(mask) for mask in port.masks[:, 0]] == ["xyz", "c", "lm"]
    assert [letters(mask) for mask in port.masks[1, :3]] == ["c", "d", "0123456789"]
    assert not port.masks[::2, 1:].any()
    (locked,) = locks.locked
    assert port.locked is locked
    assert [letters(mask) for mask in locked.bits] == ["xyz", "c"]
    assert locked.bits.ctypes.data == port.masks[0, 0].ctypes.data
    assert locked.bits.ctypes.data % 4096 == 0
    assert locked.bits.flags.c_contiguous


def test_masks_are_unlocked_once_the_process_is_gone(locks: Locks) -> None:
    port = GrammarPort(VOCAB_SIZE, 3, 1, locks)
    assert not locks.unlocked
    process = port._process
    locks.unlock_masks = lambda locked: locks.unlocked.append((locked, process.returncode is not None))  # type: ignore
    port.close()
    assert locks.unlocked == [(locks.locked[0], True)]


def test_low_rows_are_given_out_first() -> None:
    sent: list[Any] = []
    port: Any = SimpleNamespace(send=sent.append)
    scheduler = SimpleNamespace(drafts_masked=False)
    spec = SimpleNamespace(model="m", max_sequences=6)
    served: Any = SimpleNamespace(spec=spec, scheduler=scheduler, hosted=SimpleNamespace(vocab_size=VOCAB_SIZE))
    constraints = Constraints()
    constraints._models["m"] = ModelGrammars(served, port, list(range(6)), opened=True)

    def rows_of(*request_ids: int) -> list[int]:
        sent.clear()
        for request_id in request_ids:
            request: Any = SimpleNamespace(request_id=request_id, constrained=False)
            constraints.submit(served, request, SamplingParams(9, grammar="regex:a"), [])
        return [message.row for message in sent if isinstance(message, Start)]

    assert rows_of(1, 2, 3, 4) == [0, 1, 2, 3]
    for request_id in (3, 1, 2):
        constraints.drop("m", request_id)
    assert rows_of(5, 6, 7, 8) == [0, 1, 2, 4]
