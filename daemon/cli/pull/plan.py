"""Decides which files of a repository a model needs, and checks whether they fit. It uses neither network nor disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from daemon.cli.client import CommandError
from daemon.cli.table import size
from daemon.errors import EXIT_NO_FIT, EXIT_USAGE
from loader.files.safetensors import INDEX_NAME, SINGLE_NAME
from loader.models import adapter
from loader.models.catalog import SIDE_FILES

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(slots=True, frozen=True)
class RepoFile:
    """A file of a repository. digest: `sha256:HEX` of the content (large files), or `git:HEX`, git's blob id."""

    name: str
    size_bytes: int
    digest: str


@dataclass(slots=True, frozen=True)
class Repo:
    """One commit of a repository, with all its files by name."""

    name: str
    commit: str
    files: Mapping[str, RepoFile] = field(default_factory=dict)


def needed(repo: Repo, weight_map: Mapping[str, str] | None) -> list[RepoFile]:
    """Returns the files of a repository that the loader and the tokenizer read, small files first; for a LoRA adapter its two
    files. weight_map: tensor name -> file name, from the weights' index; None if there is no index. Raises CommandError if the
    repository has no weights that can be loaded."""
    if is_adapter(repo):
        if adapter.WEIGHTS_NAME not in repo.files:
            raise refused(repo, f"it is a LoRA adapter without {adapter.WEIGHTS_NAME}")
        return [repo.files[name] for name in (adapter.CONFIG_NAME, adapter.WEIGHTS_NAME)]
    if weight_map is None and SINGLE_NAME not in repo.files:
        raise _no_safetensors(repo)
    weights = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    for name in weights:
        if name not in repo.files:
            raise refused(repo, f"{INDEX_NAME} names {name}, which the repository does not have")
    side = [*SIDE_FILES, *([INDEX_NAME] if weight_map is not None else [])]
    return [repo.files[name] for name in [*(name for name in side if name in repo.files), *weights]]


def is_adapter(repo: Repo) -> bool:
    """Returns whether the repository contains a LoRA adapter and no model."""
    return adapter.CONFIG_NAME in repo.files and SINGLE_NAME not in repo.files and INDEX_NAME not in repo.files


def check_space(repo: Repo, wanted_bytes: int, missing_bytes: int, free_bytes: int, folder: str) -> None:
    """Raises CommandError, with the sizes, if the files of a repository do not fit on the drive of `folder`. wanted_bytes: the size
    of the files. missing_bytes: the part of that size that is still to be fetched. free_bytes: the free space."""
    if missing_bytes <= free_bytes:
        return
    there = (
        f" ({size(wanted_bytes)}, of which {size(wanted_bytes - missing_bytes)} are there)" if wanted_bytes != missing_bytes else ""
    )
    message = (
        f"{repo.name} needs {size(missing_bytes)}{there}, {folder} has {size(free_bytes)} free: make room for "
        f"{size(missing_bytes - free_bytes)}, or name another folder with --models"
    )
    details = {"wanted_bytes": wanted_bytes, "missing_bytes": missing_bytes, "free_bytes": free_bytes, "folder": folder}
    raise CommandError(EXIT_NO_FIT, {"code": "no_space", "message": message, "details": details})


def refused(repo: Repo, why: str) -> CommandError:
    message = f"{repo.name} cannot be served: {why}; choose another repository"
    return CommandError(EXIT_USAGE, {"code": "unsupported_model", "message": message, "details": {"repo": repo.name}})


def _no_safetensors(repo: Repo) -> CommandError:
    pickles = sorted(name for name in repo.files if name.endswith(PICKLES))
    others = sorted(name for name in repo.files if name.endswith((".safetensors", ".gguf")))
    why = f"it has neither {SINGLE_NAME} nor {INDEX_NAME}"
    if others:
        why += f" (but {others[0]}, which is no whole model in safetensors)"
    elif pickles:
        why += f", only pickles ({pickles[0]}), which are not loaded because they can run any code"
    return refused(repo, why)
