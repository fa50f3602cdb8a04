"""Tests of tokens that requests rule out by id, in an engine process with the null runner, which samples any token that the mask
allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.grammar.token_limits import TokenLimits
from engine.protocol import FINISH_LENGTH, FINISH_STOP, Abort, LoadDone, RequestFailed, SamplingParams, SetLease
from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model
from tests.engine.engine_process import EngineProcess, load_message, null_configure, submit_message

DIGITS = list(b"0123456789")


@pytest.fixture(params=[False, True], ids=["step by step", "launched ahead"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    folder = make_model(tmp_path / "m", max_position_embeddings=4096, hearthd_null={"launches_ahead": request.param})
    with EngineProcess(null_configure(null_step_ms=0.2)) as process:
        process.send(load_message(str(folder), eos_token_ids=[END_ID], max_model_len=2048, max_sequences=8, lease_chunks=60))
        process.wait_for(LoadDone)
        yield process


def failed(engine: EngineProcess) -> tuple[str, str]:
    (message,) = engine.of(RequestFailed)
    return message.code, message.error


def allowed(params: SamplingParams, output: list[int], vocab_size: int = 70) -> set[int]:
    bits = TokenLimits("m", params, vocab_size, output).bits
    assert len(bits) == -(-vocab_size // 32)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def test_masks_of_lists_and_words() -> None:
    everything = set(range(70))
    assert allowed(SamplingParams(9, allowed_token_ids=[3, 69, 70, 5000]), []) == {3, 69}
    assert allowed(SamplingParams(9, bad_words=[[3], [200]]), []) == everything - {3}
    words = SamplingParams(9, bad_words=[[1, 2, 3], [1, 4], [2, 5], [2, 500]])
    assert allowed(words, []) == everything, "the prompt does not count"
    assert allowed(words, [1]) == everything - {4}
    assert allowed(words, [1, 2]) == everything - {3, 5}
    assert allowed(words, [2]) == everything - {5}, "only the last tokens count"
    assert allowed(words, [1, 2, 7]) == everything
    both = SamplingParams(9, allowed_token_ids=[2, 3], bad_words=[[1, 2, 3], [2]])
    assert allowed(both, [1, 2]) == set()
    grown = TokenLimits("m", words, 70, [1])
    grown.extend([2])
    assert (grown.bits == TokenLimits("m", words, 70, [1, 2]).bits).all()


def test_only_allowed_ids_come_and_other_rows_are_free(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=60, allowed_token_ids=DIGITS), submit_message(2, max_tokens=60))
    engine.wait_finished(1, 2)
    assert set(engine.output()[1]) <= set(DIGITS)
    assert len(set(engine.output()[1])) > 3
    assert engine.finished()[1] == FINISH_LENGTH
    assert not set(engine.output()[2]) <= set(DIGITS)


def test_bad_words_never_come(engine: EngineProcess) -> None:
    """Random output of three tokens soon contains every pair, but no bad word when bad words are given."""
    three = [10, 11, 12]
    bad = [[10, 11], [11, 11, 12], [12, 12]]
    for at, words in ((1, []), (2, bad)):
        engine.send(submit_message(at, max_tokens=400, seed=5, allowed_token_ids=three, bad_words=words))
    engine.wait_finished(1, 2)

    def found(at: int) -> list[bool]:
        text = "".join(chr(token) for token in engine.output()[at])
        return ["".join(map(chr, word)) in text for word in bad]

    assert found(1) == [True] * 3
    assert found(2) == [False] * 3
    assert set(engine.output()[2]) == set(three)
    assert len(engine.output()[2]) == 400


def test_a_word_that_the_prompt_begins_may_be_completed(engine: EngineProcess) -> None:
    engine.send(submit_message(1, prompt=[10], max_tokens=4, allowed_token_ids=[11], bad_words=[[10, 11]]))
    engine.wait_finished(1)
    assert engine.output()[1] == [11] * 4


def test_with_a_grammar_both_hold(engine: EngineProcess) -> None:
    words = [[ord("a")], list(b"bc"), list(b"de")]
    engine.send(*(submit_message(at, grammar="regex:[a-e]{40}", max_tokens=50, bad_words=words) for at in (1, 2, 3)))
    engine.send(submit_message(4, grammar="regex:[a-e]{9}", max_tokens=50, allowed_token_ids=list(b"cab")))
    engine.wait_finished(1, 2, 3, 4)
    for at in (1, 2, 3):
        text = bytes(engine.output()[at]).decode()
        assert re.fullmatch("[b-e]{40}", text)
        assert "bc" not in text
        assert "de" not in text
    assert re.fullmatch(b"[abc]{9}", bytes(engine.output()[4]))
    assert {engine.finished()[at] for at in (1, 2, 3, 4)} == {FINISH_STOP}, "the grammar's end needs no end id"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"allowed_token_ids": [7], "bad_words": [[7]]}, "allowed_token_ids and bad_words"),
        ({"bad_words": [[token] for token in range(VOCAB_SIZE)]}, "bad_words leaves"),
        ({"grammar": "regex:x+", "allowed_token_ids": list(b"yz")}, "allowed_token_ids and the grammar"),
        ({"allowed_token_ids": [7], "bad_words": [[7]], "output": [8]}, "1 tokens of output"),
    ],
)
def test_where_nothing_may_begin_the_request_ends_with_the_reason(
    engine: EngineProcess, settings: dict[str, Any], names: str
) -> None:
    engine.send(submit_message(1, max_tokens=9, **settings), submit_message(2, max_tokens=9))
    engine.until(lambda: bool(engine.of(RequestFailed)))
    code, error = failed(engine)
    assert code == "no_token_left"
    assert names in error
    assert engine.output().get(1, []) == []
    engine.wait_finished(2)


@pytest.mark.parametrize("grammar", ["", "regex:[78]{9}"])
def test_where_nothing_may_follow_the_request_keeps_its_tokens_and_ends(engine: EngineProcess, grammar: str) -> None:
    """After 7 three times nothing is allowed: the request ends with an error and keeps its tokens."""
    engine.send(submit_message(1, max_tokens=9, grammar=grammar, allowed_token_ids=list(b"7"), bad_words=[list(b"7777")]))
    engine.send(submit_message(2, max_tokens=9))
    engine.until(lambda: bool(engine.of(RequestFailed)))
    assert failed(engine)[0] == "no_token_left"
    assert bytes(engine.output()[1]) == b"777"
    engine.wait_finished(2)


def test_a_grammar_that_may_end_ends_well_where_the_limits_let_nothing_follow(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=9, grammar="regex:x{1,20}", allowed_token_ids=list(b"x"), bad_words=[list(b"xxxx")]))
    engine.wait_finished(1)
    assert engine.finished()[1] == FINISH_STOP
    assert bytes(engine.output()[1]) == b"xxx"
    assert not engine.of(RequestFailed)


def test_end_ids_that_are_not_allowed_do_not_come(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=30, allowed_token_ids=[10]))
    engine.send(submit_message(2, max_tokens=300, allowed_token_ids=[10, END_ID], ignore_eos=True))
    engine.send(submit_message(3, max_tokens=300, allowed_token_ids=[10, END_ID]))
    engine.wait_finished(1, 2, 3)
    assert engine.output()[1] == [10] * 30
    assert set(engine.output()[2]) == {10, END_ID}
    assert engine.finished()[2] == FINISH_LENGTH
    assert engine.output()[3][-1] == END_ID
    assert engine.finished()[3] == FINISH_STOP


def test_min_tokens_holds_ends_back_where_anything_else_may_come(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=300, min_tokens=40, allowed_token_ids=[10, END_ID]))
    engine.wait_finished(1)
    assert END_ID not in engine.output()[1][:40]
    assert engine.finished()[1] == FINISH_STOP


def test_end_ids_that_alone_may_come_do_not_end_the_text_before_min_tokens(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=9, min_tokens=3, allowed_token_ids=[END_ID]))
    engine.send(submit_message(2, max_tokens=9, min_tokens=3, allowed_token_ids=[77], stop_token_ids=[77]))
    engine.wait_finished(1, 2)
    assert engine.output()[1] == [END_ID] * 4
    assert engine.output()[2] == [77] * 4
    assert engine.finished()[1] == engine.finished()[2] == FINISH_STOP


def test_a_resubmission_knows_the_words_that_have_begun(engine: EngineProcess) -> None:
    settings: dict[str, Any] = {"max_tokens": 200, "seed": 3, "allowed_token_ids": [10, 11, 12], "bad_words": [[10, 11], [12, 12]]}
    engine.send(submit_message(1, **settings))
    engine.wait_finished(1)
    whole = list(engine.output()[1])
    begun = whole.index(10) + 1
    engine.send(submit_message(1, **settings, output=whole[:begun]))
    engine.until(lambda: engine.output()[1] == whole + whole[begun:])


def test_preempted_rows_go_on(engine: EngineProcess) -> None:
    settings: dict[str, Any] = {"max_tokens": 400, "allowed_token_ids": [10, 11, 12], "bad_words": [[10, 11], [12, 12]]}
    engine.send(*(submit_message(at, **settings) for at in range(1, 9)))
    engine.until(lambda: len(engine.output().get(8, [])) > 40)
    engine.send(SetLease(1))
    engine.until(lambda: engine.last_stats().preemptions > 0)
    engine.send(SetLease(60))
    engine.wait_finished(*range(1, 9))
    for at in range(1, 9):
        text = bytes(engine.output()[at])
        assert set(text) == {10, 11, 12}
        assert len(text) == 400
        assert b"\x0a\x0b" not in text
        assert b"\x0c\x0c" not in text


def test_an_aborted_one_leaves_nothing_behind(engine: EngineProcess) -> None:
    engine.send(submit_message(1, max_tokens=2000, bad_words=[[10, 11]]))
    engine.until(lambda: len(engine.output().get(1, [])) > 2)
    engine.send(Abort([1]), submit_message(1, max_tokens=5, allowed_token_ids=[33]))
    engine.wait_finished(1)
    assert engine.output()[1][-5:] == [33] * 5


def test_limits_hold_when_the_models_grammar_process_gives_up(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", max_position_embeddings=4096)
    (folder / "tokenizer.json").write_text("{}")
    with EngineProcess(null_configure(null_step_ms=0.2)) as engine:
        engine.send(load_message(str(folder), eos_token_ids=[END_ID], max_model_len=4096, max_sequences=2, lease_chunks=60))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, max_tokens=4000, allowed_token_ids=DIGITS))
        engine.until(lambda: len(engine.output().get(1, [])) > 2)
        engine.send(submit_message(2, max_tokens=5, grammar="regex:x"))
        engine.wait_for(RequestFailed)
        told = len(engine.output()[1])
        engine.until(lambda: len(engine.output()[1]) > told + 50)
        assert set(engine.output()[1]) <= set(DIGITS)
