"""Locks and publishes the folder `.partial-NAME`, which a command fills with a model's files. It is renamed once it is complete, so
that others see either all of its content or nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.cli.client import CommandError
from daemon.errors import EXIT_BUSY, EXIT_DENIED, EXIT_NO_FIT


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Locks a folder for this process while the block runs, and creates it first if it does not exist. command: the word for this
    command in the error. Raises CommandError if another process has locked the folder."""
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another {command} is writing {folder}; wait for it, or stop it"
            raise CommandError(EXIT_BUSY, {"code": "busy", "message": message, "details": {}}) from None
        yield
    finally:
        os.close(fd)


def publish(partial: Path, target: Path) -> None:
    """Renames the folder `partial` to `target` and deletes the previous content of `target`. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replaced = partial.with_name(partial.name.replace(".partial-", ".replaced-", 1))
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def write_errors(folder: str) -> Iterator[None]:
    """Converts errors of the file system in its block into CommandError. folder: the folder to name for an error without a path."""
    try:
        yield
    except PermissionError as error:
        message = f"{error.filename or folder}: no permission to write; run it as a user who may (the service's group is hearthd)"
        raise CommandError(EXIT_DENIED, {"code": "permission_denied", "message": message, "details": {}}) from None
    except OSError as error:
        code, exit_code = ("no_space", EXIT_NO_FIT) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ("internal", 1)
        message = f"{error.filename or folder}: {error.strerror or error}"
        raise CommandError(exit_code, {"code": code, "message": message, "details": {}}) from None
