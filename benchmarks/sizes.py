"""The sizes of large published models on devices that are not there, by their config.json alone: what `hearth plan --config` says
of each, as the table of docs/reference/sizes.md.

usage: python -m benchmarks.sizes
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from daemon.cli import main as cli
from daemon.errors import EXIT_NO_FIT

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "published"
# the file of CONFIGS: the model's name, and the devices
MODELS = {
    "llama-3.1-8b": ("Llama 3.1 8B", "cuda=80GiB"),
    "gpt-oss-20b": ("gpt-oss 20B", "cuda=24GiB"),
    "gpt-oss-120b": ("gpt-oss 120B", "cuda=80GiB"),
    "deepseek-v2-lite": ("DeepSeek-V2-Lite", "cuda=48GiB"),
    "glm-4.7-flash": ("GLM-4.7-Flash", "cuda=80GiB"),
    "qwen3-235b-a22b": ("Qwen3 235B-A22B", "cuda=8x80GiB"),
    "qwen3-235b-a22b-fp8": ("Qwen3 235B-A22B FP8", "cuda=4x80GiB"),
    "qwen3-next-80b-a3b": ("Qwen3-Next 80B-A3B", "cuda=4x80GiB"),
    "deepseek-v3": ("DeepSeek-V3", "cuda=8x141GiB"),
    "kimi-k2.5": ("Kimi K2.5", "cuda=8x80GiB"),
    "llama-4-scout": ("Llama 4 Scout", "cuda=2x141GB"),
}
HEADER = ("Model", "Matrices", "Parameters", "of a token", "Weights", "KV a token", "Devices", "Left for KV", "Tokens")


def planned(name: str, devices: str) -> dict[str, Any]:
    """Returns `hearth plan --config` of one model as JSON."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as told:
        shutil.copyfile(CONFIGS / f"{name}.json", Path(folder) / "config.json")
        code = cli.run(["plan", "--json", "--config", folder, "--devices", devices])
    if code not in (0, EXIT_NO_FIT):  # with that one, no request of the greatest length fits
        raise SystemExit(f"{name} on {devices}: exit code {code}: {told.getvalue()}")
    value: dict[str, Any] = json.loads(told.getvalue())
    return value


def row(name: str) -> tuple[str, ...]:
    title, devices = MODELS[name]
    plan = planned(name, devices)
    share = plan["shares"][-1]
    settings, num_devices = plan["settings"], share["devices"]["num_devices"]
    each = f"{devices.partition('=')[2].split('x')[-1]}"
    per_token = sum(need["token_bytes"] for need in plan["kv"])
    growing = sum(need["token_bytes"] for need in plan["kv"] if not need["window_tokens"])
    kib = f"{per_token / 1024:.1f} KiB" + (f", {growing / 1024:.1f} behind the windows" if growing != per_token else "")
    return (
        title,
        settings["weight_format"] or settings["dtype"],
        f"{plan['num_parameters'] / 1e9:.1f} B",
        f"{plan['active_parameters'] / 1e9:.1f} B",
        f"{plan['weights_bytes'] / 2**30:.1f} GiB",
        kib,
        f"{num_devices} × {each}",
        f"{share['free_bytes'] * num_devices / 2**30:.1f} GiB",
        f"{share['tokens']:,}",
    )


def table() -> str:
    rows = [HEADER, ("---",) * len(HEADER), *(row(name) for name in MODELS)]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else "|---" * len(HEADER) + "|" for cells in rows)


if __name__ == "__main__":
    print(table())
