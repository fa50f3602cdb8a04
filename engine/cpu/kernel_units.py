"""Lists the kernels of each set of kernels (loader/configs/kernel_sets.py). Loads compiled kernels from the cache folder, and
compiles those that are missing.

Kernels are handled in units. A unit is a kernel for one thread together with its variant for several threads, so that code that
both contain is compiled only once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba

from engine.cpu.kernels import (
    adapters,
    amx_linear,
    attention,
    delta,
    entry,
    experts,
    four_bits,
    fp8_linear,
    grouped_linear,
    inputs,
    int8,
    linear,
    logprobs,
    own_experts,
    packed_linear,
    prefill,
    ranks,
    rows,
    sampling,
    widened_linear,
)
from engine.cpu.kernels.amx import HAS_TILES
from engine.cpu.kernels.amx_prefill import prefill_tiles_parallel, prefill_tiles_serial
from engine.cpu.kernels.attention import paged_attention_parallel, paged_attention_serial
from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS
from engine.cpu.kernels.prefill import prefill_attention_parallel, prefill_attention_serial
from engine.cpu.programs import native
from engine.host import compiled
from loader.configs import kernel_sets
from loader.configs.kernel_sets import KernelSet

# Seconds that both kernels of a unit take to compile on one core. They determine the order and the reported remaining time. All
# other units take SHORT_S.
_SECONDS = {
    paged_attention_serial: 12.0,
    entry.sample.serial: 6.0,
    prefill_attention_serial: 5.5,
    prefill_tiles_serial: 5.0,
    entry.amx_linear.serial: 5.0,
    entry.amx_int8_linear.serial: 5.0,
    entry.widened_linear.serial: 5.0,
    entry.int8_linear.serial: 3.0,
    entry.fp8_linear.serial: 3.0,
    entry.packed_linear.serial: 6.0,
    entry.grouped_fp8_linear.serial: 3.0,
    entry.few_rows_linear.serial: 2.0,
    entry.grouped_few_rows_linear.serial: 2.0,
    entry.grouped_widened_linear.serial: 4.0,
    entry.grouped_four_bits_linear.serial: 4.0,
    entry.delta_convolve.serial: 2.5,
    entry.delta_rule.serial: 5.0,
    entry.rope_and_store.serial: 2.0,
    entry.add_adapters.serial: 6.0,
}
SHORT_S = 0.7
# four-bit formats: types of their scales and zero points, as in four_bits_tiles.py
_OF_FOUR_BITS = {
    "mxfp4": (numba.uint8, numba.int8),
    "nvfp4": (numba.int8, numba.float32),
    "int4": (numba.uint16, numba.int8),
    "int4_zeros": (numba.uint16, numba.uint8),
}
_preparing = threading.Lock()  # loads of two models may ask at the same time


@dataclass(slots=True, frozen=True)
class Unit:
    """Kernels that are loaded or compiled together: usually one kernel in its variants for one and for several threads. name: the
    unit's name in messages and in the name of its lock file. kernels: pairs of a kernel and the signature to compile it for.
    seconds: roughly the time that compiling the unit takes."""

    name: str
    kernels: tuple[tuple[Any, Any], ...]
    seconds: float

    def load(self) -> bool:
        """Loads the unit's kernels from the cache folder. Returns whether all of them were found there; compiles nothing."""
        with _preparing:
            return all(_load(kernel, signature) for kernel, signature in self.kernels)

    def compile(self) -> None:
        """Compiles those of the unit's kernels that are not in the cache folder and saves them there, so that other processes can
        `load` them."""
        with _preparing, compiled.alone(self.name):  # of several processes one compiles, and the others read its files
            for kernel, signature in self.kernels:
                kernel.disable_compile(False)
                kernel.compile(signature)
                kernel.disable_compile()  # other argument types are an error, instead of seconds of compiling inside a step


class _NotThere(Exception):
    pass


def _load(kernel: Any, signature: Any) -> bool:
    def refuse(*args: Any) -> None:
        raise _NotThere

    kernel.disable_compile(False)
    kernel._compiler.compile = refuse  # `compile` would call it for a kernel that is not in the cache folder
    try:
        kernel.compile(signature)
    except _NotThere:
        return False
    finally:
        del kernel._compiler.compile
        if kernel.signatures:
            kernel.disable_compile()
    return True


def prepare_calls(units: Sequence[Unit]) -> None:
    """Compiles, for each kernel of these units, the small function through which recorded steps call it without Python
    (programs/native.py). These functions are not saved in the cache folder; compiling them takes 60 ms for all kernels."""
    native.prepare([signature.args for unit in units for _, signature in unit.kernels])


def compile_all(sets: Sequence[KernelSet], parallel: bool) -> None:
    """Compiles all units of these sets in this process. parallel: whether to compile the kernels' variants for several threads,
    too."""
    wanted = [unit for one in sets for unit in units(one, parallel)]
    for unit in wanted:
        unit.compile()
    prepare_calls(wanted)


def units(kernel_set: KernelSet, parallel: bool) -> list[Unit]:
    """Returns the units of a set of kernels. parallel: whether the units contain the kernels' variants for several threads. If a
    unit belongs to two sets, the objects for both sets are equal."""
    found = []
    for serial, shared, signature in _wanted(*kernel_set):
        kernels = ((serial, signature), (shared, signature)) if parallel and shared is not None else ((serial, signature),)
        name = f"{serial.py_func.__name__.strip('_')}-{'-'.join(str(one) for one in signature.args[:2])}"
        found.append(Unit(_file_name(name), kernels, _SECONDS.get(serial, SHORT_S)))
    return found


def _file_name(text: str) -> str:
    return "".join(one if one.isalnum() or one in "-_" else "." for one in text)


def _both(forms: entry.Forms, signature: Any) -> tuple[Any, Any, Any]:
    return forms.serial, forms.parallel, signature


def _wanted(dtype: str, name: str) -> list[tuple[Any, Any, Any]]:
    """Returns, for each kernel of the set with this dtype and name: the kernel for one thread, its variant for several threads
    (None: there is none), and the signature to compile both for. Raises ValueError for an unknown name."""
    element = numba.float32 if dtype == "float32" else numba.uint16
    gate = rows.gate_signature(element)
    if (of_groups := _OF_FOUR_BITS.get(name)) is not None:
        products = four_bits.grouped_four_bits_linear_signature(element, *of_groups)
        wanted = [
            _both(entry.grouped_four_bits_linear, products),
            _both(entry.widen_four_bits, four_bits.widen_four_bits_signature(element, *of_groups)),
        ]
        return [*wanted, _both(entry.clamped_swiglu, rows.clamped_swiglu_signature(element))] if name == "mxfp4" else wanted
    match name:
        case kernel_sets.PLAIN:
            return [
                (entry.step_tokens, None, inputs.STEP_TOKENS),
                (entry.step_blocks, None, inputs.STEP_BLOCKS),
                (entry.sampling_settings, None, inputs.SAMPLING_SETTINGS),
                (entry.rotary_turns, None, inputs.ROTARY_TURNS),
                _both(entry.gather_rows, rows.gather_rows_signature(element)),
                _both(entry.rms_norm, rows.rms_norm_signature(element)),
                _both(entry.add_rms_norm, rows.add_rms_norm_signature(element)),
                _both(entry.silu_and_mul, gate),
                *_products(dtype, element),
            ]
        case kernel_sets.ATTENTION:
            return _attention(dtype, element)
        case kernel_sets.LAYER_NORM:
            return [_both(entry.layer_norm, rows.layer_norm_signature(element))]
        case kernel_sets.GELU:
            return [_both(entry.gelu, gate), _both(entry.gelu_and_mul, gate)]
        case kernel_sets.EXPERTS:
            return [
                (entry.route, None, experts.route_signature(element)),
                (entry.route_by_sigmoid, None, experts.ROUTE_BY_SIGMOID),
                _both(entry.combine, experts.combine_signature(element)),
                _grouped_products(dtype, element),
            ]
        case kernel_sets.DELTAS:
            return [
                _both(entry.delta_convolve, delta.delta_convolve_signature(element)),
                _both(entry.delta_rule, delta.delta_rule_signature(element)),
            ]
        case kernel_sets.GREEDY if dtype == "float32":
            return [_both(entry.greedy_float32, sampling.GREEDY_FLOAT32)]
        case kernel_sets.GREEDY:
            return [_both(entry.greedy_bfloat16, sampling.GREEDY_BFLOAT16)]
        case kernel_sets.SAMPLING:
            drawn = [
                _both(entry.sample, sampling.sample_signature(element)),
                (entry.top_logprobs, None, logprobs.top_logprobs_signature(element)),
            ]
            return [*drawn, (entry.penalise, None, logprobs.PENALISE)] if dtype == "float32" else drawn
        case kernel_sets.ADAPTERS:
            return [_both(entry.add_adapters, adapters.add_adapters_signature(element))]
        case kernel_sets.RANKS:
            return _ranks(element)
        case "int8":
            return _int8(dtype, element)
        case kernel_sets.INT8_EXPERTS:
            return [
                _both(entry.grouped_fp8_linear, grouped_linear.grouped_fp8_linear_signature(element, numba.int8)),
                _both(entry.fp8_rows, fp8_linear.fp8_rows_signature(element, numba.int8)),
            ]
        case "fp8":
            return [
                _both(entry.fp8_linear, fp8_linear.fp8_linear_signature(element)),
                _both(entry.grouped_fp8_linear, grouped_linear.grouped_fp8_linear_signature(element)),
                _both(entry.fp8_rows, fp8_linear.fp8_rows_signature(element)),
            ]
        case "packed" if dtype != "bfloat16":  # only bfloat16 weights are packed
            return []
        case "packed":
            return [
                _both(entry.packed_linear, packed_linear.PACKED_LINEAR),
                _both(entry.unpack_rows, packed_linear.UNPACK_ROWS),
                _both(entry.gather_packed_rows, packed_linear.GATHER_PACKED_ROWS),
                (entry.pack_rows, None, packed_linear.PACK_ROWS),
            ]
    raise ValueError(f"{name!r} is no set of kernels")


def _products(dtype: str, element: Any) -> list[tuple[Any, Any, Any]]:
    """Returns the kernels that multiply with plain matrices, each with its variant for several threads and its signature. element:
    Numba's type of the dtype's elements."""
    if dtype == "bfloat16" and not HAS_BFLOAT16_PRODUCTS:
        return [_both(entry.widened_linear, widened_linear.widened_linear_signature(element, element))]
    wanted = [_both(entry.few_rows_linear, linear.few_rows_linear_signature(element, element))]
    if dtype == "bfloat16" and entry.HAS_MATRIX_UNIT:
        wanted.append(_both(entry.amx_linear, amx_linear.amx_linear_signature(element)))
    return wanted


def _grouped_products(dtype: str, element: Any) -> tuple[Any, Any, Any]:
    """Returns the kernel that multiplies with plain matrices of experts, with its variant for several threads and its signature.
    element: Numba's type of the dtype's elements."""
    if dtype == "bfloat16" and not HAS_BFLOAT16_PRODUCTS:
        return _both(entry.grouped_widened_linear, grouped_linear.grouped_widened_linear_signature(element))
    return _both(entry.grouped_few_rows_linear, grouped_linear.grouped_linear_signature(element))


def _attention(dtype: str, element: Any) -> list[tuple[Any, Any, Any]]:
    of_prefill = prefill.prefill_attention_signature(element)
    wanted = [
        (paged_attention_serial, paged_attention_parallel, attention.paged_attention_signature(element)),
        (prefill_attention_serial, prefill_attention_parallel, of_prefill),
        _both(entry.rope_and_store, rows.rope_and_store_signature(element)),
    ]
    if HAS_TILES and dtype == "bfloat16":
        wanted.append((prefill_tiles_serial, prefill_tiles_parallel, of_prefill))
    return wanted


def _ranks(element: Any) -> list[tuple[Any, Any, Any]]:
    wanted = [
        (entry.gather_ranks, None, ranks.gather_ranks_signature(element)),
        (entry.keep_own_experts, None, own_experts.KEEP_OWN_EXPERTS),
        (entry.keep_own_turns, None, own_experts.KEEP_OWN_TURNS),
        (entry.clear_behind, None, own_experts.clear_behind_signature(element)),
    ]
    for summed in dict.fromkeys((element, numba.float32)):  # models of every dtype have some numbers in float32
        wanted.append((entry.sum_ranks, None, ranks.sum_ranks_signature(summed)))
        wanted.append((entry.clear, None, own_experts.clear_signature(summed)))
    return wanted


def _int8(dtype: str, element: Any) -> list[tuple[Any, Any, Any]]:
    wanted = []  # the first serves matrices that are too narrow, or have too many rows, for those added after it
    if dtype == "bfloat16" and not HAS_BFLOAT16_PRODUCTS:
        widened = widened_linear.widened_linear_signature(element, numba.int8)
        wanted.append(_both(entry.widened_linear, widened))
    else:
        few_rows = linear.few_rows_linear_signature(element, numba.int8)
        wanted.append(_both(entry.few_rows_linear, few_rows))
    if dtype == "bfloat16" and entry.HAS_MATRIX_UNIT:
        wanted.append(_both(entry.amx_int8_linear, amx_linear.amx_int8_linear_signature(element)))
    elif dtype == "bfloat16" and entry.HAS_INT8_PRODUCTS:
        wanted.append(_both(entry.int8_linear, int8.int8_linear_signature(element)))
    return wanted
