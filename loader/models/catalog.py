"""Lists the models in a folder. A scan is cheap: it reads names, sizes and headers of files, but no tensor data, and does not
import torch.

A folder is a complete model if it has config.json and every file that its index names, each as long as its header says. A folder
that has only some of these is listed as incomplete, with the reason. A folder with adapter_config.json is a LoRA adapter; it may
also lie in a model's folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from loader.architectures import eagle
from loader.architectures.eagle import EagleHead
from loader.configs.hf_config import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    QUANT_CONFIG_NAME,
    GenerationDefaults,
    parse_config,
    parse_generation,
)
from loader.configs.pooling import MODULES_NAME, POOLING_NAME, pooled
from loader.errors import CheckpointError, FileTooShort, UnsupportedModel, shortened
from loader.files import hub_cache, open_files
from loader.files.regular_file import open_regular, read_regular
from loader.files.safetensors import INDEX_NAME, SINGLE_NAME, Header, TensorRef, read_header
from loader.files.weight_files import (
    OTHER_FORMATS,
    PACKED_DIR,
    FileInfo,
    MissingFile,
    is_packed_only,
    packed_files,
    read_headers,
    read_packed,
)
from loader.formats.kv_scales import unused_kv_scales
from loader.formats.registry import stored_format
from loader.formats.weight_format import StoredTensor
from loader.models import adapter as lora
from loader.models.adapter import Adapter
from loader.shapes.config_fields import json_fields
from loader.shapes.dtypes import DTYPES
from loader.shapes.model_shape import ModelShape
from loader.sizes import layout

log = logging.getLogger("hearthd.models")
MAX_DEPTH = 8  # deepest level of folders below the models folder that is looked at; also ends link cycles
MAX_FOLDERS = 100_000
_MADE_UP = ("/proc", "/sys")
UNPRINTABLE = "its name holds what is no printable UTF-8 text; rename it"
MAX_CONFIG_BYTES = 4 << 20
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_INNER = (PACKED_DIR, os.path.dirname(POOLING_NAME))  # folders in a model's folder that belong to the model
# all files of a model, other than its weights, that are read here
SIDE_FILES = (CONFIG_NAME, QUANT_CONFIG_NAME, GENERATION_CONFIG_NAME, *TOKENIZER_NAMES, MODULES_NAME, POOLING_NAME)


@dataclass(slots=True)
class Checkpoint:
    """The findings of a scan in the folder of a model, of a LoRA adapter, or of a head that drafts tokens for other models.

    complete: whether it can be loaded. If not, `reason` says what is missing (it may still arrive), or `error` what is wrong (it
    stays wrong until the files change).

    shape: the model's shape; None if config.json can't be used, or if the folder holds no model. predicting: the shape with the
    model's predictor, if the files hold one that can draft tokens; None: they hold none, or predictor_error says what is wrong with
    it. notes: sentences for operators about tensors in the files that are not used. weights_bytes: dtype -> bytes of weights that
    an engine holds, without the predictor.

    fingerprint: a hash of the files' names, sizes and times, of the configuration texts and of the weight files' headers. files_id:
    the same without times, so that copies of the files have equal ones. packed_files: files with the same weights in packed form,
    if `files` are plain. packed_reason: why packed files that exist can't be used.

    is_adapter: whether the folder is an adapter's. adapter: the adapter that the files describe; None unless it is complete. head:
    the draft head that the files describe; None: the folder is not a head's."""

    name: str
    path: str
    complete: bool = False
    reason: str = ""
    error: str = ""
    failure: CheckpointError | None = None  # the exception that `error` is the text of
    files: tuple[FileInfo, ...] = ()
    packed_files: tuple[FileInfo, ...] = ()
    packed_reason: str = ""
    shape: ModelShape | None = None
    predicting: ModelShape | None = None
    predictor_error: str = ""
    notes: tuple[str, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    weights_bytes: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    files_id: str = ""
    created: int = 0  # Unix seconds: mtime of config.json or adapter_config.json
    tokenizer_files: tuple[str, ...] = ()
    signature: str = ""  # hash of the name, size and mtime_ns of every file that matters, which rescans compare
    is_adapter: bool = False
    adapter: Adapter | None = None
    head: EagleHead | None = None

    @property
    def fault(self) -> str:
        """Returns what is missing from the checkpoint or wrong with it; "" if nothing is known to be."""
        return self.reason or self.error


@dataclass(slots=True, frozen=True)
class Seen:
    """A checkpoint that a scan has found. in_cache: whether it is in a Hugging Face cache. is_named: whether it is an adapter whose
    folder was given by name, instead of being found below the models folder."""

    checkpoint: Checkpoint
    in_cache: bool = False
    is_named: bool = False


def scan(
    models_dir: str | Path, previous: Mapping[str, Checkpoint] | None = None, named: Mapping[str, str] | None = None
) -> dict[str, Checkpoint]:
    """Returns all models, adapters and draft heads below models_dir by name, sorted. A name is the path below models_dir, except in
    a Hugging Face cache (`walk`). previous: the result of the last scan, from which checkpoints of folders that have not changed
    are taken. named: name -> folder of further LoRA adapters, which may lie anywhere. Raises OSError if models_dir itself can't be
    read, or if no more files can be opened."""
    return merged(chain(walk(models_dir, previous), named_adapters(named or {}, previous)))


def merged(found: Iterable[Seen]) -> dict[str, Checkpoint]:
    """Returns the checkpoints that a scan has found, by name, sorted. If several have the same name, only one is taken: an adapter
    whose folder was given by name if there is one, else the one in a folder below the models folder, else the one in a Hugging Face
    cache."""
    plain: dict[str, Checkpoint] = {}
    cached: dict[str, Checkpoint] = {}
    named: dict[str, Checkpoint] = {}
    for seen in found:
        (named if seen.is_named else cached if seen.in_cache else plain)[seen.checkpoint.name] = seen.checkpoint
    below = cached | plain
    for name in named.keys() & below.keys():
        log.warning("%s: its folder %s is hidden by the adapter that was loaded under this name", name, below[name].path)
    return dict(sorted((below | named).items()))


def walk(
    models_dir: str | Path,
    previous: Mapping[str, Checkpoint] | None = None,
    looking: Callable[[str], None] = lambda path: None,
    silent: Mapping[str, str] | None = None,
    watched: Callable[[str], None] = lambda folder: None,
) -> Iterator[Seen]:
    """Yields every model, adapter and draft head below models_dir as it is found. Names are paths below models_dir; a Hugging Face
    cache's `models--org--name` is named `org/name`. Raises OSError if models_dir itself can't be read, or if no more files can be
    opened.

    previous: the last scan's result; if the names, sizes and times of a folder's files have not changed, the checkpoint is taken
    from it and no file is opened. looking: called with each path before the file system is asked about it, since the answer may
    take any time. silent: path -> reason why the path must not be looked at, as the end of a sentence; a folder among them is
    listed as an incomplete model. watched: called with each folder in which a change would matter, even if the folder does not
    exist yet."""
    root, silent = Path(models_dir), silent or {}
    above = _identities_above(root)
    folders = [(root, "", 0, False)]
    num_folders = 0
    while folders:
        folder, name, depth, in_cache = folders.pop()
        if num_folders == MAX_FOLDERS:
            log.warning("%s holds more than %d folders; the rest is not looked at", root, MAX_FOLDERS)
            return
        num_folders += 1
        if depth and str(folder) in silent:
            yield Seen(Checkpoint(name, str(folder), reason=silent[str(folder)]), in_cache)
            continue
        looking(str(folder))
        try:
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError as error:
            if depth == 0 or open_files.are_used_up(error):
                raise
            continue  # removed or made unreadable meanwhile, so not a model
        watched(str(folder))
        files, below, unanswered = [], [], []
        for entry in entries:
            if entry.path in silent:
                unanswered.append(entry)
                continue
            if entry.is_symlink():
                looking(entry.path)  # the next line follows the link
            if _is_file(entry):
                files.append(entry)
            elif _is_dir(entry):
                below.append(entry)
        if depth and _looks_like_model({entry.name for entry in entries} - {entry.name for entry in below}):
            unanswered = [entry for entry in unanswered if entry.name in _INNER or not _is_real_dir(entry)]
            if unanswered:
                yield Seen(Checkpoint(name, str(folder), reason=f"{unanswered[0].name} {silent[unanswered[0].path]}"), in_cache)
                continue
            looking(str(folder))
            for inner in _INNER:
                if any(entry.name == inner for entry in below):
                    watched(os.path.join(folder, inner))
            yield Seen(_scan_folder(folder, name, files, (previous or {}).get(name)), in_cache)
            if not _is_adapter({entry.name for entry in files}):
                within = [entry for entry in below if _belongs_to_model(entry, looking, watched)]
                folders += [(Path(entry.path), f"{name}/{entry.name}", MAX_DEPTH, in_cache) for entry in within]
        elif depth < MAX_DEPTH:
            for entry in unanswered:
                inner = hub_cache.repo_name(entry.name) or entry.name
                yield Seen(Checkpoint(f"{name}/{inner}" if name else inner, entry.path, reason=silent[entry.path]), in_cache)
            for entry in below:
                if not entry.name.isprintable():  # names that are not UTF-8 are not printable either
                    escaped = ascii(entry.name)[1:-1]
                    checkpoint = Checkpoint(f"{name}/{escaped}" if name else escaped, str(folder), reason=UNPRINTABLE)
                    yield Seen(checkpoint, in_cache)
                    continue
                if entry.is_symlink() and _leads_round(entry, folder, root, above):
                    log.debug("%s leads to a folder that holds it, or to no files: not followed", entry.path)
                    continue
                repo = hub_cache.repo_name(entry.name)
                looking(entry.path)
                if repo is not None:
                    for at in (entry.path, *(os.path.join(entry.path, one) for one in hub_cache.FOLDERS)):
                        watched(at)
                inside = Path(entry.path) if repo is None else _snapshot(Path(entry.path))
                inner = repo or entry.name
                if inside is not None:
                    folders.append((inside, f"{name}/{inner}" if name else inner, depth + 1, in_cache or repo is not None))


def named_adapters(
    named: Mapping[str, str],
    previous: Mapping[str, Checkpoint] | None = None,
    looking: Callable[[str], None] = lambda path: None,
    silent: Mapping[str, str] | None = None,
    watched: Callable[[str], None] = lambda folder: None,
) -> Iterator[Seen]:
    """Yields the LoRA adapters in given folders, which may lie anywhere. named: name -> folder; a folder that holds no adapter is
    yielded as a checkpoint with an error. previous: the last scan's result, from which checkpoints of folders that have not changed
    are taken. looking, watched: both are called with each folder before it is read. silent: folder -> reason why the folder must
    not be looked at; it is yielded as incomplete. Raises OSError if no more files can be opened."""
    for name, path in named.items():
        if path in (silent or {}):
            checkpoint = Checkpoint(name, path, reason=(silent or {})[path], is_adapter=True)
        else:
            looking(path)
            watched(path)
            checkpoint = _named_adapter(name, path, (previous or {}).get(name))
        yield Seen(checkpoint, is_named=True)


def _named_adapter(name: str, path: str, previous: Checkpoint | None) -> Checkpoint:
    try:
        files = [entry for entry in os.scandir(path) if not entry.name.startswith(".") and _is_file(entry)]
    except OSError as error:
        if open_files.are_used_up(error):
            raise
        return Checkpoint(name, path, reason=f"{path}: {error.strerror}", is_adapter=True)
    if not _is_adapter({entry.name for entry in files}):
        has_config = any(entry.name == lora.CONFIG_NAME for entry in files)
        problem = f"{path} is a model's folder" if has_config else f"{path} holds no {lora.CONFIG_NAME}"
        return Checkpoint(name, path, error=problem, is_adapter=True)
    return _scan_folder(Path(path), name, files, previous)


def _identities_above(root: Path) -> set[tuple[int, int]]:
    """Returns (device, inode) of the models folder `root` and of each folder that contains it. If a link below the models folder
    leads to one of them, the scan must not follow it, since it would find the models folder again below itself."""
    found = set()
    for folder in (root.resolve(), *root.resolve().parents):
        try:
            stat = folder.stat()
        except OSError:
            continue
        found.add((stat.st_dev, stat.st_ino))
    return found


def _leads_round(link: os.DirEntry[str], folder: Path, root: Path, above: set[tuple[int, int]]) -> bool:
    """Returns whether the scan must not follow a link. That is so if the link leads to the models folder `root`, to a folder above
    it, or to one of the folders on the path from `root` to `folder`; if it leads into /proc or /sys, where each process has links
    to everywhere; and if its target does not exist. folder: the folder in which the scan found the link. above: (device, inode) of
    the models folder and of all folders above it."""
    try:
        stat = link.stat()
        if (stat.st_dev, stat.st_ino) in above or stat.st_dev in {
            os.stat(path).st_dev for path in _MADE_UP if os.path.ismount(path)
        }:
            return True
        while folder != root:
            own = folder.stat()
            if (own.st_dev, own.st_ino) == (stat.st_dev, stat.st_ino):
                return True
            folder = folder.parent
    except OSError:
        return True  # the link leads nowhere, or was removed meanwhile
    return False


def _snapshot(folder: Path) -> Path | None:
    try:
        return hub_cache.snapshot(folder)
    except OSError as error:
        if open_files.are_used_up(error):
            raise
        return None  # removed or made unreadable meanwhile


def scan_one(path: str | Path, name: str | None = None) -> Checkpoint:
    """Returns the checkpoint in a folder, complete or not. If the files are not those of a model, the checkpoint says what is
    missing or wrong. name: the checkpoint's name; None: the folder's name. Raises OSError if `path` is not a readable folder."""
    folder = Path(path)
    files = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and _is_file(entry)]
    return _scan_folder(folder, name or folder.name, files, None)


def holds_model(folder: str | Path) -> bool:
    """Returns whether the scan lists a folder as a model, complete or not, which the names of its files decide. The scan does not
    search the folders below such a folder for further models. Raises OSError if the folder can't be read."""
    with os.scandir(folder) as entries:
        return _looks_like_model({entry.name for entry in entries if not entry.name.startswith(".") and not _is_dir(entry)})


def holds_adapter(folder: str | Path) -> bool:
    """Returns whether the scan lists a folder as a LoRA adapter, which the names of its files decide. The folder may also lie
    within a model's folder. Raises OSError if the folder can't be read."""
    with os.scandir(folder) as entries:
        return _is_adapter({entry.name for entry in entries if not entry.name.startswith(".") and _is_file(entry)})


def holds_head(folder: str | Path) -> bool:
    """Returns whether a folder holds a head that drafts tokens for a model (EAGLE-3), according to its config.json. If config.json
    is damaged or unreadable, returns whether the folder holds weights, since they may be a head's. Raises OSError if the folder
    can't be read."""
    try:
        return eagle.is_head(json_fields(read_regular(Path(folder) / CONFIG_NAME, MAX_CONFIG_BYTES), CONFIG_NAME))
    except FileNotFoundError:
        return False
    except (OSError, CheckpointError) as error:
        if isinstance(error, OSError) and open_files.are_used_up(error):
            raise
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(".safetensors") and _is_file(entry) for entry in entries)


def _looks_like_model(names: set[str]) -> bool:
    known = (CONFIG_NAME, INDEX_NAME, lora.CONFIG_NAME)
    return any(name in names for name in known) or any(name.endswith(".safetensors") for name in names)


def is_model_itself(folder: str | Path) -> bool:
    """Returns whether a folder that was configured as the models folder is the folder of one model instead. Raises OSError if the
    folder can't be read."""
    names = os.listdir(folder)
    return CONFIG_NAME in names and any(name.endswith(".safetensors") for name in names)


def _is_adapter(names: Collection[str]) -> bool:
    """Returns whether a folder with files of these names is that of a LoRA adapter: it has the adapter's configuration. Some
    adapters come with the config.json of their base model; a folder with a config.json must also have the adapter's weights, and no
    weights of a model."""
    if CONFIG_NAME not in names:
        return lora.CONFIG_NAME in names
    own = lora.CONFIG_NAME in names and lora.WEIGHTS_NAME in names
    return own and SINGLE_NAME not in names and INDEX_NAME not in names


def _belongs_to_model(entry: os.DirEntry[str], looking: Callable[[str], None], watched: Callable[[str], None]) -> bool:
    """Returns whether an entry of a model's folder is the folder of an adapter or a draft head, which the scan lists in addition to
    the model. Links are not followed, because they may lead anywhere. looking, watched: both are called with the entry's path
    before it is read."""
    if entry.name in _INNER or not _is_real_dir(entry) or not entry.name.isprintable():
        return False
    looking(entry.path)
    watched(entry.path)
    try:
        return holds_adapter(entry.path) or holds_head(entry.path)
    except OSError as error:
        if open_files.are_used_up(error):
            raise
        return False  # removed or made unreadable meanwhile


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_real_dir(entry: os.DirEntry[str]) -> bool:
    """Returns whether a folder's entry is a folder itself, not a link to one."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _scan_folder(folder: Path, name: str, entries: Iterable[os.DirEntry[str]], previous: Checkpoint | None) -> Checkpoint:
    checkpoint = Checkpoint(name, str(folder))
    try:
        files = _files(entries) + _pooling_file(folder)
        files += tuple((info.name, info.size_bytes, info.mtime_ns) for info in packed_files(folder))
        checkpoint.signature = hashlib.blake2b(repr(files).encode(errors="surrogateescape"), digest_size=16).hexdigest()
        if previous is not None and previous.path == checkpoint.path and previous.signature == checkpoint.signature:
            return previous
        stats = {name: (size, mtime) for name, size, mtime in files}
        checkpoint.is_adapter = _is_adapter(stats)
        (_fill_adapter if checkpoint.is_adapter else _fill)(checkpoint, folder, stats)
        checkpoint.complete = True
    except FileTooShort as error:
        checkpoint.reason = str(error)
    except CheckpointError as error:
        checkpoint.error, checkpoint.failure = str(error), error
    except MissingFile as error:
        checkpoint.reason = str(error)
    except OSError as error:
        if open_files.are_used_up(error):
            raise  # this error is not about the folder
        checkpoint.reason = f"{error.filename or folder}: {error.strerror}"
    except MemoryError:
        checkpoint.error = "its configuration and headers need more memory than reading them may take"
    except Exception as error:  # a fault in one folder must not hide the others
        log.debug("%s: reading it failed", name, exc_info=True)
        checkpoint.error = f"cannot be read: {type(error).__name__}: {shortened(str(error))}"
    return checkpoint


def _files(entries: Iterable[os.DirEntry[str]]) -> tuple[tuple[str, int, int], ...]:
    seen = []
    for entry in entries:
        if entry.name.endswith((".safetensors", ".json", ".jinja")):
            stat = entry.stat()
            seen.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(seen))


def _pooling_file(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns (name, size in bytes, mtime_ns) of an embedding model's pooling configuration `1_Pooling/config.json`; () if there is
    none."""
    try:
        stat = (folder / POOLING_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return ((POOLING_NAME, stat.st_size, stat.st_mtime_ns),)


def _fill(checkpoint: Checkpoint, folder: Path, stats: Mapping[str, tuple[int, int]]) -> None:
    checkpoint.tokenizer_files = tuple(name for name in TOKENIZER_NAMES if name in stats)
    if CONFIG_NAME not in stats:
        raise MissingFile(f"{CONFIG_NAME} is missing")
    checkpoint.created = stats[CONFIG_NAME][1] // 1_000_000_000
    config_text = _read_text(folder, CONFIG_NAME, stats)
    generation_text = _read_text(folder, GENERATION_CONFIG_NAME, stats) if GENERATION_CONFIG_NAME in stats else None
    quant_text = _read_text(folder, QUANT_CONFIG_NAME, stats) if QUANT_CONFIG_NAME in stats else None
    digest = hashlib.blake2b(digest_size=16)
    digest.update(config_text + b"\0" + (generation_text or b"") + b"\0" + (b"" if quant_text is None else quant_text + b"\0"))
    if eagle.is_head(fields := json_fields(config_text, CONFIG_NAME)):
        headers = read_headers(folder)
        checkpoint.head = eagle.parse_head(fields, [tensor for header in headers.values() for tensor in header.tensors])
        _sum_up(checkpoint, folder, stats, headers, digest)
        return
    shape = parse_config(config_text, quant_text=quant_text)
    checkpoint.generation = parse_generation(config_text, generation_text)
    pooling_text = _read_text(folder, POOLING_NAME, stats) if POOLING_NAME in stats else None
    checkpoint.shape = pooled(shape, pooling_text, _read_text(folder, MODULES_NAME, stats) if MODULES_NAME in stats else None)
    if checkpoint.shape.pooling and not checkpoint.shape.scoring:
        digest.update((pooling_text or b"") + b"\0")
    headers = read_headers(folder, PACKED_DIR if is_packed_only(folder) else "")
    tensors = [tensor for header in headers.values() for tensor in header.tensors]
    names = {tensor.name for tensor in tensors}
    checkpoint.shape = layout.as_stored(checkpoint.shape, names)
    check_counts(checkpoint.shape, len(tensors))
    checkpoint.shape = shape = with_formats(checkpoint.shape, names, tensors)
    checkpoint.weights_bytes = {dtype: layout.weights_bytes(shape, dtype, stored_format(shape)) for dtype in DTYPES}
    _sum_up(checkpoint, folder, stats, headers, digest)
    check_parameters(checkpoint.shape, headers)
    checkpoint.notes = notes_on(names)
    _find_predictor(checkpoint, names, tensors, headers)
    beside = [info for info in packed_files(folder) if info.name.endswith(".safetensors") and info.name not in headers]
    if beside:
        checkpoint.packed_reason = read_packed(folder, headers, {info.name: info for info in checkpoint.files})
        checkpoint.packed_files = () if checkpoint.packed_reason else tuple(beside)


def _sum_up(
    checkpoint: Checkpoint,
    folder: Path,
    stats: Mapping[str, tuple[int, int]],
    headers: Mapping[str, Header],
    digest: hashlib.blake2b,
) -> None:
    """Sets a checkpoint's `files`, `fingerprint` and `files_id`. stats: file name -> (size in bytes, mtime_ns). headers: file name
    -> header, for every weight file. digest: a hash that already contains the configuration texts."""
    files, without_times = [], digest.copy()
    for file, header in headers.items():
        size, mtime = stats[file] if file in stats else _stat(folder / file)
        files.append(FileInfo(file, size, mtime))
        digest.update(f"{file}\0{size}\0{mtime}\0".encode() + header.raw)
        without_times.update(f"{file}\0{size}\0".encode() + header.raw)
    checkpoint.files = tuple(files)
    checkpoint.fingerprint, checkpoint.files_id = digest.hexdigest(), without_times.hexdigest()


def with_formats(shape: ModelShape, names: Collection[str], tensors: Sequence[TensorRef]) -> ModelShape:
    """Returns the shape with three fields set according to a checkpoint's tensors: stored_format (the weight format), plain_groups
    (the tensor groups that are not quantised) and block_offsets (where groups begin in their files, for direct reads). names: the
    names of all stored tensors. tensors: the same tensors, from the files' headers. Raises CheckpointError if, in a group of
    matrices that one matrix multiplication reads, some are quantised and some are not."""
    shape = replace(shape, stored_format=layout.format_by_name(shape, names))
    shape = replace(shape, plain_groups=layout.plain_groups(shape, tensors))
    return replace(shape, block_offsets=layout.block_offsets(shape, tensors))


def notes_on(names: Iterable[str]) -> tuple[str, ...]:
    """Returns sentences for operators about tensors that the files hold and that are not used. names: the names of all stored
    tensors."""
    note = unused_kv_scales(names)
    return (note,) if note else ()


def _find_predictor(
    checkpoint: Checkpoint, names: Collection[str], tensors: Sequence[TensorRef], headers: Mapping[str, Header]
) -> None:
    """Sets the checkpoint's field `predicting` to the shape with the model's predictor (a further layer that drafts tokens), if the
    files hold one. For a damaged predictor sets `predictor_error` instead; the model is then served without it. names, tensors: the
    names of all stored tensors, and the tensors themselves. headers: file name -> header."""
    assert checkpoint.shape is not None
    shape = layout.predicting(checkpoint.shape, names)
    if shape is None:
        return
    try:
        shape = with_formats(shape, names, tensors)
        check_parameters(shape, headers)
        checkpoint.predicting = shape
    except CheckpointError as error:
        checkpoint.predictor_error = str(error)


def _fill_adapter(checkpoint: Checkpoint, folder: Path, stats: Mapping[str, tuple[int, int]]) -> None:
    checkpoint.created = stats[lora.CONFIG_NAME][1] // 1_000_000_000
    config_text = _read_text(folder, lora.CONFIG_NAME, stats)
    try:
        fd = open_regular(folder / lora.WEIGHTS_NAME)
    except FileNotFoundError:
        stem = lora.WEIGHTS_NAME.removesuffix(".safetensors")
        other = next((stem + ending for ending in OTHER_FORMATS if (folder / (stem + ending)).exists()), "")
        if other:
            raise UnsupportedModel(other, None, "weights are read from safetensors alone: convert them") from None
        raise MissingFile(f"{lora.WEIGHTS_NAME} is missing") from None
    try:
        header = read_header(fd, lora.WEIGHTS_NAME)
    finally:
        os.close(fd)
    checkpoint.adapter = lora.parse_adapter(config_text, header)
    _sum_up(checkpoint, folder, stats, {lora.WEIGHTS_NAME: header}, hashlib.blake2b(config_text + b"\0", digest_size=16))


def _read_text(folder: Path, name: str, stats: Mapping[str, tuple[int, int]]) -> bytes:
    if stats[name][0] > MAX_CONFIG_BYTES:
        raise CheckpointError(name, None, f"{stats[name][0]} bytes is too long for a configuration (at most {MAX_CONFIG_BYTES})")
    return read_regular(folder / name, MAX_CONFIG_BYTES)


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def check_counts(shape: ModelShape, num_tensors: int) -> None:
    """Raises CheckpointError if the files hold fewer tensors (num_tensors) than the model has layers or, if experts are stored one
    by one, than it has experts in all layers. Called before anything lists all layers, since config.json may give any number of
    them."""
    if shape.num_layers > num_tensors:
        raise CheckpointError(
            CONFIG_NAME, None, f"key num_hidden_layers: {shape.num_layers} is more than the files hold tensors ({num_tensors})"
        )
    if shape.experts is not None and not shape.experts.stacked:
        num = shape.experts.num_experts * (shape.num_layers - len(shape.experts.dense_layers))
        if num > num_tensors:
            raise CheckpointError(CONFIG_NAME, None, f"asks for {num} experts, and the files hold {num_tensors} tensors")


def check_parameters(shape: ModelShape, headers: Mapping[str, Header]) -> None:
    """Checks that the files hold every parameter of the model with its shape and a supported dtype, and no other tensors except
    those that the model ignores. Raises CheckpointError, which names file and tensor, if they do not. headers: file name ->
    header."""
    tensors = [tensor for header in headers.values() for tensor in header.tensors]
    what = f"{shape.architecture} with this config.json"
    check_tensors(layout.stored_tensors(shape), tensors, partial(layout.is_ignored_tensor, shape), what, ", ".join(headers))


def check_tensors(
    stored: Iterable[StoredTensor], tensors: Iterable[TensorRef], is_ignored: Callable[[str], bool], what: str, files: str
) -> None:
    """Checks that files hold all tensors that are needed, with their shapes and dtypes, and no others except ignored ones. Raises
    CheckpointError, which names file and tensor, if they do not.

    stored: the tensors that are needed. tensors: those in the files. is_ignored: returns whether a further tensor of a given name
    is allowed. what, files: parts of messages: what needs the tensors, such as "LlamaForCausalLM with this config.json", and the
    names of the files."""
    wanted = {tensor.name: tensor for tensor in stored}
    for tensor in tensors:
        expected = wanted.pop(tensor.name, None)
        if expected is None:
            if not is_ignored(tensor.name):
                raise CheckpointError(tensor.file, tensor.name, f"{what} has no such parameter")
        elif not expected.fits(tensor.shape):
            asked = list(expected.shape)
            raise CheckpointError(tensor.file, tensor.name, f"has shape {list(tensor.shape)}, config.json asks for {asked}")
        elif tensor.dtype not in expected.dtypes:
            supported = ", ".join(expected.dtypes)
            raise CheckpointError(tensor.file, tensor.name, f"dtype {tensor.dtype} is not supported here; supported: {supported}")
    for name in wanted:
        raise CheckpointError(files, name, "missing: config.json asks for it")
