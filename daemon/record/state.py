"""The operator's decisions that survive a restart: pins, disabled models, loaded adapters; a JSON file in the state folder."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from daemon.record import whole_file
from daemon.record.saved_object import DamagedFile, entries, saved_object

log = logging.getLogger("hearthd.state")
VERSION = 1
KEPT = "pins, switched-off models and loaded adapters"  # what the file holds, for messages


class NodeState:
    """The operator's last decisions, which survive a restart. pinned, enabled: by model, what `hearth pin|unpin` and `hearth
    enable|disable` last decided; a model without an entry follows the settings. adapters: name -> folder, for LoRA adapters that an
    operator has loaded. A change of `adapters` replaces the dictionary and never modifies it."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "state.json"
        self.pinned: dict[str, bool] = {}
        self.enabled: dict[str, bool] = {}
        self.adapters: dict[str, str] = {}

    def load(self) -> None:
        """Reads the decisions from state.json in the state folder; there are none without that file. An invalid file is renamed to
        state.json.bad-TIME, with a warning, and counts as missing. Raises OSError naming the setting if the folder cannot be made
        or the file cannot be read."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(OSError):
                whole_file.partial(self.path).unlink()
            text = self.path.read_bytes()
        except FileNotFoundError as error:
            if self.path.parent.is_dir():
                return
            why = f"cannot be made: {error.strerror}"
            raise OSError(f"state_dir {self.path.parent} {why}; name another with --state-dir DIR") from None
        except OSError as error:
            raise OSError(f"state_dir {self.path.parent}: {error.strerror}; name another with --state-dir DIR") from None
        try:
            values = saved_object(text, VERSION)
            self.pinned, self.enabled, self.adapters = (
                entries(values, "pinned", _is_switch, "true or false"),
                entries(values, "enabled", _is_switch, "true or false"),
                # absent in files of earlier versions
                entries({"adapters": {}} | values, "adapters", _is_text, "a text, the path of the adapter's folder"),
            )
        except DamagedFile as error:
            aside = self.path.with_name(f"{self.path.name}.bad-{int(time.time())}")
            self.path.replace(aside)
            log.warning("%s cannot be used: %s; kept as %s, and hearthd starts without %s", self.path, error, aside, KEPT)

    def snapshot(self) -> bytes:
        values = {"version": VERSION, "pinned": self.pinned, "enabled": self.enabled, "adapters": self.adapters}
        return json.dumps(values, indent=1, sort_keys=True).encode() + b"\n"

    def write(self, data: bytes) -> None:
        """Replaces the file's content by `data`, a snapshot, atomically. Raises OSError."""
        whole_file.write(self.path, data)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
