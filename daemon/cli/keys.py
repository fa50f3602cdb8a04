"""`hearth hash-key`: prints what to write into a keys file. It needs no daemon."""

from __future__ import annotations

import argparse
import getpass
import json
import sys

from daemon.cli.client import Client, CommandError
from daemon.errors import EXIT_USAGE

MIN_CHARACTERS = 20  # a shorter key could be found from its hash by trying all keys


def hash_key(client: Client, options: argparse.Namespace) -> None:
    """Prints the hash of a key that is read from the terminal or standard input, or of a new key. The key is never an argument,
    because all users of the machine can see those."""
    from daemon.access import keys  # imported here: it needs the libraries for settings, which the other commands do without

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
