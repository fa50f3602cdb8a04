"""The CPU kernels as engine/cpu/ops.py calls them. Each kernel has a compiled variant for each element type;
engine/cpu/kernel_units.py compiles them.

The cache folder and the threading layer must be set before this module is imported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba

from engine.cpu.kernels import (
    adapters,
    amx_tiles,
    delta,
    experts,
    four_bits,
    four_bits_tiles,
    grouped_linear,
    int8,
    linear,
    rows,
    sampling,
)
from engine.cpu.kernels.amx import TILE_ROWS, fits_tiles, may_use_tiles
from engine.cpu.kernels.amx_linear import amx_int8_linear_parallel, amx_int8_linear_serial, amx_linear_parallel, amx_linear_serial
from engine.cpu.kernels.amx_linear import scratch_words as amx_scratch_words
from engine.cpu.kernels.amx_prefill import prefill_tiles_parallel, prefill_tiles_serial
from engine.cpu.kernels.attention import paged_attention_parallel, paged_attention_serial
from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS
from engine.cpu.kernels.experts import route, route_by_sigmoid
from engine.cpu.kernels.fp8_linear import fp8_linear_parallel, fp8_linear_serial, fp8_rows_parallel, fp8_rows_serial
from engine.cpu.kernels.grouped_linear import widened_scratch_floats as grouped_widened_scratch_floats
from engine.cpu.kernels.inputs import rotary_turns, sampling_settings, step_blocks, step_tokens
from engine.cpu.kernels.int8 import int8_linear_parallel, int8_linear_serial
from engine.cpu.kernels.linear import few_rows_linear_parallel, few_rows_linear_serial
from engine.cpu.kernels.logprobs import penalise, top_logprobs
from engine.cpu.kernels.own_experts import clear, clear_behind, keep_own_experts, keep_own_turns
from engine.cpu.kernels.packed_linear import MOST_ROWS as PACKED_ROWS
from engine.cpu.kernels.packed_linear import (
    gather_packed_rows_parallel,
    gather_packed_rows_serial,
    pack_rows,
    packed_linear_parallel,
    packed_linear_serial,
    unpack_rows_parallel,
    unpack_rows_serial,
)
from engine.cpu.kernels.prefill import prefill_attention_parallel, prefill_attention_serial
from engine.cpu.kernels.ranks import gather_ranks, sum_ranks
from engine.cpu.kernels.sampling import sample_parallel, sample_serial
from engine.cpu.kernels.widened_linear import FEW_ROWS as FEW_WIDENED_ROWS
from engine.cpu.kernels.widened_linear import scratch_floats as widened_scratch_floats
from engine.cpu.kernels.widened_linear import widened_linear_parallel, widened_linear_serial
from engine.host.processor import this_processor

__all__ = [
    "FEW_ROWS",
    "FEW_ROWS_FP8",
    "FEW_ROWS_INT8",
    "HAS_INT8_PRODUCTS",
    "HAS_MATRIX_UNIT",
    "MOST_ROWS",
    "add_adapters",
    "add_rms_norm",
    "amx_int8_linear",
    "amx_linear",
    "amx_scratch_words",
    "clamped_swiglu",
    "clear",
    "clear_behind",
    "combine",
    "delta_convolve",
    "delta_rule",
    "few_rows_linear",
    "fp8_linear",
    "fp8_linear_kernel",
    "fp8_rows",
    "gather_ranks",
    "gather_rows",
    "gelu",
    "gelu_and_mul",
    "greedy_bfloat16",
    "greedy_float32",
    "grouped_four_bits_linear",
    "grouped_four_bits_rows",
    "grouped_fp8_linear",
    "grouped_fp8_rows",
    "grouped_linear_kernel",
    "grouped_widened_linear",
    "grouped_widened_scratch_floats",
    "int8_linear",
    "int8_linear_kernel",
    "keep_own_experts",
    "keep_own_turns",
    "layer_norm",
    "linear_kernel",
    "num_shares",
    "pack_rows",
    "paged_attention",
    "penalise",
    "prefill_attention",
    "rms_norm",
    "rope_and_store",
    "rotary_turns",
    "route",
    "route_by_sigmoid",
    "sample",
    "sampling_settings",
    "sampling_shares",
    "set_num_threads",
    "silu_and_mul",
    "step_blocks",
    "step_tokens",
    "sum_ranks",
    "top_logprobs",
    "widen_four_bits",
    "widened_linear",
    "widened_scratch_floats",
]

# Work below these sizes is not shared, because waking the other threads costs more than they save.
_SHARED_ATTENTION = 1 << 20  # elements of keys that are read
# Bytes of weights, and the number of rows whose products cost as much as reading the weights. Two threads multiply a row with
# 1.2 MB in half of the time of one (benchmarks/kernels.py).
_SHARED_WEIGHTS, _ROWS_AS_READING = 1 << 20, 8
_SHARED_EXPERTS, _SHARED_FOUR_BITS = 2 << 20, 1 << 20  # bytes of experts' weights that are read
_SHARED_WIDENING = 256 << 10  # bytes of FP8 weights that are widened
_SHARED_TILES = 512 << 10  # bytes of weights that the matrix unit multiplies
# FEW_ROWS: up to this many rows few_rows_linear is faster than torch's linear (benchmarks/kernels.py), by element type; tiles of
# float32 are made for 32 registers of 512 bits. _INT8_PRODUCTS_ROWS and MOST_ROWS are the same limits for int8_linear and for the
# matrix unit's kernel.
#
# Above _VECTOR_ROWS rows the matrix unit's kernel is faster than all others. Up to _VECTOR_ROWS rows vectors are faster, because
# they read each line of memory once, wherever rows begin. The exception is a matrix with at least _WIDE times as many outputs as
# inputs, because vectors end every output with a sum across their lanes.
#
# With int8 weights the matrix unit is faster at any number of rows: up to 32 it uses the weights as they are, above that as
# bfloat16 (amx_linear.py), for MOST_ROWS rows at a time, whose columns stay in the second-level cache. With bfloat16 weights
# torch's linear is faster above MOST_ROWS.
#
# Processors that do not multiply bfloat16 use widened_linear, for bfloat16 weights at any number of rows, and for int8 weights from
# the number of rows where two digits are more work than one widened weight.
FEW_ROWS = {"bfloat16": 16, "float32": 64 if "avx512" in this_processor().features else 8}
FEW_ROWS_INT8 = {"bfloat16": 16, "float32": 64}
FEW_ROWS_FP8 = {"bfloat16": 16, "float32": 16}
_INT8_PRODUCTS_ROWS = 32 if HAS_BFLOAT16_PRODUCTS else 16
_VECTOR_ROWS, _WIDE = 4, 4
MOST_ROWS = 256
# Above so many rows a matrix with weights of four bits is widened once for all of them (benchmarks/formats_experts.py). Where tiles
# have one row, every row widens them again.
FOUR_BITS_ROWS = {"bfloat16": 12, "float32": 24} if four_bits_tiles.ROWS > 1 else {"bfloat16": 2, "float32": 2}
HAS_MATRIX_UNIT = may_use_tiles()
HAS_INT8_PRODUCTS = int8.HAS_INT8_PRODUCTS and not HAS_MATRIX_UNIT
_SHARED_ROWS = 1 << 14  # elements of row-wise work; so few, because between products the other threads are not asleep yet
_SHARED_LOGITS = 1 << 16  # logits that are sampled from
_SHARED_CONVOLUTION = 1 << 15  # columns that are convolved
_SHARED_STATES = 1 << 17  # numbers of states that tokens change


class _Thread(threading.local):
    """The settings of a calling thread. num_threads: how many threads share the work of the kernels that it calls."""

    num_threads = 1


_thread = _Thread()


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads share the work of the kernels that the calling thread calls: num_threads, or the number of cores that
    Numba started with if that is lower."""
    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    if _thread.num_threads != num_threads:
        _thread.num_threads = num_threads
        if num_threads > 1:  # a single thread runs the serial forms
            numba.set_num_threads(num_threads)


def _uses_tiles(out: Any, block_tokens: int, head_dim: int) -> bool:
    """Returns whether attention is computed with AMX, for keys in blocks of block_tokens positions of head_dim elements: the
    elements of `out`, the results, are bfloat16, the keys fit tiles, and this process may use AMX."""
    return out.itemsize == 2 and fits_tiles(block_tokens, head_dim) and may_use_tiles()


@dataclass(slots=True, frozen=True)
class Forms:
    """A kernel compiled in two forms: `serial` for one thread, and `parallel` for all threads that share work. A call runs one of
    the two forms. is_shared: returns, from a call's arguments, whether the work is large enough to wake the other threads."""

    serial: Any
    parallel: Any
    is_shared: Callable[[Sequence[Any]], bool]

    def due(self, args: Sequence[Any]) -> Any:
        """Returns the form of the kernel that a call with these arguments runs. It is the same form each time a recorded call is
        repeated."""
        return self.parallel if self.is_shared(args) else self.serial

    def __call__(self, *args: Any) -> None:
        self.due(args)(*args)


def num_shares() -> int:
    """Returns the number of parts into which the calling thread's kernels cut work that threads share: the number of threads set by
    set_num_threads."""
    return _thread.num_threads


def _shares_weights(x: Any, weight: Any) -> bool:
    return _thread.num_threads > 1 and weight.nbytes * (1 + len(x) / _ROWS_AS_READING) >= _SHARED_WEIGHTS


def _shares_widening(weight: Any) -> bool:
    return _thread.num_threads > 1 and weight.nbytes >= _SHARED_WIDENING


def _shares_experts(x: Any, weight: Any) -> bool:
    """Returns whether threads share the products of rows x [P, K], sorted by expert, with experts' weights [E, N, K]. They do if
    enough bytes of weights are read: those of E experts, or of P experts if P is smaller."""
    return _thread.num_threads > 1 and weight[0].nbytes * min(len(weight), len(x)) >= _SHARED_EXPERTS


def _shares_tiles(weight: Any) -> bool:
    return _thread.num_threads > 1 and weight.nbytes >= _SHARED_TILES


class Attention:
    """A kernel of attention in two forms, for one thread and for all. A call takes the compiled kernel's arguments without
    use_tiles and num_shares, which it computes from the others.

    A call has one more argument, the last but one, just before `out`: attended [1] int64, an upper bound on the number of positions
    to which all tokens of the step together attend. From this number the call decides whether threads share the work, so a recorded
    call may run another form in each step."""

    def __call__(self, *args: Any) -> None:
        kernel, own = self.forms(args)[self.is_shared(args)]
        kernel(*own)

    def is_shared(self, args: Sequence[Any]) -> bool:
        attended, out = args[-2:]
        return _thread.num_threads > 1 and int(attended[0]) * out.shape[1] >= _SHARED_ATTENTION

    def depends_on(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns a key for the arguments on which is_shared depends. In any step, is_shared returns the same for all calls with
        equal keys."""
        attended, out = args[-2:]
        return attended.ctypes.data, out.shape[1]

    def forms(self, args: Sequence[Any]) -> tuple[tuple[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]:
        """Returns two pairs (kernel, arguments): the compiled kernel for one thread with its arguments, and the one for all threads
        with its arguments. args: the arguments of a call of this object."""
        raise NotImplementedError


class PagedAttention(Attention):
    """Attention that is computed for each query token by itself (attention.py), for decode and other rows with few new tokens."""

    def forms(self, args: Sequence[Any]) -> tuple[tuple[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]:
        *before, _, out = args
        heads, kv_heads, block_tokens, head_dim = args[4:8]
        use_tiles = heads <= kv_heads * TILE_ROWS and _uses_tiles(out, block_tokens, head_dim)
        return (
            (paged_attention_serial, (*before, use_tiles, 1, out)),
            (paged_attention_parallel, (*before, use_tiles, _thread.num_threads, out)),
        )


class PrefillAttention(Attention):
    """Attention of rows with many new tokens, computed for several query tokens at a time (prefill.py, or amx_prefill.py where AMX
    can be used)."""

    def forms(self, args: Sequence[Any]) -> tuple[tuple[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]:
        *before, _, out = args
        serial, parallel = prefill_attention_serial, prefill_attention_parallel
        if _uses_tiles(out, *args[6:8]):
            serial, parallel = prefill_tiles_serial, prefill_tiles_parallel
        return (serial, (*before, 1, out)), (parallel, (*before, _thread.num_threads, out))


def linear_kernel(num_rows: int, num_inputs: int, num_outputs: int, dtype: str) -> Any:
    """Returns the kernel (Forms) that multiplies num_rows rows with weights [num_outputs, num_inputs], both of dtype ("bfloat16" or
    "float32"), or None where torch's linear is faster."""
    by_tiles = num_rows > _VECTOR_ROWS or num_outputs >= _WIDE * num_inputs
    if dtype == "bfloat16" and by_tiles and num_rows <= MOST_ROWS and _fits_panels(num_inputs * 2, num_outputs):
        return amx_linear
    if dtype == "bfloat16" and not HAS_BFLOAT16_PRODUCTS:
        return widened_linear if num_rows > 0 and num_outputs >= linear.MIN_OUTPUTS else None
    return few_rows_linear if 0 < num_rows <= FEW_ROWS[dtype] and num_outputs >= linear.MIN_OUTPUTS else None


def int8_linear_kernel(num_rows: int, num_inputs: int, num_outputs: int, dtype: str) -> Any:
    """Returns the kernel (Forms) that multiplies num_rows rows of dtype ("bfloat16" or "float32") with int8 weights [num_outputs,
    num_inputs]. Returns None if no kernel takes this number of rows or so few outputs."""
    if not num_rows or num_outputs < linear.MIN_OUTPUTS:
        return None
    if dtype == "bfloat16":
        has_digits = num_inputs <= int8.MAX_INPUTS
        if has_digits and _fits_panels(num_inputs, num_outputs):
            return amx_int8_linear
        has_digits = has_digits and HAS_INT8_PRODUCTS and num_inputs % int8.STEP == 0
        if has_digits and num_rows <= _INT8_PRODUCTS_ROWS:
            return int8_linear
        if not HAS_BFLOAT16_PRODUCTS:
            return widened_linear
        if has_digits:
            return None
    return few_rows_linear if num_rows <= FEW_ROWS_INT8[dtype] else None


def packed_rows(num_outputs: int, num_inputs: int) -> int:
    """Returns the most rows that packed_linear should multiply with a packed matrix of bfloat16 weights. For more rows it is faster
    to unpack the weights first."""
    if num_outputs < linear.MIN_OUTPUTS:
        return 0
    return _VECTOR_ROWS if _fits_panels(num_inputs * 2, num_outputs) else PACKED_ROWS


def fp8_linear_kernel(num_rows: int, num_outputs: int, dtype: str) -> Any:
    """Returns the kernel (Forms) that multiplies num_rows rows of dtype with FP8 weights without widening them first. Returns None
    if widening them first is faster, if there are no rows, or if there are fewer outputs than the kernel can take."""
    return fp8_linear if 0 < num_rows <= FEW_ROWS_FP8[dtype] and num_outputs >= linear.MIN_OUTPUTS else None


def grouped_linear_kernel(num_outputs: int, dtype: str) -> tuple[Any, int]:
    """Returns the kernel (Forms) that multiplies rows of dtype, sorted by expert, with their experts' weights, and the most rows of
    an expert that this kernel should multiply. The latter is 0 if num_outputs is less than the kernel can take."""
    if dtype == "bfloat16" and not HAS_BFLOAT16_PRODUCTS:
        kernel, most_rows = grouped_widened_linear, FEW_WIDENED_ROWS
    else:
        kernel, most_rows = grouped_few_rows_linear, FEW_ROWS[dtype]
    return kernel, most_rows if num_outputs >= linear.MIN_OUTPUTS else 0


def grouped_four_bits_rows(num_outputs: int, dtype: str) -> int:
    """Returns the most rows of an expert that grouped_four_bits_linear should multiply; for more rows it is faster to widen the
    expert's weights first. 0 if num_outputs is less than the kernel can take."""
    return FOUR_BITS_ROWS[dtype] if num_outputs >= four_bits_tiles.OUTPUTS else 0


def grouped_fp8_rows(num_outputs: int, dtype: str) -> int:
    """Returns the most rows of an expert that grouped_fp8_linear should multiply with FP8 weights; for more rows it is faster to
    widen the expert's weights first. 0 if num_outputs is less than the kernel can take."""
    return FEW_ROWS_FP8[dtype] if num_outputs >= linear.MIN_OUTPUTS else 0


def _fits_panels(row_bytes: int, num_outputs: int) -> bool:
    return HAS_MATRIX_UNIT and row_bytes % amx_tiles.STEP_BYTES == 0 and num_outputs >= amx_tiles.PANEL


def sampling_shares(logits: Any) -> int:
    """Returns the number of shares into which the rows of logits [N, V] are divided among threads for sampling; 1 if the work is
    too small to wake other threads."""
    return min(_thread.num_threads, len(logits)) if _deals_out_logits(logits) else 1


def _deals_out_logits(logits: Any) -> bool:
    return _thread.num_threads > 1 and logits.size >= _SHARED_LOGITS and len(logits) > 1


def _deals_out_rows(x: Any) -> bool:
    return _thread.num_threads > 1 and x.size >= _SHARED_ROWS and len(x) > 1


def _shares_states(args: Sequence[Any]) -> bool:
    """Returns whether threads share the work of delta_rule with these arguments. They do if the number of tokens times the number
    of values of one layer's state is large enough."""
    state_values, out = args[10], args[-1]
    return _thread.num_threads > 1 and len(out) * state_values >= _SHARED_STATES


add_adapters = Forms(adapters.add_adapters_serial, adapters.add_adapters_parallel, lambda args: args[6] > 1)
paged_attention = PagedAttention()
prefill_attention = PrefillAttention()
few_rows_linear = Forms(few_rows_linear_serial, few_rows_linear_parallel, lambda args: _shares_weights(args[0], args[1]))
widened_linear = Forms(widened_linear_serial, widened_linear_parallel, lambda args: _shares_weights(args[0], args[1]))
grouped_few_rows_linear = Forms(
    grouped_linear.grouped_linear_serial, grouped_linear.grouped_linear_parallel, lambda args: _shares_experts(args[0], args[1])
)
grouped_fp8_linear = Forms(
    grouped_linear.grouped_fp8_linear_serial,
    grouped_linear.grouped_fp8_linear_parallel,
    lambda args: _shares_experts(args[0], args[1]),
)
grouped_widened_linear = Forms(
    grouped_linear.grouped_widened_linear_serial,
    grouped_linear.grouped_widened_linear_parallel,
    lambda args: _shares_experts(args[0], args[1]),
)
grouped_four_bits_linear = Forms(
    four_bits.grouped_four_bits_linear_serial,
    four_bits.grouped_four_bits_linear_parallel,
    lambda args: _thread.num_threads > 1 and args[2].nbytes // (len(args[7]) - 1) * len(args[0]) >= _SHARED_FOUR_BITS,
)
widen_four_bits = Forms(four_bits.widen_four_bits_serial, four_bits.widen_four_bits_parallel, lambda args: _shares_tiles(args[1]))
delta_convolve = Forms(
    delta.delta_convolve_serial,
    delta.delta_convolve_parallel,
    lambda args: _thread.num_threads > 1 and args[-1].size >= _SHARED_CONVOLUTION,
)
delta_rule = Forms(delta.delta_rule_serial, delta.delta_rule_parallel, _shares_states)
combine = Forms(experts.combine_serial, experts.combine_parallel, lambda args: _deals_out_rows(args[-1]))
int8_linear = Forms(int8_linear_serial, int8_linear_parallel, lambda args: _shares_weights(args[0], args[1]))
fp8_linear = Forms(fp8_linear_serial, fp8_linear_parallel, lambda args: _shares_weights(args[0], args[1]))
packed_linear = Forms(packed_linear_serial, packed_linear_parallel, lambda args: _shares_weights(args[0], args[1]))
gather_packed_rows = Forms(gather_packed_rows_serial, gather_packed_rows_parallel, lambda args: _deals_out_rows(args[-1]))
unpack_rows = Forms(unpack_rows_serial, unpack_rows_parallel, lambda args: _shares_widening(args[0]))
fp8_rows = Forms(fp8_rows_serial, fp8_rows_parallel, lambda args: _shares_widening(args[0]))
amx_linear = Forms(amx_linear_serial, amx_linear_parallel, lambda args: _shares_tiles(args[1]))
amx_int8_linear = Forms(amx_int8_linear_serial, amx_int8_linear_parallel, lambda args: _shares_tiles(args[1]))
greedy_float32 = Forms(sampling.greedy_float32_serial, sampling.greedy_float32_parallel, lambda args: _deals_out_logits(args[0]))
greedy_bfloat16 = Forms(sampling.greedy_bfloat16_serial, sampling.greedy_bfloat16_parallel, lambda args: _deals_out_logits(args[0]))
sample = Forms(sample_serial, sample_parallel, lambda args: args[7] > 1)
gather_rows = Forms(rows.gather_rows, rows.gather_rows_parallel, lambda args: _deals_out_rows(args[4]))
rms_norm = Forms(rows.rms_norm, rows.rms_norm_parallel, lambda args: _deals_out_rows(args[0]))
add_rms_norm = Forms(rows.add_rms_norm, rows.add_rms_norm_parallel, lambda args: _deals_out_rows(args[0]))
layer_norm = Forms(rows.layer_norm, rows.layer_norm_parallel, lambda args: _deals_out_rows(args[0]))
rope_and_store = Forms(rows.rope_and_store, rows.rope_and_store_parallel, lambda args: _deals_out_rows(args[0]))
silu_and_mul = Forms(rows.silu_and_mul, rows.silu_and_mul_parallel, lambda args: _deals_out_rows(args[0]))
gelu = Forms(rows.gelu, rows.gelu_parallel, lambda args: _deals_out_rows(args[0]))
gelu_and_mul = Forms(rows.gelu_and_mul, rows.gelu_and_mul_parallel, lambda args: _deals_out_rows(args[0]))
clamped_swiglu = Forms(rows.clamped_swiglu, rows.clamped_swiglu_parallel, lambda args: _deals_out_rows(args[0]))
