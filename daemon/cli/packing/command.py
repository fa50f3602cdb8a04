"""Does the work of `hearth pack NAME` and `hearth verify NAME`, in this process and as its user. The daemon sees all packed files
or none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from daemon.cli.client import Client, CommandError
from daemon.cli.models_folder import add_models_option, models_folder
from daemon.cli.packing.model_files import ModelFiles, find
from daemon.cli.partial_folder import locked, publish, write_errors
from daemon.cli.progress import byte_progress
from daemon.cli.table import size
from daemon.errors import EXIT_NO_FIT, EXIT_USAGE

PARTIAL = ".partial-packed"


@dataclass(slots=True, frozen=True)
class Packed:
    """The result of packing a model. plain_bytes: the size of its unpacked tensors. packed_bytes: the size of the packed files.
    done_before: whether the model was packed already, so that nothing was done."""

    name: str
    folder: str
    plain_bytes: int
    packed_bytes: int
    done_before: bool


@dataclass(slots=True, frozen=True)
class Verified:
    """The result of verifying a packed model. against_original: whether the tensors were compared with those of the original files;
    otherwise they were checked against the checksums from the time of packing. plain_bytes: the size of the unpacked tensors."""

    name: str
    folder: str
    num_tensors: int
    num_packed_tensors: int
    plain_bytes: int
    packed_bytes: int
    against_original: bool


Result = TypeVar("Result", Packed, Verified)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_models_option(parser)


def pack(client: Client, options: argparse.Namespace) -> None:
    _run(client, options, packed, _packed_text)


def verify(client: Client, options: argparse.Namespace) -> None:
    _run(client, options, verified, _verified_text)


def _run(
    client: Client, options: argparse.Namespace, work: Callable[[ModelFiles, bool], Result], text: Callable[[Result], str]
) -> None:
    folder = models_folder(client, options.models)
    with write_errors(folder):
        result = work(find(folder, options.name), sys.stdout.isatty() and not options.json)
    print(json.dumps(asdict(result)) if options.json else text(result))


def _packed_text(result: Packed) -> str:
    sizes = f"{size(result.packed_bytes)} for {size(result.plain_bytes)}, {result.packed_bytes / result.plain_bytes:.3f} of it"
    already = " already," if result.done_before else ""
    return f"{result.name} is packed{already} in {result.folder}: {sizes}; `hearth verify {result.name}` proves it"


def _verified_text(result: Verified) -> str:
    what = "equal to the original, bit by bit" if result.against_original else "what was packed, by SHA-256 (the original is gone)"
    tensors = f"{result.num_tensors} tensors, {result.num_packed_tensors} of them packed"
    return f"{result.name}: {tensors}, {size(result.packed_bytes)} for {size(result.plain_bytes)}: {what}"


def packed(model: ModelFiles, with_bar: bool) -> Packed:
    """Packs a model's weight files into a folder beside them, and returns the result. Files that an interrupted run has packed
    already are kept. with_bar: whether to show a progress bar. Raises CommandError if packing would not save bytes, the drive has
    too little space or the files are faulty. Raises OSError if a file cannot be read or written."""
    from loader.errors import CheckpointError
    from loader.files.weight_files import PACKED_DIR
    from loader.packing.packer import pack_file

    target = model.folder / PACKED_DIR
    if model.packed and not model.why_not_packed:
        return Packed(model.name, str(target), model.plain_bytes, model.packed_bytes, True)
    with ExitStack() as stack:
        descriptors = {name: model.open(name, stack) for name in model.plain}
        try:
            expected = _expected_bytes(model, descriptors)
            if expected >= model.plain_bytes:
                dtypes = _dtypes(model)
                message = f"{model.name} would not become smaller: packing is for bfloat16 weights, it holds {', '.join(dtypes)}"
                raise CommandError(EXIT_USAGE, {"code": "not_packable", "message": message, "details": {"dtypes": dtypes}})
            partial = model.folder / PARTIAL
            _check_space(model, expected, _bytes_in(partial))
            with locked(partial, "pack"), byte_progress(model.name, model.plain_bytes, with_bar) as on_bytes:
                _drop_others(partial, model)
                for name, header in model.plain.items():
                    if model.is_packed_in(partial, name):
                        on_bytes(sum(tensor.num_bytes for tensor in header.tensors))
                    else:
                        pack_file(descriptors[name], header, model.source(name), partial / name, on_bytes)
                model.copy_index(partial)
                model.check_unchanged(descriptors)
                publish(partial, target)
        except CheckpointError as error:
            raise _failed(model, str(error)) from None
    done = find(str(model.models_dir), model.name)
    return Packed(model.name, str(target), done.plain_bytes, done.packed_bytes, False)


def verified(model: ModelFiles, with_bar: bool) -> Verified:
    """Verifies a model's packed weights, and returns the result: they are compared with the original files or, if those are gone,
    checked against checksums. with_bar: whether to show a progress bar. Raises CommandError if nothing is packed or the weights
    differ, and OSError if a file cannot be read."""
    from loader.errors import CheckpointError
    from loader.packing.verifier import verify_tensor

    if not model.packed or model.why_not_packed:
        raise _failed(model, _why_not_verified(model))
    num_tensors = num_packed = 0
    with ExitStack() as stack, byte_progress(model.name, model.plain_bytes, with_bar) as on_bytes:
        for name, header in model.packed.items():
            original = model.plain_name(name)
            fd = model.open(name, stack)
            plain_fd = model.open(original, stack) if original else None
            plain = {tensor.name: tensor for tensor in model.plain[original].tensors} if original else {}
            for tensor in header.tensors:
                try:
                    verify_tensor(fd, tensor, plain_fd, plain.get(tensor.name), on_bytes)
                except CheckpointError as error:
                    raise _failed(model, f"{error}; {_cure(model)}") from None
                num_tensors, num_packed = num_tensors + 1, num_packed + tensor.is_packed
    return Verified(
        model.name, model.packed_folder, num_tensors, num_packed, model.plain_bytes, model.packed_bytes, bool(model.plain)
    )


def _expected_bytes(model: ModelFiles, descriptors: dict[str, int]) -> int:
    """Returns the size in bytes that the packed files would have. If packing saves nothing, that is at least plain_bytes.
    descriptors: open descriptors of the plain files, by name. Raises CheckpointError for a faulty file, and OSError if one cannot
    be read."""
    from loader.packing.packer import expected_bytes

    return sum(
        len(header.raw) + sum(expected_bytes(descriptors[name], tensor) for tensor in header.tensors)
        for name, header in model.plain.items()
    )


def _dtypes(model: ModelFiles) -> list[str]:
    return sorted({tensor.dtype for header in model.plain.values() for tensor in header.tensors})


def _why_not_verified(model: ModelFiles) -> str:
    """Returns, for an error message, why the model has no packed files to verify, and what to do about it."""
    why = model.why_not_packed or "nothing of it is packed"
    if not model.plain:
        return why
    from loader.errors import CheckpointError

    with ExitStack() as stack:
        try:
            expected = _expected_bytes(model, {name: model.open(name, stack) for name in model.plain})
        except CheckpointError as error:
            return f"{why}; {error}"
    if expected >= model.plain_bytes:
        return f"{why}; nor can it be: packing is for bfloat16 weights, it holds {', '.join(_dtypes(model))}"
    return f"{why}; `hearth pack {model.name}` packs it"


def _check_space(model: ModelFiles, expected: int, there: int) -> None:
    """Raises CommandError, with the sizes, if the drive has no room for the packed files. expected: their size in bytes. there: how
    many bytes of them an interrupted run has already written."""
    status = os.statvfs(model.folder)
    free, missing = status.f_bavail * status.f_frsize, max(0, expected - there)
    if missing <= free:
        return
    part = f" ({size(expected)}, of which {size(there)} are there)" if there else ""
    message = (
        f"{model.name} packed needs {size(missing)}{part} beside the {size(model.plain_bytes)} it has, {model.folder} has "
        f"{size(free)} free: make room for {size(missing - free)}"
    )
    details = {"wanted_bytes": expected, "missing_bytes": missing, "free_bytes": free, "folder": str(model.folder)}
    raise CommandError(EXIT_NO_FIT, {"code": "no_space", "message": message, "details": details})


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0


def _drop_others(partial: Path, model: ModelFiles) -> None:
    """Deletes packed files from the folder `partial` if the model no longer has the plain files from which an interrupted run
    packed them."""
    from loader.packing.packer import INCOMPLETE, JOURNAL

    keep = {name + ending for name in model.plain for ending in ("", INCOMPLETE, JOURNAL)}
    for entry in os.scandir(partial):
        if entry.name not in keep:
            os.unlink(entry.path)


def _cure(model: ModelFiles) -> str:
    """Returns, for an error message, how to replace packed files that turned out to be wrong."""
    if not model.plain:
        return "there is no original to pack it from again: fetch it once more"
    return f"move {model.packed_folder} away, then `hearth pack {model.name}` makes it again"


def _failed(model: ModelFiles, why: str) -> CommandError:
    return CommandError(1, {"code": "bad_checkpoint", "message": f"{model.name}: {why}", "details": {"folder": str(model.folder)}})
