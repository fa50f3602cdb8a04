"""The case of the kernels of the gated delta rule: rows that decode and rows with several tokens, some of which begin in the middle
of a block, and padding."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.cuda.kernels import triton_delta
from engine.ops.ops import DeltaRule
from tests.engine.kernels.delta_states import delta_rows
from tests.engine.kernels.draw import TOLERANCE, Draw


def gated_delta(draw: Draw) -> None:
    """The rows' block tables lie at slots in another order, behind which is the one of padding, whose entries name a block."""
    case = delta_rows(draw, (8, 20, 32) if draw.interpreted else (64, 96, 128))
    num_rows, num_tokens = len(case.starts), int(case.num_new.sum())
    slots = torch.randperm(num_rows, generator=draw.generator)
    table = torch.zeros(num_rows + 1, case.block_table.shape[1], dtype=torch.int32)
    table[slots] = case.block_table
    missing = len(case.x) - num_tokens
    nobody = torch.tensor([num_rows if missing else 0], dtype=torch.int32)[: 1 if missing else 0]
    rows = torch.repeat_interleave(torch.arange(num_rows), case.num_new)
    token_rows = torch.cat((rows, torch.full((missing,), num_rows))).int()

    def padded(column: torch.Tensor, value: int) -> torch.Tensor:
        return draw.on(torch.cat((column.int(), torch.full_like(nobody, value))))

    columns = (
        padded(slots, num_rows),
        padded(case.contexts - case.num_new, 0),
        padded(case.starts, num_tokens),
        padded(case.contexts, missing),
    )
    rule: DeltaRule = case.rule
    tensors = {name: draw.on(getattr(rule, name)) for name in ("convolution", "decay", "step_bias", "norm")}
    states, out = draw.on(case.states), draw.like(torch.empty(len(case.x), rule.num_value_heads * rule.value_dim, dtype=draw.dtype))
    triton_delta.gated_delta(
        draw.on(case.x),
        draw.on(case.gates),
        replace(rule, **tensors),
        states,
        case.layer,
        case.block_tokens,
        draw.on(table),
        draw.on(token_rows),
        *columns,
        bool((case.num_new > 1).any()),
        out,
    )
    wanted, after = case.compute()
    tolerance = TOLERANCE[draw.dtype]
    made, expected = out[:num_tokens].cpu().float(), wanted[:num_tokens].float()
    assert (made - expected).norm() <= tolerance * expected.norm()
    # the last norm makes small rows large, and their rounding with them
    torch.testing.assert_close(made, expected, rtol=10 * tolerance, atol=10 * tolerance)
    torch.testing.assert_close(states.cpu(), after, rtol=tolerance, atol=tolerance, equal_nan=True)
