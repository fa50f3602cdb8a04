"""Sets up the models that a daemon serves in a benchmark on one GPU, and computes what they ask of the machine: device memory, host
memory, disk.
"""

from __future__ import annotations

import argparse
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_drives import checkpoints_folder
from benchmarks.gpu_shapes import BLOCK_TOKENS, shape_of
from benchmarks.server import Server
from config.units import machine_memory_bytes
from loader.shapes import kv_layout
from loader.shapes.model_shape import ModelShape
from loader.sizes import layout
from loader.sizes.gpu_sizing import gpu_work_space_bytes

DTYPE, MAX_SEQUENCES = "bfloat16", 256
TINY = ["--dtype", "float32", "--threads", "1"]  # flags of a node without a GPU, whose models are small


@dataclass(frozen=True, slots=True)
class Node:
    """models: name -> shape (gpu_shapes.CONFIGS). num_resident: how many of them are on the device at a time. budget_bytes: of the
    device; 0: the default. host_tier_bytes: 0: none. drafts: whether the models may be drafted for.
    same_files: whether all models of a shape are one checkpoint."""

    models: Mapping[str, str]
    num_resident: int
    max_model_len: int
    max_num_batched_tokens: int = 4096
    budget_bytes: int = 0
    host_tier_bytes: int = 0
    drafts: bool = True
    same_files: bool = False

    @property
    def device(self) -> str:
        return "cuda:0" + (f"={self.budget_bytes}" if self.budget_bytes else "")

    def flags(self, folder: pathlib.Path) -> list[str]:
        flags = ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        return [*flags, *host_tier(self.host_tier_bytes), *settings(folder, self.models, self.max_model_len, self.drafts)]

    def device_bytes(self) -> int:
        """Returns what the device must have room for: weights of the largest models that are there at a time, a sequence of full
        length of each, and one step's work space."""
        shapes = sorted(map(shape_of, self.models.values()), key=_weights_bytes)[-self.num_resident :]
        kv_bytes = sum(
            -(-self.max_model_len // BLOCK_TOKENS) * kv_layout.block_bytes(shape, DTYPE, BLOCK_TOKENS) for shape in shapes
        )
        work_bytes = max(gpu_work_space_bytes(shape, DTYPE, self.max_num_batched_tokens, MAX_SEQUENCES) for shape in shapes)
        return sum(map(_weights_bytes, shapes)) + kv_bytes + work_bytes

    def checkpoints(self) -> Counter[str]:
        """Returns how many checkpoints of each shape its models have."""
        shapes = Counter(self.models.values())
        return Counter(dict.fromkeys(shapes, 1)) if self.same_files else shapes

    def disk_bytes(self) -> int:
        return checkpoints_bytes(self.checkpoints())


def checkpoints_bytes(checkpoints: Mapping[str, int]) -> int:
    """Returns what the weights of so many checkpoints of each shape take on a drive."""
    return sum(num * _weights_bytes(shape_of(shape)) for shape, num in checkpoints.items())


def _weights_bytes(shape: ModelShape) -> int:
    return layout.weights_bytes(shape, DTYPE)


def settings(
    folder: pathlib.Path, models: Mapping[str, Any] | str | list[str], max_model_len: int, drafts: bool = True
) -> list[str]:
    """Returns flags for a file with the longest context of each model: by default a quarter of the device is kept for one such
    request. drafts: whether they may be drafted for."""
    path = folder / "node.toml"
    more = "" if drafts else 'speculator = "none"\n'
    path.write_text("".join(f'[models."{name}"]\nmax_model_len = {max_model_len}\n{more}' for name in models))
    return ["--config", str(path)]


def host_tier(wanted_bytes: int) -> list[str]:
    """Returns the flags of a host tier: a smaller one on a machine that has less memory now. A virtual one may get its memory as it
    is used, and the daemon refuses what it does not see."""
    if not wanted_bytes:
        return ["--host-tier-bytes", "0"]
    return ["--host-tier-bytes", f"{min(wanted_bytes, machine_memory_bytes() * 3 // 4) >> 20}MiB"]


def main(program: str, description: str | None, node: Node, run: Callable[[pathlib.Path, bool], None]) -> None:
    """Runs the script of a benchmark that serves one node. run: called with the folder for its checkpoints, and with whether models
    are tiny and computed on the cpu device (--tiny)."""
    parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, computed on the cpu device")
    options = parser.parse_args()
    with checkpoints_folder(0 if options.tiny else node.disk_bytes()) as folder:
        run(folder, options.tiny)


def last_source(server: Server, name: str) -> str:
    """Returns where the model's last load found its weights: disk, host or device (left there by an engine before)."""
    rows = [row for row in server.cli("history", name, "--json") if row["source"]]
    return str(rows[-1]["source"])
