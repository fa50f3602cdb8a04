"""Computes the attention of rows with several new tokens with FlashAttention 3, if its package `flash_attn_3` is installed and was
measured to be faster on this GPU (tile_choice.py).

It reads the same paged KV as triton_extend, without copies: its operator takes the arena's strides, the block tables of all slots,
and all lengths as tensors on the device, so that a call may be captured in a graph. It is used for attention without a window, a
softcap and sinks, in half precision with KV of the same type; triton_extend computes everything else.

A failure within the library ends the process, because it calls exit().
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from pathlib import Path

import torch
from torch import Tensor

from engine.cuda.batch import PromptRows, QueryTiles
from engine.cuda.kernels.tiles import HOPPER

log = logging.getLogger("engine")

PACKAGE, OPERATORS = "flash_attn_3", "flash_attn_3._C"  # the distribution; its module that makes torch know the operators
LARGEST_HEAD = 256
HEAD_STEP = 8  # head sizes are multiples of this
ARGUMENTS = {
    "out",
    "cu_seqlens_q",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "page_table",
    "kv_batch_idx",
    "softmax_scale",
    "is_causal",
    "num_splits",
}  # those of the operator that a call here sets; versions before May 2025 lack some


@functools.cache
def version(gpu: int) -> str:
    """Returns the version of FlashAttention 3 that can be used on a GPU, with the size and time of its library, since builds of
    different sources and options have the same version; "": none can. The first call loads the library; the log says why if one is
    installed that cannot be used. gpu: the compute capability, 90 for 9.0."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""
    try:
        # For 8.x many builds have no kernels and end the process. Those that have some start programs for as many tiles of each row
        # as a whole step has, which a comparison of one row does not show.
        if gpu != HOPPER:
            raise ValueError(f"it is not used on GPUs of compute capability {gpu // 10}.{gpu % 10}")
        library = Path(str(importlib.import_module(OPERATORS).__file__)).stat()
        taken = {argument.name for argument in torch.ops.flash_attn_3.fwd.default._schema.arguments}
        if lacking := ARGUMENTS - taken:
            raise ValueError(f"its operator has no {', '.join(sorted(lacking))}")
    except Exception as error:  # what other people's code raises while it is imported
        log.warning("%s %s is installed but not used: %s: %s", PACKAGE, found, type(error).__name__, error)
        return ""
    return f"{found}-{library.st_size:x}-{library.st_mtime_ns:x}"


def kind(head_dim: int, dtype: str) -> str:
    """Returns the kind of prompts that has a kernel of its own, compared and measured for itself: the head size and the type of
    numbers. Builds leave out kernels of some sizes and types. dtype: its name."""
    return f"{head_dim} {dtype}"


def takes(head_dim: int, reach: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> bool:
    """Returns whether the library computes attention of this kind where it is chosen: with heads of a size for which it has
    kernels, and, as it was compared and measured, without a window or chunks (reach; see triton_decode.first_seen), a softcap and
    sinks."""
    has_kernels = head_dim % HEAD_STEP == 0 and head_dim <= LARGEST_HEAD
    return has_kernels and reach == 0 and softcap == 0.0 and sinks is None


def extend_attention(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    heads: int,
    block_table: Tensor,
    table_rows: Tensor,
    tiles: QueryTiles,
    contexts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Computes the attention of a step's rows with several new tokens and writes the results of their tokens to out [T, H D]; other
    tokens' results stay. The arguments are those of triton_extend.extend_attention. It takes some work space: H x T float32, and a
    few numbers for each row."""
    num_tokens, head_dim = len(qkv), kv.shape[5]
    if tiles.prompt_rows is None:
        tiles.prompt_rows = _prompt_rows(tiles, num_tokens)
    # What the library takes next. Its builds for torch's stable ABI do not say in the error that it is memory that lacks.
    qkv.new_empty(heads, num_tokens, dtype=torch.float32)
    keys, values = (kv[:, layer, of].transpose(1, 2) for of in range(2))  # [blocks, block_tokens, G, D]
    torch.ops.flash_attn_3.fwd(
        qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim)),
        keys,
        values,
        out=out.view(num_tokens, heads, head_dim),
        cu_seqlens_q=tiles.prompt_rows.bounds,
        seqused_q=tiles.prompt_rows.num_new,
        seqused_k=contexts,
        max_seqlen_q=num_tokens,
        page_table=block_table,
        kv_batch_idx=table_rows,
        softmax_scale=scale,
        is_causal=True,
        num_splits=1,
    )


def _prompt_rows(tiles: QueryTiles, num_tokens: int) -> PromptRows:
    """Returns the rows of a step of num_tokens tokens as the library takes them: a row with one new token has none here, because
    decode attention computes it."""
    bounds = torch.nn.functional.pad(tiles.starts, (0, 1), value=num_tokens)
    return PromptRows(bounds, tiles.num_new * (tiles.num_new > 1))
