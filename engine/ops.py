"""Operations for models and layers, which call nothing below them: only this module picks a kernel or its reference on torch.

`configure` or `configure_gpu` must run before the first operation. On a GPU, Triton computes all but most matrix products. On the
CPU, Numba computes float32 and bfloat16 where it is installed; the reference computes everything else. Shapes: T tokens, W width,
H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import cpu_products
from engine.cpu_products import array as _array
from engine.kernels import compiled, reference, reference_inputs
from engine.steps.device_batch import DeviceBatch
from engine.steps.forward_batch import LONG_ROW_TOKENS, ForwardBatch, Rotary
from engine.steps.program import call, empty, into, is_recording
from loader.formats.int8 import WIDENED_BYTES
from loader.work_space import PREFILL_TILE_TOKENS, sampler_rows

BLOCK_TOKENS_STEP = 4  # paged_attention takes blocks of a multiple of this
_kernels: Any = None  # engine.kernels.cpu, once configured, if Numba is installed
_in_use: frozenset[tuple[str, str]] | None = None  # dtypes and quantisations whose kernels are called; None: all
_gpu: Any = None  # engine.kernels.gpu, once configured for a GPU


class _Told(threading.local):
    num_threads = 0  # what the calling thread has set in torch and the kernels


_told = _Told()


def configure(cache_dir: str, use_kernels: bool = True, deferred: bool = False) -> bool:
    """Finds the CPU kernels, kept compiled in cache_dir. Returns whether there are any. deferred: none is called before `use`."""
    global _kernels, _gpu, _told, _in_use
    _gpu, _told, _in_use = None, _Told(), frozenset() if deferred else None
    if not use_kernels or importlib.util.find_spec("numba") is None:
        _kernels = None
        return False
    compiled.keep_in(cache_dir)
    compiled.use_threading_layer()
    from engine.kernels import cpu

    _kernels = cpu
    return True


def use(dtype: str, quantize: str = "") -> None:
    """Lets models of this dtype call kernels from now on. Their units (engine/kernels/cpu_wanted.py) must be compiled."""
    global _in_use
    if _in_use is not None:
        _in_use |= {(compiled.kernels_dtype(dtype), one) for one in ("", quantize)}


def is_final(dtype: str, quantize: str = "") -> bool:
    """Returns whether models of this dtype call the kernels they will always call; False while these are still being compiled."""
    return _kernels is None or _in_use is None or (compiled.kernels_dtype(dtype), quantize) in _in_use


def configure_gpu(cache_dir: str) -> None:
    """Finds the kernels of this process's GPU and keeps their compiled code in cache_dir. Raises ImportError without Triton."""
    global _kernels, _gpu
    from engine.kernels import gpu

    gpu.configure(str(Path(cache_dir or Path.home() / ".cache" / "hearthd") / "triton"))
    _kernels, _gpu = None, gpu


def prepare(dtype: str, num_threads: int, quantize: str = "") -> None:
    """Compiles in this process what models of this dtype need and lets them use it, so that no step compiles: half a minute, once
    per machine. Engines have other processes do it: engine/kernel_builds.py."""
    if _kernels is not None:
        from engine.kernels import cpu_wanted

        cpu_wanted.compile_all(compiled.kernels_dtype(dtype), num_threads > 1, quantize)
        use(dtype, quantize)


def threads_may_share() -> bool:
    """Returns whether two threads may run operations at a time. Numba's own work queue serves only one."""
    return _kernels is None or compiled.threading_layer() == "omp"


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads share the operations that the calling thread starts from now on, for torch and for the kernels."""
    if num_threads != _told.num_threads:  # nothing else sets it, and asking torch takes 20 us in a step
        _told.num_threads = num_threads
        torch.set_num_threads(num_threads)
        if _kernels is not None:
            _kernels.set_num_threads(num_threads)


def input_kernels() -> Any:
    """Returns the module that reads a recorded step's inputs off the sequence table; it has reference_inputs.py's functions."""
    return reference_inputs if _kernels is None or _in_use == frozenset() else _kernels


def rotary_turns(rotary: Rotary, positions: Any, turns: Tensor) -> None:
    """Writes turns [T, 2 P] float32 for positions [T] (int32 array): cosines, then sines, of the dimensions that rotate."""
    call(input_kernels().rotary_turns, positions, rotary.inv_freq.numpy(), rotary.scale, turns.numpy())


def cos_sin(rotary: Rotary, positions: Any) -> Tensor:
    """Returns what rotary_turns writes, as a new tensor."""
    turns = torch.empty(len(positions), 2 * len(rotary.inv_freq))
    rotary_turns(rotary, positions, turns)
    return turns


def _served(x: Tensor, quantize: str = "") -> bool:
    if _kernels is None or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _in_use is None or ("float32" if x.dtype is torch.float32 else "bfloat16", quantize) in _in_use


def _draws(logits: Tensor) -> bool:
    # logits of any model may be edited, in float32, so the kernels of every dtype can sample from float32
    return _served(logits) or (bool(_in_use) and logits.dtype is torch.float32)


def embedding(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Returns the rows [T, W] of weight [V, W] that ids [T] int64 name, times scale."""
    if _gpu is not None or not _served(weight):
        return reference.gather_rows(weight, ids, scale)
    out = empty(weight, len(ids), weight.shape[1])
    call(_kernels.gather_rows, ids.numpy(), _array(weight), scale, _array(out))
    return out


def pick(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copies rows [N] int64 of x [T, W] to out [N, W]."""
    if _gpu is not None or not _served(x):
        torch.index_select(x, 0, rows, out=out)
    else:
        call(_kernels.gather_rows, rows.numpy(), _array(x), 1.0, _array(out))


@dataclass(slots=True, frozen=True)
class Int8Matrix:
    """A matrix of int8 weights: values [N, K] int8 times scales [N] float32, one for each output."""

    values: Tensor
    scales: Tensor


def linear(x: Tensor, weight: Tensor | Int8Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x [T, K] @ weight [N, K] transposed, plus bias [N], in their common dtype; with an Int8Matrix, in x's."""
    if isinstance(weight, Int8Matrix):
        return _int8_linear(x, weight, bias)
    if _gpu is not None:
        return _gpu.linear(x, weight, bias)
    if _served(x) and (product := cpu_products.linear(_kernels, x, weight, bias)) is not None:
        return product
    if is_recording() and _gpu is None:  # the functions that torch's linear calls
        out = empty(x, len(x), len(weight))
        own, to = x.view(x.shape), out.view(out.shape)
        if bias is None:
            call(partial(torch.mm, out=to), own, weight.t())
        else:
            call(partial(torch.addmm, out=to), bias, own, weight.t())
        return out
    return torch.nn.functional.linear(x, weight, bias)


def _int8_linear(x: Tensor, weight: Int8Matrix, bias: Tensor | None) -> Tensor:
    """Multiplies with an Int8Matrix. Without a kernel, a few outputs' weights at a time are converted to x's dtype, never all."""
    if _served(x, "int8") and (product := cpu_products.int8_linear(_kernels, x, weight.values, weight.scales, bias)) is not None:
        return product
    if not is_recording():
        return reference.int8_linear(x, weight.values, weight.scales, bias, WIDENED_BYTES)
    out = empty(x, len(x), len(weight.values))
    call(into, out.view(out.shape), reference.int8_linear, x.view(x.shape), weight.values, weight.scales, bias, WIDENED_BYTES)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
    """Returns x [T, W], each row normalised, times weight [W] (around_one: times 1 + weight)."""
    if _gpu is not None:
        return _gpu.rms_norm(x, weight, eps, around_one)
    if not _served(x):
        return reference.rms_norm(x, weight, eps, around_one)
    out = empty(x, *x.shape)
    call(_kernels.rms_norm, _array(x), _array(weight), around_one, eps, _array(out))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
    """Adds x to residual in place; returns the norm of the sum, as rms_norm does."""
    if _gpu is not None:
        return _gpu.add_rms_norm(x, residual, weight, eps, around_one)
    if not _served(x):
        return reference.add_rms_norm(x, residual, weight, eps, around_one)
    out = empty(x, *x.shape)
    call(_kernels.add_rms_norm, _array(x), _array(residual), _array(weight), around_one, eps, _array(out))
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up as [T, W]; gate_up is [T, 2 W]."""
    return _gate_and_mul(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up as [T, W]; gate_up is [T, 2 W]. gelu: its form with tanh."""
    return _gate_and_mul(gate_up, gelu=True)


def _gate_and_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    if _gpu is not None:
        return _gpu.gate_and_mul(gate_up, gelu)
    if not _served(gate_up):
        return reference.gelu_and_mul(gate_up) if gelu else reference.silu_and_mul(gate_up)
    out = empty(gate_up, gate_up.shape[0], gate_up.shape[1] // 2)
    call(_kernels.gelu_and_mul if gelu else _kernels.silu_and_mul, _array(gate_up), _array(out))
    return out


@dataclass(slots=True, frozen=True)
class HeadNorms:
    """The RMS norms of each head's queries and keys: weights [D]. around_one: the factors are 1 + weight."""

    query: Tensor
    key: Tensor
    eps: float
    around_one: bool = False


def rope_and_store(qkv: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: ForwardBatch) -> None:
    """Normalises (if norms are given) and rotates the queries and keys of qkv [T, (H + 2 G) D] in place (on a GPU only the
    queries), and stores keys and values in the KV blocks."""
    query_norm, key_norm = (None, None) if norms is None else (norms.query, norms.key)
    eps, around_one = (0.0, False) if norms is None else (norms.eps, norms.around_one)
    if isinstance(batch, DeviceBatch):
        _gpu.rope_and_store(qkv, query_norm, key_norm, around_one, eps, layer, heads, batch)
        return
    group, place = batch.group_of(layer)
    kv = group.kv
    if not _served(qkv) or group.scales is not None:
        slots = torch.from_numpy(group.slots)
        of_norms = (query_norm, key_norm, around_one, eps)
        reference.rope_and_store(qkv, group.cos_sin, *of_norms, kv, place, heads, slots, group.scales)
        return
    array = _array(qkv)
    none = array[0, :0]
    call(
        _kernels.rope_and_store,
        array,
        group.cos_sin.numpy(),
        none if norms is None else _array(norms.query),
        none if norms is None else _array(norms.key),
        around_one,
        eps,
        group.kv_flat,
        kv.shape[1],
        place,
        heads,
        kv.shape[3],
        kv.shape[4],
        kv.shape[5],
        group.slots,
    )


def attention(qkv: Tensor, layer: int, heads: int, scale: float, softcap: float, batch: ForwardBatch) -> Tensor:
    """Returns causal attention [T, H D] of every token over its row's KV blocks in the layer's window. Runs after rope_and_store.

    softcap: scores become softcap * tanh(score / softcap); 0: they are unchanged."""
    if isinstance(batch, DeviceBatch):
        return _gpu.attention(qkv, layer, heads, scale, softcap, batch)
    group, place = batch.group_of(layer)
    kv = group.kv
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    out = empty(qkv, qkv.shape[0], heads * head_dim)
    if batch.num_tokens < len(out):
        call(out[batch.num_tokens :].zero_)
    served = _served(qkv) and group.scales is None and kv.shape[4] % BLOCK_TOKENS_STEP == 0
    sizes = (kv.shape[1], place, heads, kv_heads, kv.shape[4], head_dim)
    how = (group.window_tokens, scale, softcap)
    if len(batch.paged_tokens):
        queries = (batch.paged_tokens, batch.paged_rows, batch.paged_contexts)
        if served:
            where = (group.block_table, *queries, *how, batch.attended)
            call(_kernels.paged_attention, _array(qkv), group.kv_flat, *sizes, *where, _array(out))
        else:
            table, tokens, rows, contexts = (torch.from_numpy(x) for x in (group.block_table, *queries))
            reference.paged_attention(qkv, kv, place, heads, table, tokens, rows, contexts, *how, out, None, group.scales)
    if not batch.has_long_rows:
        return out
    if served:
        rows_of = (group.block_table, batch.starts, batch.num_new, batch.contexts, LONG_ROW_TOKENS)
        call(_kernels.prefill_attention, _array(qkv), group.kv_flat, *sizes, *rows_of, *how, batch.attended, _array(out))
        return out
    for row in np.flatnonzero(batch.num_new > LONG_ROW_TOKENS):
        start, num_new = int(batch.starts[row]), int(batch.num_new[row])
        query = qkv[start : start + num_new, : heads * head_dim].view(num_new, heads, head_dim).transpose(0, 1)
        to = out[start : start + num_new].view(num_new, heads, head_dim)
        context, blocks = int(batch.contexts[row]), torch.from_numpy(group.block_table[row])
        reference.long_row_attention(query, kv, place, blocks, context, *how, to, PREFILL_TILE_TOKENS, group.scales)
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap), computed in place; with cap 0, x unchanged."""
    if cap:
        call(reference.capped, x.view(x.shape), cap)
    return x


def greedy(logits: Tensor) -> tuple[Any, Any]:
    """Returns numpy arrays: the most likely ids [N] int32 of logits [N, V], and bad [N] bool, rows that hold NaN or an infinity."""
    if _gpu is not None:
        return _drawn(*_gpu.greedy(logits))
    if not _draws(logits):
        best, not_finite = reference.greedy(logits)
        return best.to(torch.int32).numpy(), not_finite.numpy()
    ids, bad = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
    if logits.dtype is torch.bfloat16:
        call(_kernels.greedy_bfloat16, logits.view(torch.int16).numpy(), ids, bad)
    else:
        call(_kernels.greedy_float32, logits.view(logits.shape).numpy(), ids, bad)
    return ids, bad


def sample(logits: Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
    """Samples one token for each row of logits [N, V]; the other arguments are numpy arrays [N] (keys uint32). Rows of temperature
    0 get their most likely token. Returns ids and bad rows as `greedy` does."""
    if _gpu is not None:
        arrays = (temperature, top_p, top_k, min_p, key0.view(np.int32), key1.view(np.int32))
        return _drawn(*_gpu.sample(logits, *(_gpu.column(x, logits.device) for x in arrays)))
    if not _draws(logits):
        arrays = (temperature, top_p, top_k, min_p, key0.astype(np.int64), key1.astype(np.int64))
        columns = [torch.from_numpy(x) for x in arrays]
        step = sampler_rows(logits.shape[1])  # the reference needs several copies of the logits
        parts = [
            reference.sample(logits[at : at + step], *(column[at : at + step] for column in columns))
            for at in range(0, len(logits), step)
        ]
        drawn, not_finite = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        return drawn.to(torch.int32).numpy(), not_finite.numpy()
    ids, bad = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
    array = _array(logits)
    shares = _kernels.sampling_shares(array)
    call(_kernels.sample, array, temperature, top_p, top_k, min_p, key0, key1, shares, ids, bad)
    return ids, bad


def _drawn(ids: Tensor, bad: Tensor) -> tuple[Any, Any]:
    return ids.cpu().numpy(), bad.cpu().numpy().astype(np.bool_)


def top_logprobs(logits: Tensor, rows: Any, chosen: Any, num_top: int) -> tuple[Any, Any, Any]:
    """Returns log-softmax values of rows [M] (int32 array) of logits [N, V], as numpy arrays: at chosen [M] int32 -> [M] float32;
    then ids and values [M, num_top] of the most likely tokens. The rows must be finite."""
    num_top = min(num_top, logits.shape[1])
    if _gpu is not None:
        on_device = (_gpu.column(x, logits.device) for x in (rows, chosen))
        return tuple(x.cpu().numpy() for x in _gpu.top_logprobs(logits, *on_device, num_top))
    picked, top_ids = np.empty(len(rows), np.float32), np.empty((len(rows), num_top), np.int32)
    top = np.empty((len(rows), num_top), np.float32)
    if _served(logits):
        _kernels.top_logprobs(_array(logits), rows, chosen, picked, top_ids, top)
        return picked, top_ids, top
    step = sampler_rows(logits.shape[1])
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        told = reference.top_logprobs(logits[torch.from_numpy(rows[part])], torch.from_numpy(chosen[part]).long(), num_top)
        picked[part], top_ids[part], top[part] = (each.numpy() for each in told)
    return picked, top_ids, top


def penalise(row: Tensor, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
    """Applies penalties to one row's logits [V] float32, in place. tokens: int32 array, num_prompt prompt tokens, then output."""
    if _gpu is not None:
        _gpu.penalise(row, _gpu.column(tokens, row.device), num_prompt, presence, frequency, repetition)
        return
    if not _draws(row):
        reference.penalise(row, torch.from_numpy(tokens), num_prompt, presence, frequency, repetition)
        return
    counts = np.zeros(len(row), np.int32)
    _kernels.penalise(row.numpy(), tokens, num_prompt, presence, frequency, repetition, counts)
