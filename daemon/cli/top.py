"""Implements `hearth top`, which shows how memory is divided, what runs, and the last swaps. It is drawn with plain ANSI codes, and
with colours only on a terminal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any

from daemon.cli.client import WAITING, Client, CommandError
from daemon.cli.drafts import acceptance
from daemon.cli.models import LEFT_OUT
from daemon.cli.node import host_memory
from daemon.cli.table import size, table
from daemon.errors import EXIT_USAGE

# characters of a bar by kind; weights are drawn as the letter of their model
_FILL = {"work": "#", "kv": "=", "cache": "-", "reserved": ".", "free": " "}
_KINDS = "letters weights, = KV, - cached prefixes, . reserved KV, # work space"
_COLOURS = (39, 208, 78, 170, 220, 45, 203, 141)
_TIMELINE_S = 120.0
_FIRST_LOOK_S = 0.5
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def top(client: Client, options: argparse.Namespace) -> None:
    if not 0.1 <= options.every <= 3600:
        message = f"--every: {options.every:g} must be from 0.1 to 3600 seconds"
        raise CommandError(EXIT_USAGE, {"code": "invalid_request", "message": message, "details": {}})
    before = client.get("/control/v1/top")
    if options.json:
        print(json.dumps(before, indent=1))
        return
    live = sys.stdout.isatty() and not options.once
    time.sleep(min(_FIRST_LOOK_S, options.every))
    if not live:
        print("\n".join(lines(client.get("/control/v1/top"), before, shutil.get_terminal_size().columns, False)))
        return
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        while True:
            try:
                now = client.get("/control/v1/top")
            except CommandError as error:
                sys.stdout.write(f"\x1b[H{WAITING}\x1b[K")
                sys.stdout.flush()
                client.until_back(error)
                continue
            columns, rows = shutil.get_terminal_size()
            shown = lines(now, before, columns, True)[: rows - 1]
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
            sys.stdout.flush()
            before = now
            time.sleep(options.every)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")


def lines(now: dict[str, Any], before: dict[str, Any], columns: int, colours: bool) -> list[str]:
    """Returns the lines of `hearth top`, none longer than `columns` characters. now, before: two snapshots from the daemon, whose
    differences give the rates. colours: whether to colour the bars."""
    passed_s = max(now["time"] - before["time"], 1e-3)
    letters = _letters(now)
    counters = now["counters"]
    rate = (counters["tokens"] - before["counters"]["tokens"]) / passed_s
    node = now["node"]
    state = "draining" if node["draining"] else "ready" if node["ready"] else f"not ready: {node['reason']}"
    started = counters["requests"] - before["counters"]["requests"]
    head = f"hearthd {state} | {counters['open']} open, {counters['queued']} waiting | {max(0.0, started / passed_s):.1f} ended/s"
    found = [_cut(f"{head} | {max(0.0, rate):.0f} tok/s", columns), ""]
    for device in now["devices"]:
        found += _device(device, letters, columns, colours)
    found.append(_cut(f"({_KINDS})", columns))
    if now["host_tier"]["bytes"]:
        found.append(_cut(host_memory(now["host_tier"]), columns))
    found.append("")
    found += [_cut(line, columns) for line in _models(now, before, passed_s, letters).splitlines()]
    found += [_cut(line, columns) for line in _adapters(now)]
    found += ["", _cut(_timeline(now, columns), columns)]
    found += [_cut(_swap(row, now["time"]), columns) for row in now["swaps"][-5:]]
    return found


def _letters(now: dict[str, Any]) -> dict[str, str]:
    """Returns a letter for each model, name -> letter, by the order of the names, so that it stays the same as long as the same
    models are registered. With more than 52 models, letters repeat."""
    names = sorted(model["name"] for model in now["models"])
    return {name: _LETTERS[at % len(_LETTERS)] for at, name in enumerate(names)}


def _device(device: dict[str, Any], letters: dict[str, str], columns: int, colours: bool) -> list[str]:
    free_bytes = sum(part["bytes"] for part in device["parts"] if part["kind"] == "free")
    state = "down" if not device["up"] else f"loads {device['loading']}" if device["loading"] else f"{size(free_bytes)} free"
    waiting = f", {device['waiting']} models wait" if device["waiting"] else ""
    title = f"{device['name']}  {size(device['budget_bytes'])}, {state}{waiting}"
    if device["problem"]:
        title += f"; {device['problem']}"
    return [_cut(title, columns), _bar(device, letters, max(10, columns - 2), colours)]


def _bar(device: dict[str, Any], letters: dict[str, str], width: int, colours: bool) -> str:
    """Returns a bar for a device's memory, in brackets: `width` characters, of which each kind of use has its own, and each model's
    weights have the model's letter. The ends of the parts are rounded, not their lengths, so that the parts together have the right
    width. colours: whether to add ANSI codes that colour each model's part."""
    text, at, done = "", 0, 0
    for part in device["parts"]:
        done += part["bytes"]
        end = round(width * done / max(1, device["budget_bytes"]))
        letter = letters.get(part["model"], "?")
        fill = (letter if part["kind"] == "weights" else _FILL.get(part["kind"], "?")) * (end - at)
        if colours and fill and part["model"]:
            colour = _COLOURS[_LETTERS.find(letter) % len(_COLOURS)]
            fill = f"\x1b[38;5;{colour}m{fill}\x1b[0m"
        text, at = text + fill, end
    return f"[{text}{' ' * (width - at)}]"


def _models(now: dict[str, Any], before: dict[str, Any], passed_s: float, letters: dict[str, str]) -> str:
    shown = [model for model in now["models"] if model["state"] not in LEFT_OUT]
    if not shown:
        return "no model is loaded"
    earlier = {model["name"]: model for model in before["models"]}
    accepted = {model["name"]: acceptance(model, earlier.get(model["name"])) for model in shown}
    with_drafts = any(accepted.values())
    rows = []
    for model in shown:
        name = model["name"]
        tokens = now["tokens"].get(name, 0) - before["tokens"].get(name, 0)
        rows.append(
            (
                letters[name],
                name if len(name) <= 24 else f"{name[:23]}~",
                model["state"],
                size(model["weights_bytes"]),
                size(model["kv_bytes"]),
                str(model["active"]),
                str(model["queued"]),
                f"{max(0.0, tokens / passed_s):.0f}",
                *((accepted[name],) if with_drafts else ()),
            )
        )
    header = ("", "MODEL", "STATE", "WEIGHTS", "KV", "RUNS", "WAITS", "TOK/S", *(("ACCEPTED",) if with_drafts else ()))
    return table(header, rows, frozenset({3, 4, 5, 6, 7, 8}))


def _adapters(now: dict[str, Any]) -> list[str]:
    """Returns a line for each model that has LoRA adapters in a device's memory: how many, their bytes and their names. now: the
    daemon's snapshot."""
    lines = []
    for model in now["models"]:
        if resident := model.get("adapters"):
            count = f"{len(resident)} of {model['num_adapters']} in memory, {size(sum(resident.values()))}"
            lines.append(f"adapters of {model['name']}: {count}: {', '.join(sorted(resident))}")
    return ["", *lines] if lines else []


def _timeline(now: dict[str, Any], columns: int) -> str:
    """Returns a line with the loads of the last two minutes, as characters from left to right: l is a load, e a load for which
    models were evicted, f one that forced busy models out. now: the daemon's snapshot."""
    label, end = f"swaps of the last {_TIMELINE_S:.0f} s [", "] l load, e evicts, f forces"
    width = max(10, columns - len(label) - len(end))
    cells = ["-"] * width
    for row in now["swaps"]:
        ago_s = now["time"] - row["begun"]
        if 0 <= ago_s < _TIMELINE_S:
            at = min(width - 1, int(width * (1 - ago_s / _TIMELINE_S)))
            cells[at] = max(cells[at], "f" if row["forced"] else "e" if row["victims"] else "l", key="-lef".index)
    return label + "".join(cells) + end


def _swap(row: dict[str, Any], now_s: float) -> str:
    left = ", ".join(victim["name"] for victim in row["victims"])
    how = f"{row['load_s']:.2f} s from {row['source']}" if row["source"] else row["outcome"] or "under way"
    return f"{row['begun'] - now_s:7.0f} s  {row['model']} on {row['device']}: {how}" + (f"; {left} left" if left else "")


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: max(0, columns - 1)]}~"
