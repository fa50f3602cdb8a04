"""Finds the folder of a model by its name, and the running daemon's rows about it, for commands that change the models folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemon.cli.client import Client, CommandError
from daemon.errors import EXIT_BUSY, EXIT_NOT_FOUND, EXIT_USAGE
from loader.files import hub_cache
from loader.models import catalog

ON_DEVICE = ("loading", "ready", "draining", "paused")


def rows_by_name(client: Client, models_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns the daemon's rows of `hearth models`, by the model's name; {} if no daemon runs, or if the running daemon serves
    another models folder. Raises CommandError if a daemon runs and does not answer."""
    try:
        served = str(client.get("/control/v1/status")["models_dir"])
        if not os.path.isdir(served) or not os.path.samefile(served, models_dir):
            return {}
        return {row["name"]: row for row in client.get("/control/v1/models")}
    except CommandError as error:
        if error.error["code"] != "not_running":
            raise
        return {}


def refuse_if_used(row: dict[str, Any] | None) -> None:
    """Raises CommandError for a model that is on a device or has requests. row: the daemon's row of the model; None: the daemon
    does not know it."""
    if row is None or not (row["state"] in ON_DEVICE or row["active"] or row["queued"]):
        return
    requests = f", {row['active']} requests run and {row['queued']} wait" if row["active"] or row["queued"] else ""
    message = f"{row['name']} is {row['state']}{requests}; --evict has it leave first"
    raise CommandError(EXIT_BUSY, {"code": "busy", "message": message, "details": {"state": row["state"]}})


def path_of(models_dir: Path, name: str) -> Path:
    """Returns the path below the models folder at which a model of this name belongs; it need not exist. Raises CommandError if
    `name` cannot be a model's name, or the path leads through a link or another model's folder."""
    parts = name.split("/")
    if not all(part and not part.startswith(".") and part.isprintable() for part in parts) or len(parts) > catalog.MAX_DEPTH:
        raise _error(
            EXIT_USAGE, "invalid_request", f"{name!r} is no name of a model: it is a path below {models_dir}, as in org/name"
        )
    folder = models_dir
    for part in parts[:-1]:
        folder = folder / part
        if folder.is_symlink():
            message = f"{folder} is a link to {os.readlink(folder)}, so what is below it does not belong to {models_dir}"
            raise _error(EXIT_USAGE, "invalid_request", message)
        if folder.is_dir() and catalog.holds_model(folder) and not _is_within(models_dir.joinpath(*parts), folder):
            raise _error(EXIT_USAGE, "invalid_request", f"{folder} is a model itself, and no others are looked for below it")
    return folder / parts[-1]


def _is_within(path: Path, model: Path) -> bool:
    """Returns whether `path` is the folder of an adapter or a drafting head inside the model's folder."""
    if path.parent != model or not path.is_dir() or path.is_symlink():
        return False
    return catalog.holds_adapter(path) or catalog.holds_head(path)


def existing(models_dir: Path, name: str) -> Path:
    """Returns the path of the model's folder, or of the link to it. Raises CommandError if there is no model of this name."""
    path = path_of(models_dir, name)
    if not os.path.lexists(path):
        if any(hub_cache.repo_name(entry) == name for entry in os.listdir(models_dir)):
            message = f"{name} is in a cache of the Hugging Face hub ({models_dir}); the hub's own tools look after that"
            raise _error(EXIT_USAGE, "invalid_request", message)
        raise _error(EXIT_NOT_FOUND, "model_not_found", f"There is no model {name!r} in {models_dir}.")
    is_dangling = path.is_symlink() and not path.exists()
    if not is_dangling and not (path.is_dir() and catalog.holds_model(path)):
        raise _error(EXIT_NOT_FOUND, "model_not_found", f"{path} is no model.")
    return path


def second_names(models_dir: Path, folder: Path) -> list[str]:
    """Returns the second names of a model: the paths, relative to the models folder, of all links to the model's folder."""
    target = os.path.realpath(folder)
    return [str(link.relative_to(models_dir)) for link in _links(models_dir, 0) if os.path.realpath(link) == target]


def _links(folder: Path, depth: int) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir() and depth < catalog.MAX_DEPTH and not catalog.holds_model(entry.path):
            yield from _links(Path(entry.path), depth + 1)


def _error(exit_code: int, code: str, message: str) -> CommandError:
    return CommandError(exit_code, {"code": code, "message": message, "details": {}})
