"""Implements the commands `hearth status|drain|resume|reload|version`."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from urllib.parse import quote

from daemon.cli.client import Client
from daemon.cli.table import ago, duration, size, table
from daemon.engines.kernels import sentence as kernels_sentence
from daemon.process.version import VERSION


def status(client: Client, options: argparse.Namespace) -> None:
    value = client.get("/control/v1/status")
    if options.json:
        print(json.dumps(value, indent=1))
        return
    state = "draining" if value["draining"] else "ready" if value["ready"] else f"not ready: {value['reason']}"
    print(f"hearthd {value['version']}, pid {value['pid']}, up {duration(value['uptime_s'])}: {state}")
    print(f"serves {value['url']}, {value['requests']} requests open")
    print(_keys(value))
    if value["tls"] is not None:
        print(certificate(value["tls"]))
    for key in value["keys_ending"]:
        print(f"keys: {key['text']}")
    for problem in value["problems"]:
        print(f"problem: {problem}")
    if value["reload_refused"] is not None:
        refused = value["reload_refused"]
        print(f"reload refused {ago(refused['since'])}, older settings are in use: {refused['message']}")
    if value["state_not_saved"] is not None:
        lost = value["state_not_saved"]
        print(
            f"state not saved: {lost['message']} (first {ago(lost['since'])}); a restart would forget pins, "
            "switched-off models and loaded adapters"
        )
    print(f"longest stall of the event loop {1000 * value['event_loop_stall_max_s']:.1f} ms\n")
    header = ("DEVICE", "ENGINE", "BUDGET", "MODELS", "WORK SPACE", "KV LEASE", "RESTARTS")
    print(table(header, [_device(row) for row in value["devices"]], frozenset({2, 3, 4, 5, 6})))
    if value["host_tier"]["bytes"]:
        print("\n" + host_memory(value["host_tier"]))
    for row in value["devices"]:
        if row.get("kernels"):
            print(f"\n{kernels_sentence(row['name'], row['kernels'])}")
        if row.get("problem"):
            print(f"\n{row['name']}: {row['problem']}")


def _keys(value: dict[str, Any]) -> str:
    if not value["keys"]:
        return "no keys are set: whoever reaches it may use it"
    return f"keys are set, tenants: {value['tenants']}" + (
        "" if value["num_keys"] else "; the keys file has no key: nobody gets in"
    )


def certificate(tls: dict[str, Any]) -> str:
    """Returns a line for `hearth status` about the TLS certificate in use. tls: the daemon's report about it."""
    day = time.strftime("%Y-%m-%d", time.gmtime(tls["expires"]))
    left = f"{tls['days_left']} days left, until {day}" if tls["days_left"] >= 0 else f"expired on {day}"
    clients = "; clients must show a certificate, too" if tls["client_certificates"] else ""
    return f"TLS {tls['min_version']} or newer, certificate {tls['subject']}: {left}{clients}"


def host_memory(host: dict[str, int]) -> str:
    """Returns a line about what the host tier's memory is used for. host: the daemon's report, bytes by kind of content."""
    kinds = (("weights_bytes", "weights"), ("kv_bytes", "saved KV"), ("transit_bytes", "being written"), ("free_bytes", "free"))
    return f"host memory {size(host['bytes'])}: {', '.join(f'{text} {size(host[key])}' for key, text in kinds)}"


def _device(row: dict[str, Any]) -> tuple[str, ...]:
    engine = f"pid {row['pid']}" if row["up"] else "down"
    parts = [size(row.get(key, 0)) for key in ("held_bytes", "work_space_bytes", "lease_bytes")]
    return (row["name"], engine, size(row["budget_bytes"]), *parts, str(row["restarts"]))


def drain(client: Client, options: argparse.Namespace) -> None:
    _gate(client, options, "drain", "takes no new requests; what runs or waits goes on")


def resume(client: Client, options: argparse.Namespace) -> None:
    _gate(client, options, "resume", "takes requests again")


def _gate(client: Client, options: argparse.Namespace, verb: str, text: str) -> None:
    value = client.post(f"/control/v1/{verb}" + (f"?model={quote(options.name, safe='')}" if options.name else ""))
    print(json.dumps(value) if options.json else f"{options.name or 'the node'} {text}")


def reload(client: Client, options: argparse.Namespace) -> None:
    value = client.post("/control/v1/reload")
    if options.json:
        print(json.dumps(value))
        return
    print("applied: " + (", ".join(value["applied"]) or "nothing changed"))
    if value["needs_restart"]:
        print("needs a restart: " + ", ".join(value["needs_restart"]))
    if value.get("unknown_models"):
        print("the settings name models that are not there (yet): " + ", ".join(value["unknown_models"]))
    if value.get("hidden_names"):
        print("these further names are hidden by models of the same names, which answer: " + ", ".join(value["hidden_names"]))


def version(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth version`: prints the version of this program and that of the running daemon, or why that is not known."""
    from daemon.cli.client import CommandError

    value: dict[str, Any] = {"hearth": VERSION, "hearthd": None}
    try:
        value["hearthd"] = client.get("/control/v1/version")["version"]
    except CommandError as error:
        value["reason"] = str(error)
    if options.json:
        print(json.dumps(value))
    else:
        print(f"hearth {VERSION}, hearthd {value['hearthd'] or 'unknown: ' + value['reason']}")
