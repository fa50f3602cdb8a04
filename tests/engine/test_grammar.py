"""Tests of grammars in an engine process, with the null runner, which samples any token that the mask allows."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.protocol import FINISH_LENGTH, FINISH_STOP, Abort, Evicted, EvictModel, LoadDone, RequestFailed, SetLease
from tests.e2e.checkpoints import END_ID, make_model
from tests.engine.engine_process import EngineProcess, load_message, null_configure, submit_message

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
JSON = "json_schema:" + json.dumps(SCHEMA)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    folder = make_model(tmp_path / "m", max_position_embeddings=4096)
    with EngineProcess(null_configure(null_step_ms=0.2)) as process:
        process.send(load_message(str(folder), eos_token_ids=[END_ID], max_model_len=2048, max_sequences=8, lease_chunks=60))
        process.wait_for(LoadDone)
        yield process


def text_of(engine: EngineProcess, request_id: int) -> str:
    return bytes(token for token in engine.output()[request_id] if token < 256).decode()


def grammar_processes(engine: EngineProcess) -> list[psutil.Process]:
    children = psutil.Process(engine.process.pid).children()
    return [child for child in children if "engine.grammar" in child.cmdline()]


def test_json_schema(engine: EngineProcess) -> None:
    engine.send(*(submit_message(at, grammar=JSON, max_tokens=500) for at in range(1, 6)))
    engine.wait_finished(*range(1, 6))
    for at in range(1, 6):
        assert engine.finished()[at] == FINISH_STOP
        value = json.loads(text_of(engine, at))
        assert value["kind"] in ("cat", "dog")
        assert 0 <= value["legs"] <= 99


def test_regex_and_lark(engine: EngineProcess) -> None:
    engine.send(
        submit_message(1, grammar="regex:[a-f]{3}-[0-9]{2}", max_tokens=50),
        submit_message(2, grammar='lark:start: ("yes" | "no") " "? MARK\nMARK: /[!?]{1,3}/', max_tokens=50),
    )
    engine.wait_finished(1, 2)
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(engine, 1))
    assert re.fullmatch("(yes|no) ?[!?]{1,3}", text_of(engine, 2))


def test_plain_rows_are_not_constrained(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=40), submit_message(2, grammar="regex:x{20}", max_tokens=40))
    engine.wait_finished(1, 2)
    assert text_of(engine, 2) == "x" * 20
    assert len(set(engine.output()[1])) > 3


def test_length_is_told_as_such(engine: EngineProcess) -> None:
    engine.send(submit_message(1, grammar="regex:x{20}", max_tokens=5))
    engine.wait_finished(1)
    assert engine.finished()[1] == FINISH_LENGTH
    assert text_of(engine, 1) == "x" * 5


def test_ignore_eos_goes_on_to_the_grammars_end(engine: EngineProcess) -> None:
    engine.send(submit_message(1, grammar="regex:x{1,20}", max_tokens=50, ignore_eos=True))
    engine.wait_finished(1)
    assert engine.finished()[1] == FINISH_STOP
    assert text_of(engine, 1) == "x" * 20


def test_min_tokens_holds_the_end_back_but_not_past_the_grammars_end(engine: EngineProcess) -> None:
    engine.send(
        *(submit_message(at, grammar="regex:x{1,20}", max_tokens=50, min_tokens=10) for at in range(1, 5)),
        submit_message(9, grammar="regex:x{4}", max_tokens=50, min_tokens=10),
    )
    engine.wait_finished(1, 2, 3, 4, 9)
    for at in range(1, 5):
        assert len(text_of(engine, at)) >= 10
    assert text_of(engine, 9) == "xxxx"
    assert engine.finished()[9] == FINISH_STOP


def test_a_resubmission_goes_on_where_it_was(engine: EngineProcess) -> None:
    engine.send(submit_message(1, grammar=JSON, max_tokens=500))
    engine.wait_finished(1)
    whole = list(engine.output()[1])
    half = len(whole) // 2
    engine.send(submit_message(1, grammar=JSON, max_tokens=500, output=whole[:half]))
    engine.until(lambda: engine.output()[1] == whole + whole[half:])


def test_a_resubmission_of_a_complete_text_ends_at_once(engine: EngineProcess) -> None:
    engine.send(submit_message(1, grammar="regex:ab", max_tokens=50, output=list(b"ab")))
    engine.wait_finished(1)
    assert engine.finished()[1] == FINISH_STOP
    assert engine.output().get(1, []) == []


@pytest.mark.parametrize("grammar", ["regex:(a", 'json_schema:{"type":"nope"}', "lark:start: nobody", "json_schema:[1]", "what:is"])
def test_a_bad_grammar_fails_by_name_and_alone(engine: EngineProcess, grammar: str) -> None:
    engine.send(submit_message(1, grammar="regex:ok{3}", max_tokens=50), submit_message(2, grammar=grammar, max_tokens=50))
    engine.wait_finished(1, 2)
    (failed,) = engine.of(RequestFailed)
    assert (failed.request_id, failed.code) == (2, "unsupported_grammar")
    assert text_of(engine, 1) == "okkk"


def test_more_requests_than_rows(engine: EngineProcess) -> None:
    engine.send(*(submit_message(at, grammar="regex:[a-z]{6}", max_tokens=50) for at in range(1, 41)))
    engine.wait_finished(*range(1, 41))
    assert all(re.fullmatch("[a-z]{6}", text_of(engine, at)) for at in range(1, 41))


def test_abort_gives_the_row_back(engine: EngineProcess) -> None:
    engine.send(*(submit_message(at, grammar="regex:x{2000}", max_tokens=2000) for at in range(1, 9)))
    engine.until(lambda: len(engine.output().get(8, [])) > 2)
    engine.send(submit_message(9, grammar="regex:late", max_tokens=50), Abort(list(range(1, 9))))
    engine.wait_finished(9)
    assert text_of(engine, 9) == "late"


def test_preempted_rows_go_on(engine: EngineProcess) -> None:
    engine.send(*(submit_message(at, grammar="regex:[a-z]{400}", max_tokens=500) for at in range(1, 9)))
    engine.until(lambda: len(engine.output().get(8, [])) > 40)
    engine.send(SetLease(1))
    engine.until(lambda: engine.last_stats().preemptions > 0)
    engine.send(SetLease(60))
    engine.wait_finished(*range(1, 9))
    assert all(re.fullmatch("[a-z]{400}", text_of(engine, at)) for at in range(1, 9))


def test_a_dead_grammar_process_is_replaced(engine: EngineProcess) -> None:
    engine.send(*(submit_message(at, grammar="regex:[a-z]{300}", max_tokens=500) for at in range(1, 5)), submit_message(5))
    engine.until(lambda: len(engine.output().get(4, [])) > 40)
    (process,) = grammar_processes(engine)
    os.kill(process.pid, signal.SIGKILL)
    engine.wait_finished(1, 2, 3, 4, 5)
    assert all(re.fullmatch("[a-z]{300}", text_of(engine, at)) for at in range(1, 5))


def test_eviction_ends_the_process(engine: EngineProcess) -> None:
    engine.send(submit_message(1, grammar="regex:x{2000}", max_tokens=2000))
    engine.until(lambda: len(engine.output().get(1, [])) > 2)
    assert len(grammar_processes(engine)) == 1
    engine.send(EvictModel(2, "m", 60))
    engine.wait_for(Evicted)
    assert grammar_processes(engine) == []


def test_no_process_without_a_grammar(engine: EngineProcess) -> None:
    engine.send(submit_message(1))
    engine.wait_finished(1)
    assert grammar_processes(engine) == []


def test_an_edited_tokenizer_is_used_by_new_requests(tmp_path: Path) -> None:
    """The ids of x and y are swapped while a request runs, which keeps its own."""
    folder = make_model(tmp_path / "m", max_position_embeddings=4096)
    file = folder / "tokenizer.json"
    with EngineProcess(null_configure(null_step_ms=10)) as engine:
        engine.send(load_message(str(folder), eos_token_ids=[END_ID], max_model_len=2048, max_sequences=8, lease_chunks=60))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, grammar="regex:x{2000}", max_tokens=2000, text_id="a"))
        engine.until(lambda: len(engine.output().get(1, [])) > 5)
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
        file.write_text(json.dumps(tokenizer))
        engine.send(*(submit_message(at, grammar="regex:x{20}", max_tokens=40, text_id="b") for at in (2, 3)))
        engine.wait_finished(2, 3)
        assert [text_of(engine, at) for at in (2, 3)] == ["y" * 20] * 2
        num = len(text_of(engine, 1))
        engine.until(lambda: len(text_of(engine, 1)) > num + 5)
        assert set(text_of(engine, 1)) == {"x"}
        file.write_text("{}")
        engine.send(submit_message(4, grammar="regex:x", max_tokens=5, text_id="c"))
        engine.until(lambda: bool(engine.of(RequestFailed)))
        assert "tokenizer.json" in engine.of(RequestFailed)[0].error
        engine.send(submit_message(5, grammar="regex:x{20}", max_tokens=40, text_id="b"))
        engine.wait_finished(5)
        assert text_of(engine, 5) == "y" * 20


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with EngineProcess(null_configure()) as engine:
        engine.send(load_message(str(folder), eos_token_ids=[END_ID]))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, grammar="regex:x", max_tokens=5), submit_message(2, max_tokens=5))
        engine.wait_finished(1, 2)
        (failed,) = engine.of(RequestFailed)
        assert "tokenizer.json" in failed.error
        assert engine.finished()[2] == FINISH_LENGTH
