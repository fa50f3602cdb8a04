"""Implements `hearth cp NAME NEW`, which gives a model a second name, as a link beside its folder. The weights are not copied."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Container
from pathlib import Path

from daemon.cli.client import Client, CommandError
from daemon.cli.models_folder import add_models_option, models_folder
from daemon.cli.partial_folder import write_errors
from daemon.errors import EXIT_BUSY


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("new", metavar="NEW", help="the second name")
    add_models_option(parser)


def copy(client: Client, options: argparse.Namespace) -> None:
    from daemon.cli import model_folder  # imported here, because it loads code that reads checkpoints, which takes time

    models_dir = Path(models_folder(client, options.models))
    with write_errors(str(models_dir)):
        link = _linked(models_dir, options.name, options.new, model_folder.rows_by_name(client, models_dir))
    if options.json:
        print(json.dumps({"name": options.new, "path": str(link), "link_to": os.readlink(link)}))
    else:
        print(f'{options.new} is a second name of {options.name}, with settings of its own: [models."{options.new}"]')


def _linked(models_dir: Path, name: str, new: str, known: Container[str]) -> Path:
    """Makes the name `new` a link to the folder of the model `name`, and returns the link's path. known: names of models that a
    daemon lists, which are taken. Raises CommandError if there is no such model or `new` is taken, and OSError if the link cannot
    be made."""
    from daemon.cli import model_folder

    folder = model_folder.existing(models_dir, name).resolve()
    link = model_folder.path_of(models_dir, new)
    if os.path.lexists(link) or new in known:
        message = f"there is a model {new!r} already, or something else of that name"
        raise CommandError(EXIT_BUSY, {"code": "busy", "message": message, "details": {"name": new}})
    # a relative link, because the models folder may be moved
    is_below = folder.is_relative_to(models_dir.resolve())
    target = os.path.relpath(folder, link.parent.resolve()) if is_below else str(folder)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target, target_is_directory=True)
    return link
