"""Models that are split over real engines: what they say is what one engine says, whatever else the engines do."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import FINISH_STOP, Configure, Evicted, LoadDone, LoadFailed, TokensOut
from loader.formats.stored_fp8 import BY_OUTPUT
from loader.models.catalog import scan_one
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, planned_reads
from loader.shapes import kv_layout
from loader.shapes.model_shape import DeviceShare, Division
from tests.e2e.checkpoints import END_ID, make_model
from tests.engine.group_engines import Engines
from tests.engine.said import PROMPT, Said
from tests.kernel_cache import CACHE_DIR
from tests.loader import fp8

LIMITS = {"max_model_len": 256, "max_sequences": 8, "eos_token_ids": [END_ID], "weights_chunks": 8, "kv_reserved_chunks": 16}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("split")
    windows = {"architecture": "Gemma2ForCausalLM", "model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 16}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4}
    others: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, **windows}
    return {
        "a": str(make_model(folder / "a", seed=1, hidden_size=64)),
        "b": str(make_model(folder / "b", seed=2, hidden_size=64, **others)),  # two KV groups
        "c": str(
            make_model(
                folder / "c",
                seed=3,
                architecture="Qwen3_5ForCausalLM",
                model_type="qwen3_5_text",
                layer_types=["linear_attention", "full_attention"],
                **delta,
            )
        ),
    }


@pytest.fixture(scope="module")
def two() -> Iterator[Engines]:
    configure = Configure("cpu:0", 96, 64 << 10, 1 << 20, 64, 16, 10.0, 1, cache_dir=CACHE_DIR)
    engines = Engines(2, configure, **LIMITS)
    yield engines
    engines.close()


def settings(path: str, **changes: Any) -> dict[str, Any]:
    checkpoint = scan_one(Path(path))
    return {"fingerprint": checkpoint.fingerprint, "speculator": "prompt-lookup", **changes}


def split_settings(path: str, **changes: Any) -> dict[str, Any]:
    """Returns the settings of a load that divides the model over engines."""
    shape = scan_one(Path(path)).shape
    assert shape is not None
    return settings(path, num_kv_groups=len(kv_layout.kv_groups(shape, "float32", 16)), **changes)


def test_whatever_is_asked_a_split_model_says_what_a_whole_one_says(two: Engines, paths: dict[str, str]) -> None:
    two.load_alone(paths["a"], "a", 0, **settings(paths["a"]))
    whole = Said(two, 0, "a")
    two.evict_alone("a", 0)
    assert whole.ends["a grammar"] == FINISH_STOP
    assert len(whole.floats["log-probabilities"]) == 8 * 4
    assert len(whole.floats["the prompt's"]) == 49 * 3
    num_drafted = 0  # a draft is left out where steps of several tokens were slow, which may be so on a busy machine
    for members in ([0, 1], [1, 0]):
        two.load(paths["a"], "a", members, **split_settings(paths["a"]))
        said = Said(two, members[0], "a")
        said.check(whole)
        again = Said(two, members[0], "a")  # from cached prefixes and recorded steps
        again.check(whole)
        assert any(out.cached.values() for out in two.all[members[0]].of(TokensOut) if out.model == "a")
        num_drafted += said.num_drafted + again.num_drafted
        two.evict("a")
    assert num_drafted, "prompt lookup drafted nothing"


def test_sequences_may_have_states(two: Engines, paths: dict[str, str]) -> None:
    how = settings(paths["c"])
    two.load_alone(paths["c"], "c", 0, **how)
    whole = Said(two, 0, "c")
    two.evict_alone("c", 0)
    two.load(paths["c"], "c", [1, 0], **split_settings(paths["c"]))
    Said(two, 1, "c").check(whole)
    two.evict("c")


def test_matrices_may_be_quantised(two: Engines, paths: dict[str, str], tmp_path: Path) -> None:
    """Each engine reads its share of codes and scales, and has the format's kernels."""
    fp8.quantize(Path(paths["a"]), tmp_path, fp8.KINDS["compressed-channel"])
    how = settings(str(tmp_path), quantize=BY_OUTPUT.name)
    two.load_alone(str(tmp_path), "q", 0, **how)
    whole = Said(two, 0, "q")
    two.evict_alone("q", 0)
    two.load(str(tmp_path), "q", [1, 0], num_kv_groups=1, **how)
    Said(two, 1, "q").check(whole)
    two.evict("q")


def test_two_split_models_and_single_ones_beside_each_other(two: Engines, paths: dict[str, str]) -> None:
    """Each engine leads one model, follows in another and has one of its own; split ones come and go."""
    choose, told = random.Random(7), {}
    where = {"a": [0, 1], "b": [1, 0], "own 0": [0], "own 1": [1]}
    of = {"a": paths["a"], "b": paths["b"], "own 0": paths["b"], "own 1": paths["a"]}
    prompts = [PROMPT[:num] for num in (3, 20, 70)]

    def ask(model: str, prompt: list[int]) -> int:
        return two.ask(where[model][0], model, 16, prompt, temperature=0.0)

    for model, members in where.items():
        if len(members) > 1:
            two.load(of[model], model, members, **split_settings(of[model]))
        else:
            two.load_alone(of[model], model, members[0], **settings(of[model]))
    for number, model in ((0, "own 0"), (1, "own 1")):
        for at, prompt in enumerate(prompts):
            request_id = ask(model, prompt)
            two.all[number].wait_finished(request_id)
            told[of[model], at] = two.all[number].output()[request_id]
    for turn in range(6):
        asked = []
        for _ in range(10):
            model, at = choose.choice([*where]), choose.randrange(3)
            asked.append((model, at, ask(model, prompts[at])))
        if turn % 2:
            leaving = choose.choice("ab")
            time.sleep(choose.random() * 0.05)
            two.evict(leaving, choose.sample([0, 1], 2))
            two.load(of[leaving], leaving, where[leaving], **split_settings(of[leaving]))
            asked = [one for one in asked if one[0] != leaving]
        for model, at, request_id in asked:
            engine = two.all[where[model][0]]
            engine.wait_finished(request_id)
            assert engine.output()[request_id] == told[of[model], at], model
    for model, members in where.items():
        two.evict(model) if len(members) > 1 else two.evict_alone(model, members[0])


def test_engines_pass_on_what_all_of_them_need(two: Engines, paths: dict[str, str]) -> None:
    """They read less from the file than if each read all rows of which it has columns. How much less depends on when each begins,
    but whoever begins later finds what the other one has offered."""
    alone_bytes = 0
    with ExitStack() as stack:
        for rank in range(2):
            source = open_checkpoint(paths["b"], "", stack, share=DeviceShare(rank, Division(2)))
            reads = planned_reads(source, "float32", StagingRing(), shares=True)
            assert sum(read.num_readers > 1 for read in reads) >= 2
            alone_bytes += sum(read.num_bytes for read in reads)
    two.load(paths["b"], "b", [0, 1], **split_settings(paths["b"]))
    assert sum(engine.of(LoadDone)[-1].bytes_read for engine in two.all) < alone_bytes
    two.evict("b")


def test_what_cannot_be_split_is_refused(two: Engines, paths: dict[str, str], tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "odd", hidden_size=60, num_heads=3, num_kv_heads=3))
    two.begin(path, "odd", [0, 1], **settings(path))
    for engine in two.all:
        failed = engine.wait_for(LoadFailed)
        assert failed.permanent
        assert "parallel: num_attention_heads 3 is no multiple of 2" in failed.error
    two.evict("odd")


def test_shares_that_come_back_are_not_read_again(two: Engines, paths: dict[str, str]) -> None:
    """Each device knows which share it holds: with its ranks exchanged, the model is read anew."""

    def come(members: list[int]) -> tuple[list[tuple[bool, bool]], list[int]]:
        """Loads the model, asks it, and evicts it as one that comes back. Returns for each rank whether its weights were adopted
        and whether any were read, and the answer."""
        leader = two.load(paths["a"], "a", members, **settings(paths["a"]))
        loaded = [two.all[member].of(LoadDone)[-1] for member in members]
        request_id = two.ask(members[0], "a", 12, temperature=0.0, ignore_eos=True)
        leader.wait_finished(request_id)
        two.evict("a", comes_back=True)
        return [(done.adopted, done.bytes_read > 0) for done in loaded], leader.output()[request_id]

    read, adopted = [(False, True)] * 2, [(True, False)] * 2
    first, text = come([0, 1])
    assert first == read
    assert come([0, 1]) == (adopted, text)
    assert come([1, 0]) == (read, text)
    assert come([1, 0]) == (adopted, text)
    two.load_alone(paths["a"], "a", 0, **settings(paths["a"]))
    assert not two.all[0].of(LoadDone)[-1].adopted, "a share is not the whole model"
    two.evict_alone("a", 0)


def test_a_killed_follower_does_not_take_its_leader_along(two: Engines, paths: dict[str, str]) -> None:
    """The last test: the second engine is gone afterwards."""
    two.load_alone(paths["b"], "own", 0, **settings(paths["b"]))
    leader = two.load(paths["a"], "a", [0, 1], **settings(paths["a"]))
    stream = two.ask(0, "a", 200, temperature=0.0, ignore_eos=True)
    two.wait_tokens(0, stream, 20)
    follower = two.all[1].process
    follower.send_signal(signal.SIGKILL)
    follower.wait(10)
    assert set(two.all[1].running()) <= {stream}  # none between two steps
    time.sleep(0.1)  # the leader waits, asleep
    two.node.exchange.break_group(two.groups["a"][1][0])
    own = two.ask(0, "own", 10, temperature=0.0, ignore_eos=True)
    leader.wait_finished(own)
    before = len(leader.output()[stream])
    two.evict("a", [0])
    assert leader.of(Evicted)
    assert len(leader.output()[stream]) == before < 200
    assert stream not in leader.finished()
