"""Implements the commands `hearth ps|models|load|unload|pin|unpin|enable|disable`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any
from urllib.parse import quote, urlencode

from daemon.cli.client import Client, CommandError
from daemon.cli.drafts import acceptance
from daemon.cli.table import ago, duration, size, table
from daemon.engines.kernels import sentence as kernels_sentence
from daemon.errors import EXIT_USAGE
from daemon.operate.control_status import EXIT_OF_STATUS

ROW_KEYS = (
    "name",
    "kind",
    "state",
    "device",
    "weights_bytes",
    "kv_bytes",
    "active",
    "queued",
    "pinned",
    "last_used",
    "keep_alive_s",
    "leaves",
)
# Fields of the rows of some models: those that have drafted tokens, whose devices have copies of experts, or that are drained.
OPTIONAL_KEYS = ("drafted_tokens", "accepted_tokens", "expert_copies", "drained")
RIGHT = ("WEIGHTS", "BITS", "KV", "ACTIVE", "QUEUED")  # columns of numbers
NOT_TO_BE_LOADED = ("disabled", "incomplete", "refused")
LEFT_OUT = ("cold", "head", *NOT_TO_BE_LOADED)  # `ps` and `top` leave models in these states out
DONE = {
    "load": "is loaded",
    "unload": "is unloaded",
    "pin": "is pinned",
    "unpin": "is no longer pinned",
    "enable": "is enabled",
    "disable": "is disabled",
}


def ps(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth ps`: shows the models that are on a device, being loaded, warm, paused or failed, and the adapters that are on a
    device. Models that cannot be loaded are only counted."""
    found = client.get("/control/v1/models")
    held = [row for row in found if row["state"] != "adapter" or row["device"]]
    rows = [row for row in held if row["state"] not in LEFT_OUT]
    num_others = sum(row["state"] in NOT_TO_BE_LOADED for row in found)
    if options.json:
        shown = [{key: row[key] for key in ROW_KEYS} | {key: row[key] for key in OPTIONAL_KEYS if key in row} for row in rows]
        print(json.dumps(shown, indent=1))
    else:
        print(_table(rows) if rows else "no model is loaded; `hearth models` lists all")
        compiling = {row["device"]: row["kernels"] for row in rows if row.get("kernels")}
        for device, told in compiling.items():
            print(f"\n{kernels_sentence(device, told)}")
        _tell_drained(found)
        for row in found:
            if "not_warmed" in row:
                print(f"\n{row['name']} was {row['not_warmed']}")
        if num_others:
            print(f"\n{num_others} cannot be loaded; `hearth models` says why")


def models(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth models`: shows all models, notes such as which parts of a checkpoint are not used, the reason for each model
    that cannot run, and the further names of models."""
    rows = client.get("/control/v1/models")
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("there are no models below the models folder; one is a folder with config.json, *.safetensors and tokenizer.json")
        status = client.get("/control/v1/status")
        if status.get("models_dir_is_model"):
            print(f"{status['models_dir']} is a model's folder itself; name the folder that holds it (hearthd --models)")
    else:
        print(_table(rows, with_formats=True))
        if embedders := [row["name"] for row in rows if row.get("task") == "embed"]:
            print(f"\nembeddings, and no text, are made by {', '.join(embedders)}")
        if scorers := [row["name"] for row in rows if row.get("task") == "score"]:
            print(f"\npairs of texts are scored, and no text is made, by {', '.join(scorers)}")
        _tell_drained(rows)
        for row in rows:
            for note in row.get("notes", ()):
                print(f"\n{row['name']}: {note}")
            if row["state"] == "head":
                print(f"\n{row['name']}: {row['reason']}")
            if row["state"] in ("refused", "incomplete", "failed", "down"):
                print(f"\n{row['name']} is {row['state']}: {row['reason']}")
    if not options.json and (names := client.get("/control/v1/names")):
        print("\n" + _names(names))


def _tell_drained(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "drained" in row:
            print(f"\n{row['name']} takes no new requests (hearth drain); `hearth resume {row['name']}` ends that")


def _table(rows: list[dict[str, Any]], with_formats: bool = False) -> str:
    """Returns a table of models. rows: the models as the daemon lists them. with_formats: whether the table says how weights are
    held in memory: their weight format or dtype, and the bits that a parameter takes on average."""
    with_leaves = any(row["keep_alive_s"] is not None for row in rows)
    with_drafts = any(map(acceptance, rows))
    last = (*(("LEAVES",) if with_leaves else ()), *(("ACCEPTED",) if with_drafts else ()))
    formats = ("HELD AS", "BITS") if with_formats else ()
    header = ("NAME", "STATE", "DEVICE", "WEIGHTS", *formats, "KV", "ACTIVE", "QUEUED", "PINNED", "LAST USED", *last)
    lines = [
        (
            row["name"],
            _state(row),
            row["device"] or row.get("upstream") or (f"{row['num_ranks']} devices" if row.get("num_ranks", 1) > 1 else "-"),
            "-" if row.get("upstream") else size(row["weights_bytes"]),
            *((row.get("held_as", "-"), _bits(row)) if with_formats else ()),
            "-" if row.get("upstream") else size(row["kv_bytes"]),
            str(row["active"]),
            str(row["queued"]),
            "yes" if row["pinned"] else "",
            "-" if row["state"] == "adapter" else ago(row["last_used"]),
            *((_leaves(row),) if with_leaves else ()),
            *((acceptance(row),) if with_drafts else ()),
        )
        for row in rows
    ]
    return table(header, lines, frozenset(at for at, name in enumerate(header) if name in RIGHT))


def _bits(row: dict[str, Any]) -> str:
    return "-" if row.get("bits_per_weight") is None else f"{row['bits_per_weight']:g}"


def _leaves(row: dict[str, Any]) -> str:
    """Returns, as text, when the model is evicted from its device if no request comes; "" if it stays."""
    if row["keep_alive_s"] is None or row["pinned"] or not row["device"]:
        return ""
    if row["leaves"] is not None:
        return f"in {duration(max(0.0, row['leaves'] - time.time()))}"
    return f"{duration(row['keep_alive_s'])} after a request"


def _names(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the names that the settings' table [names] defines, each with the models that it leads to, followed by
    the reasons why some of these models cannot be used. rows: the daemon's rows, one for each name."""
    lines, told = [], []
    for row in rows:
        targets = ", ".join(each["name"] for each in row["targets"])
        lines.append((row["name"], targets, "a model hides it" if row["hidden"] else row["leads_to"] or "none can serve"))
        told += [f"{each['name']}: {each['problem']}" for each in row["targets"] if each["problem"]]
    return "\n\n".join([table(("FURTHER NAME", "LEADS TO", "NOW"), lines, frozenset()), *dict.fromkeys(told)])


def _state(row: dict[str, Any]) -> str:
    total = row.get("bytes_total")
    if row["state"] == "loading" and total:
        return f"loading {100 * row['bytes_done'] // total} %"
    if row["state"] == "adapter":
        return f"adapter of {row['base']}"
    return f"upstream {row['state']}" if row.get("upstream") else str(row["state"])


def command(client: Client, options: argparse.Namespace) -> int | None:
    """Runs load, unload, pin, unpin, enable or disable, which are the same request with different verbs. Returns the exit code if
    the command was done but could not be saved, otherwise None. Raises CommandError if it failed."""
    verb, name = options.command, options.name
    path = f"/control/v1/models/{quote(name)}/{verb}"
    folder = getattr(options, "adapter", None)
    if folder is None and getattr(options, "replace", False):
        error = {"code": "invalid_request", "message": "--replace: goes with --adapter DIR", "details": {}}
        raise CommandError(EXIT_USAGE, error)
    if folder is not None:
        path += "?" + urlencode({"adapter": os.path.abspath(folder), "replace": int(options.replace)})
    elif getattr(options, "no_wait", False):
        path += "?wait=0"
    if getattr(options, "to", "cold") != "cold":
        path += f"?to={options.to}"
    lines = client.lines("POST", path)
    if verb in ("load", "pin") and folder is None and not options.json and sys.stdout.isatty():
        from daemon.cli.progress import show

        lines = show(name, lines)
    result = client.result(lines)
    if options.json:
        print(json.dumps(result))
    elif result.get("waiting"):
        print(f"{name} is {'pinned and ' if verb == 'pin' else ''}being loaded")
    else:
        print(f"{name} {DONE[verb]}" + _extra(verb, result))
    if result.get("saved", True):
        return None
    if not options.json:
        print(f"hearth: {result['error']['message']}", file=sys.stderr)
    return EXIT_OF_STATUS[result["status"]]


def _extra(verb: str, result: dict[str, Any]) -> str:
    if result["state"] == "adapter":
        return f", an adapter of {result['base']}"
    if verb == "unload" and result["state"] in ("loading", "ready"):
        return f"; requests that wait for it bring it back ({result['state']})"
    return f" ({result['state']})" if verb in ("pin", "enable", "unload") and result["state"] != "absent" else ""
