"""Measures what fp8 KV costs in quality: the same model as it is and with kv_cache_dtype = "fp8", over the same text
(benchmarks/quantize.py says which, and what the columns are).

Every token reads its predecessors' keys and values from the cache, also within a prompt, so this is what decoding reads, too.
Computed on the CPU by the kernels' reference implementations (engine/ops/reference.py): the codes and scales are a GPU's. `scale`
says what the values are divided by: "head" is what the engine does, a power of two for each token and head; "1" is what others do
where a checkpoint brings no scales: nothing, clamped to 448. `keys_times`: so much larger are all keys made and so much smaller all
queries, which is the same model (its perplexity shows it), as one with other habits might have been trained.

usage: python -m benchmarks.kv_cache_dtype [MODEL_DIR ...] [--tokens N] [--dtype D]: four JSON lines a model, and a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.host.process import prepare_process

prepare_process()  # before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.forward import load_model, make_table  # noqa: E402
from benchmarks.quantize import CONTEXT, DEMO_MODELS, quality, text_pieces  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from engine.cpu.model import CpuModel  # noqa: E402
from engine.ops import reference  # noqa: E402
from loader.shapes.kv_dtypes import KV_FP8  # noqa: E402
from loader.shapes.kv_layout import kv_bytes_per_token  # noqa: E402

ROWS, LARGER_KEYS = 2, 128
E4M3_MAX, SCALE_OF_ONE = 448.0, 127


def unscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes with scales of one; takes quantize_fp8's place."""
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.full(x.shape[:-1], SCALE_OF_ONE, dtype=torch.uint8)


@contextmanager
def scaled_by(scale: str) -> Iterator[None]:
    """Has keys and values that are written meanwhile divided by what `scale` says: "head" or "1", see above."""
    original = reference.quantize_fp8
    if scale == "1":
        reference.quantize_fp8 = unscaled
    try:
        yield
    finally:
        reference.quantize_fp8 = original


def enlarge_keys(model: CpuModel, factor: float) -> None:
    """factor: a power of two, so that nothing is rounded."""
    queries, keys = (heads * model.shape.head_dim for heads in (model.shape.num_heads, model.shape.num_kv_heads))
    assert model._model is not None
    for layer in model._model.layers:
        weight = layer.attention.qkv_weight
        weight[:queries] /= factor
        weight[queries : queries + keys] *= factor


def compare(path: Path, dtype: str, num_tokens: int) -> list[dict[str, Any]]:
    loaded = [load_model(path, dtype, ROWS, CONTEXT, kv_cache_dtype=kv_cache_dtype) for kv_cache_dtype in ("", KV_FP8)]
    models, shape = [one[0] for one in loaded], loaded[0][1]
    dtype = shape.dtype if dtype == "auto" else dtype
    sequences, pieces = make_table(ROWS, CONTEXT, shape.vocab_size), text_pieces(path, num_tokens)
    per_token = {"bytes_per_token": kv_bytes_per_token(shape, dtype), "fp8_bytes_per_token": kv_bytes_per_token(shape, KV_FP8)}
    about = {"benchmark": "kv_cache_dtype", "model": path.name, "dtype": dtype}
    lines = []
    for keys_times in (1, LARGER_KEYS):
        for model in models if keys_times > 1 else ():
            enlarge_keys(model, keys_times)
        for scale in ("head", "1"):
            with scaled_by(scale):
                cost = quality(models, sequences, pieces, "fp8")
            lines.append({**about, "scale": scale, "keys_times": keys_times, **per_token, **cost})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.kv_cache_dtype", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", help="checkpoint folders; default: the demo's")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    print(json.dumps({"benchmark": "kv_cache_dtype", **machine()}))
    rows = []
    for path in options.models or sorted(one for one in DEMO_MODELS.iterdir() if (one / "config.json").exists()):
        for line in compare(path, options.dtype, options.tokens):
            print(json.dumps(line), flush=True)
            rows.append(line)
    print(f"\n{table(rows, {key: key.replace('_', ' ') for key in rows[0] if key != 'benchmark'})}")


if __name__ == "__main__":
    main()
