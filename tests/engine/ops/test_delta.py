"""The gated delta rule: the CPU kernels give the results and the states of the reference implementation, and steps of any size the
same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.cpu import deltas
from engine.ops import reference
from loader.shapes.model_shape import DeltaShape
from tests.engine.cpu_ops import ops
from tests.engine.kernels.delta_states import DeltaRows, by_steps, delta_rows, delta_rule
from tests.engine.kernels.draw import Draw
from tests.engine.ops.twins import compiled_as_called, share_everything

kernels = compiled_as_called  # in place of the folder's fixture


def computed(rows: DeltaRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the kernels make of the rows, and the states after them."""
    states = rows.states.clone()
    group = SimpleNamespace(kv=states, kv_flat=states.view(-1).numpy(), block_table=rows.block_table.numpy())
    columns = (one.numpy() for one in (rows.starts, rows.num_new, rows.contexts))
    starts, num_new, contexts = columns
    batch = SimpleNamespace(
        group_of=lambda layer: (group, rows.layer),
        block_tokens=rows.block_tokens,
        starts=starts,
        num_new=num_new,
        contexts=contexts,
    )
    return deltas.gated_delta(ops.kernels, rows.x, rows.gates, rows.rule, 0, batch), states  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_any_rows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int) -> None:
    pytest.importorskip("numba")
    rows = delta_rows(Draw(seed, dtype, "cpu"))
    ops.set_num_threads(1 + seed % 2)
    share_everything(monkeypatch)
    found, states = computed(rows)
    wanted, after = rows.compute()
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states, after, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not found[int(rows.num_new.sum()) :].any()


@pytest.mark.parametrize(("served", "value_dim"), [(3, 8), (1, 8), (3, 4)])
def test_the_convolution_of_any_number_of_columns(served: int, value_dim: int) -> None:
    """The kernel and its twin convolve 40, 24 and 28 columns as the formula says. On aarch64 oneDNN computes 40 and 24 wrongly in
    vectors of 512 bits."""
    pytest.importorskip("numba")
    shape, num = DeltaShape(frozenset((0,)), 1, served, 8, value_dim, 4, by_head=False), 20
    drawn = Draw(7, torch.float32, "cpu")
    columns, rule = drawn.normal(num, shape.conv_width), delta_rule(drawn, shape)
    values, ints = served * value_dim, [torch.tensor([value], dtype=torch.int32) for value in (0, num, num)]
    x, gates = torch.cat((columns, drawn.normal(num, values)), dim=1), drawn.normal(num, 2 * served)
    table = torch.arange(2, dtype=torch.int32).unsqueeze(0)
    rows = DeltaRows(rule, x, gates, torch.zeros(2, 1, shape.state_values), 0, 16, table, *ints)

    before = torch.cat((torch.zeros(3, shape.conv_width), columns))
    wanted = torch.stack([(before[t : t + 4].double() * rule.convolution.t()).sum(dim=0) for t in range(num)])
    torch.testing.assert_close(reference._delta_convolve(before, rule).double(), wanted, rtol=1e-6, atol=1e-6)
    ops.set_num_threads(1)
    for found, of_twin in zip(computed(rows), rows.compute(), strict=True):
        torch.testing.assert_close(found, of_twin, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", [[1] * 70, [3, 64, 2, 1], [16, 16, 38]])
def test_steps_of_any_size_give_the_same(sizes: list[int]) -> None:
    """The twin computes 64 tokens at a time by another formula than one by one."""
    rows = delta_rows(Draw(5, torch.float32, "cpu"))
    num = sum(sizes)
    blocks = -(-(num + 3) // rows.block_tokens)
    drawn = Draw(6, torch.float32, "cpu")
    one = DeltaRows(
        rows.rule,
        drawn.normal(num, rows.x.shape[1]),
        drawn.normal(num, rows.gates.shape[1]),
        torch.zeros(blocks, 1, rows.states.shape[2]),
        0,
        rows.block_tokens,
        torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
        *(torch.tensor([value], dtype=torch.int32) for value in (0, num, num)),
    )
    for found, wanted in zip(by_steps(one, sizes), one.compute(), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
