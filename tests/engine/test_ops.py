"""The CPU kernels against their torch twins, through ops.py: the same call with and without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import ops
from engine.contracts import BatchPlan
from engine.kernels import compiled, reference
from engine.kernels.compiled import direct
from engine.steps.forward_batch import ForwardBatch, GroupMemory, Rotary, build_batch, padded_rows
from tests.engine.model_bench import make_table
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("numba")
compiled.keep_in(CACHE_DIR)  # before a kernel is imported
from engine.kernels import cpu_int8  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_TOKENS = 6, 2, 16, 2, 4
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    ops.configure(CACHE_DIR)
    for dtype in ("float32", "bfloat16"):
        ops.prepare(dtype, 2, "int8")
    yield
    ops.configure(CACHE_DIR)
    ops.set_num_threads(1)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """(with kernels, with the reference)."""
    with_kernels = call()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_kernels", None)
        return with_kernels, call()


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even what is too little to be worth it, if there are threads to share with."""
    monkeypatch.setattr(ops._kernels, "_SHARED_ATTENTION", 0)
    monkeypatch.setattr(ops._kernels, "_SHARED_WEIGHTS", 0)
    monkeypatch.setattr(ops._kernels, "_SHARED_TILES", 0)
    monkeypatch.setattr(ops._kernels, "_SHARED_ROWS", 0)


def same(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    tolerance = TOLERANCE[left.dtype]
    torch.testing.assert_close(left.float(), right.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def make_batch(
    dtype: torch.dtype, rows: list[tuple[int, int, int]], padded: bool = False, window: int = 0, pairs: int = HEAD_DIM // 2
) -> ForwardBatch:
    columns = np.array(rows, np.int32)
    plan = BatchPlan(0, "m", columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), np.ones(len(rows), np.bool_))
    kv = random(256, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=dtype)
    flat = kv.view(-1).view(torch.uint16).numpy() if dtype is torch.bfloat16 else kv.view(-1).numpy()
    places = [(0, layer) for layer in range(LAYERS)]
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    return build_batch(plan, make_table(), [GroupMemory(kv, flat, Rotary(inv_freq[:pairs]), window)], places, padded)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("around_one", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, around_one: bool, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    x, weight = random(7, 48, dtype=dtype, scale=scale), random(48, dtype=dtype)
    same(*both(monkeypatch, lambda: ops.rms_norm(x, weight, 1e-5, around_one)))

    def add() -> Tensor:
        residual = random(7, 48, dtype=dtype, scale=3.0).clone()
        return torch.cat((ops.add_rms_norm(x, residual, weight, 1e-5, around_one), residual))

    same(*both(monkeypatch, add))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_gated_activations(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    gate_up = random(5, 160, dtype=dtype, scale=scale)
    same(*both(monkeypatch, lambda: ops.silu_and_mul(gate_up)))
    gate_up[:, 80:] /= scale  # where gelu vanishes, torch's loses all its digits; up must not make them large
    same(*both(monkeypatch, lambda: ops.gelu_and_mul(gate_up)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pairs", [HEAD_DIM // 2, 6, 3])
@pytest.mark.parametrize("kind", ["no norms", "norms", "norms around one"])
def test_rope_and_store(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, pairs: int, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    weights = random(HEAD_DIM, dtype=dtype), random(HEAD_DIM, dtype=dtype) + 1
    norms = None if kind == "no norms" else ops.HeadNorms(*weights, 1e-5, kind == "norms around one")

    def call() -> Tensor:
        batch = make_batch(dtype, [(0, 17, 1), (1, 5, 4), (3, 0, 9)], padded=True, pairs=pairs)
        qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype).clone()
        ops.rope_and_store(qkv, norms, 1, HEADS, batch)
        return torch.cat((qkv[: batch.num_tokens].flatten(), batch.groups[0].kv.flatten()))

    same(*both(monkeypatch, call))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 1)],
        [(0, 99, 1), (1, 3, 1), (2, 4, 1), (3, 15, 1)],
        [(0, 99, 1), (1, 3, 5), (2, 20, 40), (4, 0, 30)],
    ],
    ids=["first-token", "decode", "mixed"],
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (8, 5.0), (0, 5.0), (200, 0.0)])
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: list[tuple[int, int, int]],
    threads: int,
    window: int,
    softcap: float,
) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    batch = make_batch(dtype, rows, padded=True, window=window)
    qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, scale=2.0)
    same(*both(monkeypatch, lambda: ops.attention(qkv, 1, HEADS, HEAD_DIM**-0.5, softcap, batch)))


@pytest.mark.parametrize("window", [0, 3, 6, 30])
def test_attention_reads_nothing_beyond_context_and_window(dtype: torch.dtype, window: int) -> None:
    """NaN in blocks and places that don't belong to the rows stays where it is; blocks behind the window have no place at all."""
    batch = make_batch(dtype, [(0, 5, 1), (1, 2, 3), (2, 50, 1), (3, 30, 40)], window=window)
    owned = torch.zeros(batch.groups[0].kv.shape[0], BLOCK_TOKENS, dtype=torch.bool)
    for row, context in enumerate(batch.contexts.tolist()):
        first = max(0, context - int(batch.num_new[row]) - window + 1) if window else 0
        for position in range(first, context):
            owned[int(batch.groups[0].block_table[row, position // BLOCK_TOKENS]), position % BLOCK_TOKENS] = True
        batch.groups[0].block_table[row, : first // BLOCK_TOKENS] = -1
    batch.groups[0].kv.permute(0, 4, 1, 2, 3, 5)[~owned] = torch.nan
    qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    for softcap in (0.0, 5.0):
        assert torch.isfinite(ops.attention(qkv, 0, HEADS, 0.25, softcap, batch)).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 11, 16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 80), (551, 65), (2000, 130), (9000, 3)])
def test_linear(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    bias: bool,
    threads: int,
) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    x, weight = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, num_inputs, dtype=dtype, scale=num_inputs**-0.5)
    added = random(num_outputs, dtype=dtype) if bias else None
    same(*both(monkeypatch, lambda: ops.linear(x, weight, added)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 100])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 80), (551, 65), (2000, 130), (9000, 3)])
def test_int8_linear(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    bias: bool,
    threads: int,
) -> None:
    """Against the product with what the matrix stands for, in parts of a few outputs where torch computes it."""
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    monkeypatch.setattr(ops, "DEQUANTIZED_BYTES", 7 * num_inputs * dtype.itemsize)
    x = random(num_rows, num_inputs, dtype=dtype)
    values = (random(num_outputs, num_inputs, dtype=torch.float32) * 40).round().clamp(-127, 127).to(torch.int8)
    weight = ops.Int8Matrix(values, random(num_outputs, dtype=torch.float32).abs() * 0.03 * num_inputs**-0.5)
    added = random(num_outputs, dtype=dtype) if bias else None
    wanted = x.double() @ (values * weight.scales.unsqueeze(1)).double().T + (0 if added is None else added.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for given in both(monkeypatch, lambda: ops.linear(x, weight, added)):
        assert given.dtype is dtype
        torch.testing.assert_close(given.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocab", [1, 31, 1024, 5000])
def test_greedy_takes_the_first_largest(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int) -> None:
    logits = random(9, vocab, dtype=dtype)
    logits[0] = -3.0  # all equal
    logits[1, vocab // 2 :] = 50.0
    logits[2] = torch.finfo(dtype).min
    logits[3] = -logits[3].abs() - 1
    (ids, bad), (wanted, wanted_bad) = both(monkeypatch, lambda: ops.greedy(logits))
    assert ids.tolist() == wanted.tolist() == logits.float().argmax(-1).tolist()
    assert not bad.any()
    assert not wanted_bad.any()


SIZES = [(64, 32, 1), (768, 70, 5), (2048, 130, 16), (8192 + 64, 300, 33), (128, 600, 250)]  # inputs, outputs, rows


def of_int8(num_inputs: int, num_outputs: int) -> ops.Int8Matrix:
    values = (random(num_outputs, num_inputs, dtype=torch.float32) * 40).round().clamp(-127, 127).to(torch.int8)
    return ops.Int8Matrix(values, random(num_outputs, dtype=torch.float32).abs() * 0.03 * num_inputs**-0.5)


def kernel_of(name: str) -> None:
    """Skips where this processor has no such kernel."""
    if name.startswith("amx") and not ops._kernels._HAS_MATRIX_UNIT:
        pytest.skip("this processor has no AMX, or the kernel does not let this process use it")
    if name == "int8_linear" and not cpu_int8.HAS_INT8_PRODUCTS:
        pytest.skip("this processor has no AVX512-VNNI")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "num_rows"), SIZES)
def test_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, bias: bool, threads: int
) -> None:
    """One piece of the inputs and several, rows and outputs that fill no tile, and more rows than stay in the cache."""
    kernel_of("amx_linear")
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    assert ops._kernels.linear_kernel(num_rows, num_inputs, num_outputs, "bfloat16") is ops._kernels.amx_linear
    x = random(num_rows, num_inputs, dtype=torch.bfloat16)
    weight = random(num_outputs, num_inputs, dtype=torch.bfloat16, scale=num_inputs**-0.5)
    added = random(num_outputs, dtype=torch.bfloat16) if bias else None
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    torch.testing.assert_close(ops.linear(x, weight, added).double(), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", ["amx_int8_linear", "int8_linear"])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "num_rows"), SIZES)
def test_int8_is_multiplied_as_it_is(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, kernel: str, threads: int
) -> None:
    """No more than the result's own rounding is lost, even in a row of which one element is a thousand times the others."""
    kernel_of(kernel)
    if kernel == "int8_linear":
        use_int8_products(monkeypatch)
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    assert ops._kernels.int8_linear_kernel(num_rows, num_inputs, num_outputs, "bfloat16") is getattr(ops._kernels, kernel)
    x, weight = random(num_rows, num_inputs, dtype=torch.bfloat16), of_int8(num_inputs, num_outputs)
    x[::3, 5] *= 1000
    x[1::7] = 0
    added = random(num_outputs, dtype=torch.bfloat16)
    wanted = x.double() @ (weight.values * weight.scales.unsqueeze(1)).double().T + added.double()
    unit = x.double().abs().amax(1, keepdim=True) / cpu_int8.LARGEST
    lost = unit / 2 * (weight.values.abs().double().sum(1) * weight.scales.double())  # at most
    error = (ops.linear(x, weight, added).double() - wanted).abs()
    assert (error <= 2**-8 * wanted.abs() + lost + 1e-6).all()


def use_int8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AMX."""
    monkeypatch.setattr(ops._kernels, "_HAS_MATRIX_UNIT", False)
    monkeypatch.setattr(ops._kernels, "_HAS_INT8_PRODUCTS", True)
    monkeypatch.setattr(ops._kernels, "_INT8_PRODUCTS_ROWS", 250)
    ops.prepare("bfloat16", 2, "int8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kernel", ["amx_int8_linear", "int8_linear"])
def test_rows_that_are_not_finite_stay_so_in_digits(monkeypatch: pytest.MonkeyPatch, kernel: str, value: float) -> None:
    kernel_of(kernel)
    if kernel == "int8_linear":
        use_int8_products(monkeypatch)
    x = random(3, 128, dtype=torch.bfloat16)
    x[1, 77] = value
    finite = torch.isfinite(ops.linear(x, of_int8(128, 64)))
    assert finite.all(dim=1).tolist() == [True, False, True]
    assert not finite[1].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_bad_and_no_others(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float, temperature: float
) -> None:
    logits = random(4, 300, dtype=dtype)
    logits[1, 7] = value
    logits[3, 299] = value
    ones = np.ones(4, np.float32)
    keys = np.arange(4, dtype=np.uint32)

    def call() -> Any:
        if temperature == 0.0:
            return ops.greedy(logits)
        return ops.sample(logits, ones, ones, np.zeros(4, np.int32), np.zeros(4, np.float32), keys, keys)

    for _, bad in both(monkeypatch, call):
        assert bad.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.7, 0.9, 0, 0.0),
        (1.5, 1.0, 20, 0.0),
        (0.8, 0.5, 40, 0.0),
        (1e-4, 1.0, 0, 0.0),
        (1.0, 1.0, 0, 0.05),
        (1.2, 0.8, 30, 0.01),
    ],
)
def test_sample_draws_what_the_twin_draws(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    rows = 200
    logits = random(rows, 700, dtype=dtype, scale=2.0)
    generator = np.random.default_rng(1)
    keys = [generator.integers(0, 2**32, rows, dtype=np.uint32) for _ in range(2)]
    settings = (np.full(rows, temperature, np.float32), np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int32))
    settings += (np.full(rows, min_p, np.float32),)
    (ids, _), (wanted, _) = both(monkeypatch, lambda: ops.sample(logits, *settings, *keys))
    assert (ids != wanted).sum() <= 1  # rounding at a cutoff or a dead heat


def test_the_least_noise_does_not_pick_a_token_that_may_not_come(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """With key1 0 and this key0 the hash of `token` is 0, as it is once in 2**32 draws."""
    vocab, token = 300, 7
    logits = random(1, vocab, dtype=dtype)
    logits[0, token] = torch.finfo(dtype).min
    key0 = np.array([token * 0x9E3779B1 & 0xFFFFFFFF], np.uint32)
    settings = (np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32))
    for ids, _ in both(monkeypatch, lambda: ops.sample(logits, *settings, key0, np.zeros(1, np.uint32))):
        assert ids[0] != token


@pytest.mark.parametrize(("vocab", "num_top"), [(5000, 20), (5000, 0), (1025, 5), (7, 20), (1, 1)])
def test_log_probabilities_are_the_twins(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int, num_top: int) -> None:
    """Of some rows, in any order; ties go to the lower id."""
    logits = random(6, vocab, dtype=dtype, scale=3.0)
    logits[2] = -1.5
    rows, chosen = np.array([4, 2, 0], np.int32), np.array([vocab - 1, vocab // 2, 0], np.int32)
    (picked, top_ids, top), wanted = both(monkeypatch, lambda: ops.top_logprobs(logits, rows, chosen, num_top))
    assert top_ids.shape == (3, min(num_top, vocab))
    assert np.abs(picked - wanted[0]).max() < 2e-6
    assert top_ids.tolist() == wanted[1].tolist()
    if num_top:
        assert np.abs(top - wanted[2]).max() < 2e-6
        exact = torch.log_softmax(logits[rows].double(), -1).numpy()
        assert np.abs(np.take_along_axis(exact, top_ids.astype(np.int64), 1) - top).max() < 2e-6
        assert top_ids[1].tolist() == list(range(min(num_top, vocab)))


def test_penalties_are_the_twins(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    generator = np.random.default_rng(2)
    tokens = generator.integers(0, 300, 200).astype(np.int32)
    row = torch.from_numpy(generator.normal(0, 4, 300).astype(np.float32))
    row[tokens[3]], row[tokens[5]] = torch.nan, torch.inf

    def call() -> Any:
        out = row.clone()
        ops.penalise(out, tokens, 150, 0.4, 0.7, 1.3)
        ops.penalise(out, tokens[:9], 4, -0.4, -0.7, 1e-36)  # twice: nothing is left behind in between
        return out.numpy()

    ours, wanted = both(monkeypatch, call)
    assert np.allclose(ours, wanted, rtol=1e-6, equal_nan=True)
    assert (~np.isfinite(ours)).sum() == 2


def test_hash_is_the_twins(kernels: None) -> None:
    from numba import njit, uint32

    from engine.kernels.cpu_bits import hash32

    @njit
    def run(num: int, key0: int, key1: int) -> Any:
        out = np.empty(num, np.uint32)
        for i in range(num):
            out[i] = hash32(uint32(i), key0, key1)
        return out

    for key0, key1 in ((0, 0), (2**32 - 1, 2**32 - 1), (123456789, 3987654321)):
        wanted = reference.hash32(torch.arange(5000), torch.tensor(key0), torch.tensor(key1))
        assert run(5000, np.uint32(key0), np.uint32(key1)).astype(np.int64).tolist() == wanted.tolist()


def test_threads_have_a_compilation_of_their_own() -> None:
    """Numba's cache goes by name: with one name it hands out whichever was compiled first."""
    from engine.kernels import cpu_amx_linear, cpu_attention, cpu_linear, cpu_rows

    for serial, parallel in (
        (cpu_rows.rms_norm, cpu_rows.rms_norm_parallel),
        (cpu_attention.paged_attention_serial, cpu_attention.paged_attention_parallel),
        (cpu_linear.few_rows_linear_serial, cpu_linear.few_rows_linear_parallel),
        (cpu_int8.int8_linear_serial, cpu_int8.int8_linear_parallel),
        (cpu_amx_linear.amx_linear_serial, cpu_amx_linear.amx_linear_parallel),
        (cpu_amx_linear.amx_int8_linear_serial, cpu_amx_linear.amx_int8_linear_parallel),
    ):
        assert serial.py_func.__qualname__ != parallel.py_func.__qualname__


@pytest.mark.parametrize("threads", [1, 2])
def test_a_repeated_call_enters_the_machine_code(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, threads: int) -> None:
    """It is that of the form that is due and of these types; what was never compiled for them stays as it is."""
    from engine.kernels import cpu_rows

    share_everything(monkeypatch)
    ops.set_num_threads(threads)
    x, weight, out = torch.randn(3, 64).to(dtype), torch.rand(64).to(dtype), torch.empty(3, 64, dtype=dtype)
    args = (ops._array(x), ops._array(weight), False, 1e-5, ops._array(out))
    kernel, due = ops._kernels.rms_norm, cpu_rows.rms_norm if threads == 1 else cpu_rows.rms_norm_parallel
    entry = direct(kernel, args)
    assert entry in [found.entry_point for found in due.overloads.values()]
    entry(*args)
    same(out, reference.rms_norm(x, weight, 1e-5, False))
    assert direct(kernel, (*args[:3], 1, args[4])) is due, "an integer for eps"
    assert direct(print, args) is print


def test_kernels_refuse_to_compile_inside_a_step() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        ops._kernels.silu_and_mul(np.zeros((2, 8), np.float64), np.zeros((2, 4), np.float64))


def test_padded_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [padded_rows(n) for n in range(1, 1025)]
    assert all(n <= size <= n * 1.8 for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 64
    assert padded_rows(0) == 0


def test_float16_runs_on_the_reference() -> None:
    x = random(3, 16, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))
