"""A model with windows behind the daemon: what it holds stays bounded while its text grows."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node

WINDOW, BATCHED_TOKENS, BLOCK_TOKENS = 256, 128, 16
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * BLOCK_TOKENS  # two layers' keys and values of two heads of 8, in float32


def test_kv_of_a_long_text_is_its_window(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "m", architecture="MistralForCausalLM", max_position_embeddings=4096, sliding_window=WINDOW)
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    most, window_bytes = 0, WINDOW // BLOCK_TOKENS * BLOCK_BYTES
    with Node(tmp_path, devices=["cpu=64MiB"], runner="torch", flags=flags) as node:
        end = time.monotonic() + SAFETY_S
        while most < window_bytes:  # the engine counts four times a second: on a busy machine a whole answer may fall between two
            assert time.monotonic() < end, f"never more than {most} bytes of KV"
            stream = Stream(node, "m", "word " * 300, 2500)
            while stream.alive:
                _, metrics = node.get("/metrics")  # takes a millisecond, where a command takes as long as many tokens
                held = [int(float(value)) for value in re.findall(r"^hearth_kv_bytes\{.*\} (\S+)$", metrics, re.MULTILINE)]
                most = max([most, *held])
                time.sleep(0.01)
            assert not stream.join().error
    assert most <= (-(-(WINDOW + BATCHED_TOKENS) // BLOCK_TOKENS) + 1) * BLOCK_BYTES
