"""Measures what latent attention takes on the cpu device in its two forms: queries that read the latents (absorbed), and keys and
values made of the latents first (expanded), at the sizes of DeepSeek-V2-Lite's layers, bfloat16, for one row of a step.

The forms take turns; a figure is the median of the fastest quarter. `chosen`: the form that the engine takes for so many queries.

usage: python -m benchmarks.latent_attention [--threads N]: one JSON line and a table.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

from engine.host.process import num_cores, prepare_process

prepare_process()  # before torch is imported

import torch  # noqa: E402

from benchmarks.formats import seconds  # noqa: E402
from benchmarks.run import machine, table  # noqa: E402
from engine.cpu import latents  # noqa: E402
from engine.ops.ops import LatentHeads  # noqa: E402

NUM_HEADS, RANK, PLAIN, ROPE, VALUE = 16, 512, 128, 64, 128
CALLS = 12


def measure(num_queries: int, context: int) -> dict[str, Any]:
    held = torch.randn(context, RANK + ROPE)
    up = torch.randn(NUM_HEADS * (PLAIN + VALUE), RANK).mul_(RANK**-0.5).bfloat16()
    heads = LatentHeads(up, NUM_HEADS, PLAIN, ROPE, VALUE)
    queries = torch.randn(num_queries, NUM_HEADS * (PLAIN + ROPE)).bfloat16()
    outs = {form: queries.new_empty(num_queries, NUM_HEADS * VALUE) for form in ("absorbed", "expanded")}
    scale = (PLAIN + ROPE) ** -0.5
    forms = {form: partial(latents.attend_row, queries, heads, held, scale, out, form == "absorbed") for form, out in outs.items()}
    took = seconds({form: [call] for form, call in forms.items()}, CALLS, time.perf_counter)
    torch.testing.assert_close(outs["absorbed"].float(), outs["expanded"].float(), rtol=0.1, atol=0.05)
    return {
        "queries": num_queries,
        "positions": context,
        **{f"{form} ms": round(own_s * 1e3, 2) for form, own_s in took.items()},
        "expanded / absorbed": round(took["expanded"] / took["absorbed"], 2),
        "chosen": "absorbed" if latents.absorbs(heads, num_queries) else "expanded",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_cores())
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    rows = [measure(queries, context) for context in (512, 4096) for queries in (16, 64, 128, 256, 512) if queries <= context]
    print(json.dumps({"benchmark": "latent_attention", "threads": options.threads, "rows": rows} | machine()))
    print(table(rows, {key: key for key in rows[0]}))


if __name__ == "__main__":
    main()
