"""Kernels that overlap: that each waits for the one before it where it must, and that their results are those of kernels that run
apart. On a GPU tests/gpu compares results of kernels that do overlap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.cuda import overlap_choice
from engine.cuda.kernels import triton_overlap, triton_rows
from engine.cuda.kernels.triton_overlap import Way
from engine.cuda.overlap_choice import TURNS, have_right_results
from engine.cuda.overlap_trial import Layers, Sizes
from tests.engine.cuda_bench import INTERPRETED
from tests.engine.not_interpreted import KERNEL_CACHE, output_of

LAUNCHES_IN_ENGINES = overlap_choice.LAUNCHES
LAUNCHES = 4  # of layers, for each way of launching them
SMALL = Sizes(width=32, inner=64, heads=4, kv_heads=2, head_dim=16, context=70, num_layers=2, dtype="float32")
BLOCK_TOKENS = 16
pytestmark = INTERPRETED
KERNELS = {"_norm_kernel", "_few_rows_kernel", "_rope_and_store_kernel", "_piece_kernel", "_combine_kernel", "_gate_kernel"}
ORDERED = re.compile(r"(?<![\w.])(ld\.global|st\.global|atom|red\.|cp\.async\.c|griddepcontrol\.\w+|bra\b|ret\b)(.*)")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces the two instructions, which the interpreter does not have, and returns which of them programs have run."""
    told: list[str] = []
    monkeypatch.setattr(overlap_choice, "LAUNCHES", LAUNCHES)
    monkeypatch.setattr(triton_overlap, "gdc_wait", lambda: told.append("wait"))
    monkeypatch.setattr(triton_overlap, "gdc_launch_dependents", lambda: told.append("launch"))
    yield told
    triton_overlap.use(False)


def results(layers: Layers, way: Way, number: int = 0) -> Tensor:
    layers.begin(number)
    with triton_overlap.forced(way):
        layers.launch()
    return layers.results.clone()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5])
def test_overlapping_kernels_compute_the_same_bits(num_rows: int, waits: list[str]) -> None:
    layers = Layers(num_rows, BLOCK_TOKENS, "cpu", 1, SMALL)
    apart = results(layers, Way.APART)
    assert not waits
    assert torch.equal(results(layers, Way.OVERLAPPING), apart)
    assert waits == ["wait", "launch"] * (len(waits) // 2) != []
    assert torch.equal(results(layers, Way.WAITING), apart)
    assert not torch.equal(results(layers, Way.APART, 1), apart)
    assert apart.isfinite().all()
    assert apart.abs().amax(-1).min() > 0


@pytest.mark.parametrize("measures", [False, True])
def test_layers_are_launched_as_they_are_captured_and_before(monkeypatch: pytest.MonkeyPatch, measures: bool) -> None:
    """The driver refuses to load a kernel within a capture, which would end the engine."""
    told: list[str] = []

    class Told(Layers):
        def launch(self) -> None:
            told.append("overlapping" if triton_overlap.options().get("launch_pdl") else "others")
            super().launch()

    def capture(launch: Callable[[], None]) -> Capture:
        way = "overlapping" if triton_overlap.options().get("launch_pdl") else "others"
        assert way in told
        told.append(f"capture {way}")
        return Capture(Layers(1, BLOCK_TOKENS, "cpu", 1, SMALL))

    def times_s(calls: dict[Way, Any], flush: Tensor) -> dict[Way, list[float]]:
        return {way: [1.0] for way in calls}

    monkeypatch.setattr(overlap_choice, "Layers", lambda *sizes: Told(*sizes, SMALL))
    monkeypatch.setattr(overlap_choice.linear_choice, "times_s", times_s)
    if measures:
        assert overlap_choice.measured_on(BLOCK_TOKENS, "cpu", 1, capture)(1) == ([1.0], [1.0])
        assert told == ["others", "capture others", "overlapping", "capture overlapping"]
        return
    overlap_choice.compared_on(BLOCK_TOKENS, "cpu", 1, capture)(1)
    assert told.count("capture overlapping") == told.count("capture others") == 1
    assert told.count("overlapping") > LAUNCHES, "those without a graph overlap, too"
    assert LAUNCHES_IN_ENGINES * TURNS == 32
    assert len(told) < 16, "one call does not hold up a step for long: a launch without a graph takes the host some 2 ms"


class Capture:
    """Stands in for captured graphs, which launch the layers anew. spoil: what a replay does to the results of which number."""

    def __init__(self, layers: Layers, spoil: Callable[[Tensor], object] = lambda _: None, at: int = -1) -> None:
        self._layers, self._spoil, self._at, self.num = layers, spoil, at, 0

    def __call__(self, way: Way) -> Capture:
        return self if way is Way.OVERLAPPING else Capture(self._layers)

    def replay(self) -> None:
        self._layers.launch()
        if self.num == self._at:
            self._spoil(self._layers.results)
        self.num += 1


def test_right_results_are_found_right() -> None:
    layers = Layers(1, BLOCK_TOKENS, "cpu", 1, SMALL)
    capture = Capture(layers)
    assert have_right_results(layers, capture)
    assert capture.num == LAUNCHES


@pytest.mark.parametrize("spoil", [lambda all: all[0, 0, -1].neg_(), lambda all: all[1].fill_(torch.nan), lambda all: all.zero_()])
def test_one_other_bit_of_one_launch_is_found(spoil: Callable[[Tensor], object]) -> None:
    layers = Layers(1, BLOCK_TOKENS, "cpu", 1, SMALL)
    assert not have_right_results(layers, Capture(layers, spoil, LAUNCHES - 1))


def test_a_kernel_that_reads_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, too: a norm that reads what was there before the kernel in front of it wrote."""
    layers = Layers(1, BLOCK_TOKENS, "cpu", 1, SMALL)
    norm, before = triton_rows.rms_norm, [torch.zeros(1, SMALL.width)]

    def early(x: Tensor, *others: object) -> None:
        if triton_overlap.options().get("launch_pdl"):
            before.append(x.clone())
            x = before.pop(0)
        norm(x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_rows, "rms_norm", early)
    assert not have_right_results(layers, Capture(layers))


def test_wrong_arithmetic_of_overlapping_kernels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All overlapping launches have the same bits, but others than kernels that run apart."""
    layers = Layers(1, BLOCK_TOKENS, "cpu", 1, SMALL)
    norm = triton_rows.rms_norm

    def wrong(x: Tensor, *others: object) -> None:
        norm(2 * x if triton_overlap.options()["OVERLAPS"] else x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_rows, "rms_norm", wrong)
    assert not have_right_results(layers, Capture(layers))


def test_what_is_forced_ends_with_the_context() -> None:
    assert triton_overlap.options() == {"OVERLAPS": False}
    triton_overlap.use(True)
    assert triton_overlap.is_used()
    assert triton_overlap.options() == {"OVERLAPS": True, "launch_pdl": True}
    with triton_overlap.forced(Way.APART):
        assert triton_overlap.options() == {"OVERLAPS": False}
    with triton_overlap.forced(Way.WAITING):
        assert triton_overlap.options() == {"OVERLAPS": True}
        with triton_overlap.forced(Way.APART):
            pass
        assert triton_overlap.options() == {"OVERLAPS": True}, "the context around another one goes on"
    assert triton_overlap.options()["OVERLAPS"]


def waits_first(ptx: str) -> bool:
    """Returns whether each program of a kernel waits once, before its first branch and before everything that reads or writes the
    device's memory but loads of what is read once (weights, with the policy evict_first), and lets the next kernel start after
    that."""
    found = [match for line in ptx.splitlines() if (match := ORDERED.search(line))]
    steps = [match[1] for match in found if "evict_first" not in match[2]]
    return steps[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] and steps.count(steps[0]) == 1


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Returns all kernels that may overlap, compiled so that they do by one process, which takes seconds to start."""
    told = output_of("tests.engine.kernels.compile_overlap", "--overlapping", "90", limit_s=300, **KERNEL_CACHE)
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.timeout(330)
def test_every_program_waits_before_it_reads_or_writes(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["name"] for kernel in compiled} == KERNELS
    for kernel in compiled:
        ptx = kernel["ptx"]
        assert waits_first(ptx), kernel["name"]
        assert not waits_first(ptx.replace("griddepcontrol.wait", "// "))
        late = re.sub(r"(.*griddepcontrol\.wait.*\n)((?:.*\n)*?.*ld\.global(?!.*evict_first).*\n)", r"\2\1", ptx, count=1)
        assert late != ptx
        assert not waits_first(late), kernel["name"]
        assert kernel["stack_bytes"] == 0


@pytest.mark.timeout(330)
def test_weights_are_read_while_the_kernel_before_still_ends(compiled: list[dict[str, Any]]) -> None:
    products = [kernel["ptx"] for kernel in compiled if kernel["name"] == "_few_rows_kernel"]
    assert len(products) == 3  # two sizes, and one with an activation
    for ptx in products:
        first, _, rest = ptx.partition("griddepcontrol.wait")
        assert "ld.global" in first
        assert "ld.global" in rest
