"""Checks whether budgets fit the machine's memory, and whether a memfd gets huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from config.device_names import is_local
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from daemon.cli.table import size
from engine.host.child_process import COMPILER_BYTES, MOST_COMPILERS

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
# Resident memory of an engine besides its budget: libraries, kernels, buffers for reading. Not yet measured for cuda engines.
CPU_ENGINE_BYTES, CUDA_ENGINE_BYTES = 768 << 20, 3 << 30
NO_LIMIT_BYTES = 1 << 62  # the first version of control groups says that there is no limit by a number that is nearly 2**63
OTHERS_BYTES = 1536 << 20  # the memory of the daemon, text workers (usually 100 MiB each, 1 GiB at most) and the scanning process
MAX_SHARE = 0.9  # the largest share of the memory for budgets: the rest is for the system, the daemon, and the engines' own needs


def budgets(devices: Mapping[str, int], host_tier_bytes: int, memory_bytes: int) -> Finding:
    """Checks whether the budgets fit the machine's memory, and returns the finding. devices: name -> budget in bytes; only this
    machine's cpu devices are counted. host_tier_bytes: the size of the host tier, which is counted, too. memory_bytes: the
    machine's memory."""
    parts = [f"{name} {size(value)}" for name, value in devices.items() if is_local(name, "cpu")]
    total = sum(value for name, value in devices.items() if is_local(name, "cpu")) + host_tier_bytes
    parts += [f"host tier {size(host_tier_bytes)}"] if host_tier_bytes else []
    found = f"{' + '.join(parts) or 'nothing'} of {size(memory_bytes)}"
    change = f"lower device or host_tier_bytes by {size(max(0, total - int(MAX_SHARE * memory_bytes)))}"
    if total > memory_bytes:
        return Finding("memory", FAIL, found + ": more than there is", change)
    if total > MAX_SHARE * memory_bytes:
        return Finding("memory", WARN, found + ": little is left for everything else", change)
    return Finding("memory", OK, found)


def needed_bytes(devices: Mapping[str, int], host_tier_bytes: int, num_cores: int) -> int:
    """Returns the most memory, in bytes, that all processes of hearthd may need together. A limit on them, such as MemoryMax=,
    should not be lower. devices: name -> budget in bytes. num_cores: how many cores hearthd may use; the more there are, the more
    kernels are compiled at the same time."""
    cpu = [value for name, value in devices.items() if is_local(name, "cpu")]
    own = len(cpu) * CPU_ENGINE_BYTES + sum(is_local(name, "cuda") for name in devices) * CUDA_ENGINE_BYTES
    compiling = min(num_cores, MOST_COMPILERS) * COMPILER_BYTES
    return sum(cpu) + host_tier_bytes + own + OTHERS_BYTES + compiling


def service_limit(needed: int, limit: int | None, whose: str) -> Finding:
    """Compares the memory limit of hearthd's processes with what they need, and returns the finding. needed: the bytes that they
    need. limit: the limit of their control group in bytes; None: there is no limit. whose: whose limit it is, in words for the
    finding."""
    found = f"budgets and what hearthd's processes need beside them come to {size(needed)}"
    mib = -(-needed // (1 << 20))
    change = f"systemctl edit hearthd: [Service] MemoryMax={mib}M, for a container --memory {mib}m, or lower budgets"
    if limit is None:
        rule = "MemoryMax= of its unit, or --memory of its container, should be no less"
        return Finding("memory limit", OK, f"{found}; {whose} has none: {rule}")
    if limit < needed:
        return Finding("memory limit", WARN, f"{found}; {whose} may take {size(limit)}", change)
    return Finding("memory limit", OK, f"{found}; {whose} may take {size(limit)}")


def find_service_limit(devices: Mapping[str, int], host_tier_bytes: int, pid: int, num_cores: int) -> Finding:
    """Finds the memory limit of the running daemon, compares it with what hearthd needs, and returns the finding. devices: name ->
    budget in bytes. pid: the daemon's process id; 0: none runs, and the limit of this process is taken. num_cores: as in
    needed_bytes."""
    return service_limit(needed_bytes(devices, host_tier_bytes, num_cores), limit_of(pid), "hearthd" if pid else "this shell")


def limit_of(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the smallest memory limit, in bytes, of the control groups that contain a process; None: there is no limit. Both
    versions of control groups are supported. pid: the process; 0: this one. proc, groups: the folders at which procfs and the
    control groups are mounted."""
    lines = _read(proc / str(pid or "self") / "cgroup").splitlines()
    values = [_read(file) for line in lines for file in _limit_files(line, groups)]
    limits = [int(value) for value in values if value.isdigit()]
    return min((limit for limit in limits if limit < NO_LIMIT_BYTES), default=None)


def _limit_files(line: str, groups: Path) -> Iterator[Path]:
    """Yields the files that contain the memory limits of a control group and of all groups above it; none if the group's hierarchy
    does not control memory. line: the group's line in /proc/PID/cgroup. groups: the folder at which control groups are mounted."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0":
        top, name = groups, "memory.max"
    elif "memory" in controllers.split(","):
        top, name = groups / "memory", "memory.limit_in_bytes"
    else:
        return
    folder = top / path.strip("/")
    while folder != top.parent:
        yield folder / name
        folder = folder.parent


def chosen(text: str) -> str:
    """Returns the chosen value of a kernel setting, which the kernel marks with brackets, such as `advise` in `always [advise]
    never`; "" if no value is marked."""
    return text.partition("[")[2].partition("]")[0]


def huge_pages(problem: str | None, shmem_enabled: str, num_reserved: int) -> Finding:
    """Returns the finding on whether hearthd's memory gets huge pages. problem: why a trial with the memory of a memfd failed; None
    if it worked. shmem_enabled: the chosen value in transparent_hugepage/shmem_enabled. num_reserved: the value of vm.nr_hugepages,
    which reserves huge pages that hearthd cannot use."""
    found = f"shmem_enabled {shmem_enabled or 'not there'}"
    reserved = ""
    if num_reserved:
        reserved = f"; vm.nr_hugepages = {num_reserved} keeps {size(num_reserved * HUGE_BYTES)} that hearthd cannot use"
    if problem is None:
        if num_reserved:
            return Finding("huge pages", WARN, f"a memfd gets them ({found}){reserved}", "sysctl vm.nr_hugepages=0")
        return Finding("huge pages", OK, f"a memfd gets them ({found})")
    change = f"echo advise > {SHMEM_ENABLED}; Linux 6.1 or newer"
    return Finding("huge pages", WARN, f"a memfd gets none: {problem} ({found}){reserved}", change)


def find_huge_pages() -> Finding:
    return huge_pages(collapse_problem(), chosen(_read(SHMEM_ENABLED)), int(_read(NR_HUGEPAGES) or 0))


def collapse_problem() -> str | None:
    """Tries to put the memory of a memfd into one huge page, as engines do. Returns why that failed; None if it worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failed = ctypes.c_void_p(-1).value
    # twice the size, so that it contains a whole huge page at an aligned address
    address = libc.mmap(None, 2 * HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == failed:
        return os.strerror(ctypes.get_errno())
    fd = os.memfd_create("hearth-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        place = (address + HUGE_BYTES - 1) // HUGE_BYTES * HUGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(place, HUGE_BYTES, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == failed:
            return os.strerror(ctypes.get_errno())
        ctypes.memset(place, 1, HUGE_BYTES)
        return os.strerror(ctypes.get_errno()) if libc.madvise(place, HUGE_BYTES, _MADV_COLLAPSE) else None
    except OSError as error:
        return error.strerror
    finally:
        os.close(fd)
        libc.munmap(address, 2 * HUGE_BYTES)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
