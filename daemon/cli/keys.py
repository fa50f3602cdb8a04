"""`hearth hash-key`: what to write into a keys file. Talks to no daemon."""

from __future__ import annotations

import argparse
import getpass
import json
import sys

from daemon.cli.client import Client, CommandError
from daemon.errors import EXIT_USAGE

MIN_CHARACTERS = 20  # a sum of a short key can be undone by trying them all


def hash_key(client: Client, options: argparse.Namespace) -> None:
    """The key never comes as an argument: those are seen by every user of the machine."""
    from daemon.access import keys  # with the settings' libraries, which the other commands do without

    if options.generate:
        key = keys.new_key()
        print(json.dumps({"key": key, "hash": keys.hash_key(key)}) if options.json else f"key:  {key}\nhash: {keys.hash_key(key)}")
        return
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if len(key) < MIN_CHARACTERS or not key.isascii() or not key.isprintable():
        message = f"a key is {MIN_CHARACTERS} printable ASCII characters or more; `hearth hash-key --generate` makes one"
        raise CommandError(EXIT_USAGE, {"code": "bad_key", "message": message, "details": {}})
    print(json.dumps({"hash": keys.hash_key(key)}) if options.json else keys.hash_key(key))
