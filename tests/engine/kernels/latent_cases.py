"""Cases for the kernels of latent attention: norm, rotation and store of latents, products with each head's part of an FP8 matrix,
and attention of rows with one new token and with several."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.kernels import triton_decode, triton_extend, triton_latent, triton_latent_attention
from engine.ops import reference
from engine.ops.ops import Fp8Matrix, Int8Matrix, LatentHeads, Matrix
from tests.engine.kernels.draw import Draw, close
from tests.engine.kernels.paged_kv import Paged, paged
from tests.engine.kernels.row_cases import fp8_matrix, int4_matrix, int4_on_device, int8_matrix, nvfp4_matrix, nvfp4_on_device

SIZES = ((24, 8), (40, 16), (64, 32), (136, 64))  # numbers of a latent, rotated dimensions


def latents(draw: Draw, contexts: list[int], fp8: bool) -> tuple[Paged, int, int]:
    """Returns KV of one vector a token, with its parts' sizes."""
    rank, rope_dim = draw.one_of(*SIZES)
    return paged(draw, contexts, contexts, fp8, token_dims=(1, 1, rank + rope_dim)), rank, rope_dim


def store_latents(draw: Draw, fp8: bool = False) -> None:
    rows = draw.between(1, 3)
    case, rank, rope_dim = latents(draw, [draw.between(rows, 30)], fp8)
    plain_dim, eps = draw.one_of(12, 16, 32), 1e-6
    queries, down = draw.normal(rows, case.heads * (plain_dim + rope_dim)), draw.normal(rows, draw.one_of(0, 28) + rank + rope_dim)
    norm, interleaved = draw.normal(rank), draw.one_of(True, True, False)
    turns = torch.randn(rows, rope_dim, generator=draw.generator)
    slots = torch.randperm(case.kv.shape[0] * case.kv.shape[4], generator=draw.generator)[:rows]
    slots[draw.between(0, rows - 1)] = -1
    ours, arena = draw.on(queries), draw.on(case.arena)
    given = (draw.on(down), draw.on(turns), draw.on(norm), eps)
    triton_latent.rope_and_store_latents(ours, *given, *case.view(arena), case.layer, case.heads, draw.on(slots), interleaved)
    layer = (case.kv, case.layer, case.heads, slots, case.scales)
    reference.rope_and_store_latents(queries, down, turns, norm, eps, *layer, interleaved)
    close(ours, queries, draw.dtype)
    kv, scales = case.view(arena.cpu())
    if scales is None:
        assert torch.equal(kv.isnan(), case.kv.isnan())
        close(kv.nan_to_num(0.0), case.kv.nan_to_num(0.0), draw.dtype)
        return
    # numbers are computed first, and a difference in the last digit may round to the next code
    assert case.scales is not None
    assert (kv != case.kv).float().mean() < 0.02
    found, wanted = (reference.widen_fp8(*pair) for pair in ((kv, scales), (case.kv, case.scales)))
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found.nan_to_num(0.0), wanted.nan_to_num(0.0), rtol=1 / 8, atol=4e-3)


def products_by_head(draw: Draw, int8: bool = False, int4: bool = False, nvfp4: bool = False) -> None:
    """Weights are rounded once to the inputs' dtype, which is allowed for."""
    num_tokens, heads = draw.one_of(1, 3, 17, 40), draw.between(1, 3)
    rank = draw.one_of(32, 96, 256) if int4 or nvfp4 else draw.one_of(24, 136, 256)
    plain_dim, value_dim, rope_dim = draw.one_of(12, 16, 128), draw.one_of(16, 20, 72), 8
    height = plain_dim + value_dim
    wide = torch.empty(heads * height, rank)
    if int4:
        packed = int4_matrix(draw, heads * height, rank)
        reference.int4_rows(packed.packed, packed.scales, packed.zeros, packed.group_inputs, wide)
        placed: Matrix = int4_on_device(draw, packed)
    elif int8:
        whole = int8_matrix(draw, heads * height, rank)
        wide = whole.values.float() * whole.scales.unsqueeze(1)
        placed = Int8Matrix(draw.on(whole.values), draw.on(whole.scales))
    elif nvfp4:
        own = nvfp4_matrix(draw, heads * height, rank)
        reference.nvfp4_rows(own.packed, own.scales, own.factors, wide)
        placed = nvfp4_on_device(draw, own)
    else:
        up = fp8_matrix(draw, heads * height, rank, draw.one_of(rank, 128))
        reference.fp8_rows(up.values, up.scales, up.group_inputs, wide)
        placed = Fp8Matrix(draw.on(up.values), draw.on(up.scales), up.group_inputs)
    matrices = wide.view(heads, height, rank)
    on_device = LatentHeads(placed, heads, plain_dim, rope_dim, value_dim)
    queries, sums = draw.normal(num_tokens, heads, plain_dim + rope_dim), draw.normal(num_tokens, heads, rank)
    absorbed = draw.like(torch.empty(num_tokens, heads, rank + rope_dim, dtype=draw.dtype))
    values = draw.like(torch.empty(num_tokens, heads, value_dim, dtype=draw.dtype))
    triton_latent.product_by_head(draw.on(queries)[..., :plain_dim], on_device, False, draw.interpreted, absorbed[..., :rank])
    triton_latent.product_by_head(draw.on(sums), on_device, True, draw.interpreted, values)
    assert absorbed[..., rank:].isnan().all()
    wanted = torch.einsum("thk,hkl->thl", queries[..., :plain_dim].float(), matrices[:, :plain_dim])
    close(absorbed[..., :rank], wanted, draw.dtype)
    close(values, torch.einsum("thl,hvl->thv", sums.float(), matrices[:, plain_dim:]), draw.dtype)


def expected(queries: Tensor, case: Paged, rank: int, tokens: list[int], rows: list[int], seen: list[int], scale: float) -> Tensor:
    """Returns the reference implementation's sums [T, H, L] in float32: its result with a matrix that hands queries and latents
    through."""
    num_tokens, heads, width = queries.shape
    through = torch.cat((torch.eye(rank), torch.eye(rank))).expand(heads, -1, -1)
    out = torch.zeros(num_tokens, heads * rank)
    columns = (torch.tensor(x, dtype=torch.int32) for x in (tokens, rows, seen))
    kv = case.kv.float() if case.scales is None else case.kv
    flat = queries.float().reshape(num_tokens, heads * width)
    reference.latent_attention(flat, through, kv, case.layer, case.block_table, *columns, scale, out, case.scales)
    return out.view(num_tokens, heads, rank)


def decode_latents(draw: Draw, fp8: bool = False) -> None:
    contexts = [draw.one_of(0, 1, draw.between(2, 40), draw.between(60, 150)) for _ in range(draw.between(1, 3))]
    case, rank, rope_dim = latents(draw, contexts, fp8)
    scale, heads = draw.one_of(0.1, 0.3), draw.one_of(1, 3, 16, 20, 40)
    queries = draw.normal(len(contexts), heads, rank + rope_dim)
    work = triton_decode.make_work(len(contexts), draw.one_of(1, 3, 8), 0, draw.device)
    triton_decode.split_contexts(draw.on(torch.tensor(contexts, dtype=torch.int32)), 0, work)
    out = draw.like(torch.empty(len(contexts), heads, rank, dtype=draw.dtype))
    triton_latent_attention.decode_attention(
        draw.on(queries),
        *case.view(draw.on(case.arena)),
        case.layer,
        draw.on(case.shuffled_table),
        draw.on(case.table_rows),
        work,
        scale,
        32,
        draw.interpreted,
        out,
    )
    there = [row for row, context in enumerate(contexts) if context]
    close(out, expected(queries, case, rank, there, there, [contexts[row] for row in there], scale), draw.dtype)


def extend_latents(draw: Draw, fp8: bool = False) -> None:
    """Queries come some at a time, and a tile may have parts of two such times."""
    new = [draw.one_of(1, 5, draw.between(2, 40), draw.between(60, 70)) for _ in range(draw.between(1, 2))]
    contexts = [n + draw.one_of(0, draw.between(1, 70)) for n in new]
    case, rank, rope_dim = latents(draw, contexts, fp8)
    scale, heads = draw.one_of(0.1, 0.3), draw.between(1, 2)
    first = draw.one_of(0, 2)  # tokens before `first` belong to other rows and must not change
    starts = [first + sum(new[:row]) for row in range(len(new))]
    queries = draw.normal(first + sum(new), heads, rank + rope_dim)
    tile_tokens = triton_extend.tile_tokens([192], draw.dtype, fp8)
    tiles = [(row, at) for row, n in enumerate(new) for at in range(0, n, tile_tokens)]

    def ints(values: list[int]) -> Tensor:
        return draw.on(torch.tensor(values, dtype=torch.int32))

    out = draw.like(torch.empty(len(queries), heads, rank, dtype=draw.dtype))
    at_once = draw.one_of(len(queries), 24)
    for begin in range(0, len(queries), at_once):
        part = slice(begin, begin + at_once)
        triton_latent_attention.extend_attention(
            draw.on(queries[part]),
            begin,
            *case.view(draw.on(case.arena)),
            case.layer,
            draw.on(case.shuffled_table),
            draw.on(case.table_rows),
            ints([row for row, _ in tiles]),
            ints([at for _, at in tiles]),
            tile_tokens,
            ints(starts),
            ints(new),
            ints(contexts),
            scale,
            draw.interpreted,
            out[part],
        )
    assert out[:first].isnan().all()
    rows = [row for row, n in enumerate(new) for _ in range(n)]
    seen = [contexts[row] - n + 1 + i for row, n in enumerate(new) for i in range(n)]
    wanted = expected(queries, case, rank, list(range(first, len(queries))), rows, seen, scale)
    close(out[first:], wanted[first:], draw.dtype)
