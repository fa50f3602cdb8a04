"""Loads the GPU's model on the CPU, where its kernels are interpreted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.plain_memory import PlainRange
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.protocol import LoadModel
from loader.formats.registry import FORMATS, stored_format
from loader.models.catalog import scan_one
from loader.models.drafters import joined
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.sizes import layout
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN
from tests.kernel_cache import CACHE_DIR

PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
OTHER = np.random.default_rng(12).integers(0, 211, 45).tolist()
KINDS = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3-partial-window",
    "olmo2",
    "cohere2",
    "qwen2-moe",
    "qwen3-next",
    "glm4-moe",
    "deepseek-v3",
    "gpt-oss",
    "llama4",
]
INTERPRETED = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities, a GPU does not
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the same model"),
]


def load_cuda_model(
    folder: Path,
    device: str = "cpu",
    dtype: str = "float32",
    max_graph_rows: int = 0,
    kv_cache_dtype: str = "",
    max_graph_tokens: int = 0,
    speculator: str = "none",
    head: str = "",
    quantize: str = "",
) -> CudaModel:
    limits = (1 << 20, 0, 0, MAX_LEN, 8, [1])
    seen = scan_one(folder)
    assert seen.shape is not None, seen.reason or seen.error
    held = FORMATS[quantize] if quantize else stored_format(seen.shape)
    fingerprint = joined(seen, scan_one(head)).fingerprint if head else seen.fingerprint
    spec = LoadModel(1, "tiny", str(folder), dtype, fingerprint, *limits, held.name)
    spec = msgspec.structs.replace(spec, kv_cache_dtype=kv_cache_dtype, speculator=speculator, head_path=head)
    with ExitStack() as stack:
        source = open_checkpoint(folder, spec.fingerprint, stack, in_place=False, predicts=spec.predicts, head=head)
        on_host = PlainRange(layout.weights_bytes(source.shape, dtype, held), "cpu")
        sink = HostSink(on_host.memory.numpy().data)
        stream_weights(source, dtype, sink, StagingRing(), lambda done, total: None, lambda: False, held)
    weights = PlainRange(on_host.num_bytes, device)
    weights.memory.copy_(on_host.memory)
    arena = torch.full((4 << 20,), 0xFF, dtype=torch.uint8, device=device)  # NaN in every dtype
    return CudaModel(CudaOps(CACHE_DIR), spec, source.shape, weights, arena, BLOCK_TOKENS, max_graph_rows, max_graph_tokens)


def expected(made: tuple[Path, Any], tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return made[1](torch.tensor([tokens])).logits[0].numpy()


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(wanted).max() > 1.0, "the checkpoint's logits are too small to tell anything"
    assert np.abs(actual - wanted).max() < 2e-4
