"""Implements the commands `hearth why` and `hearth events`, which show what happened."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote

from daemon.cli.client import WAITING, Client, CommandError
from daemon.cli.output_reader import interrupted_without_reader


def why(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth why`: prints what happened to a model or request, and what it waits for."""
    value = client.get(f"/control/v1/why/{quote(options.name)}")
    if options.json:
        print(json.dumps(value, indent=1))
    else:
        print("\n".join(value["lines"]))


def events(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth events`: prints the events that the daemon remembers. With -f it prints new ones, too, until Ctrl-C or until
    nobody reads them, and waits for the next daemon when this one is restarted."""
    try:
        with interrupted_without_reader() if options.follow else nullcontext():
            for event in _followed(client) if options.follow else client.lines("GET", "/control/v1/events"):
                print(json.dumps(event) if options.json else _line(event), flush=True)
    except KeyboardInterrupt:
        pass


def _followed(client: Client) -> Iterator[dict[str, Any]]:
    """Yields the daemon's events as they come. When the daemon ends, waits for the next one and yields its events. Raises
    CommandError if no daemon can be reached at the start, or if no other follows in time."""
    has_begun = False
    while True:
        try:
            for event in client.lines("GET", "/control/v1/events?follow=1"):
                has_begun = True
                yield event
            raise client.gone()
        except CommandError as error:
            if not has_begun:
                raise
            print(f"hearth: {WAITING}", file=sys.stderr, flush=True)
            client.until_back(error)


def _line(event: dict[str, Any]) -> str:
    stamp = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    kind = event["event"]
    if kind == "state":
        where = f" on {event['device']}" if event["device"] else ""
        change = f"{event['old'] or 'new'} -> {event['new'] or 'gone'}{where}"
        return f"{stamp}  {event['model']}: {change} ({event['reason']}; {event['cause']})"
    if kind == "registered":
        return f"{stamp}  {event['text']}"
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
    return f"{stamp}  {kind}: {rest}"
