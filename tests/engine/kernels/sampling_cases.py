"""Cases for the kernels that turn logits into tokens."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import Tensor

from engine.cuda.kernels import triton_logits, triton_sampling
from engine.ops import reference
from tests.engine.kernels.draw import Draw


def rows_of_logits(draw: Draw, rows: int, vocab: int) -> Tensor:
    """Returns logits [N, V] of one of several kinds: usual ones, all equal, one that outweighs all, huge ones, few levels (ties at
    every cut), sorted ones (the heavy tokens side by side), and half of them as low as can be."""
    kind = draw.one_of("usual", "usual", "usual", "equal", "one", "huge", "levels", "sorted", "low")
    logits = draw.normal(rows, vocab, scale=draw.one_of(0.3, 2.0, 5.0))
    most = torch.finfo(draw.dtype).max
    if kind == "equal":
        logits[:] = -2.5
    elif kind == "one":
        logits[:, vocab // 2] = 1000.0
    elif kind == "huge":
        logits *= most / 64
    elif kind == "levels":
        logits = logits.round()
    elif kind == "sorted":
        logits = logits.sort(-1, descending=True).values
    elif kind == "low":
        logits[:, 1::2] = -most
    return logits


def sampling(draw: Draw) -> None:
    """Tokens are the reference implementation's, for greedy and sampled rows with settings of their own, some of them with logits
    that are not finite. Interpreted, rows have many small tiles, or fronts are longer than what is stored of them."""
    rows, vocab = draw.between(1, 4), draw.one_of(1, 17, 300, 1000, 5000)
    tile, most = draw.one_of((4096, 31), (128, 31), (256, 2))
    if not draw.interpreted:
        tile, most = 4096, 31  # all else would be compiled for the test alone
    if tile < 4096:
        vocab = min(vocab, 1000)
    logits = rows_of_logits(draw, rows, vocab)
    if draw.one_of(False, False, True):
        logits[draw.between(0, rows - 1), draw.between(0, vocab - 1)] = draw.one_of(math.nan, math.inf, -math.inf)

    def column(*values: float) -> Tensor:
        return torch.tensor([draw.one_of(*values) for _ in range(rows)], dtype=torch.float32)

    temperature, top_p, min_p = column(0.0, 0.7, 1.0, 1.4), column(1.0, 1.0, 0.999, 0.95, 0.5, 0.0), column(0.0, 0.0, 0.05)
    top_k = column(0, 0, 1, 5, 40, 300).to(torch.int32)
    keys = [torch.randint(0, 2**32, (rows,), generator=draw.generator) for _ in range(2)]
    ids, bad = (draw.like(torch.empty(rows, dtype=torch.int32)) for _ in range(2))
    settings = (temperature, top_p, top_k, min_p, *keys)
    with mock.patch.multiple(triton_sampling, TILE_TOKENS=tile, MOST_FRONT=most, MOST_PIVOTS=most):
        triton_sampling.sample(draw.on(logits), *(draw.on(x) for x in settings), ids, bad)
    greedy, wanted_bad = reference.greedy(logits)
    drawn, _ = reference.sample(logits, temperature.clamp(min=1e-9), *settings[1:])
    wanted = torch.where(temperature > 0, drawn, greedy)
    assert bad.cpu().bool().tolist() == wanted_bad.tolist()
    fine = ~wanted_bad
    assert ids.cpu()[fine].tolist() == wanted[fine].tolist()
    assert ((ids >= 0) & (ids < vocab)).all()


def edits(draw: Draw) -> None:
    """Masks, biases, penalties and bans of several rows at once are what the reference implementation and torch make of them row by
    row, to the last bit. Some rows have none, sequences are of different lengths, and some logits are not finite."""
    rows, vocab, before = draw.between(1, 5), draw.one_of(5, 300, 2100), draw.between(0, 2)
    logits = draw.normal(before + rows, vocab, scale=4.0)
    logits[before, 0], logits[-1, vocab // 2] = math.inf, math.nan
    wanted, least = logits[before:].float().clone(), torch.finfo(draw.dtype).min
    masks = torch.tensor([draw.between(-1, 2) for _ in range(rows)], dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=draw.generator).int()
    edited = [row for row in range(rows) if draw.one_of(True, True, False)] or [rows - 1]
    words, penalties = torch.zeros(len(edited), triton_logits.EDIT_WORDS, dtype=torch.int32), torch.ones(len(edited), 4).double()
    masks_at = torch.where(masks >= 0, masks * bits.shape[1] + 1, -1).int()
    memory, counted = [torch.zeros(1).int(), bits.flatten()], torch.zeros(rows, dtype=torch.int32)

    def ids(num: int, distinct: bool = True) -> tuple[int, int]:
        own = (
            torch.randperm(vocab, generator=draw.generator)
            if distinct
            else torch.randint(0, vocab, (num,), generator=draw.generator)
        )
        first = sum(map(len, memory))
        memory.append(own[:num].int())
        return first, first + len(memory[-1])

    for row in range(rows):
        if masks[row] >= 0:
            of_tokens = torch.arange(vocab)
            allowed = (bits[masks[row].long()][of_tokens // 32] >> (of_tokens % 32)) & 1 == 1
            wanted[row] = torch.where(allowed | ~torch.isfinite(wanted[row]), wanted[row], least)
    for at, row in enumerate(edited):
        first, end = ids(draw.one_of(0, 7, 60, 1300, 9000), distinct=False)
        tokens = memory[-1]
        output = draw.between(first, end)
        words[at, :4] = torch.tensor([row, first, output, end])
        counted[row], numbers = int(end > first), [draw.shapes.gauss(0, 1), draw.shapes.gauss(0, 1), draw.shapes.random() + 0.5]
        penalties[at, :3] = torch.tensor(numbers, dtype=torch.float64)
        biased = ids(draw.one_of(0, 2, 700))
        biases = torch.randn(biased[1] - biased[0], generator=draw.generator)
        wanted[row, memory[-1].long()] += biases
        memory.append(biases.view(torch.int32))
        ruled_out = ids(draw.one_of(0, 1, 3))
        words[at, 4:] = torch.tensor([*biased, *ruled_out])
        if end > first:
            reference.penalise(wanted[row], tokens, output - first, *numbers)
        held = wanted[row, memory[-1].long()]
        wanted[row, memory[-1].long()] = torch.where(torch.isfinite(held), torch.finfo(torch.float32).min, held)
    wide, counts = draw.like(wanted), draw.like(torch.empty(rows, vocab, dtype=torch.int32))
    pointed, own = draw.on(torch.cat(memory)), draw.on(words.flatten())
    triton_logits.widen(draw.on(logits), before, draw.on(masks_at), pointed, draw.on(counted), wide, counts)
    triton_logits.add_biases_and_count(wide, counts, own, pointed)
    triton_logits.penalise_and_ban(wide, counts, own, draw.on(penalties.flatten()), pointed)
    torch.testing.assert_close(wide.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def logprobs(draw: Draw) -> None:
    rows, vocab = draw.between(1, 5), draw.one_of(1, 9, 300, 5000)
    logits = draw.normal(rows, vocab, scale=3.0)
    logits[rows - 1] = -1.5  # all equal: the lower id first
    num_top = min(vocab, draw.one_of(0, 1, 5, 20))
    asked = torch.randperm(rows, generator=draw.generator)[: draw.between(1, rows)].int()
    chosen = torch.randint(0, vocab, (rows,), generator=draw.generator).int()
    wanted = reference.top_logprobs(logits[asked.long()], chosen[asked.long()].long(), num_top)
    nums = torch.tensor([draw.between(0, num_top) for _ in asked], dtype=torch.int32)
    if len(asked) > 1:
        asked[-1] = -1  # a row that nobody asks for, of which nothing is written
    picked, top_ids, top = torch.full_like(wanted[0], 7.0), torch.full_like(wanted[1].int(), 7), torch.full_like(wanted[2], 7.0)
    for at, row in enumerate(asked.tolist()):
        wanted[0][at] = wanted[0][at] if row >= 0 else 7.0
        wanted[1][at, nums[at] if row >= 0 else 0 :], wanted[2][at, nums[at] if row >= 0 else 0 :] = 7, 7.0
    written = draw.on(picked), draw.on(top_ids), draw.on(top)
    before = draw.between(0, 2)
    above = draw.normal(before, vocab)
    given = draw.on(torch.cat((above, logits))), before, draw.on(asked), draw.on(nums), draw.on(chosen)
    triton_logits.top_logprobs(*given, *written)
    picked, top_ids, top = (each.cpu() for each in written)
    torch.testing.assert_close(picked, wanted[0], rtol=2e-5, atol=2e-5)
    assert top_ids.tolist() == wanted[1].tolist()
    torch.testing.assert_close(top, wanted[2], rtol=2e-5, atol=2e-5)


def ranks(draw: Draw) -> None:
    """Equal logits count, also those on either side of the token and in other blocks of a row."""
    rows, vocab = draw.between(1, 5), draw.one_of(1, 9, 300, 5000)
    logits = draw.normal(rows, vocab, scale=draw.one_of(0.01, 3.0)).mul(8).round().div(8).to(draw.dtype)
    logits[rows - 1] = -1.5
    chosen = torch.randint(0, vocab, (rows,), generator=draw.generator).int()
    wanted = reference.ranks(logits, chosen.long())
    assert int(wanted[rows - 1]) == vocab
    out = draw.like(wanted)
    triton_logits.ranks(draw.on(logits), draw.on(chosen), out)
    assert out.tolist() == wanted.tolist()
