"""`hearth keys` lists the tenants with their limits. `hearth hash-key` prints an entry for the keys file, without a daemon."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
import time
from typing import Any

from daemon.cli.client import Client, CommandError
from daemon.cli.table import table
from daemon.errors import EXIT_USAGE

MIN_CHARACTERS = 20  # a shorter key could be found from its hash by trying all keys


def keys(client: Client, options: argparse.Namespace) -> None:
    rows = client.get("/control/v1/keys")
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("no tenants: no keys are set, or the keys file has none")
    else:
        header = ("TENANT", "KEYS", "REQUESTS/MIN LEFT", "TOKENS/MIN LEFT", "TOKENS/DAY LEFT", "TOKENS TODAY", "NEXT EXPIRY")
        print(table(header, [_row(row) for row in rows], frozenset({1, 2, 3, 4, 5})))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    limits = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")
    left = [_left(row["limits"][name]) for name in limits]
    num_keys = f"{row['keys']} (+{row['expired_keys']} expired)" if row["expired_keys"] else str(row["keys"])
    expiry = row["next_expiry"]
    ends = "-" if expiry is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expiry))
    return (row["tenant"], num_keys, *left, str(row["tokens_today"]), ends)


def _left(limit: dict[str, Any] | None) -> str:
    return "-" if limit is None else f"{limit['remaining']} of {limit['limit']}"


def hash_key(client: Client, options: argparse.Namespace) -> None:
    """Runs `hearth hash-key`: prints the hash of a key that is read from the terminal or standard input or, with --generate, a new
    key and its hash. The key is never an argument, because all users of the machine can see those. Raises CommandError for a key
    that is too short or not printable ASCII."""
    from daemon.access import (
        keys as access_keys,
    )  # imported here, because it needs the settings' libraries, which other commands do not

    if options.generate:
        key = access_keys.new_key()
        print(
            json.dumps({"key": key, "hash": access_keys.hash_key(key)})
            if options.json
            else f"key:  {key}\nhash: {access_keys.hash_key(key)}"
        )
        return
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if len(key) < MIN_CHARACTERS or not key.isascii() or not key.isprintable():
        message = f"a key is {MIN_CHARACTERS} printable ASCII characters or more; `hearth hash-key --generate` makes one"
        raise CommandError(EXIT_USAGE, {"code": "bad_key", "message": message, "details": {}})
    print(json.dumps({"hash": access_keys.hash_key(key)}) if options.json else access_keys.hash_key(key))
