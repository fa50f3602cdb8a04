"""The operations of the `cpu` device. They call Numba's kernels for float32 and bfloat16 if Numba is installed and the kernels are
compiled, and else the reference implementation (engine/ops/reference.py).

Shapes: T tokens, W width, H query heads, G KV heads, D head size, P pairs of a head's dimensions that rotary embedding rotates, V
vocabulary."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cpu import deltas, latents, products
from engine.cpu import experts as grouped_experts
from engine.cpu.batch import LONG_ROW_TOKENS, HostBatch
from engine.cpu.products import array
from engine.cpu.programs.program import call, empty, into, is_recording
from engine.host import compiled
from engine.ops import reference, reference_inputs
from engine.ops.ops import (
    AdaptedProduct,
    DeltaRule,
    ExpertMatrices,
    Fp8Matrix,
    HeadNorms,
    Int4Matrix,
    Int8Matrix,
    LatentHeads,
    Matrix,
    Mxfp4Matrix,
    Nvfp4Matrix,
    PackedMatrix,
    Rotary,
)
from engine.ops.rows_apart import rows_apart, touch_each_other
from loader.configs.kernel_sets import (
    ADAPTERS,
    ATTENTION,
    DELTAS,
    EXPERTS,
    GELU,
    GREEDY,
    INT8_EXPERTS,
    LAYER_NORM,
    OF_DECODERS,
    PLAIN,
    RANKS,
    SAMPLING,
    KernelSet,
)
from loader.formats import packed_rows
from loader.formats.int8 import WIDENED_BYTES
from loader.shapes.model_shape import TemperatureShape
from loader.sizes.work_space import PREFILL_TILE_TOKENS, sampler_rows

_NO_SINKS = np.empty(0, np.float32)
BLOCK_TOKENS_STEP = 4  # paged_attention needs blocks of a multiple of this many tokens


class _ThreadCount(threading.local):
    """The arguments of the calling thread's last call of CpuOps.set_num_threads. of: the CpuOps object of that call; None: the
    thread has not called it. num_threads: number of threads that share an operation."""

    of: CpuOps | None = None
    num_threads = 0


_thread_count = _ThreadCount()


def _heat(positions: Any, temperature: TemperatureShape, turns: Tensor) -> None:
    """Multiplies turns [T, 2 P], the cosines and sines of a rotary embedding, in place by the attention temperature: a factor of
    the queries that depends on their positions [T] (reference.temperature_of)."""
    turns.mul_(reference.temperature_of(torch.from_numpy(positions), temperature).unsqueeze(1))


class CpuOps:
    """Implements engine.ops.ops.Ops for the `cpu` device, for steps whose inputs are an engine.cpu.batch.HostBatch.

    cache_dir: folder below which compiled kernels are kept; "": the user's cache.
    use_kernels: whether kernels may be used; False: the reference implementation computes everything.
    deferred: whether a set of kernels is called only after `use` was called for it; False: all sets may be called at once.
    asks: called with a set of kernels when a step needs the set for the first time and it is not in use.
    beside_compilers: returns whether steps should leave cores to compilers.
    kernels: the module engine.cpu.kernels.entry; None without Numba.
    asked: the sets of kernels that steps needed while they were not in use.
    num_late: how many of the sets in `asked` have come into use since."""

    def __init__(
        self,
        cache_dir: str,
        use_kernels: bool = True,
        deferred: bool = False,
        asks: Callable[[KernelSet], None] = lambda kernel_set: None,
        beside_compilers: Callable[[], bool] = lambda: False,
    ) -> None:
        self.kernels: Any = None
        self._in_use: frozenset[KernelSet] | None = frozenset() if deferred else None  # None: all
        self._given_up: frozenset[KernelSet] = frozenset()
        self._changing, self._asks = threading.Lock(), asks
        self.beside_compilers = beside_compilers
        self.asked: set[KernelSet] = set()
        self.num_late = 0
        if use_kernels and importlib.util.find_spec("numba") is not None:
            compiled.keep_in(cache_dir)
            compiled.use_threading_layer()
            from engine.cpu.kernels import entry

            self.kernels = entry

    def use(self, kernel_set: KernelSet) -> None:
        """Makes operations call the kernels of a set from now on. The kernels must be compiled (engine/cpu/kernel_units.py)."""
        with self._changing:  # both loads and the engine's loop bring kernels into use
            if self._in_use is not None:
                self._in_use |= {kernel_set}
                self.num_late += kernel_set in self.asked

    def give_up(self, kernel_set: KernelSet) -> None:
        """Records that the kernels of a set cannot be compiled, so that models no longer wait for them."""
        self._given_up |= {kernel_set}

    def awaited(self, sets: Iterable[KernelSet]) -> list[KernelSet]:
        """Returns those of the given sets of kernels that may still come into use: they are not in use yet and were not given up.
        Returns [] without Numba."""
        if self.kernels is None or self._in_use is None:
            return []
        return [one for one in sets if one not in self._in_use and one not in self._given_up]

    def prepare(self, dtype: str, num_threads: int, *further: str) -> None:
        """Compiles kernels in this process and brings them into use, so that no step has to compile. Engines do not call this; they
        compile in other processes (engine/cpu/kernel_builds.py). The kernels are those of decoders and the sets named in `further`,
        for dtype (float32 or bfloat16), and those for sampling from float32 logits. It takes half a minute, once per machine.
        num_threads: if more than 1, the kernels' variants for several threads are compiled, too."""
        if self.kernels is not None:
            from engine.cpu import kernel_units

            edited = [KernelSet("float32", name) for name in (GREEDY, SAMPLING)]
            sets = list(dict.fromkeys([*(KernelSet(dtype, name) for name in (*OF_DECODERS, *further)), *edited]))
            kernel_units.compile_all(sets, num_threads > 1)
            for one in sets:
                self.use(one)

    def threads_may_share(self) -> bool:
        """Returns whether two threads may run operations at the same time. They may not if Numba runs kernels by its own work
        queue, which serves one thread at a time."""
        return self.kernels is None or compiled.threading_layer() == "omp"

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads share the operations that the calling thread starts from now on, for torch and for the kernels."""
        if num_threads != _thread_count.num_threads or _thread_count.of is not self:  # asking torch takes 20 us in a step
            _thread_count.num_threads, _thread_count.of = num_threads, self
            torch.set_num_threads(num_threads)
            if self.kernels is not None:
                self.kernels.set_num_threads(num_threads)

    def input_kernels(self) -> Any:
        """Returns the module whose functions compute a recorded step's inputs from the sequence table: engine.cpu.kernels.entry if
        its kernels are in use, else engine.ops.reference_inputs."""
        return self.kernels if self._is_in_use(PLAIN) else reference_inputs

    def pack_rows(self, *arrays: Any) -> int:
        """Packs rows of bfloat16 weights without loss into given arrays, and returns how many weights have an exponent without a
        code, which is stored apart. arrays: the arguments of loader.formats.packed_rows.pack_rows, which is called if the compiled
        kernel is not in use."""
        packing: Callable[..., int] = self.kernels.pack_rows if self._is_in_use("packed") else packed_rows.pack_rows
        return packing(*arrays)

    def gather_kernels(self, x: Tensor) -> Any:
        """Returns the module of kernels if its gather_ranks can join tensors of x's dtype; None if that kernel is not in use or
        does not exist for this dtype. gather_ranks joins the columns that the ranks of a split model have computed."""
        return self.kernels if self._served(x, RANKS) else None

    def sum_kernels(self, x: Tensor) -> Any:
        """Returns the module of kernels if its sum_ranks can add up tensors of x's dtype; None if that kernel is not in use or does
        not exist for this dtype. sum_ranks adds up the partial sums of the ranks of a split model. Models of either dtype have it
        for float32, too."""
        is_served = self._is_in_use(RANKS) if x.dtype is torch.float32 else self._served(x, RANKS)
        return self.kernels if is_served else None

    def rotary_turns(self, rotary: Rotary, positions: Any, turns: Tensor) -> None:
        """Writes to turns [T, 2 P] float32 the cosines, then the sines, by which a rotary embedding rotates each pair of dimensions
        at positions [T] (an int32 array). They are multiplied by the embedding's scale and by its attention temperature, if it has
        one."""
        call(self.input_kernels().rotary_turns, positions, rotary.inv_freq.numpy(), rotary.scale, turns.numpy())
        if rotary.temperature is not None:
            call(_heat, positions, rotary.temperature, turns.view(turns.shape))

    def cos_sin(self, rotary: Rotary, positions: Any) -> Tensor:
        """Returns a new tensor [T, 2 P] float32 with the cosines, then the sines, by which a rotary embedding rotates each pair of
        dimensions at positions [T]."""
        turns = torch.empty(len(positions), 2 * len(rotary.inv_freq))
        self.rotary_turns(rotary, positions, turns)
        return turns

    def _is_in_use(self, name: str) -> bool:
        """Returns whether the set of kernels of this name may be called for at least one dtype."""
        if self.kernels is None or self._in_use is None:
            return self.kernels is not None
        return any(one.name == name for one in self._in_use)

    def _served(self, x: Tensor, *names: str) -> bool:
        """Returns whether all sets of kernels with these names may be called for tensors of x's dtype. Asks for the compilation of
        each set that is not in use, once for each set."""
        if self.kernels is None or x.dtype not in (torch.float32, torch.bfloat16):
            return False
        if self._in_use is None:
            return True
        dtype = "float32" if x.dtype is torch.float32 else "bfloat16"
        missing = [one for name in names if (one := KernelSet(dtype, name)) not in self._in_use]
        for one in missing:
            if one not in self.asked:
                self.asked.add(one)
                self._asks(one)
        return not missing

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return self._packed_embedding(ids, weight, scale)
        if not self._served(weight, PLAIN):
            return reference.gather_rows(weight, ids, scale, first)
        out = empty(weight, len(ids), weight.shape[1])
        call(self.kernels.gather_rows, ids.numpy(), array(weight), first or 0, scale, array(out))
        return out

    def _packed_embedding(self, ids: Tensor, weight: PackedMatrix, scale: float) -> Tensor:
        out = empty(weight.body, len(ids), weight.num_inputs, weight.dtype)
        if self._served(out, PLAIN, "packed"):
            call(self.kernels.gather_packed_rows, ids.numpy(), *reference.panels_of(weight), scale, array(out))
        else:
            call(into, out.view(out.shape), reference.gather_packed_rows, weight, ids, scale)
        return out

    def pick(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """Copies row rows[n] of x [T, W] to row n of out [N, W], for all n. rows [N]: int64."""
        if not self._served(x, PLAIN):
            torch.index_select(x, 0, rows, out=out)
        else:
            call(self.kernels.gather_rows, rows.numpy(), array(x), 0, 1.0, array(out))

    def copy(self, x: Tensor, out: Tensor) -> None:
        if not self._served(x, PLAIN):
            call(out.view(out.shape).copy_, x.view(x.shape))
        else:
            call(self.kernels.gather_rows, np.arange(len(x)), array(x), 0, 1.0, array(out))

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Int8Matrix):
            return self._int8_linear(x, weight, bias)
        if isinstance(weight, Fp8Matrix):
            matrix: tuple[Any, ...] = (weight.values, weight.scales, weight.group_inputs)
            return self._widened_linear("fp8", products.fp8_linear, reference.fp8_linear, x, weight, matrix, bias)
        if isinstance(weight, Int4Matrix):
            if weight.order is not None:
                x = self._ordered(x, weight.order)
            matrix = (weight.packed, weight.scales, weight.zeros, weight.group_inputs)
            kernels = _format_of_int4(weight)
            return self._widened_linear(kernels, products.four_bits_linear, reference.int4_linear, x, weight, matrix, bias)
        if isinstance(weight, Nvfp4Matrix):
            matrix = (weight.packed, weight.scales, weight.factors)
            return self._widened_linear("nvfp4", products.four_bits_linear, reference.nvfp4_linear, x, weight, matrix, bias)
        if isinstance(weight, PackedMatrix):
            return self._widened_linear("packed", products.packed_linear, reference.packed_linear, x, weight, (weight,), bias)
        if self._served(x, PLAIN) and (product := products.linear(self.kernels, x, weight, bias)) is not None:
            return product
        if is_recording():  # calls the functions inside torch's linear, which can be recorded
            out = empty(x, len(x), len(weight))
            own, to = x.view(x.shape), out.view(out.shape)
            if touch_each_other(own):
                call(products.write_torch_product, own, weight, bias, to)
            elif bias is None:
                call(partial(torch.mm, out=to), own, weight.t())
            else:
                call(partial(torch.addmm, out=to), bias, own, weight.t())
            return out
        return torch.nn.functional.linear(rows_apart(x), weight, bias)

    def add_adapters(self, x: Tensor, out: Tensor, product: AdaptedProduct, batch: HostBatch) -> None:
        adapters = batch.adapters
        assert adapters is not None
        held = (adapters.numbers, adapters.places[product.number], adapters.ranks[product.number])
        if self._served(x, ADAPTERS) and x.is_contiguous() and out.is_contiguous():
            parts, shares = np.array(product.parts, np.int64), self.kernels.num_shares()
            call(self.kernels.add_adapters, array(x), parts, *held, array(adapters.memory), shares, array(out))
            return
        tables = (torch.from_numpy(one) for one in held)
        memory = adapters.memory.view(adapters.memory.shape)
        call(reference.add_adapters, x.view(x.shape), out.view(out.shape), product.parts, *tables, memory)

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        out = empty(x, len(x), len(weight), torch.float32)
        call(into, out.view(out.shape), reference.linear_float32, x.view(x.shape), weight.view(weight.shape))
        return out

    def _int8_linear(self, x: Tensor, weight: Int8Matrix, bias: Tensor | None) -> Tensor:
        """Returns x times the transposed int8 matrix, plus bias. If no kernel computes it, the weights of a few outputs at a time
        are converted to x's dtype, to save memory."""
        if (
            self._served(x, "int8")
            and (product := products.int8_linear(self.kernels, x, weight.values, weight.scales, bias)) is not None
        ):
            return product
        if not is_recording():
            return reference.int8_linear(x, weight.values, weight.scales, bias, WIDENED_BYTES)
        out = empty(x, len(x), len(weight.values))
        call(into, out.view(out.shape), reference.int8_linear, x.view(x.shape), weight.values, weight.scales, bias, WIDENED_BYTES)
        return out

    def _widened_linear(
        self,
        quantize: str,
        product: Callable[[Any, Tensor, Any, Tensor | None], Tensor | None],
        fallback: Callable[..., Tensor],
        x: Tensor,
        weight: Fp8Matrix | Int4Matrix | Nvfp4Matrix | PackedMatrix,
        matrix: tuple[Any, ...],
        bias: Tensor | None,
    ) -> Tensor:
        """Returns x times the transposed quantised or packed matrix, plus bias. For many rows, and without kernels, the weights of
        a few outputs at a time are converted to x's dtype, to save memory.
        quantize: the name of the set of kernels that `product` calls.
        product: computes the result with kernels; returns None if no kernel can compute it.
        fallback: the reference implementation, called with x and then the elements of `matrix`.
        matrix: the fields of `weight`, or `weight` itself, as `fallback` takes them."""
        if self._served(x, PLAIN, quantize) and (made := product(self.kernels, x, weight, bias)) is not None:
            return made
        if not is_recording():
            return fallback(x, *matrix, bias, WIDENED_BYTES)
        out = empty(x, len(x), len(weight))
        call(into, out.view(out.shape), fallback, x.view(x.shape), *matrix, bias, WIDENED_BYTES)
        return out

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        """Returns x [T, K] with its columns in another order: column k of the result is column order[k] of x."""
        out = empty(x, *x.shape)
        call(partial(torch.index_select, out=out.view(out.shape)), x.view(x.shape), 1, order)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
        if not self._served(x, PLAIN):
            return reference.rms_norm(x, weight, eps, around_one)
        out = empty(x, *x.shape)
        call(self.kernels.rms_norm, array(x), array(weight), around_one, eps, array(out))
        return out

    def add(self, update: Tensor, residual: Tensor, scale: float = 1.0) -> None:
        call(partial(residual.view(residual.shape).add_, alpha=scale), update.view(update.shape))

    def add_and_scale(self, update: Tensor, residual: Tensor, factor: Tensor) -> None:
        call(reference.add_and_scale, update.view(update.shape), residual.view(residual.shape), factor.view(factor.shape))

    def multiply(self, x: Tensor, other: Tensor) -> None:
        call(x.view(x.shape).mul_, other[:])

    def columns_twice(self, x: Tensor, first: int) -> Tensor:
        out = empty(x, len(x), 2 * x.shape[1] - first)
        call(reference.columns_twice, x.view(x.shape), first, out.view(out.shape))
        return out

    def norm_columns(self, x: Tensor, first: int, weight: Tensor, eps: float, around_one: bool) -> None:
        columns = x[:, first : first + len(weight)]
        rows = empty(x, len(x), len(weight))  # kernels take arrays whose rows lie end to end
        call(rows.view(rows.shape).copy_, columns)
        normed = self.rms_norm(rows, weight, eps, around_one)
        call(columns.copy_, normed.view(normed.shape))

    def column_squares(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        out = empty(x, len(x), len(widths), torch.float32)
        call(reference.column_squares, x.view(x.shape), widths, out.view(out.shape))
        return out

    def norm_columns_by(self, x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
        own = tuple(weight.view(weight.shape) for weight in weights)
        call(reference.norm_columns_by, x.view(x.shape), own, squares.view(squares.shape), parts, eps)

    def normed_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        rows = empty(x, len(x), len(weight))
        call(rows.view(rows.shape).copy_, x[:, first : first + len(weight)])
        return self.rms_norm(rows, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False, scale: float = 1.0
    ) -> Tensor:
        if not self._served(x, PLAIN):
            return reference.add_rms_norm(x, residual, weight, eps, around_one, scale)
        out = empty(x, *x.shape)
        call(self.kernels.add_rms_norm, array(x), array(residual), scale, array(weight), around_one, eps, array(out))
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if not self._served(x, LAYER_NORM):
            return reference.layer_norm(x, weight, bias, eps)
        return self._layer_norm(x, array(x)[:0], weight, bias, eps, 1.0)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0
    ) -> Tensor:
        if not self._served(x, LAYER_NORM):
            return reference.add_layer_norm(x, residual, weight, bias, eps, scale)
        return self._layer_norm(x, array(residual), weight, bias, eps, scale)

    def _layer_norm(self, x: Tensor, residual: Any, weight: Tensor, bias: Tensor | None, eps: float, scale: float) -> Tensor:
        """Returns the LayerNorm of x [T, W], computed by the kernel. residual: an array [T, W], to which scale * x is first added
        in place; the result is then the LayerNorm of that sum. An array without rows: nothing is added."""
        out, factors = empty(x, *x.shape), array(weight)
        added = factors[:0] if bias is None else array(bias)
        call(self.kernels.layer_norm, array(x), residual, scale, factors, added, eps, array(out))
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_and_mul(gate_up, gelu=False)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_and_mul(gate_up, gelu=True)

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, gelu: bool) -> Tensor:
        return self._gate_and_mul(self.linear(x, weight, bias), gelu)

    def gelu(self, x: Tensor) -> Tensor:
        if not self._served(x, GELU):
            return reference.gelu(x)
        out = empty(x, *x.shape)
        call(self.kernels.gelu, array(x), array(out))
        return out

    def _gate_and_mul(self, gate_up: Tensor, gelu: bool) -> Tensor:
        if not self._served(gate_up, GELU if gelu else PLAIN):
            return reference.gelu_and_mul(gate_up) if gelu else reference.silu_and_mul(gate_up)
        out = empty(gate_up, gate_up.shape[0], gate_up.shape[1] // 2)
        call(self.kernels.gelu_and_mul if gelu else self.kernels.silu_and_mul, array(gate_up), array(out))
        return out

    def experts(self, x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: HostBatch) -> Tensor:
        slots = batch.groups[0].slots
        if self._served(x, *_sets_of_experts(experts), *([RANKS] if experts.is_part else [])):
            return grouped_experts.experts(self.kernels, x, scores, experts, shared, slots)
        return reference.experts(x, scores, experts, torch.from_numpy(slots), shared)

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        layer: int,
        heads: int,
        batch: HostBatch,
        interleaved: bool = False,
        num_turned: int | None = None,
    ) -> None:
        query_norm, key_norm, value_norm = (None, None, None) if norms is None else (norms.query, norms.key, norms.value)
        eps, around_one = (0.0, False) if norms is None else (norms.eps, norms.around_one)
        group, place = batch.group_of(layer)
        kv = group.kv
        if group.scales is not None or not self._served(qkv, ATTENTION):
            slots = torch.from_numpy(group.slots)
            of_norms = (query_norm, key_norm, around_one, eps)
            how = (slots, group.scales, interleaved, num_turned)
            reference.rope_and_store(qkv, group.cos_sin, *of_norms, kv, place, heads, *how, value_norm=value_norm)
            return
        columns = array(qkv)
        none = columns[0, :0]
        call(
            self.kernels.rope_and_store,
            columns,
            group.cos_sin.numpy(),
            none if norms is None else array(norms.query),
            none if norms is None else array(norms.key),
            none if value_norm is None else array(value_norm),
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
            interleaved,
            heads + kv.shape[3] if num_turned is None else num_turned,
        )

    def rope(
        self, queries: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: HostBatch, interleaved: bool = False
    ) -> None:
        norm, around_one, eps = (None, False, 0.0) if norms is None else (norms.query, norms.around_one, norms.eps)
        group, _ = batch.group_of(layer)
        if not self._served(queries, ATTENTION):
            reference.rope(queries, group.cos_sin, norm, around_one, eps, heads, interleaved)
            return
        columns = array(queries)
        none = columns[0, :0]
        weight = none if norm is None else array(norm)
        kv, head_dim = columns.reshape(-1), queries.shape[1] // heads  # an array without KV heads, so nothing is stored
        sizes = (1, 0, heads, 0, batch.block_tokens, head_dim)
        of_norms = (weight, weight, none, around_one, eps)
        call(self.kernels.rope_and_store, columns, group.cos_sin.numpy(), *of_norms, kv, *sizes, group.slots, interleaved, heads)

    def attention(
        self,
        qkv: Tensor,
        layer: int,
        heads: int,
        scale: float,
        softcap: float,
        batch: HostBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group, place = batch.group_of(layer)
        kv = group.kv
        kv_heads, head_dim = kv.shape[3], kv.shape[5]
        out = empty(qkv, qkv.shape[0], heads * head_dim)
        if batch.num_tokens < len(out):
            call(out[batch.num_tokens :].zero_)
        served = group.scales is None and kv.shape[4] % BLOCK_TOKENS_STEP == 0 and self._served(qkv, ATTENTION)
        sizes = (kv.shape[1], place, heads, kv_heads, kv.shape[4], head_dim)
        how = (group.reach, scale, softcap)
        of_sinks = _NO_SINKS if sinks is None else sinks.numpy()
        if len(batch.paged_tokens):
            queries = (batch.paged_tokens, batch.paged_rows, batch.paged_contexts)
            if served:
                where = (group.block_table, *queries, *how, of_sinks, batch.attended)
                call(self.kernels.paged_attention, array(qkv), group.kv_flat, *sizes, *where, array(out))
            else:
                table, tokens, rows, contexts = (torch.from_numpy(x) for x in (group.block_table, *queries))
                reference.paged_attention(qkv, kv, place, heads, table, tokens, rows, contexts, *how, out, sinks, group.scales)
        if not batch.has_long_rows:
            return out
        if served:
            rows_of = (group.block_table, batch.starts, batch.num_new, batch.contexts, LONG_ROW_TOKENS)
            of_rows = (*rows_of, *how, of_sinks, batch.attended)
            call(self.kernels.prefill_attention, array(qkv), group.kv_flat, *sizes, *of_rows, array(out))
            return out
        for row in np.flatnonzero(batch.num_new > LONG_ROW_TOKENS):
            start, num_new = int(batch.starts[row]), int(batch.num_new[row])
            query = qkv[start : start + num_new, : heads * head_dim].view(num_new, heads, head_dim).transpose(0, 1)
            to = out[start : start + num_new].view(num_new, heads, head_dim)
            context, blocks = int(batch.contexts[row]), torch.from_numpy(group.block_table[row])
            reference.long_row_attention(query, kv, place, blocks, context, *how, to, PREFILL_TILE_TOKENS, group.scales, sinks)
        return out

    def rope_and_store_latents(
        self,
        queries: Tensor,
        down: Tensor,
        norm: Tensor,
        eps: float,
        layer: int,
        heads: LatentHeads,
        batch: HostBatch,
        interleaved: bool,
    ) -> None:
        group, place = batch.group_of(layer)
        call(
            reference.rope_and_store_latents,
            queries.view(queries.shape),
            down.view(down.shape),
            group.cos_sin.view(group.cos_sin.shape),
            norm.view(norm.shape),
            eps,
            group.kv,
            place,
            heads.num_heads,
            torch.from_numpy(group.slots),
            group.scales,
            interleaved,
        )

    def latent_attention(self, queries: Tensor, layer: int, heads: LatentHeads, scale: float, batch: HostBatch) -> Tensor:
        group, place = batch.group_of(layer)
        out = empty(queries, len(queries), heads.num_heads * heads.value_dim)
        if batch.num_tokens < len(out):
            call(out[batch.num_tokens :].zero_)
        of_layer = (queries.view(queries.shape), heads, group.kv, place, group.block_table)
        last = (scale, out.view(out.shape), group.scales)
        if len(batch.paged_tokens):
            call(latents.attend_short, *of_layer, batch.paged_tokens, batch.paged_rows, batch.paged_contexts, *last)
        if batch.has_long_rows:
            call(latents.attend_long, *of_layer, batch.starts, batch.num_new, batch.contexts, LONG_ROW_TOKENS, *last)
        return out

    def without_gates(self, x: Tensor, heads: int, head_dim: int) -> Tensor:
        out = empty(x, len(x), x.shape[1] - heads * head_dim)
        call(reference.without_gates, x.view(x.shape), heads, head_dim, out.view(out.shape))
        return out

    def gate_heads(self, attended: Tensor, x: Tensor, head_dim: int) -> None:
        call(reference.gate_heads, attended.view(attended.shape), x.view(x.shape), head_dim)

    def gated_delta(self, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: HostBatch) -> Tensor:
        return deltas.gated_delta(self.kernels if self._served(x, DELTAS) else None, x, gates, rule, layer, batch)

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        if scale != 1.0:
            call(x.view(x.shape).mul_, scale)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if cap:
            call(reference.capped, x.view(x.shape), cap)
        return x

    def greedy(self, logits: Tensor) -> tuple[Any, Any]:
        if not self._served(logits, GREEDY):
            best, not_finite = reference.greedy(logits)
            return best.to(torch.int32).numpy(), not_finite.numpy()
        ids, bad = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
        if logits.dtype is torch.bfloat16:
            call(self.kernels.greedy_bfloat16, logits.view(torch.int16).numpy(), ids, bad)
        else:
            call(self.kernels.greedy_float32, logits.view(logits.shape).numpy(), ids, bad)
        return ids, bad

    def sample(self, logits: Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
        if not self._served(logits, SAMPLING):
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
        values = array(logits)
        shares = self.kernels.sampling_shares(values)
        call(self.kernels.sample, values, temperature, top_p, top_k, min_p, key0, key1, shares, ids, bad)
        return ids, bad

    def top_logprobs(self, logits: Tensor, rows: Any, chosen: Any, num_top: int) -> tuple[Any, Any, Any]:
        num_top = min(num_top, logits.shape[1])
        picked, top_ids = np.empty(len(rows), np.float32), np.empty((len(rows), num_top), np.int32)
        top = np.empty((len(rows), num_top), np.float32)
        if self._served(logits, SAMPLING):
            self.kernels.top_logprobs(array(logits), rows, chosen, picked, top_ids, top)
            return picked, top_ids, top
        step = sampler_rows(logits.shape[1])
        for at in range(0, len(rows), step):
            part = slice(at, at + step)
            told = reference.top_logprobs(logits[torch.from_numpy(rows[part])], torch.from_numpy(chosen[part]).long(), num_top)
            picked[part], top_ids[part], top[part] = (each.numpy() for each in told)
        return picked, top_ids, top

    def ranks(self, logits: Tensor, chosen: Any) -> Any:
        step = sampler_rows(logits.shape[1])
        ids = torch.from_numpy(chosen).long()
        parts = zip(logits.split(step), ids.split(step), strict=True)
        return torch.cat([reference.ranks(part, own) for part, own in parts]).numpy()

    def penalise(self, row: Tensor, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
        if not self._served(row, SAMPLING):
            reference.penalise(row, torch.from_numpy(tokens), num_prompt, presence, frequency, repetition)
            return
        counts = np.zeros(len(row), np.int32)
        self.kernels.penalise(row.numpy(), tokens, num_prompt, presence, frequency, repetition, counts)


def _sets_of_experts(experts: ExpertMatrices) -> Iterator[str]:
    """Yields the names of the sets of kernels that a layer's experts need. A name may be yielded twice."""
    yield PLAIN
    yield EXPERTS
    if experts.gelu:
        yield GELU
    if experts.clamped is not None or isinstance(experts.gate_up, Mxfp4Matrix):
        yield "mxfp4"
        return
    for matrices in (experts.gate_up, experts.down):
        if isinstance(matrices, Fp8Matrix):
            yield "fp8"
        elif isinstance(matrices, Int8Matrix):
            yield INT8_EXPERTS
        elif isinstance(matrices, Int4Matrix):
            yield _format_of_int4(matrices)
        elif isinstance(matrices, Nvfp4Matrix):
            yield "nvfp4"


def _format_of_int4(weight: Int4Matrix) -> str:
    return "int4" if weight.zeros is None else "int4_zeros"
