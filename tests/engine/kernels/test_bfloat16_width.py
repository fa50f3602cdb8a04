"""Attention in bfloat16 at the width of an 8B model, 32 heads of queries and 8 of keys and values of 128 numbers each, against
float64: decode steps, with pieces joined by a second kernel and by the programs themselves, and several tokens of a row.

The interpreter multiplies numbers that were widened to float32, as tensor cores multiply bfloat16. It makes bfloat16 of weights and
results by dropping bits, where a GPU rounds. By how much that changes a number is known, so each has a bound of its own, which one
wrong head of 32, or a scale that is off by 2 %, exceeds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.cuda.kernels import tiles, triton_decode, triton_extend
from tests.engine.cuda_bench import INTERPRETED

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, LAYERS, LAYER = 32, 8, 128, 16, 2, 1
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SCALE = HEAD_DIM**-0.5
DROPPED = 2.0**-7  # share of a number that dropping all but its eight leading bits takes, at most
SUMMED = 1.05  # what sums in float32 may add to that
QUERY_SIZE = 3.0  # such that some positions weigh much more than others
CONTEXTS = (150, 3, 61)
NEW, BEFORE = 21, 45
pytestmark = INTERPRETED


class Case:
    """Rows with these contexts, whose last `new` tokens are computed. Blocks are scattered; what no row has written is NaN."""

    def __init__(self, contexts: tuple[int, ...], new: int) -> None:
        generator = torch.Generator().manual_seed(1)
        rows, most_blocks = len(contexts), -(-max(contexts) // BLOCK_TOKENS)
        self.contexts, self.new = contexts, new
        self.qkv = (QUERY_SIZE * torch.randn(rows * new, WIDTH, generator=generator)).bfloat16()
        written = torch.randn(rows, max(contexts), LAYERS, 2, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        self.table = torch.randperm(rows * most_blocks, generator=generator).int().view(rows, most_blocks)
        kv = torch.full((rows * most_blocks, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
        for row, context in enumerate(contexts):
            for at in range(context):
                kv[self.table[row, at // BLOCK_TOKENS], :, :, :, at % BLOCK_TOKENS] = written[row, at]
        self.kv, self.written = kv, written[:, :, LAYER].double()

    def exact(self) -> tuple[Tensor, Tensor]:
        """Returns the attention [T, H, D] in float64, and by how much a result in bfloat16 may be off: by what is dropped of
        its weights and of itself."""
        queries = self.qkv[:, : HEADS * HEAD_DIM].double().view(-1, HEADS, HEAD_DIM)
        results, bounds = [], []
        for token, query in enumerate(queries):
            row, at = divmod(token, self.new)
            seen = self.contexts[row] - self.new + at + 1
            keys, values = self.written[row, :seen].repeat_interleave(HEADS // KV_HEADS, dim=2).unbind(1)
            weights = (torch.einsum("hd,phd->hp", query, keys) * SCALE).softmax(1)
            results.append(torch.einsum("hp,phd->hd", weights, values))
            bounds.append(torch.einsum("hp,phd->hd", weights, values.abs()) + results[-1].abs())
        return torch.stack(results), SUMMED * DROPPED * torch.stack(bounds)

    def excess(self, out: Tensor) -> float:
        """Returns by what factor the worst number of a result is further off than it may be; infinity if one is no number."""
        result, bound = self.exact()
        off = (out.double().view(-1, HEADS, HEAD_DIM) - result).abs() / bound
        return float(off.nan_to_num(torch.inf).max())


def decoded(module: ModuleType, joins: bool) -> float:
    case, rows = Case(CONTEXTS, 1), len(CONTEXTS)
    contexts = torch.tensor(CONTEXTS, dtype=torch.int32)
    work = triton_decode.make_work(rows, 4, KV_HEADS, "cpu")
    triton_decode.split_contexts(contexts, 0, work)
    assert max(work.firsts.diff().tolist()) > 1, "no row has pieces to join"
    out = torch.full((rows, HEADS * HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    places = (case.table, torch.arange(rows, dtype=torch.int32))
    with tiles.forced(tiles.decode_tile(HEAD_DIM, 2)._replace(joins=joins)):
        module.decode_attention(case.qkv, case.kv, None, LAYER, HEADS, *places, work, SCALE, 0.0, None, True, out)
    return case.excess(out)


def in_pieces(module: ModuleType) -> float:
    return decoded(module, joins=False)


def joined(module: ModuleType) -> float:
    return decoded(module, joins=True)


def extended(module: ModuleType) -> float:
    case = Case((BEFORE + NEW,), NEW)
    out = torch.full((NEW, HEADS * HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    tokens = triton_extend.tile_tokens([HEAD_DIM], torch.bfloat16, False)
    zero, new, context, firsts = (
        torch.tensor(values, dtype=torch.int32) for values in ([0], [NEW], [BEFORE + NEW], list(range(0, NEW, tokens)))
    )
    columns = (case.table, zero, torch.zeros_like(firsts), firsts, tokens, zero, new, context)
    module.extend_attention(case.qkv, case.kv, None, LAYER, HEADS, *columns, 0, SCALE, 0.0, None, True, out)
    return case.excess(out)


@pytest.fixture
def with_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, str], ModuleType]:
    """Returns a function that makes a module from its own text with one change."""
    return lambda module, right, wrong: _with_fault(module, right, wrong, tmp_path, monkeypatch)


def _with_fault(module: ModuleType, right: str, wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    text = Path(str(module.__file__)).read_text()
    assert text.count(right) == 1, f"{right} is {text.count(right)} times in {module.__name__}"
    path = folder / f"{module.__name__.rpartition('.')[2]}_with_fault.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, changed)
    spec.loader.exec_module(changed)
    return changed


Way = Callable[[Any], float]
WRONG_SCALE = ("factor = log2_factor(scale, SOFTCAP)", "factor = log2_factor(scale * 1.02, SOFTCAP)")
WRONG_KEYS = ("keys_at = (layer * 2 * G + kv_head)", "keys_at = (layer * 2 * G + kv_head - (kv_head == 5))")
WRONG_PART = ("at_piece = (first + place * STRIDE).to(tl.int64) * H + head", " + head - (head == 9)")
FAULTS: list[tuple[Way, ModuleType, str, str]] = [
    (in_pieces, triton_decode, *WRONG_KEYS),
    (in_pieces, triton_decode, *WRONG_SCALE),
    (joined, triton_decode, WRONG_PART[0], WRONG_PART[0].removesuffix(" + head") + WRONG_PART[1]),
    (extended, triton_extend, "kv_head = head // (H // G)", "kv_head = (head + (head == 11)) // (H // G)"),
    (extended, triton_extend, *WRONG_SCALE),
]


@pytest.mark.parametrize(("way", "module"), [(in_pieces, triton_decode), (joined, triton_decode), (extended, triton_extend)])
def test_attention_is_no_further_off_than_bfloat16_makes_it(way: Way, module: ModuleType) -> None:
    assert way(module) <= 1.0


@pytest.mark.parametrize(
    ("way", "module", "right", "wrong"), FAULTS, ids=["a head's keys", "scale", "a head's piece", "a KV head", "scale of prompts"]
)
def test_a_wrong_head_or_scale_is_found(
    way: Way, module: ModuleType, right: str, wrong: str, with_fault: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    assert way(with_fault(module, right, wrong)) > 2.0
