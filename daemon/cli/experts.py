"""Implements `hearth experts`, which shows how evenly tokens are spread over the experts of a model."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from daemon.cli.client import Client
from daemon.cli.table import table


def experts(client: Client, options: argparse.Namespace) -> None:
    told = client.get(f"/control/v1/experts/{quote(options.name)}")
    if options.json:
        print(json.dumps(told, indent=1))
    elif not told["tokens"]:
        print(f"no token has passed through the experts of {told['model']} since hearthd started")
    else:
        print(_table(told["layers"]))
        all_layers = f"{told['tokens']} tokens at experts in {len(told['layers'])} layers"
        print(f"\n{all_layers}; the busiest have {told['imbalance']:.2f} times as many as the mean")
        if len(told["devices"]) > 1:
            print("\n" + _devices(told["devices"], told["tokens"]))


def _table(layers: list[dict[str, Any]]) -> str:
    header = ("LAYER", "TOKENS", "BUSIEST", "ITS SHARE", "IMBALANCE", "NEVER CHOSEN")
    lines = [
        (
            str(row["layer"]),
            str(row["tokens"]),
            str(row["busiest"]),
            _share(row["busiest_tokens"], row["tokens"]),
            f"{row['imbalance']:.2f}",
            f"{row['num_unused']} of {len(row['counts'])}",
        )
        for row in layers
    ]
    return table(header, lines, frozenset(range(len(header))))


def _devices(devices: dict[str, int], total: int) -> str:
    lines = [(name, str(tokens), _share(tokens, total)) for name, tokens in devices.items()]
    return table(("DEVICE", "TOKENS", "SHARE"), lines, frozenset({1, 2}))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
