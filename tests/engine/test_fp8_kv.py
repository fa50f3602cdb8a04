"""Models that store keys and values as fp8: on the GPU's kernels (interpreted) and their reference implementations, and when KV is
saved and restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda.backend import check_capability
from engine.memory.arena import kv_views
from engine.null.runner import NullModel, Pacer
from loader.errors import UnsupportedModel
from loader.shapes.kv_dtypes import KV_CACHE_DTYPES, KV_FP8, kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CASES,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)
from tests.engine.test_host_tier import PROMPTS, preempted, undisturbed
from tests.engine.tier_bench import NUM_SLOTS, TierBench, make_models

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
OTHER = np.random.default_rng(12).integers(0, 211, 45).tolist()


def test_a_block_holds_its_values_and_their_scales() -> None:
    """Each byte of a block belongs to exactly one value or scale, and to no other block."""
    layers, heads, head_dim = 3, 2, 24
    group = KVGroupSpec("full", 8, layers * 2 * heads * 8 * kv_dtype_named(KV_FP8).head_bytes(head_dim), tuple(range(layers)))
    arena = torch.zeros(5 * group.block_bytes + 17, dtype=torch.uint8)
    kv, scales = kv_views(arena, group, (2, heads, head_dim), KV_FP8)
    assert scales is not None
    assert (kv.shape, scales.shape) == ((5, layers, 2, heads, 8, head_dim), (5, layers, 2, heads, 8))
    for number in range(5):
        kv[number] += 1 + number
        scales[number] += 101 + number
    blocks = arena[: 5 * group.block_bytes].view(5, group.block_bytes)
    for number, block in enumerate(blocks):
        assert (block == 1 + number).sum() == kv[0].numel()
        assert (block == 101 + number).sum() == scales[0].numel()
    assert (arena[5 * group.block_bytes :] == 0).all()


def prefilled_and_mixed(model: Any) -> np.ndarray:
    """Returns the logits of two rows in chunks, then of a decode row together with a chunk, then of two decode rows."""
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    put(table, 1, OTHER)
    parts = [model.logits(plan((0, 0, 30), (1, 0, 9)), table, True), model.logits(plan((0, 30, 1), (1, 9, 25)), table, True)]
    parts += [model.logits(plan((0, 31, 1), (1, 34, 1)), table)]
    return np.concatenate(parts)


def wanted_logits(made: Any) -> np.ndarray:
    with torch.inference_mode():
        first, second = (made(torch.tensor([tokens])).logits[0].numpy() for tokens in (PROMPT, OTHER))
    return np.concatenate((first[:30], second[:9], first[30:31], second[9:34], first[31:32], second[34:35]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the same model")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities, a GPU does not
@pytest.mark.parametrize("kind", ["gemma2", "phi3-partial-window"])
def test_the_gpus_model_equals_the_twins_and_both_are_near_the_truth(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("triton")
    from tests.engine.cuda_bench import load_cuda_model

    truth = wanted_logits(make_checkpoint(tmp_path, **CASES[kind] | {"num_hidden_layers": 2}))
    runner = compute_with(make_runner(make_memory()), use_kernels=False)
    twins = prefilled_and_mixed(load(runner, tmp_path, kv_cache_dtype=KV_FP8))
    ours = prefilled_and_mixed(load_cuda_model(tmp_path, kv_cache_dtype=KV_FP8))
    # a sum in another order may round a key to the next fp8 code, a sixteenth away, so the mean has the stricter limit
    spread = float(truth.std())
    assert np.abs(ours - twins).mean() < 2e-3 * spread
    assert np.abs(ours - twins).max() < 0.1 * spread
    error = np.abs(ours - truth)
    assert 1e-3 * spread < error.mean() < 0.1 * spread, "of weights drawn at random, which no rounding is kind to"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_models(made, llama=CASES["llama"], gemma=CASES["gemma2"])
    return made


class Fp8Bench(TierBench):
    def spec(self, name: str, **changes: Any) -> Any:
        return super().spec(name, **({"kv_cache_dtype": KV_FP8} | changes))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_saved_kv_is_read_with_the_scales_it_was_written_with(folder: Path, name: str) -> None:
    """Sequences whose KV is saved and restored go on with the tokens they would have had, also where they share their beginning."""
    bench = Fp8Bench(folder)
    gone, done = preempted(bench, name, 18, range(NUM_SLOTS))
    assert 0 < gone.saved_kv_tokens == done.restored_kv_tokens
    assert [recomputed for _, recomputed in bench.resumed.values()] == [1] * len(PROMPTS), "the last token only"
    assert bench.output == undisturbed(folder, name, Fp8Bench)
    plain = TierBench(folder)
    plain_gone, _ = preempted(plain, name, 18, range(NUM_SLOTS))
    assert len(gone.kv_slots_used) < len(plain_gone.kv_slots_used) / 2, "17 bytes a head instead of 64"


def test_saved_kv_of_another_type_is_left(folder: Path) -> None:
    bench = Fp8Bench(folder)
    bench.load("llama")
    bench.submit("llama", 3, PROMPTS[3], 4)
    bench.run("llama")
    gone = bench.evict("llama", range(NUM_SLOTS))
    assert gone.saved_kv_tokens > 0
    saved = {"kv_slots": gone.kv_slots_used, "kv_index": gone.kv_index}
    assert bench.load("llama", kv_cache_dtype="", **saved).restored_kv_tokens == 0
    bench.evict("llama")
    assert bench.load("llama", **saved).restored_kv_tokens == gone.saved_kv_tokens


def test_a_null_model_takes_as_little(folder: Path) -> None:
    bench = Fp8Bench(folder)
    spec = bench.spec("llama")
    config = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    (group,) = NullModel(spec, config, bench.configure, Pacer(0.0)).kv_groups
    assert group.block_bytes == 3 * 2 * 2 * 17 * BLOCK_TOKENS


def test_gpus_that_cannot_convert_it_refuse_it() -> None:
    check_capability(KV_CACHE_DTYPES[KV_FP8], (8, 9))
    check_capability(KV_CACHE_DTYPES[KV_FP8], (10, 0))
    with pytest.raises(UnsupportedModel, match=r"kv_cache_dtype: fp8 needs compute capability 8\.9; this GPU has 8\.0"):
        check_capability(KV_CACHE_DTYPES[KV_FP8], (8, 0))
