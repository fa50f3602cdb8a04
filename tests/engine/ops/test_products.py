"""Products with float, int8 and FP8 weights, by each kernel that this processor can run, equal those of torch."""

from __future__ import annotations

import pytest
import torch

from engine.cpu import ops as cpu_ops
from engine.cpu import products
from engine.cpu.products import array
from engine.cpu.programs.program import Recorder, Scratch, recording
from engine.host import compiled
from engine.host.processor import this_processor
from engine.ops import reference
from engine.ops.ops import Fp8Matrix, Int8Matrix
from engine.ops.rows_apart import rows_apart
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import both, compiled_as_called, lost_by_adding_to, random, same, share_everything
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("numba")
compiled.keep_in(CACHE_DIR)  # before a kernel is imported
from engine.cpu.kernels import int8  # noqa: E402

kernels = compiled_as_called  # in place of the folder's fixture
SIZES = [(64, 32, 1), (768, 70, 5), (2048, 130, 16), (8192 + 64, 300, 33), (128, 600, 250)]  # inputs, outputs, rows


@pytest.mark.parametrize(("bias", "threads"), [(False, 2), (True, 1)])
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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [17, 40, 130])
@pytest.mark.parametrize("num_inputs", [40, 551, 2000, 2048])
def test_a_row_that_is_not_finite_spoils_no_other(dtype: torch.dtype, num_rows: int, num_inputs: int, bias: bool) -> None:
    """Also where the product is recorded, and behind the last row, where NaN lies in memory."""
    ops.set_num_threads(1)
    held = random(num_rows + 1, num_inputs, dtype=dtype)
    held[num_rows], held[num_rows // 2, 0] = float("nan"), float("inf")
    x, weight = held[:num_rows], random(65, num_inputs, dtype=dtype)
    added = random(65, dtype=dtype) if bias else None
    recorder = Recorder(Scratch())
    with torch.inference_mode():
        found = ops.linear(x, weight, added)
        with recording(recorder):
            replayed = ops.linear(x, weight, added)
        replayed.fill_(7)
        for call in recorder.calls:
            call.kernel(*call.args)
    ones = torch.ones(65, num_inputs, dtype=torch.int8)
    for out in (found, replayed, reference.int8_linear(x, ones, torch.ones(65), added, 1 << 20)):
        assert torch.isfinite(out).all(dim=1).tolist() == [row != num_rows // 2 for row in range(num_rows)]


def test_rows_are_put_apart_for_whoever_asks() -> None:
    """The caller knows where torch computes; processors without AMX show no fault if the rows stay as they are."""
    for x in (random(5, 48, dtype=torch.bfloat16), torch.empty(5, 48, dtype=torch.float16, device="meta")):
        apart = rows_apart(x)
        assert (apart.shape, apart.dtype, apart.device, apart.stride()) == (x.shape, x.dtype, x.device, (64, 1))
    for x in (random(5, 64, dtype=torch.bfloat16), random(5, 48, dtype=torch.float32)):
        assert rows_apart(x) is x


@pytest.mark.parametrize(("bias", "threads"), [(False, 2), (True, 1)])
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
    """Products equal those with the dequantised matrix. Where torch computes them, the matrix is dequantised a few outputs at a
    time."""
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    monkeypatch.setattr(cpu_ops, "WIDENED_BYTES", 7 * num_inputs * dtype.itemsize)
    x = random(num_rows, num_inputs, dtype=dtype)
    values = (random(num_outputs, num_inputs, dtype=torch.float32) * 40).round().clamp(-127, 127).to(torch.int8)
    weight = Int8Matrix(values, random(num_outputs, dtype=torch.float32).abs() * 0.03 * num_inputs**-0.5)
    added = random(num_outputs, dtype=dtype) if bias else None
    wanted = x.double() @ (values * weight.scales.unsqueeze(1)).double().T + (0 if added is None else added.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for given in both(monkeypatch, lambda: ops.linear(x, weight, added)):
        assert given.dtype is dtype
        torch.testing.assert_close(given.double(), wanted, rtol=tolerance, atol=tolerance)


def of_fp8_matrix(num_inputs: int, num_outputs: int, group_inputs: int) -> Fp8Matrix:
    """Returns one with every code that is a number, and with scales that differ by a thousand times."""
    codes = torch.arange(num_inputs * num_outputs).remainder(255).view(num_outputs, num_inputs).to(torch.uint8)
    codes += (codes >= 0x7F).to(torch.uint8)
    scales = torch.rand(num_outputs, -(-num_inputs // group_inputs)) * num_inputs**-0.5 / 100
    scales[:, ::2] /= 1000
    return Fp8Matrix(codes.masked_fill_(codes == 0xFF, 0), scales, group_inputs)


def test_all_codes_are_widened_exactly(dtype: torch.dtype) -> None:
    """Codes times their scale become the numbers that they stand for, to the last bit, whatever the length of a row."""
    for num_inputs, group_inputs in ((254, 254), (254, 128), (7, 7)):
        matrix = of_fp8_matrix(num_inputs, 3, group_inputs)
        assert num_inputs == 7 or len(matrix.values.unique()) == 254
        wanted, widened = (torch.empty(3, num_inputs, dtype=dtype) for _ in range(2))
        reference.fp8_rows(matrix.values, matrix.scales, group_inputs, wanted)
        ops.kernels.fp8_rows(matrix.values.numpy(), matrix.scales.numpy(), group_inputs, array(widened))
        assert torch.equal(widened, wanted)


@pytest.mark.parametrize(("bias", "threads"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 40])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "group_inputs"), [(48, 80, 48), (551, 65, 128), (2000, 130, 2000), (9000, 3, 128)]
)
def test_fp8_linear(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    group_inputs: int,
    bias: bool,
    threads: int,
) -> None:
    """Products equal those with the dequantised matrix. For few rows the weights are not rounded to bfloat16, for many they are."""
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    for module in (cpu_ops, products):
        monkeypatch.setattr(module, "WIDENED_BYTES", 70 * num_inputs * dtype.itemsize)
    x = random(num_rows, num_inputs, dtype=dtype)
    weight = of_fp8_matrix(num_inputs, num_outputs, group_inputs)
    dense = torch.empty(num_outputs, num_inputs)
    reference.fp8_rows(weight.values, weight.scales, group_inputs, dense)
    added = random(num_outputs, dtype=dtype) if bias else None
    wanted = x.double() @ dense.double().T + (0 if added is None else added.double())
    rounding = 1e-6 if dtype is torch.float32 else 2**-8
    lost = rounding * (wanted.abs() + x.abs().double() @ dense.abs().double().T)  # the most that rounded weights and results lose
    lost += lost_by_adding_to(added, num_inputs)
    for given in both(monkeypatch, lambda: ops.linear(x, weight, added)):
        assert ((given.double() - wanted).abs() <= lost).all()
    if dtype is torch.bfloat16 and num_rows <= 16 and num_outputs >= 4:  # the result's own rounding, and next to nothing else
        error = (ops.linear(x, weight, added).double() - wanted).abs()
        assert (error <= rounding * wanted.abs() + 1e-5 * wanted.abs().amax()).all()
    x[num_rows // 2, 0] = float("nan")
    finite = torch.isfinite(ops.linear(x, weight, None))
    assert finite.all(dim=1).tolist() == [row != num_rows // 2 for row in range(num_rows)]


def of_int8_matrix(num_inputs: int, num_outputs: int) -> Int8Matrix:
    values = (random(num_outputs, num_inputs, dtype=torch.float32) * 40).round().clamp(-127, 127).to(torch.int8)
    return Int8Matrix(values, random(num_outputs, dtype=torch.float32).abs() * 0.03 * num_inputs**-0.5)


def kernel_of(name: str) -> None:
    """Skips the test if this processor cannot run the kernel of this name."""
    if name.startswith("amx") and not ops.kernels.HAS_MATRIX_UNIT:
        pytest.skip("this processor has no AMX, or the kernel does not let this process use it")
    if name == "int8_linear" and not int8.HAS_INT8_PRODUCTS:
        pytest.skip("this processor has no AVX512-VNNI")


@pytest.mark.parametrize(("bias", "threads"), [(False, 2), (True, 1)])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "num_rows"), SIZES)
def test_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, bias: bool, threads: int
) -> None:
    """AMX products are right with one piece of the inputs and with several, with rows and outputs that fill no tile, and with more
    rows than stay in the cache."""
    kernel_of("amx_linear")
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    monkeypatch.setattr(ops.kernels, "_VECTOR_ROWS", 0)
    assert ops.kernels.linear_kernel(num_rows, num_inputs, num_outputs, "bfloat16") is ops.kernels.amx_linear
    x = random(num_rows, num_inputs, dtype=torch.bfloat16)
    weight = random(num_outputs, num_inputs, dtype=torch.bfloat16, scale=num_inputs**-0.5)
    added = random(num_outputs, dtype=torch.bfloat16) if bias else None
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    torch.testing.assert_close(ops.linear(x, weight, added).double(), wanted, rtol=2**-8, atol=1e-5)


def use_int8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ops choose kernels as on a processor without AMX."""
    monkeypatch.setattr(ops.kernels, "HAS_MATRIX_UNIT", False)
    monkeypatch.setattr(ops.kernels, "HAS_INT8_PRODUCTS", True)
    monkeypatch.setattr(ops.kernels, "_INT8_PRODUCTS_ROWS", 250)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("of_int8", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 13, 28, 29, 35, 37, 64, 256, 300])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 32), (551, 65), (1100, 131), (2, 4), (31, 200)])
def test_widened_weights(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, of_int8: bool, threads: int
) -> None:
    """A processor that multiplies neither bfloat16 nor int8 widens the weights. Products are right with few rows and many, and with
    inputs and outputs that fill no tile."""
    monkeypatch.setattr(ops.kernels, "HAS_BFLOAT16_PRODUCTS", False)
    monkeypatch.setattr(ops.kernels, "HAS_MATRIX_UNIT", False)
    monkeypatch.setattr(ops.kernels, "HAS_INT8_PRODUCTS", False)
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    choose = ops.kernels.int8_linear_kernel if of_int8 else ops.kernels.linear_kernel
    assert choose(num_rows, num_inputs, num_outputs, "bfloat16") is ops.kernels.widened_linear
    x = random(num_rows, num_inputs, dtype=torch.bfloat16)
    weight: torch.Tensor | Int8Matrix = random(num_outputs, num_inputs, dtype=torch.bfloat16, scale=num_inputs**-0.5)
    dense = weight
    if of_int8:
        weight = of_int8_matrix(num_inputs, num_outputs)
        dense = weight.values * weight.scales.unsqueeze(1)
    added = random(num_outputs, dtype=torch.bfloat16)
    for bias in (None, added):
        wanted = x.double() @ dense.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(ops.linear(x, weight, bias).double(), wanted, rtol=2**-8, atol=1e-5)
    x[num_rows // 2, 0] = float("nan")
    finite = torch.isfinite(ops.linear(x, weight, None))
    assert finite.all(dim=1).tolist() == [row != num_rows // 2 for row in range(num_rows)]


def test_each_processor_has_kernels_of_its_own() -> None:
    """The kernels chosen depend on the processor's features: for bfloat16 weights with one row and with 200, and for int8 weights
    with eight."""
    features, kernels = this_processor().features, ops.kernels
    chosen = (
        kernels.linear_kernel(1, 768, 768, "bfloat16"),
        kernels.linear_kernel(200, 768, 768, "bfloat16"),
        kernels.int8_linear_kernel(8, 768, 768, "bfloat16"),
    )
    if kernels.HAS_MATRIX_UNIT:
        assert chosen == (kernels.few_rows_linear, kernels.amx_linear, kernels.amx_int8_linear)
    elif "avx512bf16" in features:
        assert chosen == (kernels.few_rows_linear, None, kernels.int8_linear)
    elif "avx512vnni" in features:
        assert chosen == (kernels.widened_linear, kernels.widened_linear, kernels.int8_linear)
    else:
        assert chosen == (kernels.widened_linear,) * 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", ["amx_int8_linear", "int8_linear"])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "num_rows"), SIZES)
def test_int8_is_multiplied_as_it_is(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, kernel: str, threads: int
) -> None:
    """No more than the result's own rounding is lost, even in a row where one element is a thousand times the others."""
    kernel_of(kernel)
    if kernel == "int8_linear":
        use_int8_products(monkeypatch)
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    assert ops.kernels.int8_linear_kernel(num_rows, num_inputs, num_outputs, "bfloat16") is getattr(ops.kernels, kernel)
    x, weight = random(num_rows, num_inputs, dtype=torch.bfloat16), of_int8_matrix(num_inputs, num_outputs)
    x[::3, 5] *= 1000
    x[1::7] = 0
    added = random(num_outputs, dtype=torch.bfloat16)
    wanted = x.double() @ (weight.values * weight.scales.unsqueeze(1)).double().T + added.double()
    unit = x.double().abs().amax(1, keepdim=True) / int8.LARGEST
    lost = unit / 2 * (weight.values.abs().double().sum(1) * weight.scales.double())  # the most that rounding x can lose
    error = (ops.linear(x, weight, added).double() - wanted).abs()
    assert (error <= 2**-8 * wanted.abs() + lost + 1e-6).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_rows", [33, 64, 250])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 32), (832, 70), (8192 + 64, 130)])
def test_int8_of_many_rows_is_multiplied_as_bfloat16(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, num_outputs: int, num_rows: int, threads: int
) -> None:
    """The product equals the bfloat16 one bit for bit. Scales that are powers of two make the matrix exact in bfloat16, too."""
    kernel_of("amx_int8_linear")
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    x, values = random(num_rows, num_inputs, dtype=torch.bfloat16), of_int8_matrix(num_inputs, num_outputs).values
    scales = 2.0 ** torch.randint(-12, -6, (num_outputs,))
    added = random(num_outputs, dtype=torch.bfloat16)
    plain = ops.linear(x, (values * scales.unsqueeze(1)).bfloat16(), added)
    assert torch.equal(ops.linear(x, Int8Matrix(values, scales), added), plain)


@pytest.mark.parametrize("num_rows", [257, 600])
def test_int8_of_very_many_rows_is_multiplied_in_blocks(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    kernel_of("amx_int8_linear")
    share_everything(monkeypatch)
    x, weight, added = random(num_rows, 128, dtype=torch.bfloat16), of_int8_matrix(128, 70), random(70, dtype=torch.bfloat16)
    blocks = [ops.linear(some, weight, added) for some in x.split(ops.kernels.MOST_ROWS)]
    assert torch.equal(ops.linear(x, weight, added), torch.cat(blocks))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [3, 70])
@pytest.mark.parametrize("kernel", ["amx_int8_linear", "int8_linear"])
def test_rows_that_are_not_finite_stay_so(monkeypatch: pytest.MonkeyPatch, kernel: str, num_rows: int, value: float) -> None:
    kernel_of(kernel)
    if kernel == "int8_linear":
        use_int8_products(monkeypatch)
    x = random(num_rows, 128, dtype=torch.bfloat16)
    x[1, 77] = value
    finite = torch.isfinite(ops.linear(x, of_int8_matrix(128, 64)))
    assert finite.all(dim=1).tolist() == [row != 1 for row in range(num_rows)]
    assert not finite[1].any()
