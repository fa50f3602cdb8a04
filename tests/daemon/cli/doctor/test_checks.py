"""Each check on made-up machines."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.cli.doctor import gpu, memory, network, storage, system
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from daemon.gpu.inventory import Gpu, GpuProcess
from engine.host.processor import Processor
from loader.models.catalog import scan
from tests.loader.checkpoints import write_checkpoint

GIB, MIB = 1 << 30, 1 << 20
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
"""


def says(finding: Finding, level: str, *texts: str) -> None:
    assert finding.level == level, finding
    assert all(text in f"{finding.found} · {finding.change}" for text in texts), finding
    assert bool(finding.change) == (level != OK), "what is not well says what to change, and only that"


@pytest.mark.parametrize(
    ("release", "level", "text"),
    [
        ("6.8.0-45-generic", OK, "Linux 6.8.0-45-generic"),
        ("6.5.0", OK, ""),
        ("6.4.1", WARN, "lacks asking what the page cache holds (cachestat)"),
        ("5.15.0-1", WARN, "lacks huge pages on demand (MADV_COLLAPSE), asking"),
        ("5.4", WARN, "MADV_POPULATE_WRITE"),
        ("next", WARN, "Linux next"),
    ],
)
def test_kernel(release: str, level: str, text: str) -> None:
    says(system.kernel(release), level, text)


def test_processor() -> None:
    amx = frozenset({"avx2", "avx512", "avx512vnni", "avx512bf16", "avx512fp16", "amx"})
    says(system.processor(Processor(amx)), OK, "AMX: bfloat16")
    says(system.processor(Processor(frozenset({"avx2", "avx512", "avx512vnni"}))), OK, "AVX-512 with VNNI: ", "widened")
    says(system.processor(Processor(frozenset({"avx2"}))), WARN, "AVX2: ", "AVX-512")
    says(system.processor(Processor(amx - {"amx"}, frozenset({"amx"}))), WARN, "without amx", "unset HEARTHD_CPU_FEATURES")
    says(
        system.find_processor({"HEARTHD_CPU_FEATURES": "-amx,sse"}), FAIL, "HEARTHD_CPU_FEATURES: 'sse'", "-avx2", "does not start"
    )
    assert system.find_processor({}).level != FAIL


def test_the_environment_of_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"A": "b=c"}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until it runs, its environment is not written yet
        assert system.environment_of(process.pid)["A"] == "b=c"
        process.communicate(b"\n")
    assert system.environment_of(1 << 30) == dict(os.environ)


def test_limits() -> None:
    limits = system.soft_limits(LIMITS)
    assert limits == {"Max cpu time": system.UNLIMITED, "Max open files": 1024, "Max locked memory": 8 << 20}
    says(system.open_files(limits, "hearthd's"), WARN, "1024 (hearthd's)", "LimitNOFILE=")
    assert system.hard_open_files(LIMITS) == 524288, "hearthd raises the soft limit to it"
    assert system.hard_open_files(LIMITS.replace("524288", "unlimited")) == system.UNLIMITED
    says(system.open_files({"Max open files": 524288}, "x"), OK, "524288")
    says(system.open_files({"Max open files": system.UNLIMITED}, "x"), OK, "unlimited")
    says(system.locked_memory(limits, "x", wants_gpu=False), OK, "8192 KiB", "only GPUs need more")
    says(system.locked_memory(limits, "x", wants_gpu=True), WARN, "8192 KiB", "LimitMEMLOCK=infinity")
    says(system.locked_memory({"Max locked memory": system.UNLIMITED}, "x", wants_gpu=True), OK, "unlimited")


def test_compiler() -> None:
    says(system.compiler("/usr/bin/gcc", "/h/Python.h", True, wants_gpu=True), OK, "/usr/bin/gcc")
    says(system.compiler(None, "/h/Python.h", True, wants_gpu=True), FAIL, "no C compiler", "gcc")
    says(system.compiler("/usr/bin/gcc", "/h/Python.h", False, wants_gpu=True), FAIL, "no /h/Python.h", "python3-dev")
    says(system.compiler(None, "/h/Python.h", False, wants_gpu=False), OK, "only GPUs need them")


def test_cache_folder(tmp_path: Path) -> None:
    says(system.cache_folder("/c", is_noexec=True, is_writable=True), FAIL, "noexec", "cache_dir")
    says(system.cache_folder("/c", is_noexec=False, is_writable=False), WARN, "cannot be written")
    says(system.find_cache_folder(str(tmp_path / "not" / "yet"), checks_writing=True), OK, "not/yet")


def test_state_folder(tmp_path: Path) -> None:
    says(storage.state_folder("/s", 17 << 20, ""), OK, "/s, 17.0 MiB free")
    says(storage.state_folder("/s", 0, ""), WARN, "/s, 0 B free", "state_dir")
    says(storage.state_folder("/s", 0, "No space left on device"), FAIL, "forget pins", "No space left on device")
    says(storage.find_state_folder(str(tmp_path / "not" / "yet"), ""), OK, "not/yet")


def test_budgets() -> None:
    says(
        memory.budgets({"cpu:0": 12 * GIB, "cuda:0": 80 * GIB}, 8 * GIB, 32 * GIB), OK, "cpu:0 12.0 GiB + host tier 8.0 GiB of 32.0"
    )
    says(memory.budgets({"cpu:0": 30 * GIB}, 0, 32 * GIB), WARN, "little is left", "by 1.2 GiB")
    says(memory.budgets({"cuda:0": 80 * GIB}, 40 * GIB, 32 * GIB), FAIL, "more than there is", "by 11.2 GiB")
    says(memory.budgets({"cuda:0": 80 * GIB}, 0, 32 * GIB), OK, "nothing of")


def test_what_all_processes_need_is_reckoned() -> None:
    assert (
        memory.needed_bytes({"cpu:0": 4 * GIB, "cpu:1": 2 * GIB}, GIB, 64) == 7 * GIB + 2 * 768 * MIB + 1536 * MIB + 4 * 640 * MIB
    )
    assert memory.needed_bytes({"cpu:0": 4 * GIB}, 0, 2) == 4 * GIB + 768 * MIB + 1536 * MIB + 2 * 640 * MIB
    assert memory.needed_bytes({"cuda:0": 80 * GIB}, 8 * GIB, 64) == 8 * GIB + 3 * GIB + 1536 * MIB + 4 * 640 * MIB


def test_a_limit_from_outside() -> None:
    says(memory.service_limit(6 * GIB, None, "hearthd"), OK, "come to 6.0 GiB", "has none")
    says(memory.service_limit(6 * GIB, 8 * GIB, "hearthd"), OK, "hearthd may take 8.0 GiB")
    says(memory.service_limit(6 * GIB, 4 * GIB, "hearthd"), WARN, "may take 4.0 GiB", "MemoryMax=6144M", "--memory 6144m")


def test_the_least_limit_above_a_process_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for pid, line in (("7", "0::/system.slice/hearthd.service\n"), ("8", "0::/other\n"), ("9", "1:memory:/old\n")):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(line)
    (groups / "system.slice" / "hearthd.service").mkdir(parents=True)
    (groups / "system.slice" / "hearthd.service" / "memory.max").write_text(f"{8 * GIB}\n")
    (groups / "system.slice" / "memory.max").write_text(f"{6 * GIB}\n")
    (groups / "other").mkdir()
    (groups / "other" / "memory.max").write_text("max\n")
    assert memory.limit_of(7, proc, groups) == 6 * GIB
    assert memory.limit_of(8, proc, groups) is None
    assert memory.limit_of(9, proc, groups) is None
    assert memory.limit_of(10, proc, groups) is None


def test_a_limit_of_the_first_version_of_control_groups_counts(tmp_path: Path) -> None:
    """In a container the kernel names the group as the host sees it, and what is mounted there begins with the container's own."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for pid, line in (("7", "5:cpu:/\n4:memory:/docker/0123\n0::/docker/0123\n"), ("8", "4:hugetlb,memory:/wide/open\n")):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(line)
    (groups / "memory" / "wide" / "open").mkdir(parents=True)
    (groups / "memory" / "wide" / "memory.limit_in_bytes").write_text(f"{5 * GIB}\n")
    (groups / "memory" / "wide" / "open" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # there is none
    assert memory.limit_of(7, proc, groups) is None
    assert memory.limit_of(8, proc, groups) == 5 * GIB
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    assert memory.limit_of(7, proc, groups) == 4 * GIB
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory.limit_of(7, proc, groups) is None


def test_huge_pages() -> None:
    assert memory.chosen("always within_size [advise] never deny force") == "advise"
    assert memory.chosen("") == ""
    says(memory.huge_pages(None, "advise", 0), OK, "gets them (shmem_enabled advise)")
    says(memory.huge_pages(None, "never", 512), WARN, "keeps 1.0 GiB that hearthd cannot use", "nr_hugepages=0")
    says(memory.huge_pages("Invalid argument", "deny", 0), WARN, "gets none: Invalid argument", "echo advise")


def test_driver() -> None:
    found = gpu.Driver("570.1", 12080, ("H200",))
    says(gpu.driver(found, True, True), OK, "570.1, CUDA 12.8, H200")
    says(gpu.driver(found, True, False), WARN, "/dev/nvidia-uvm is missing", "nvidia-persistenced")
    says(gpu.driver(gpu.Driver("470.1", 11040, ("T4",)), True, True), FAIL, "CUDA 11.4", "upgrade")
    says(gpu.driver(gpu.Driver("570.1", 12080, ()), True, True), FAIL, "no GPU")
    says(gpu.driver("Not Found", True, False), FAIL, "Not Found", "install")
    says(gpu.driver("Not Found", False, False), OK, "none is configured")


def test_devices() -> None:
    held = Gpu(0, "GPU-a", "H200", 140 * GIB, 60 * GIB, processes=(GpuProcess(7, "trainer", 60 * GIB),))
    says(gpu.device("cuda:0", held, "GPU-a", 80 * GIB, False), OK, "H200, 60.0 GiB of 140.0 GiB used")
    says(gpu.device("cuda:0", held, "GPU-a", 139 * GIB, False), FAIL, "by pid 7 trainer 60.0 GiB", "a smaller budget")
    says(gpu.device("cuda:0", held, "GPU-a", 139 * GIB, True), OK, "H200")
    other = replace(held, processes=(GpuProcess(7, "trainer", 55 * GIB, is_engine=False), GpuProcess(8, "engine", 5 * GIB, True)))
    taken = "60.0 GiB of 140.0 GiB used; others hold 55.0 GiB of 140.0 GiB: pid 7 trainer 55.0 GiB; its budget is 78.5 GiB"
    for is_running in (False, True):
        says(gpu.device("cuda:0", other, "GPU-a", 157 * GIB // 2, is_running), OK, taken)
    says(gpu.device("cuda:0", replace(other, ecc_errors=3), "GPU-a", 157 * GIB // 2, True), WARN, taken, "3 memory errors")
    says(gpu.device("cuda:0", None, "GPU-a", 1, True), FAIL, "the driver has no GPU-a", "Xid")
    says(gpu.device("cuda:0", replace(held, ecc_errors=3), "GPU-a", 1, True), WARN, "3 memory errors", "reset")
    says(gpu.device("cuda:0", replace(held, problem="a row; the GPU needs repair"), "GPU-a", 1, True), FAIL, "needs repair")


def test_drive() -> None:
    fast, slow = storage.Reading(3 * GIB, 1.0), storage.Reading(GIB // 4, 1.0)
    says(storage.drive(False, fast), OK, "3.22 GB/s")
    says(storage.drive(True, fast), OK, "3.22 GB/s")
    says(storage.drive(False, slow), WARN, "a solid-state drive, 0.27 GB/s", "NVMe")
    says(
        storage.drive(True, storage.Reading(problem="no model")),
        WARN,
        "a drive that calls itself rotating, speed unknown: no model",
        "NVMe",
    )
    says(storage.drive(None, storage.Reading(1 << 20, 0.1)), OK, "unknown kind, speed unknown: the largest file has 1 MiB")


def test_rotational_is_the_kernels_word(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    place = tmp_path / "vda" / "vda1"
    place.mkdir(parents=True)
    sysfs = tmp_path / "sys"
    sysfs.mkdir()
    assert storage.is_rotational(str(tmp_path), str(sysfs)) is None
    (sysfs / f"{os.major(device)}:{os.minor(device)}").symlink_to(place)
    (tmp_path / "vda" / "queue").mkdir()
    for text, rotational in (("1\n", True), ("0\n", False)):
        (tmp_path / "vda" / "queue" / "rotational").write_text(text)
        assert storage.is_rotational(str(tmp_path), str(sysfs)) is rotational


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(20 << 20))
    reading = storage.read_direct(str(path))
    if reading.problem:
        pytest.skip(f"no direct reads here: {reading.problem}")
    assert reading.num_bytes == 20 << 20
    assert "No such file" in storage.read_direct(str(tmp_path / "none")).problem


def test_models(tmp_path: Path) -> None:
    (one,) = storage.models(str(tmp_path), [])
    says(one, WARN, "holds none", "hearth pull")
    write_checkpoint(tmp_path / "whole")
    (write_checkpoint(tmp_path / "part") / "model.safetensors").unlink()
    (write_checkpoint(tmp_path / "wrong") / "config.json").write_text("{")
    first, part, wrong = storage.models(str(tmp_path), list(scan(tmp_path).values()))
    says(first, OK, "1 of 3")
    says(part, WARN, "part is incomplete: neither model.safetensors nor", "finish copying")
    says(wrong, WARN, "wrong: config.json", "correct or replace")
    says(storage.find_storage("")[0], WARN, "no models folder is configured")
    says(storage.find_storage(str(tmp_path / "none"))[0], FAIL, "No such file or directory")


def test_port() -> None:
    taken = OSError(errno.EADDRINUSE, "Address already in use")
    says(network.port("h:1", None, None), OK, "h:1 is free")
    says(network.port("h:1", taken, "nginx (pid 7)"), FAIL, "taken by nginx (pid 7)", "another port")
    says(network.port("h:1", taken, "systemd (pid 1)"), OK, "hearthd.socket")
    says(network.port("h:1", taken, None), WARN, "only root can see", "hearthd.socket")
    says(network.port("h:1", OSError(errno.EADDRNOTAVAIL, "Cannot assign"), None), FAIL, "Cannot assign", "address of this machine")
