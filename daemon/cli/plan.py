"""Implements `hearth plan`, `hearth evict` and `hearth history`, which show the models that would be evicted to load others or to
free memory, and those that were evicted.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from urllib.parse import quote

from daemon.cli import models
from daemon.cli.client import Client, CommandError
from daemon.cli.table import duration, size, table
from daemon.errors import EXIT_NO_FIT, EXIT_NOT_FOUND, EXIT_USAGE

SCORE = "SCORE: seconds a second that its reloads would cost, by how often it is asked for, per GiB its leaving frees"
VERDICTS = {
    "there": "is there",
    "fits": "would be loaded",
    "evicts": "would be loaded",
    "forces": "would wait",
    "waits": "would wait",
    "refused": "cannot be loaded",
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FOLDER",
        help="what the model in this folder would take, by its config.json; no daemon is asked",
    )
    defaults: dict[str, tuple[str, object]] = {}  # of the options that only --config has a use for: flag and default, by attribute

    def add(flag: str, default: str | int | None, **words: Any) -> None:
        defaults[parser.add_argument(flag, default=default, **words).dest] = flag, default

    add("--devices", None, metavar="KIND=[Nx]BYTES", help="with --config: on these devices, as in cuda=8x80GiB or cpu=64GiB")
    add("--tensor", None, metavar="N", type=int, help="with --devices: the tensor of the model's parallel")
    add("--expert", None, metavar="N", type=int, help="with --devices: the expert of the model's parallel")
    add("--pipeline", None, metavar="N", type=int, help="with --devices: the pipeline of the model's parallel")
    add("--dtype", "auto", metavar="DTYPE", help="with --config: the model's dtype (default: the checkpoint's)")
    add("--quantize", None, metavar="FORMAT", help="with --config: the model's quantize")
    add("--resident", "plain", metavar="FORM", help="with --config: the model's resident")
    add("--kv-cache-dtype", "auto", metavar="DTYPE", help="with --config: the model's kv_cache_dtype")
    add("--speculator", "auto", metavar="NAME", help="with --config: the model's speculator")
    add("--max-model-len", None, metavar="TOKENS", type=int, help="with --config: default: the checkpoint's")
    add("--max-sequences", None, metavar="N", type=int, help="with --config: in one batch (default 256)")
    parser.set_defaults(for_config=defaults)


def plan(client: Client, options: argparse.Namespace) -> int | None:
    if options.config is not None:
        if options.name:
            raise _usage("give NAME or --config, not both")
        if not options.config:
            raise _usage("--config: is empty; name the folder in which the model's config.json lies")
        from daemon.cli.capacity import capacity_plan  # imported here, because loading code for checkpoints takes time

        return capacity_plan(options)
    for attribute, (flag, default) in options.for_config.items():
        if getattr(options, attribute) != default:
            raise _usage(f"{flag}: goes with --config FOLDER")
    if not options.name:
        raise _usage("which model? Name it, or a folder with --config")
    value = client.get(f"/control/v1/plan/{quote(options.name)}")
    if options.json:
        print(json.dumps(value, indent=1))
        return None
    state = "a head" if value["state"] == "head" else value["state"]
    print(f"{value['model']} is {state}; it {VERDICTS[value['verdict']]}: {value['reason']}")
    if value["verdict"] in ("fits", "evicts"):
        source = "host memory" if value["source"] == "host" else "disk"
        print(f"the load takes about {value['load_s']:.2f} s, from {source}")
    for note in value["notes"]:
        print(note)
    for device in value["devices"]:
        print(f"\n{device['device']}: needs {size(device['needed_bytes'])}, {size(device['free_bytes'])} are free")
        _candidates(device["candidates"])
    _explain_score(value["devices"])
    return None


def evict(client: Client, options: argparse.Namespace) -> None:
    if options.bytes and options.name:
        raise _usage("give NAME or --bytes, not both")
    if not (options.bytes or options.name):
        raise _usage("which model? Name it, or use --dry-run --bytes to see who would leave")
    if options.device and not options.bytes:
        raise _usage("--device: goes with --bytes")
    if not options.dry_run:
        if options.bytes:
            raise _usage("--bytes needs --dry-run: models are evicted by name")
        options.command, options.to = "unload", "cold"
        models.command(client, options)
    elif options.bytes:
        device = f"&device={quote(options.device, safe='')}" if options.device else ""
        _room(client.get(f"/control/v1/room?bytes={quote(options.bytes, safe='')}{device}"), options)
    else:
        _one(client, options)


def _room(plans: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Shows, for `hearth evict --dry-run --bytes`, which models would be evicted to free that many bytes. plans: the daemon's
    answer, one plan for each device. Raises CommandError if no device can free that much; the error's details contain the plans."""
    can = any(device["verdict"] in ("fits", "evicts") for device in plans)
    if options.json and can:
        print(json.dumps(plans, indent=1))
    if not options.json:
        _tell_room(plans)
    if not can:
        where = ", ".join(device["device"] for device in plans)
        message = f"--bytes {options.bytes}: what is idle on {where} does not free so much; ask for less, or unpin or unload models"
        raise CommandError(EXIT_NO_FIT, {"code": "would_not_fit", "message": message, "details": {"devices": plans}})


def _tell_room(plans: list[dict[str, Any]]) -> None:
    for number, device in enumerate(plans):
        print(("\n" if number else "") + f"{device['reason']}; {size(device['free_bytes'])} are free now")
        _candidates(device["candidates"])
    _explain_score(plans)


def _one(client: Client, options: argparse.Namespace) -> None:
    planned = client.get(f"/control/v1/plan/{quote(options.name)}")  # raises CommandError if there is no such model
    found, name = client.get("/control/v1/room?bytes=1"), planned["model"]
    here = [(device["device"], one) for device in found for one in device["candidates"] if one["name"] == name]
    if not here:
        state = planned["state"]
        message = f"{name} is on no device: it is {state}"
        raise CommandError(EXIT_NOT_FOUND, {"code": "not_loaded", "message": message, "details": {"state": state}})
    devices, (_, one) = [device for device, _ in here], here[0]
    reload_s = max(each["reload_s"] for _, each in here)
    if options.json:
        print(json.dumps({"device": "+".join(devices), **one, "reload_s": reload_s}, indent=1))
        return
    where = " and as much of ".join(devices)
    print(f"{name} would free {size(one['freed_bytes'])} of {where}; to load it again takes about {reload_s:.2f} s")
    if one["active"] or one["queued"]:
        print(f"requests would wait and bring it back: {one['active']} that run, {one['queued']} that wait already")


def _candidates(candidates: list[dict[str, Any]]) -> None:
    if not candidates:
        print("no model is on it")
        return
    header = ("MODEL", "SCORE", "RATE", "RELOAD", "FREES", "IDLE", "RUNS", "WAITS", "")
    rows = [
        (
            one["name"],
            _score(one["score"]),
            f"{60 * one['requests_per_s']:.1f}/min",
            f"{one['reload_s']:.2f} s",
            size(one["freed_bytes"]),
            "-" if one["idle_s"] is None else duration(one["idle_s"]),
            str(one["active"]),
            str(one["queued"]),
            one["reason"],
        )
        for one in candidates
    ]
    print(table(header, rows, frozenset({1, 2, 3, 4, 5, 6, 7})))


def _explain_score(devices: list[dict[str, Any]]) -> None:
    if any(device["candidates"] for device in devices):
        print(f"\n{SCORE}; who has least leaves first, idle models before busy ones")


def history(client: Client, options: argparse.Namespace) -> None:
    query = f"?model={quote(options.name, safe='')}" if options.name else ""
    rows = client.get(f"/control/v1/history{query}")
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print(
            f"{options.name} was not placed since hearthd started" if options.name else "nothing was placed since hearthd started"
        )
        return
    header = ("TIME", "ID", "MODEL", "DEVICE", "CAUSE", "WAITED", "TOOK", "BYTES", "OUTCOME", "LEFT FOR IT (SCORE)")
    print(table(header, [_placement(row) for row in rows], frozenset({1, 5, 6, 7})))
    print(
        "\nCAUSE: the event it was decided at. WAITED: before, since its oldest request. TOOK: until it was "
        f"ready, with the time others took to leave.\n{SCORE}. busy: made to leave for overdue requests"
    )


def _placement(row: dict[str, Any]) -> tuple[str, ...]:
    outcome = row["outcome"] or "under way"
    return (
        time.strftime("%H:%M:%S", time.localtime(row["begun"])),
        str(row["id"]),
        row["model"],
        row["device"],
        row["cause"],
        f"{row['waited_s']:.2f} s",
        "-" if row["ended"] is None else f"{row['ended'] - row['begun']:.2f} s",
        size(row["weights_bytes"]),
        f"{outcome}, {row['load_s']:.2f} s from {row['source']}" if row["source"] else outcome,
        ", ".join(f"{one['name']} ({_score(one['score'])}{', busy' if one['busy'] else ''})" for one in row["victims"]) or "-",
    )


def _score(score: float) -> str:
    """Returns a model's eviction score as text, per GiB instead of per byte (times 2**30). score: the expected cost of the model's
    absence for each byte that its eviction frees: the model's priority, times the seconds of reloading to expect per second."""
    return f"{score * 2**30:.3g}"


def _usage(message: str) -> CommandError:
    return CommandError(EXIT_USAGE, {"code": "invalid_request", "message": message, "details": {}})
