"""Implements `hearth rm NAME`, which deletes a model's folder. It runs in this process and as its user, because the service may not
write to the models folder.

The folder is first renamed to `.removing-NAME`, which scans ignore: the model exists completely or not at all. The remains of an
interrupted removal are deleted when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from daemon.cli.client import Client, CommandError
from daemon.cli.models_folder import add_models_option, models_folder
from daemon.cli.partial_folder import write_errors
from daemon.cli.table import size
from daemon.errors import EXIT_BUSY, EXIT_USAGE

PREFIX = ".removing-"


@dataclass(slots=True, frozen=True)
class Removal:
    """A model that `hearth rm` is about to remove or has removed. path: its folder or link. num_files, num_bytes: the files in the
    folder, 0 for a link. link_to: the target if the name is a link, of which only the link is removed; "" for a folder. removed:
    whether the model has been removed."""

    name: str
    path: str
    num_files: int
    num_bytes: int
    link_to: str = ""
    removed: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--evict", action="store_true", help="also a model that is loaded or in use: it leaves its device first")
    add_models_option(parser)


def remove(client: Client, options: argparse.Namespace) -> None:
    from daemon.cli import model_folder  # imported here, because it loads code that reads checkpoints, which takes time

    models_dir = Path(models_folder(client, options.models))
    with write_errors(str(models_dir)):
        path, hidden = _found(models_dir, options.name)
        planned = _planned(options.name, path if os.path.lexists(path) else hidden)
        row = model_folder.rows_by_name(client, models_dir).get(options.name)
        if not options.evict:
            model_folder.refuse_if_used(row)
        if not options.dry_run:
            _confirm(planned, options.yes)
            if row is not None and row.get("kind") == "local":
                # this also frees its memory in the host tier; a pinned model is refused
                client.result(client.lines("POST", f"/control/v1/models/{quote(options.name)}/unload"))
            _remove(path, hidden, models_dir)
    done = Removal(**{**asdict(planned), "removed": not options.dry_run})
    if options.json:
        print(json.dumps(asdict(done)))
    else:
        print(f"{_told(done)} {'is removed' if done.removed else 'would be removed'}")


def _found(models_dir: Path, name: str) -> tuple[Path, Path]:
    """Returns the model's path and the hidden path that its folder is renamed to before it is deleted; one of them exists. Raises
    CommandError if none does, or if another name is a link to the model's folder."""
    from daemon.cli import model_folder

    path = model_folder.path_of(models_dir, name)
    hidden = path.with_name(PREFIX + path.name)
    if os.path.lexists(path) or not os.path.lexists(hidden):
        model_folder.existing(models_dir, name)
    if path.is_dir() and not path.is_symlink() and (others := model_folder.second_names(models_dir, path)):
        message = f"{', '.join(others)} would lead to nothing: a second name of {name}; `hearth rm` it first"
        raise CommandError(EXIT_BUSY, {"code": "busy", "message": message, "details": {"second_names": others}})
    return path, hidden


def _planned(name: str, path: Path) -> Removal:
    if path.is_symlink():
        return Removal(name, str(path), 0, 0, os.readlink(path))
    num_files = num_bytes = 0
    for folder, _, files in os.walk(path, onerror=_raise):
        for file in files:
            found = os.lstat(os.path.join(folder, file))
            num_files += 1
            num_bytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return Removal(name, str(path), num_files, num_bytes)


def _told(planned: Removal) -> str:
    if planned.link_to:
        return f"{planned.name}, a link to {planned.link_to} (which stays),"
    return f"{planned.name} ({size(planned.num_bytes)} in {planned.num_files} files, {planned.path})"


def _confirm(planned: Removal, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        message = f"{_told(planned)} would be removed; say --yes, as there is no terminal to ask on"
        raise CommandError(EXIT_USAGE, {"code": "invalid_request", "message": message, "details": {}})
    print(f"Remove {_told(planned)}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(EXIT_USAGE, {"code": "cancelled", "message": "nothing was removed", "details": {}})


def _remove(path: Path, hidden: Path, models_dir: Path) -> None:
    """Deletes a model's folder or link, and then the folders above it that have become empty, up to the models folder. path: the
    model's path. hidden: the path that the folder is renamed to first. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    else:
        if path.exists():
            if hidden.exists():
                shutil.rmtree(hidden)
            path.rename(hidden)
        shutil.rmtree(hidden)
    with contextlib.suppress(OSError):  # deletes folders that are empty now, such as an organisation's
        for parent in path.parents:
            if parent == models_dir:
                return
            parent.rmdir()


def _raise(error: OSError) -> None:
    raise error
