"""Does the work of `hearth pull REPO`, in this process and as its user. The daemon finds the folder only when it is complete."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.cli.client import Client, CommandError
from daemon.cli.models_folder import add_models_option, models_folder
from daemon.cli.partial_folder import locked, publish, write_errors
from daemon.cli.progress import byte_progress
from daemon.cli.table import size
from daemon.errors import EXIT_USAGE

if TYPE_CHECKING:
    from daemon.cli.pull.hub import Hub
    from daemon.cli.pull.plan import Repo, RepoFile


@dataclass(slots=True, frozen=True)
class Pulled:
    """The result of a pull. folder: where the model is. commit: the commit of the repository that was pulled. fetched_bytes: the
    downloaded bytes; None if the models folder had the commit already."""

    name: str
    folder: str
    commit: str
    fetched_bytes: int | None


_COMMIT = re.compile(r"[0-9a-f]{40}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="REVISION", default=None, help="a branch, tag or commit (default: main)")
    add_models_option(parser)


def pull(client: Client, options: argparse.Namespace) -> None:
    folder = models_folder(client, options.models)
    with write_errors(folder):
        result = pulled(Path(folder), options.name, options.revision, sys.stdout.isatty() and not options.json)
    if options.json:
        print(json.dumps(asdict(result)))
    elif result.fetched_bytes is None:
        print(f"{options.name} is there already, at commit {result.commit[:12]}")
    else:
        print(f"{options.name} is in {result.folder}, commit {result.commit[:12]}, {size(result.fetched_bytes)} fetched")


def pulled(models_dir: Path, name: str, revision: str | None, with_bar: bool) -> Pulled:
    """Downloads a model into the models folder unless it is already there. name: the repository, ORG/NAME. revision: a branch, tag
    or commit, None for the main branch. with_bar: whether to show progress. Raises CommandError if the model cannot be fetched,
    served or stored, and OSError if a file cannot be read or written."""
    from daemon.cli.pull import download, plan, receipt
    from daemon.cli.pull.hub import Hub

    target = models_dir / name
    known = receipt.read(target)
    if known is not None and revision and _COMMIT.fullmatch(revision) and known.commit == revision and known.is_complete(target):
        return Pulled(name, str(target), revision, None)
    hub = Hub()
    repo = hub.repo(name, revision)
    if known is not None and known.commit == repo.commit and known.is_complete(target):
        return Pulled(name, str(target), repo.commit, None)
    in_cache = _in_cache(models_dir, repo)
    if in_cache is not None:
        return Pulled(name, str(in_cache), repo.commit, None)
    if known is None and os.path.lexists(target):
        message = f"{target} is there and did not come from a pull; move it away, or name another folder with --models"
        raise CommandError(EXIT_USAGE, {"code": "folder_exists", "message": message, "details": {"folder": str(target)}})
    files = _needed(hub, repo)
    partial = download.partial_folder(models_dir, name)
    missing = download.missing_bytes(partial, target, files)
    status = os.statvfs(models_dir)
    plan.check_space(repo, sum(file.size_bytes for file in files), missing, status.f_bavail * status.f_frsize, str(models_dir))
    with locked(partial, "pull"), byte_progress(name, missing, with_bar) as on_bytes:
        download.download(hub, repo, files, partial, target, on_bytes)
        publish(partial, target)
    return Pulled(name, str(target), repo.commit, missing)


def _in_cache(models_dir: Path, repo: Repo) -> Path | None:
    """Returns the folder that already contains the commit, if the models folder is a cache of the Hugging Face hub's own tools and
    the model is complete in it; otherwise None."""
    from loader.models.catalog import scan_one

    folder = models_dir / f"models--{repo.name.replace('/', '--')}" / "snapshots" / repo.commit
    try:
        return folder if scan_one(folder).complete else None
    except OSError:
        return None


def _needed(hub: Hub, repo: Repo) -> list[RepoFile]:
    """Returns the files of the repository to download. It fetches the configuration and the index of the weights and checks them,
    so that of a model that cannot be served no weights are downloaded. Raises CommandError for such a model."""
    from daemon.cli.pull import plan
    from loader.configs.hf_config import CONFIG_NAME, QUANT_CONFIG_NAME, check_config
    from loader.errors import CheckpointError
    from loader.files.safetensors import INDEX_NAME, parse_index
    from loader.models import adapter

    weight_map = None
    try:
        if INDEX_NAME in repo.files:
            weight_map = parse_index(hub.text(repo, repo.files[INDEX_NAME]))
        files = plan.needed(repo, weight_map)
        if plan.is_adapter(repo):
            adapter.check_config(hub.text(repo, repo.files[adapter.CONFIG_NAME]))
            return files
        if CONFIG_NAME not in repo.files:
            raise plan.refused(repo, f"it has no {CONFIG_NAME}")
        quantised = repo.files.get(QUANT_CONFIG_NAME)
        check_config(hub.text(repo, repo.files[CONFIG_NAME]), None if quantised is None else hub.text(repo, quantised))
    except CheckpointError as error:
        raise plan.refused(repo, str(error)) from None
    return files
