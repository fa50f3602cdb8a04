"""The one place that picks a kernel or its torch reference. Models and layers call these and nothing below them.

`configure` must run before the first operation. Numba serves float32 and bfloat16 on the CPU where it is installed; the reference
serves everything else. Shapes: T tokens, W width, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.forward_batch import ForwardBatch
from engine.kernels import reference
from loader.sizing import PREFILL_TILE_TOKENS, sampler_rows

_kernels: Any = None  # engine.kernels.cpu, once configured and if numba is there


def configure(cache_dir: str, use_kernels: bool = True) -> bool:
    """Finds the kernels, to be kept compiled in cache_dir. Returns whether they are in use.

    The folder's name carries a digest of their sources, because Numba looks only at the file of the kernel itself.
    """
    global _kernels
    if not use_kernels or importlib.util.find_spec("numba") is None:
        _kernels = None
        return False
    import numba

    digest = hashlib.blake2b(digest_size=6)
    for source in sorted((Path(__file__).parent / "kernels").glob("cpu*.py")):
        digest.update(source.read_bytes())
    base = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "hearthd"
    numba.config.CACHE_DIR = str(base / f"numba-{digest.hexdigest()}")
    numba.config.THREADING_LAYER = _threading_layer()
    from engine.kernels import cpu

    _kernels = cpu
    return True


def _threading_layer() -> str:
    """OpenMP's where the system has libgomp: it shares the machine best with torch's own threads. Numba's queue otherwise."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "workqueue"
    return "omp"


def prepare(dtype: str, num_threads: int) -> None:
    """Compiles what models of this dtype need, so that no step has to. Takes seconds once per machine, milliseconds later."""
    if _kernels is not None and dtype in ("float32", "bfloat16"):
        import numba

        folder = Path(numba.config.CACHE_DIR)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            # several engines start at once: the first compiles, the others read what it wrote
            fcntl.flock(lock, fcntl.LOCK_EX)
            _kernels.prepare(dtype, num_threads > 1)


def set_num_threads(num_threads: int) -> None:
    """Threads of the operations the calling thread starts from here on."""
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    if _kernels is not None:
        _kernels.set_num_threads(num_threads)


def _served(x: Tensor) -> bool:
    return _kernels is not None and x.dtype in (torch.float32, torch.bfloat16)


def _array(x: Tensor) -> Any:
    """The tensor's memory as numpy sees it: bfloat16 as uint16 bits."""
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K] transposed, in their dtype."""
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _served(x):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    _kernels.rms_norm(_array(x), _array(weight), eps, _array(out))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns its norm."""
    if not _served(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    _kernels.add_rms_norm(_array(x), _array(residual), _array(weight), eps, _array(out))
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 W] -> [T, W]: silu(gate) * up."""
    if not _served(gate_up):
        return reference.silu_and_mul(gate_up)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _kernels.silu_and_mul(_array(gate_up), _array(out))
    return out


def rope_and_store(
    qkv: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float, layer: int, heads: int, batch: ForwardBatch
) -> None:
    """Normalises (if norms are given) and rotates queries and keys of qkv [T, (H + 2 G) D] in place; stores keys and values."""
    group, place = batch.group_of(layer)
    kv = group.kv
    if not _served(qkv):
        reference.rope_and_store(qkv, batch.cos_sin, query_norm, key_norm, eps, kv, place, heads, torch.from_numpy(group.slots))
        return
    array = _array(qkv)
    none = array[0, :0]
    _kernels.rope_and_store(
        array,
        batch.cos_sin.numpy(),
        none if query_norm is None else _array(query_norm),
        none if key_norm is None else _array(key_norm),
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


def attention(qkv: Tensor, layer: int, heads: int, scale: float, batch: ForwardBatch) -> Tensor:
    """Causal attention of every token over its row's KV blocks, after rope_and_store. Returns [T, H D]."""
    group, place = batch.group_of(layer)
    kv = group.kv
    kv_heads, head_dim = kv.shape[3], kv.shape[5]
    out = qkv.new_empty(qkv.shape[0], heads * head_dim)
    out[batch.num_tokens :] = 0
    if len(batch.paged_tokens):
        if _served(qkv):
            _kernels.paged_attention(
                _array(qkv),
                group.kv_flat,
                kv.shape[1],
                place,
                heads,
                kv_heads,
                kv.shape[4],
                head_dim,
                group.block_table,
                batch.paged_tokens,
                batch.paged_rows,
                batch.paged_contexts,
                scale,
                _array(out),
            )
        else:
            reference.paged_attention(
                qkv,
                kv,
                place,
                heads,
                torch.from_numpy(group.block_table),
                torch.from_numpy(batch.paged_tokens),
                torch.from_numpy(batch.paged_rows),
                torch.from_numpy(batch.paged_contexts),
                scale,
                out,
            )
    for row in batch.long_rows:
        start, num_new = int(batch.starts[row]), int(batch.num_new[row])
        context = int(batch.contexts[row])
        key, value = reference.gather_context(kv, place, torch.from_numpy(group.block_table[row]), context)
        query = qkv[start : start + num_new, : heads * head_dim].view(num_new, heads, head_dim).transpose(0, 1)
        target = out[start : start + num_new].view(num_new, heads, head_dim)
        if num_new == context:
            target.copy_(reference.causal_attention(query, key, value, scale, None).transpose(0, 1))
            continue
        for tile in range(0, num_new, PREFILL_TILE_TOKENS):  # the mask is what takes memory
            end = min(tile + PREFILL_TILE_TOKENS, num_new)
            visible = context - num_new + end
            mask = torch.ones(end - tile, visible, dtype=torch.bool).tril_(visible - (end - tile))
            part = reference.causal_attention(query[:, tile:end], key[:, :visible], value[:, :visible], scale, mask)
            target[tile:end] = part.transpose(0, 1)
    return out


def greedy(logits: Tensor) -> tuple[Any, Any]:
    """logits [N, V] -> (ids [N] int32, bad [N] bool) as numpy arrays; bad: the row holds NaN or an infinity."""
    if not _served(logits):
        best, not_finite = reference.greedy(logits)
        return best.to(torch.int32).numpy(), not_finite.numpy()
    ids, bad = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
    if logits.dtype is torch.bfloat16:
        _kernels.greedy_bfloat16(logits.view(torch.int16).numpy(), ids, bad)
    else:
        _kernels.greedy_float32(logits.numpy(), ids, bad)
    return ids, bad


def sample(logits: Tensor, temperature: Any, top_p: Any, top_k: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
    """Draws one token for each row of logits [N, V]; the rest are numpy arrays [N] (keys uint32). Returns as `greedy` does."""
    if not _served(logits):
        columns = [torch.from_numpy(x) for x in (temperature, top_p, top_k, key0.astype(np.int64), key1.astype(np.int64))]
        step = sampler_rows(logits.shape[1])  # it needs several copies of the logits
        parts = [
            reference.sample(logits[at : at + step], *(column[at : at + step] for column in columns))
            for at in range(0, len(logits), step)
        ]
        drawn, not_finite = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        return drawn.to(torch.int32).numpy(), not_finite.numpy()
    ids, bad = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
    _kernels.sample(_array(logits), temperature, top_p, top_k, key0, key1, ids, bad)
    return ids, bad
