"""Finds the models folder for commands that need no daemon."""

from __future__ import annotations

import argparse
import os

from config import paths
from daemon.cli.client import Client, CommandError
from daemon.errors import EXIT_NOT_FOUND, EXIT_USAGE


def add_models_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", metavar="DIR", default="", help="the models folder (default: the running daemon's, else the service's)"
    )


def models_folder(client: Client, named: str) -> str:
    """Returns the path of the models folder: that of --models if given, else the running daemon's, else the one in the service's
    settings. named: the value of --models, "" if not given. Raises CommandError if none is known, or if the path is no folder."""
    folder, source = named and os.path.abspath(named), "--models"
    if not folder:
        folder, source = _of_daemon(client), "hearthd"
    if not folder and os.path.exists(paths.SERVICE_CONFIG):
        folder, source = _of_file(paths.SERVICE_CONFIG), paths.SERVICE_CONFIG
    if not folder:
        message = f"which models folder? hearthd does not run at {client.control}; name the folder with --models DIR"
        raise CommandError(EXIT_USAGE, {"code": "invalid_request", "message": message, "details": {}})
    if not os.path.isdir(folder):
        message = f"{source}: {folder} is no folder; make it, or name another with --models DIR"
        raise CommandError(EXIT_NOT_FOUND, {"code": "folder_not_found", "message": message, "details": {"folder": folder}})
    return folder


def _of_daemon(client: Client) -> str:
    try:
        return str(client.get("/control/v1/status").get("models_dir", ""))
    except CommandError:
        return ""


def _of_file(path: str) -> str:
    from config import load  # imported here, because nothing else needs it

    try:
        return load.load(path).models_dir
    except load.ConfigError as error:
        message = f"{error}; correct it, or name the folder with --models DIR"
        raise CommandError(EXIT_USAGE, {"code": "invalid_config", "message": message, "details": {}}) from None
