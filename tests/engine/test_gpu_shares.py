"""Models that are split over GPUs compute what they compute on one device: in processes that are the ranks of a group, with
interpreted kernels, and with gloo in the place of NCCL. What only GPUs can show (NCCL, graphs) is in tests/gpu.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.connecting import CONNECT_LIMIT_S
from engine.protocol import Configure, LoadFailed
from loader.models.catalog import scan_one
from tests.e2e.checkpoints import make_model
from tests.engine.group_engines import Engines
from tests.engine.interpreted_engine import HOLD
from tests.engine.rank_processes import RankGroup
from tests.engine.split_checks import check_broken, check_logits, check_results, check_waits
from tests.engine.split_models import How, drawn_copies, execute_alone, shape_of, write_quantised
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities, a GPU does not
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU"),
]

GPU = How(gpu=True, few_steps=True, few_layers=True)
STAGES, SOME_EXPERTS = replace(GPU, num_stages=2), replace(GPU, expert_parts=2)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    made.close()


# each has what others have, too; `python -m tests.engine.split_sweep --gpu` computes all
OF_EACH_KIND = ("llama-biases", "qwen3.5", "gemma4", "deepseek-v3", "gpt-oss")
WITH_SOME_EXPERTS = ("deepseek-v3-moe", "gpt-oss")


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_logits_are_those_of_one_device(two: RankGroup, family: str) -> None:
    check_logits(two, family, (GPU, GPU))


def test_small_sums_may_go_through_memory_that_the_ranks_map(two: RankGroup) -> None:
    check_logits(two, "llama", [replace(GPU, maps=True)] * 2)


@pytest.mark.parametrize("family", WITH_SOME_EXPERTS)
def test_each_rank_may_have_some_of_the_experts(two: RankGroup, family: str) -> None:
    check_logits(two, family, (SOME_EXPERTS, SOME_EXPERTS))


def test_ranks_may_have_copies_of_each_others_experts(two: RankGroup) -> None:
    copies = drawn_copies(shape_of("gpt-oss", "float32", few_layers=True), 2, 1)
    check_logits(two, "gpt-oss", [replace(SOME_EXPERTS, copies=copies)] * 2)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "gemma4"])
def test_layers_may_be_divided_among_stages(two: RankGroup, family: str) -> None:
    check_logits(two, family, (STAGES, STAGES))


def test_the_layers_of_a_stage_may_be_divided_too() -> None:
    four = RankGroup(4)
    check_logits(four, "llama-biases", (STAGES,) * 4)
    four.close()


def test_quantised_shares_compute_what_one_device_does(two: RankGroup, tmp_path: Path) -> None:
    check_logits(two, write_quantised("INT4", tmp_path), (GPU, GPU))


@pytest.mark.parametrize("how", [GPU, STAGES], ids=["ranks", "stages"])
def test_followers_join_whatever_the_leader_executes(two: RankGroup, how: How) -> None:
    check_results(two, (how, how))


def test_a_step_tells_how_long_it_waited_for_a_follower(two: RankGroup) -> None:
    check_waits(two, GPU)


def test_a_load_whose_group_breaks_raises(two: RankGroup) -> None:
    """The other rank never loads its share."""
    check_broken(two, GPU)


def test_a_step_of_a_broken_group_raises(two: RankGroup) -> None:
    two.renew()
    two.start(execute_alone, GPU)
    assert two.results(ranks=[1]) == [""]
    time.sleep(0.2)  # in most runs the rank waits by now
    two.broken[0] = 1
    assert two.results(ranks=[0]) == ["GroupBroken"]


# what is asked -> settings of the request: each takes another road through the leader
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "num_tokens": 3},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 3, "num_tokens": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 4.0}, "num_tokens": 2},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3, "num_tokens": 2},
    "allowed tokens": {"temperature": 0.7, "seed": 4, "allowed_token_ids": [65, 66, 67, 68], "num_tokens": 2},
}


class Asked:
    """Asks a model on an engine everything in ASKED."""

    def __init__(self, engines: Engines, number: int, model: str) -> None:
        self._engine = engines.all[number]
        self._ids = [engines.ask(number, model, **settings) for settings in ASKED.values()]

    def answers(self) -> list[list[int]]:
        self._engine.until(lambda: all(one in self._engine.finished() for one in self._ids))
        return [self._engine.output()[one] for one in self._ids]


@pytest.fixture(scope="module")
def holds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that keeps ranks from connecting while it exists."""
    return tmp_path_factory.mktemp("holds") / "held"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model that they load."""
    return str(make_model(tmp_path_factory.mktemp("models") / "a", seed=1, hidden_size=64, num_hidden_layers=2))


@pytest.fixture(scope="module")
def engines(holds: Path, path: str) -> Iterator[Engines]:
    """Two engines that compute as on GPUs, each of which takes seconds to start, with the model "whole" on the first one."""
    configure = Configure("cuda:0", 96, 64 << 10, 1 << 20, 64, 16, 10.0, 1, cache_dir=CACHE_DIR)
    limits = {"max_model_len": 64, "max_sequences": 8, "eos_token_ids": [], "weights_chunks": 8, "kv_reserved_chunks": 8}
    limits["fingerprint"] = scan_one(path).fingerprint
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLD, str(holds))
        made = Engines(2, configure, module="tests.engine.interpreted_engine", **limits)
        try:
            made.load_alone(path, "whole", 0)
            yield made
        finally:
            made.close()


def test_a_rank_that_is_lost_between_meeting_and_connecting_costs_the_load_alone(engines: Engines, path: str, holds: Path) -> None:
    """The other engine serves its own model meanwhile, and loads the split one with the engine that comes next."""
    reached = holds.with_name("reached")
    expected = Asked(engines, 0, "whole").answers()
    for number, how in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
        holds.touch()
        engines.begin(path, "split", [0, 1])
        while not reached.exists():
            time.sleep(0.01)
        began_s = time.monotonic()
        engines.all[1].process.send_signal(how)
        engines.node.exchange.break_group(engines.groups["split"][1][0])  # as the daemon does
        failed = engines.all[0].wait_for(LoadFailed, number)
        assert time.monotonic() - began_s < CONNECT_LIMIT_S / 2, "a limit has ended it"
        assert failed.error == "GroupBroken: rank 0 of 2: the group has lost a device while its ranks connected"
        assert Asked(engines, 0, "whole").answers() == expected
        engines.all[1].process.kill()
        engines.replace(1)
        engines.evict("split")
        holds.unlink()
        reached.unlink()
    engines.load(path, "split", [0, 1])
    assert Asked(engines, 0, "split").answers() == expected
    engines.evict("split")


def test_engines_that_compute_as_on_gpus_share_a_model(engines: Engines, path: str) -> None:
    """Two engines say together what one says alone, before and after an eviction. When one dies, the other one goes on."""
    expected = Asked(engines, 0, "whole").answers()
    assert len({tuple(answer) for answer in expected}) > 1
    for num_stages in (1, 2):
        engines.load(path, "split", [0, 1], num_stages=num_stages)
        assert Asked(engines, 0, "split").answers() == expected
        engines.evict("split")
    engines.load(path, "split", [0, 1])
    engines.load(path, "layers", [0, 1], num_stages=2)
    for model in ("split", "layers"):
        engines.wait_tokens(0, engines.ask(0, model, 50), 2)
    engines.all[1].process.kill()
    for model in ("split", "layers"):
        engines.node.exchange.break_group(engines.groups[model][1][0])  # as the daemon does
    assert Asked(engines, 0, "whole").answers() == expected
    for model in ("split", "layers"):
        engines.evict(model, [0])
