"""NCCL on one GPU, where a communicator has one rank. What takes several GPUs is in `make gpu ONLY=split`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_ranks import NCCL, Rank
from benchmarks.gpu_split_exchanges import ABORT_LIMIT_S, abort, connections, prepare_abort

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def alone() -> Iterator[Rank]:
    made = Rank(0, 1, "cuda", NCCL)
    yield made
    made.give_up()


def test_exchanges_of_one_rank_with_and_without_a_graph(alone: Rank) -> None:
    told = connections(alone)
    assert (told["wrong"], told["wrong_replays"]) == (0, 0)
    assert alone.give_up() < ABORT_LIMIT_S


@pytest.mark.parametrize("beside_graph", [False, True])
def test_a_connection_is_given_up(alone: Rank, beside_graph: bool) -> None:
    """In another thread, after its graph was destroyed, or begun before that."""
    prepare_abort(alone)
    assert not abort(alone, beside_graph)["hung"]
