"""The form of decode attention that joins pieces: that its programs join as a kernel behind them would, whichever finishes last,
and that a GPU keeps the order in which they write and read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from engine.cuda.kernels import tiles, triton_decode
from tests.engine.cuda_bench import INTERPRETED
from tests.engine.not_interpreted import KERNEL_CACHE, output_of

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 2, 64, 16
PIECES = [3, 16, 0, 37, 1]
CAPABILITIES = ("80", "90", "100")
pytestmark = INTERPRETED


class Steps:
    """Rows of PIECES pieces each, whose attention can be computed again and again."""

    def __init__(self, sinks: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        contexts = [n * triton_decode.SPLIT_TOKENS for n in PIECES]
        rows, blocks = len(contexts), max(contexts) // BLOCK_TOKENS
        self.qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
        self.kv = torch.randn(rows * blocks, 1, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, generator=generator)
        self.table = torch.randperm(rows * blocks, generator=generator).int().view(rows, blocks)
        self.sinks = torch.randn(HEADS, generator=generator) if sinks else None
        self.work = triton_decode.make_work(rows, sum(PIECES), KV_HEADS, "cpu")
        self.split(torch.tensor(contexts, dtype=torch.int32))

    def split(self, contexts: Tensor) -> None:
        triton_decode.split_contexts(contexts, 0, self.work)
        assert self.work.firsts.diff().tolist() == PIECES

    def attend(self, joins: bool, in_order: bool = False) -> Tensor:
        out = torch.full((len(PIECES), HEADS * HEAD_DIM), torch.nan)
        places, how = (self.table, torch.arange(len(PIECES), dtype=torch.int32)), (0.125, 0.0, self.sinks, True, out, in_order)
        with tiles.forced(tiles.decode_tile(HEAD_DIM, 4)._replace(joins=joins)):
            triton_decode.decode_attention(self.qkv, self.kv, None, 0, HEADS, *places, self.work, *how)
        return out


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_pieces_are_joined_as_by_a_kernel_behind(sinks: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, in whichever order the programs finish, and again with the counters that a launch leaves."""
    steps = Steps(sinks)
    wanted = steps.attend(joins=False, in_order=True)
    torch.testing.assert_close(wanted, steps.attend(joins=False))
    number, set_grid_idx = len(steps.work.rows), interpreter.interpreter_builder.set_grid_idx
    orders = {"forwards": range(number), "backwards": range(number)[::-1], "shuffled": np.random.default_rng(1).permutation(number)}
    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(int(orders[order][x]), y, z))
    for _ in range(2):
        assert torch.equal(steps.attend(joins=True), wanted)
        assert not steps.work.finished.any()


def test_a_step_that_was_broken_off_leaves_nothing_to_the_next() -> None:
    steps = Steps(False)
    wanted = steps.attend(joins=True)
    steps.work.finished.fill_(1)
    steps.split(torch.tensor(PIECES, dtype=torch.int32) * triton_decode.SPLIT_TOKENS)
    assert torch.equal(steps.attend(joins=True), wanted)


def test_counters_must_be_there() -> None:
    steps = Steps(False)
    steps.work = triton_decode.make_work(len(PIECES), sum(PIECES), KV_HEADS - 1, "cpu")
    steps.split(torch.tensor(PIECES, dtype=torch.int32) * triton_decode.SPLIT_TOKENS)
    with pytest.raises(ValueError, match="62 counters for 62 pieces of 2 KV heads"):
        steps.attend(joins=True)
    steps.attend(joins=False)


def steps_of(ptx: str) -> list[str]:
    """Returns what of a kernel's PTX has to do with the order in which programs write and read, in its order."""
    names = {
        "store": r"st\.global",
        "count": r"atom\.global\.gpu\.acq_rel\.add\.u32",
        "barrier": r"bar\.sync\s|barrier\.sync\s",
        "load": r"ld\.global\.cg",
        "other load": r"ld\.global|cp\.async\.c[ag]",
        "other count": r"atom|red\.",
    }
    patterns = {name: re.compile(rf"(?<![\w.])(?:{pattern})") for name, pattern in names.items()}
    told = (next((name for name, pattern in patterns.items() if pattern.search(line)), "") for line in ptx.splitlines())
    return [name for name in told if name]


def keeps_order(steps: list[str]) -> bool:
    """Returns whether each of two counts comes after all stores and a barrier, and before a barrier and all loads of pieces, which
    skip the L1 cache."""
    counts = [at for at, name in enumerate(steps) if name == "count"]
    if len(counts) != 2 or "other count" in steps:
        return False
    for count, until in zip(counts, (counts[1], len(steps)), strict=True):
        stored = max(at for at in range(count) if steps[at] == "store")
        loads = [at for at in range(count, until) if steps[at] == "load"]
        if not loads or "other load" in steps[count:until]:
            return False
        if "barrier" not in steps[stored:count] or "barrier" not in steps[count : loads[0]]:
            return False
    return True


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """Returns the kernel's PTX by compute capability, all compiled by one process, which takes seconds to start."""
    told = output_of("tests.engine.kernels.compile_joins", *CAPABILITIES, limit_s=300, **KERNEL_CACHE)
    ptx: dict[str, str] = json.loads(told)
    assert [re.findall(r"\.target sm_(\d+)", text) for text in ptx.values()] == [[one] for one in CAPABILITIES]
    return ptx


@pytest.mark.timeout(330)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_gpu_keeps_the_order_of_stores_counts_and_loads(compiled: dict[str, str], capability: str) -> None:
    """The compiled code keeps the order that docs/gpu.md describes. Code that lacks one part of it does not pass."""
    ptx = compiled[capability]
    steps = steps_of(ptx)
    assert keeps_order(steps), steps
    for change in ((r"bar(rier)?\.sync\s", "// "), ("acq_rel", "relaxed"), (r"\.gpu\.", ".cta."), (r"\.cg\b", "")):
        assert not keeps_order(steps_of(re.sub(*change, ptx)))
    last = max(at for at, name in enumerate(steps) if name == "count")
    behind = steps[:last] + [name for name in steps[last:] if name != "barrier"]
    assert not keeps_order(behind)
