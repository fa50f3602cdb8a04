"""Checks the name and the folder of a LoRA adapter that an operator loads, and makes the errors for adapters that cannot be loaded
or unloaded. Messages and `param` use the field names of POST /v1/load_lora_adapter."""

from __future__ import annotations

import re

from daemon.errors import BadRequest, HearthError, NotNow
from daemon.models.adapters import AdapterRecord
from daemon.models.name_table import MAX_MATCHED

MAX_PATH = 4096
# parts like those of folders' paths; no colon, which separates BASE:ADAPTER, and no wildcard, because the keys file has patterns
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=~-]*(/[A-Za-z0-9_][A-Za-z0-9_.@+=~-]*)*")


def check_name(name: str) -> None:
    """Raises BadRequest if `name` is not allowed as an adapter's name: parts of letters, digits and _ . @ + = ~ - with / between
    them."""
    if len(name) > MAX_MATCHED or not _NAME.fullmatch(name):
        allowed = "letters, digits and _ . @ + = ~ - in parts with / between them, each beginning with a letter, a digit or _"
        message = f"lora_name: {name[:MAX_MATCHED]!r} is no name for an adapter: {allowed}; at most {MAX_MATCHED} characters"
        raise BadRequest("invalid_request", message, param="lora_name")


def check_path(path: str) -> None:
    """Raises BadRequest if `path` is not an absolute path; whether the folder exists is not checked."""
    if not path.startswith("/") or len(path) > MAX_PATH or not path.isprintable():
        message = f"lora_path: {path[:MAX_MATCHED]!r} is no absolute path of a folder on the machine of hearthd"
        raise BadRequest("invalid_request", message, param="lora_path")


def load_refusal(record: AdapterRecord) -> HearthError | None:
    """Returns the error with which the loading of an adapter is refused; None if the adapter can be served. record: the record that
    the registry has made of the adapter, whose `problem` is the reason."""
    if record.served is not None:
        return None
    checkpoint, path = record.checkpoint, record.checkpoint.path
    if checkpoint.reason and not checkpoint.signature:
        return BadRequest("adapter_not_found", checkpoint.reason, param="lora_path", status=404)
    if checkpoint.reason:
        return NotNow("adapter_unavailable", f"{path} is not complete: {checkpoint.reason}", retry_after_s=10.0)
    if checkpoint.complete and record.is_incomplete:
        return BadRequest("adapter_without_base", f"{path}: {record.problem}", param="lora_path")
    return BadRequest("adapter_unusable", f"{path} cannot be served: {record.problem}", param="lora_path")


def unload_refusal(name: str, is_in_folder: bool) -> HearthError:
    """Returns the error for an attempt to unload an adapter that no operator has loaded. is_in_folder: whether it is in the models
    folder."""
    if is_in_folder:
        message = (
            f"The adapter {name!r} lies in the models folder and is served as long as it is there; its memory is free for others "
            f"while no request uses it. `hearth rm {name}` deletes it."
        )
        return BadRequest("adapter_in_folder", message, param="lora_name")
    return BadRequest("model_not_found", f"There is no adapter {name!r}.", param="lora_name", status=404)
