"""Cases for the attention kernels: the work lists of decode steps, rows with one token, and rows with several new tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.cuda.kernels import tiles, triton_decode, triton_extend
from engine.ops import reference
from tests.engine.kernels.draw import Draw, close
from tests.engine.kernels.paged_kv import Paged, paged


def attended(
    qkv: Tensor,
    case: Paged,
    tokens: list[int],
    rows: list[int],
    seen: list[int],
    reach: int,
    scale: float,
    softcap: float,
    sinks: Any,
) -> Tensor:
    """Returns the reference implementation's result [T, H D] in float32, from the same numbers, which may be half precision."""
    out = torch.zeros(qkv.shape[0], case.heads * case.head_dim)
    columns = (torch.tensor(x, dtype=torch.int32) for x in (tokens, rows, seen))
    kv = case.kv.float() if case.scales is None else case.kv
    how = (reach, scale, softcap, out, sinks, case.scales)
    reference.paged_attention(qkv.float(), kv, case.layer, case.heads, case.block_table, *columns, *how)
    return out


def work_lists(draw: Draw) -> None:
    """The work list has the reference implementation's pieces, for any number of rows that a step may have."""
    rows, reach, target = draw.one_of(1, draw.between(2, 64), draw.between(65, 300)), draw.one_of(0, 50, -50), draw.between(1, 40)
    contexts = torch.randint(0, draw.one_of(2, 90, 3000), (rows,), generator=draw.generator).int()
    work = triton_decode.make_work(rows, target, draw.between(0, 9), draw.device)
    triton_decode.split_contexts(draw.on(contexts), reach, work)
    wanted = reference.split_contexts(contexts, reach, target, triton_decode.SPLIT_TOKENS, rows + target)
    for actual, expected in zip((work.rows, work.begins, work.ends, work.firsts), wanted, strict=True):
        assert actual.tolist() == expected.tolist()
    assert not work.finished.any()


def decode_attention(draw: Draw, fp8: bool = False) -> None:
    reach = draw.one_of(0, 0, 1, 7, 64, 100, -7, -64)
    contexts = [
        draw.one_of(0, 1, draw.between(2, 40), draw.between(2, 40), draw.between(60, 200)) for _ in range(draw.between(1, 3))
    ]
    case = paged(draw, contexts, [c - reference.first_seen(c, reach) for c in contexts], fp8)
    softcap, scale = draw.one_of(0.0, 0.0, 5.0), draw.one_of(case.head_dim**-0.5, 0.3)
    sinks = torch.randn(case.heads, generator=draw.generator) if draw.one_of(False, False, True) else None
    qkv = draw.normal(len(contexts), (case.heads + 2 * case.kv_heads) * case.head_dim)
    work = triton_decode.make_work(len(contexts), draw.one_of(1, 3, 8), case.kv_heads, draw.device)
    on_device = draw.on(torch.tensor(contexts, dtype=torch.int32))
    triton_decode.split_contexts(on_device, reach, work)
    out = draw.like(torch.empty(len(contexts), case.heads * case.head_dim, dtype=draw.dtype))
    with tiles.forced(joining(case, draw.dtype, draw.one_of(False, True))):
        triton_decode.decode_attention(
            draw.on(qkv),
            *case.view(draw.on(case.arena)),
            case.layer,
            case.heads,
            draw.on(case.shuffled_table),
            draw.on(case.table_rows),
            work,
            scale,
            softcap,
            None if sinks is None else draw.on(sinks),
            draw.interpreted,
            out,
        )
    there = [row for row, context in enumerate(contexts) if context]
    close(out, attended(qkv, case, there, there, [contexts[r] for r in there], reach, scale, softcap, sinks), draw.dtype)


def joining(case: Paged, dtype: torch.dtype, joins: bool) -> tiles.Tile:
    """Returns the tile that the table has for a case, in the form that joins pieces or in the other one."""
    tile = tiles.decode_tile(case.head_dim, dtype.itemsize, case.scales is not None, case.heads // case.kv_heads)
    return tile._replace(joins=joins)


def joined_pieces(draw: Draw) -> None:
    """Rows of many pieces are joined by the programs that finish last to the last bit as by a kernel behind them, again and again,
    and counters are left at 0."""
    pieces = [draw.one_of(0, 1, 2, draw.between(3, 16), draw.between(17, 40)) for _ in range(draw.between(2, 4))]
    contexts = [max(0, n * triton_decode.SPLIT_TOKENS - draw.between(0, 63)) for n in pieces]
    kv_heads, head_dim = draw.one_of(1, 2), draw.one_of(64, 80, 128)
    case = paged(draw, contexts, contexts, False, max_heads=8, token_dims=(2, kv_heads, head_dim))
    sinks = draw.one_of(None, draw.on(torch.randn(case.heads, generator=draw.generator)))
    work = triton_decode.make_work(len(contexts), sum(pieces) + 1, kv_heads + 1, draw.device)
    triton_decode.split_contexts(draw.on(torch.tensor(contexts, dtype=torch.int32)), 0, work)
    assert work.firsts.diff().tolist() == pieces
    queries = [draw.on(draw.normal(len(contexts), (case.heads + 2 * kv_heads) * head_dim)) for _ in range(2)]
    view, places = case.view(draw.on(case.arena)), (draw.on(case.shuffled_table), draw.on(case.table_rows))

    def attend(qkv: Tensor, joins: bool, in_order: bool = False) -> Tensor:
        out = draw.like(torch.empty(len(contexts), case.heads * head_dim, dtype=draw.dtype))
        how = (work, head_dim**-0.5, 0.0, sinks, draw.interpreted, out, in_order)
        with tiles.forced(joining(case, draw.dtype, joins)):
            triton_decode.decode_attention(qkv, *view, case.layer, case.heads, *places, *how)
        return out

    assert triton_decode.joins_pieces(case.heads // kv_heads, head_dim)
    wanted = [attend(qkv, joins=False, in_order=True) for qkv in queries]
    close(wanted[0], attend(queries[0], joins=False), draw.dtype)
    for at in range(2 if draw.interpreted else 200):  # in turns, since what one wrote would be right for itself
        assert torch.equal(attend(queries[at % 2], joins=True), wanted[at % 2])
        assert not work.finished.any()


def extend_attention(draw: Draw, fp8: bool = False) -> None:
    reach = draw.one_of(0, 0, 1, 7, 33, 90, -7, -40)
    new = [draw.one_of(1, 5, draw.between(2, 40), draw.between(33, 70)) for _ in range(draw.between(1, 2))]
    contexts = [n + draw.one_of(0, 0, draw.between(1, 70), draw.between(64, 100)) for n in new]
    seen_of = [c - reference.first_seen(c - n + 1, reach) for n, c in zip(new, contexts, strict=True)]
    case = paged(draw, contexts, seen_of, fp8, max_heads=4)
    softcap, scale = draw.one_of(0.0, 0.0, 5.0), draw.one_of(case.head_dim**-0.5, 0.3)
    sinks = torch.randn(case.heads, generator=draw.generator) if draw.one_of(False, False, True) else None
    first = draw.one_of(0, 2)  # tokens before `first` belong to other rows and must not change
    starts = [first + sum(new[:row]) for row in range(len(new))]
    qkv = draw.normal(first + sum(new), (case.heads + 2 * case.kv_heads) * case.head_dim)
    parts = draw.one_of(1, 1, 2, 4)  # of a tile, as where the model has other heads besides
    tokens = parts * triton_extend.tile_tokens([case.head_dim], draw.dtype, fp8)
    tiles = [(row, at) for row, n in enumerate(new) for at in range(0, n, tokens)]

    def ints(values: list[int]) -> Tensor:
        return draw.on(torch.tensor(values, dtype=torch.int32))

    out = draw.like(torch.empty(len(qkv), case.heads * case.head_dim, dtype=draw.dtype))
    triton_extend.extend_attention(
        draw.on(qkv),
        *case.view(draw.on(case.arena)),
        case.layer,
        case.heads,
        draw.on(case.shuffled_table),
        draw.on(case.table_rows),
        ints([row for row, _ in tiles]),
        ints([at for _, at in tiles]),
        tokens,
        ints(starts),
        ints(new),
        ints(contexts),
        reach,
        scale,
        softcap,
        None if sinks is None else draw.on(sinks),
        draw.interpreted,
        out,
    )
    assert out[:first].isnan().all()
    rows = [row for row, n in enumerate(new) for _ in range(n)]
    seen = [contexts[row] - n + 1 + i for row, n in enumerate(new) for i in range(n)]
    wanted = attended(qkv, case, list(range(first, len(qkv))), rows, seen, reach, scale, softcap, sinks)
    close(out[first:], wanted[first:], draw.dtype)


def not_finite_fp8(draw: Draw) -> None:
    """A row whose fp8 KV has NaN or an infinity in a head gets no finite numbers from it, to whichever dtype codes are widened;
    other rows do. Triton's interpreter widens the code of NaN to 480, so this is for a GPU."""
    context, head_dim = draw.between(1, 90), draw.one_of(64, 80, 128)
    case = paged(draw, [context, context], [context, context], True, max_heads=4, token_dims=(2, draw.one_of(1, 2), head_dim))
    broken, kv_head, which = draw.between(0, context - 1), draw.between(0, case.kv_heads - 1), draw.one_of(0, 1)
    block_tokens = case.kv.shape[4]
    place = (case.block_table[0, broken // block_tokens], case.layer, which, kv_head, broken % block_tokens)
    numbers = torch.randn(head_dim, generator=draw.generator)
    numbers[draw.between(0, head_dim - 1)] = draw.one_of(math.nan, math.inf)
    assert case.scales is not None
    case.kv[place], case.scales[place] = reference.quantize_fp8(numbers)
    contexts = draw.on(torch.tensor([context, context], dtype=torch.int32))
    work = triton_decode.make_work(2, draw.one_of(1, 3), case.kv_heads, draw.device)
    triton_decode.split_contexts(contexts, 0, work)
    qkv = draw.normal(2, (case.heads + 2 * case.kv_heads) * head_dim)
    out = draw.on(torch.zeros(2, case.heads * head_dim, dtype=draw.dtype))
    where = (case.layer, case.heads, draw.on(case.shuffled_table), draw.on(case.table_rows))
    view = case.view(draw.on(case.arena))
    triton_decode.decode_attention(draw.on(qkv), *view, *where, work, 0.1, 0.0, None, draw.interpreted, out)
    group = case.heads // case.kv_heads
    finite = out.cpu().view(2, case.heads, head_dim).isfinite()
    of_broken = torch.zeros(2, case.heads, dtype=torch.bool)
    of_broken[0, kv_head * group : (kv_head + 1) * group] = True
    assert torch.equal(~finite.all(2), of_broken)
