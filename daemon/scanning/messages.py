"""Messages between the daemon and the scanning process; framed as engine/protocol.py frames its own.

Each `Scan` is answered with `Looking`, `Same` and `Found` in any number and then one `Finished`.
"""

from __future__ import annotations

from engine.protocol import Message
from loader.catalog import Checkpoint


class Scan(Message, frozen=True):
    """known: name -> (path, signature) of the last result. silent: paths not to be looked at, and why."""

    models_dir: str
    known: dict[str, tuple[str, str]]
    silent: dict[str, str]


class Looking(Message, frozen=True):
    """The path that is looked at next."""

    path: str


class Same(Message, frozen=True):
    """A folder that has not changed since the last result."""

    name: str
    in_cache: bool


class Found(Message, frozen=True):
    """A folder that is new or has changed; its checkpoint comes without `failure`."""

    checkpoint: Checkpoint
    in_cache: bool


class Finished(Message, frozen=True):
    """error: why the models folder itself could not be read, as (errno, text); None: it was. warnings: for the log. is_last: the
    process ends now, and takes no further `Scan`. folders: where a change would matter."""

    error: tuple[int, str] | None
    warnings: list[str]
    is_last: bool
    folders: list[str]


FromScanner = Looking | Same | Found | Finished
