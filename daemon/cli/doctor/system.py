"""Checks the kernel, the processor, a process's limits, what Triton needs for compiling, and the folder of compiled kernels."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from engine.host.processor import VARIABLE, Processor, UnknownFeature, host_features, processor_of

MIN_OPEN_FILES = 65536  # two per connection; the service's unit asks for more
# version of Linux -> a feature that it added and that hearthd uses if present
KERNEL_FEATURES = (
    ((5, 14), "memory made ready before it is used (MADV_POPULATE_WRITE)"),
    ((6, 1), "huge pages on demand (MADV_COLLAPSE)"),
    ((6, 5), "asking what the page cache holds (cachestat)"),
)
UNLIMITED = -1


def kernel(release: str) -> Finding:
    """Checks whether the version of Linux has all features that hearthd uses, and returns the finding. release: as in
    os.uname()."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if not found:
        return Finding("kernel", WARN, f"Linux {release}", "hearthd is made for Linux 6.5 or newer")
    version = (int(found[1]), int(found[2]))
    lacking = [text for since, text in KERNEL_FEATURES if version < since]
    if lacking:
        return Finding("kernel", WARN, f"Linux {release} lacks " + ", ".join(lacking), "upgrade to Linux 6.5 or newer")
    return Finding("kernel", OK, f"Linux {release}")


def processor(found: Processor) -> Finding:
    if found.taken_away:
        return Finding("processor", WARN, found.describe(), f"unset {VARIABLE} to use all it has")
    if found.tier.is_slow:
        return Finding("processor", WARN, found.describe(), "for the cpu device a processor with AVX-512; GPUs don't mind")
    return Finding("processor", OK, found.describe())


def find_processor(environment: Mapping[str, str]) -> Finding:
    """Returns the finding on this machine's processor: whether it computes the cpu device fast. environment: hearthd's environment
    variables, one of which may switch off features of the processor."""
    try:
        return processor(processor_of(host_features(), environment))
    except UnknownFeature as error:
        return Finding("processor", FAIL, str(error), "hearthd does not start with it")


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment variables that the process `pid` was started with; this process's own if they may not be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries)


def soft_limits(text: str) -> dict[str, int]:
    """Returns name -> soft limit, from the text of /proc/PID/limits; UNLIMITED means that there is no limit."""
    limits = {}
    for line in text.splitlines()[1:]:
        name, soft = line[:26].strip(), line[26:].split()[:1]
        if soft:
            limits[name] = UNLIMITED if soft[0] == "unlimited" else int(soft[0])
    return limits


def hard_open_files(text: str) -> int:
    """Returns the hard limit on open files, from the text of /proc/PID/limits. hearthd raises its soft limit to it at start."""
    for line in text.splitlines()[1:]:
        if line.startswith("Max open files"):
            hard = line[26:].split()[1]
            return UNLIMITED if hard == "unlimited" else int(hard)
    return UNLIMITED


def open_files(limits: dict[str, int], whose: str) -> Finding:
    value = limits.get("Max open files", UNLIMITED)
    if value == UNLIMITED or value >= MIN_OPEN_FILES:
        return Finding("open files", OK, f"{'unlimited' if value == UNLIMITED else value} ({whose})")
    change = f"ulimit -Hn {MIN_OPEN_FILES} before hearthd starts, LimitNOFILE= in its unit, --ulimit nofile= of its container"
    return Finding("open files", WARN, f"{value} ({whose}): connections beyond are answered 503", change)


def locked_memory(limits: dict[str, int], whose: str, wants_gpu: bool) -> Finding:
    value = limits.get("Max locked memory", UNLIMITED)
    if value == UNLIMITED:
        return Finding("locked memory", OK, f"unlimited ({whose})")
    found = f"{value >> 10} KiB ({whose})"
    change = "ulimit -l unlimited before hearthd starts, or LimitMEMLOCK=infinity in its unit"
    if not wants_gpu:
        return Finding("locked memory", OK, found + "; only GPUs need more")
    return Finding("locked memory", WARN, f"{found}: copies to a GPU come from pinned memory", change)


def compiler(path: str | None, headers: str, has_headers: bool, wants_gpu: bool) -> Finding:
    """Returns the finding on what Triton needs to compile kernels for GPUs: a C compiler, and Python's headers. path: the path of a
    C compiler, None if there is none. headers: the path at which Python.h should be. has_headers: whether the file is there.
    wants_gpu: whether cuda devices are configured; without them a missing compiler is no problem."""
    lacking = ([] if path else ["no C compiler"]) + ([] if has_headers else [f"no {headers}"])
    if not lacking:
        return Finding("C compiler", OK, f"{path}, {headers}")
    found = ", ".join(lacking)
    if not wants_gpu:
        return Finding("C compiler", OK, f"{found}; only GPUs need them")
    change = "install gcc and the headers of this Python (Debian: gcc python3-dev)"
    return Finding("C compiler", FAIL, f"{found}: Triton cannot build its launchers", change)


def find_compiler(wants_gpu: bool) -> Finding:
    path = next(
        (found for name in (os.environ.get("CC", ""), "gcc", "clang", "cc") if name and (found := shutil.which(name))), None
    )
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    return compiler(path, headers, os.path.exists(headers), wants_gpu)


def cache_folder(folder: str, is_noexec: bool, is_writable: bool) -> Finding:
    """Returns the finding on the folder of compiled kernels. If the folder does not exist, is_noexec and is_writable are those of
    the folder in which it would be created. is_noexec: whether its file system is mounted noexec. is_writable: whether this user
    may write to it."""
    if is_noexec:
        change = "remount it without noexec, or set cache_dir to another folder"
        return Finding("cache folder", FAIL, f"{folder} is mounted noexec: compiled kernels cannot be loaded", change)
    if not is_writable:
        return Finding(
            "cache folder", WARN, f"{folder} cannot be written by this user", "set cache_dir, or run this as hearthd's user"
        )
    return Finding("cache folder", OK, folder)


def find_cache_folder(folder: str, checks_writing: bool) -> Finding:
    """Looks at the folder of compiled kernels and returns the finding on it. checks_writing: whether to check that this user may
    write to it, because no daemon runs and this user may start one."""
    there = Path(folder)
    while not there.exists() and there != there.parent:
        there = there.parent
    is_noexec = bool(os.statvfs(there).f_flag & os.ST_NOEXEC)
    return cache_folder(folder, is_noexec, not checks_writing or os.access(there, os.W_OK | os.X_OK))
