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
    ids, bad = draw.like(torch.empty(rows, dtype=torch.int32)), draw.like(torch.empty(rows, dtype=torch.int8))
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


def penalties(draw: Draw) -> None:
    rows, vocab, length = draw.between(1, 4), draw.one_of(5, 300, 2000), draw.between(1, 60)
    logits = torch.randn(rows, vocab, generator=draw.generator) * 4
    logits[0, 0] = math.inf
    tokens = torch.randint(0, vocab, (rows, length), generator=draw.generator).int()
    lengths = torch.tensor([draw.between(1, length) for _ in range(rows)], dtype=torch.int32)
    num_prompt = torch.tensor([draw.between(0, int(n)) for n in lengths], dtype=torch.int32)
    presence, frequency = torch.randn(rows, generator=draw.generator), torch.randn(rows, generator=draw.generator)
    repetition = torch.rand(rows, generator=draw.generator) + 0.5
    ours = draw.on(logits)
    triton_logits.penalise(ours, *(draw.on(x) for x in (tokens, lengths, num_prompt, presence, frequency, repetition)))
    for row in range(rows):
        own = tokens[row, : int(lengths[row])]
        numbers = (float(x[row]) for x in (presence, frequency, repetition))
        reference.penalise(logits[row], own, int(num_prompt[row]), *numbers)
    torch.testing.assert_close(ours.cpu(), logits, rtol=1e-6, atol=1e-6)


def logprobs(draw: Draw) -> None:
    rows, vocab = draw.between(1, 5), draw.one_of(1, 9, 300, 5000)
    logits = draw.normal(rows, vocab, scale=3.0)
    logits[rows - 1] = -1.5  # all equal: the lower id first
    num_top = min(vocab, draw.one_of(0, 1, 5, 20))
    asked = torch.randperm(rows, generator=draw.generator)[: draw.between(1, rows)].int()
    chosen = torch.randint(0, vocab, (len(asked),), generator=draw.generator).int()
    wanted = reference.top_logprobs(logits[asked.long()], chosen.long(), num_top)
    picked, top = draw.like(wanted[0]), draw.like(wanted[2])
    top_ids = draw.like(wanted[1].int())
    triton_logits.top_logprobs(draw.on(logits), draw.on(asked), draw.on(chosen), picked, top_ids, top)
    torch.testing.assert_close(picked.cpu(), wanted[0], rtol=2e-5, atol=2e-5)
    assert top_ids.tolist() == wanted[1].tolist()
    torch.testing.assert_close(top.cpu(), wanted[2], rtol=2e-5, atol=2e-5)
