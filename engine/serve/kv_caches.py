"""Makes the KV cache of one model: a block pool for each KV group, with the group's part of the chunks that are reserved for the
model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol import LoadModel
from loader.shapes import kv_layout
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache

KINDS = ("full", "window", "chunked", "latent", "state")
_BOUNDED = ("window", "chunked", "state")


def make_kv_cache(spec: LoadModel, groups: Sequence[KVGroupSpec], chunks: ChunkPool, max_num_batched_tokens: int) -> KVCache:
    """Returns a new KV cache of a model, which takes chunks from `chunks`. groups: the model's KV groups, among which the chunks
    reserved for the model are divided (split_reserve). max_num_batched_tokens: most tokens of one step. Raises MemoryError if the
    reserved chunks are not free, ValueError for KV groups that this engine cannot hold."""
    for group in groups:
        if group.kind not in KINDS or (group.kind in _BOUNDED) != (group.window_tokens > 0):
            raise ValueError(
                f"model {spec.model}: KV group of kind {group.kind} with window_tokens {group.window_tokens}; "
                f"supported: {', '.join(KINDS)}, and a window of at least 1 token"
            )
    needs = [kv_layout.group_chunks(group, spec.max_model_len, max_num_batched_tokens, chunks.chunk_bytes) for group in groups]
    made: list[GroupCache] = []
    try:
        for group, share in zip(groups, split_reserve(spec.kv_reserved_chunks, needs), strict=True):
            pool = BlockPool(chunks, group.block_bytes, share)
            how = (group.block_tokens, group.window_tokens)
            made.append(GroupCache(pool, *how, is_chunked=group.kind == "chunked", snapshot_tokens=group.snapshot_tokens))
    except MemoryError as error:
        for cache in made:
            cache.close()
        raise MemoryError(f"model {spec.model}, {spec.kv_reserved_chunks} reserved chunks in all: {error}") from None
    return KVCache(made)


def split_reserve(num_chunks: int, needs: Sequence[int]) -> list[int]:
    """Divides num_chunks reserved chunks among a model's KV groups, and returns the number of each group's chunks. needs: the
    chunks that a sequence of full length needs in each group. Each group gets as many as it needs or, if there are too few, a
    number in proportion. The first group also gets all chunks left over."""
    total = sum(needs)
    parts = list(needs) if num_chunks >= total else [num_chunks * need // total for need in needs]
    parts[0] += num_chunks - sum(parts)
    return parts
