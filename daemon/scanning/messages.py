"""Messages between the daemon and the scanning process, framed like those of engine/protocol.py.

Each `Scan` is answered with any number of `Looking`, `Same` and `Found`, then with one `Finished`.
"""

from __future__ import annotations

from engine.protocol import Message
from loader.models.catalog import Checkpoint


class Scan(Message, frozen=True):
    """Asks for a scan of models_dir ("": of no folder) and of adapters in other folders. known: name -> (path, signature of the
    folder's files) of the models in the last result. silent: paths to skip, each with the reason. named: name -> folder of a LoRA
    adapter outside models_dir. files: paths of further files whose signatures are wanted."""

    models_dir: str
    known: dict[str, tuple[str, str]]
    silent: dict[str, str]
    named: dict[str, str]
    files: list[str]


class Looking(Message, frozen=True):
    """Names the path that the scanning process examines next, so that the daemon knows the cause if the process hangs or dies."""

    path: str


class Same(Message, frozen=True):
    """Names a model whose folder has not changed since the last result. in_cache: whether it is in a Hugging Face cache. is_named:
    whether it is one of the adapters in Scan.named."""

    name: str
    in_cache: bool
    is_named: bool = False


class Found(Message, frozen=True):
    """Reports a model whose folder is new or has changed. checkpoint: the contents of its files; its `failure`, an exception, is
    left out. in_cache: whether it is in a Hugging Face cache. is_named: whether it is one of the adapters in Scan.named."""

    checkpoint: Checkpoint
    in_cache: bool
    is_named: bool = False


class Finished(Message, frozen=True):
    """Ends the answer to a scan. error: why the models folder itself could not be read, as (errno, text), or None. warnings: lines
    for the log. is_last: the process ends now and accepts no further `Scan`. folders: the folders to watch for changes. signatures:
    those of the files in Scan.files that were looked at, by path. is_model: whether the models folder is a model's own folder."""

    error: tuple[int, str] | None
    warnings: list[str]
    is_last: bool
    folders: list[str]
    signatures: dict[str, str]
    is_model: bool = False


FromScanner = Looking | Same | Found | Finished
