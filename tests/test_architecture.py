"""The tree's rules, each with its reason. A rule that is in the way is changed here, with the new reason, not worked around."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib
from functools import cache

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("config", "scheduler", "loader", "engine", "daemon", "hearthd")

# package -> packages of ours it may import
MAY_IMPORT = {
    "config": set[str](),
    "scheduler": set[str](),
    "loader": set[str](),
    "engine": {"scheduler", "loader", "hearthd"},
    "daemon": {"config", "scheduler", "loader", "engine", "hearthd"},
    "hearthd": set[str](),
}
# exchange, loop.pulse: shared memory and system calls alone; memory: descriptors over a socket, memfds; host: this machine; remote,
# group_region, stage_link: `hearth lend`, on numpy
DAEMON_FROM_ENGINE = {
    "engine.protocol",
    "engine.exchange",
    "engine.forks.messages",
    "engine.grammar.compile",
    "engine.grammar.json_schema",
    "engine.grammar.refusals",
    "engine.host.child_process",
    "engine.host.processor",
    "engine.loop.pulse",
    "engine.memory.handles",
    "engine.memory.group_region",
    "engine.memory.mappings",
    "engine.memory.stage_link",
    "engine.remote.frames",
    "engine.remote.states_sender",
    "engine.remote.table_rows",
    "engine.remote.wire",
}
# direct_io: system calls alone; `hearth doctor` reads from the drive with it; packer and verifier: `hearth pack`, on numpy
DAEMON_FROM_LOADER = {
    "loader.models.adapter",
    "loader.adapters.layout",
    "loader.sizes.capacity",
    "loader.models.catalog",
    "loader.models.described_model",
    "loader.files.direct_io",
    "loader.models.drafters",
    "loader.shapes.dtypes",
    "loader.errors",
    "loader.formats.registry",
    "loader.sizes.gpu_sizing",
    "loader.configs.hf_config",
    "loader.files.hub_cache",
    "loader.configs.kernel_sets",
    "loader.shapes.kv_dtypes",
    "loader.shapes.kv_layout",
    "loader.sizes.layout",
    "loader.shapes.model_shape",
    "loader.configs.kernel_needs",
    "loader.files.open_files",
    "loader.files.packed",
    "loader.packing.packer",
    "loader.files.regular_file",
    "loader.ready_threads",
    "loader.files.safetensors",
    "loader.threads",
    "loader.sizes.slices",
    "loader.sizes.work_space",
    "loader.packing.verifier",
    "loader.files.weight_files",
}
PURE = {"asyncio", "time", "datetime", "os", "socket", "threading", "subprocess", "random", "logging", "torch", "pathlib"}
# inside a package: a room (a folder, or a loose file) may import only those before it
ROOM_ORDER = {
    "engine": [
        *("protocol", "host", "exchange", "memory", "grammar", "contracts", "ops", "sampling", "layers", "models"),
        *("loading", "cpu", "cuda", "null", "serve", "lifecycle", "loop", "remote", "main", "forks", "__main__", "warm"),
    ],
    "loader": [
        *("errors", "threads", "ready_threads", "cached_file", "files", "shapes", "architectures", "formats", "configs", "sizes"),
        *("packing", "models", "reading", "adapters"),
    ],
    "daemon": [
        *("errors", "process", "record", "models", "text", "streams", "traces", "contracts", "access", "http", "scanning", "gpu"),
        *("page", "upstreams", "metrics", "requests", "engines", "api", "node", "operate", "lifecycle", "main", "__main__"),
        *("simulate", "lending", "cli"),
    ],
}
MOST_LOOSE_FILES = 4  # at the top of a package that has rooms, but for __init__ and __main__
# who may start a task by itself, (module, function): what bounds it, and who is told of its error
BOUNDED_TASKS = {
    ("daemon.gpu.question", "ask"): "one question to the driver, which all who ask await",
    ("daemon.http.acceptor", "_take"): "a connection's TLS handshake, which has a limit",
    ("daemon.lifecycle", "_let_end"): "waits for an event while the stop waits for requests, at most drain_timeout_s",
    ("daemon.lifecycle", "reload_as_asked"): "one reload, which its operator awaits; it tells itself what is wrong",
    ("daemon.operate.control", "_pass_on"): "waits for the next line of one operator's connection",
    ("daemon.process.started", "started"): "the start of a process, which the caller awaits even if it is cancelled",
    ("daemon.record.state_keeper", "save"): "one write, which the caller awaits",
    ("daemon.scanning.scanner", "scan"): "the time limit of one scan, cancelled as that ends",
    ("daemon.text.helper", "start"): "the start of a process, which all who need it await",
    ("daemon.text.service", "shared_table"): "one job, which all who need its result await",
    ("daemon.text.service", "_worker"): "the connection to one worker, which all who need it await",
    ("daemon.traces.exporter", "_first_of"): "waits for events within one round of a long task, cancelled at its end",
    ("daemon.upstreams.upstreams", "watch"): "a TaskGroup within one round of a long task, which gets its error",
}
# who may start threads in a way that could hang: why it keeps nobody else waiting. The commands of `hearth` (daemon.cli) may, too:
# whoever calls one sees that it hangs, and ends it.
STARTS_THREADS = {
    "loader.packing.packer": "runs in the commands of `hearth` alone",
    "loader.ready_threads": "starts all its threads when it is made, before there is any load",
    "loader.threads": "does not wait for the thread without a limit",
    "loader.packing.verifier": "runs in the commands of `hearth` alone",
}
HEAVY = {"torch", "triton", "numba", "llvmlite"}
# library in which kernels are written -> the rooms that may import it: backends, and code for the host of any device
KERNELS_IN = {"numba": ("engine.cpu", "engine.host"), "llvmlite": ("engine.cpu", "engine.host"), "triton": ("engine.cuda",)}
# who may know a kind of device: its own folder, and what opens the configured device or compiles for it
BACKENDS = {"engine.cpu": {"engine.main", "engine.warm"}, "engine.cuda": {"engine.main"}, "engine.null": {"engine.main"}}


# what asks for managed memory: functions and flags of CUDA's two libraries, and what libraries over them call it
MANAGED = re.compile(
    r"\bcu(da)?\w*Managed|\bcu(da)?Mem(Attach|Prefetch|Advise)|\bCUmemAttach|CU_?(DA)?_?MEM\w*_(ATTACH|MANAGED)"
    r"|managed_?(array|tensor|memory|alloc|free|pool)|malloc_managed|unified_(tensor|memory)",
    re.IGNORECASE,
)


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


MODULES = modules()


def imports_of(path: pathlib.Path) -> set[str]:
    """Returns the dotted names a file imports, also under TYPE_CHECKING; `from a import b` counts as a.b where that is a module of
    ours, else as a."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a thing lives"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else str(node.module))
    return names


@cache
def imports() -> dict[str, set[str]]:
    """Returns what each module of ours imports. Reading them takes seconds, which workers without a test of this file save."""
    return {name: imports_of(path) for name, path in MODULES.items()}


@cache
def reachable(module: str) -> frozenset[str]:
    """Returns the modules of ours that a module imports, directly or by others, and itself."""
    found, left = {module}, [module]
    while left:
        new = {name for name in imports()[left.pop()] if name in MODULES} - found
        found |= new
        left += new
    return frozenset(found)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    """scheduler, loader <- engine <- daemon, and config <- daemon: the pure parts can be tested and reused without the rest. An
    engine is sent what it needs of the settings."""
    package = module.split(".")[0]
    for name in imports()[module]:
        top = name.split(".")[0]
        if top in PACKAGES and top != package:
            assert top in MAY_IMPORT[package], f"{module} imports {name}: {package} may import {sorted(MAY_IMPORT[package])}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("daemon")])
def test_daemon_takes_little_from_engine_and_loader(module: str) -> None:
    """A CUDA fault cannot reach a process that never loads torch, and the daemon starts in well under a second."""
    for name in imports()[module]:
        if name.split(".")[0] == "engine":
            assert name in DAEMON_FROM_ENGINE, f"{module} imports {name}"
        if name.split(".")[0] == "loader":
            assert name in DAEMON_FROM_LOADER, f"{module} imports {name}"
    for reached in reachable(module):
        heavy = {name for name in imports()[reached] if name.split(".")[0] in HEAVY}
        assert not heavy, f"{module} reaches {reached}, which imports {sorted(heavy)}"


def test_what_rules_name_is_there_and_used() -> None:
    """A rule about something that is gone would hold for ever."""
    by_daemon = {name for module, names in imports().items() if module.startswith("daemon") for name in names}
    by_others = {name.split(".")[0] for module, names in imports().items() if not module.startswith("scheduler") for name in names}
    assert by_others >= HEAVY | PURE, f"no file imports {sorted((HEAVY | PURE) - by_others)}"
    assert by_daemon >= DAEMON_FROM_ENGINE | DAEMON_FROM_LOADER, (DAEMON_FROM_ENGINE | DAEMON_FROM_LOADER) - by_daemon
    for package, others in MAY_IMPORT.items():
        found = {name.split(".")[0] for module, names in imports().items() if module.startswith(package) for name in names}
        assert found >= others, f"{package} does not import {others - found}"
    for backend, known_to in BACKENDS.items():
        for module in known_to:
            assert any(name.startswith(backend) for name in imports()[module]), f"{module} does not know {backend}"
    for library, rooms in KERNELS_IN.items():
        for room in rooms:
            inside = [module for module in MODULES if module.startswith(f"{room}.")]
            assert any(library in {name.split(".")[0] for name in imports()[module]} for module in inside), f"{room}: no {library}"


def test_only_tests_import_transformers() -> None:
    """Families are served by hearthd's own code; transformers' is what tests compare it with."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert any(one.startswith("transformers") for one in needed), "tests compare with it no more"
    for module, names in imports().items():
        assert "transformers" not in {name.split(".")[0] for name in names}, module


def test_kernels_are_in_backends() -> None:
    """What runs on one kind of device is in that device's folder."""
    for module, names in imports().items():
        for library in {name.split(".")[0] for name in names} & KERNELS_IN.keys():
            assert module.startswith(tuple(f"{room}." for room in KERNELS_IN[library])), f"{module} imports {library}"


def test_who_looks_for_other_packages_imports_none() -> None:
    """What is imported before a package is known to be hearthd's own would be the other's code; afterwards there is one way in."""
    for module in ("hearthd.packages", "hearthd.collisions"):
        assert {name.split(".")[0] for name in imports()[module]} & set(PACKAGES) <= {"hearthd"}, module
    for path in ("daemon/__main__.py", "daemon/cli/__main__.py", "engine/__main__.py", "hearthd/__main__.py"):
        first = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.ImportFrom)]
        assert {str(node.module).split(".")[0] for node in first} == {"__future__", "hearthd"}, path


def test_every_package_carries_the_mark() -> None:
    """It tells hearthd's own from those of other distributions with the same names."""
    from hearthd.packages import NAMES, is_marked

    assert {*NAMES, "hearthd"} == set(PACKAGES)
    assert all(is_marked(str(ROOT), name) for name in NAMES)


# inside daemon.api: a module of the row may not import a module of the columns to its right
API_ORDER = ["daemon.api.bodies", "daemon.api.generation", "daemon.api.endpoints", "daemon.api.router", "daemon.api.app"]


def room_of(module: str) -> str:
    """Returns the part of a module's name that ROOM_ORDER ranks: a folder's name, or a loose file's."""
    return module.split(".")[1]


@pytest.mark.parametrize("package", ROOM_ORDER)
def test_rooms_have_an_order(package: str) -> None:
    """Whoever changes a room needs to know those it imports, never those that import it. Counts what TYPE_CHECKING guards, too."""
    order, own = ROOM_ORDER[package], [module for module in MODULES if module.startswith(f"{package}.")]
    assert sorted(order) == sorted({room_of(module) for module in own})
    for module in own:
        names = [name for name in imports()[module] if name in MODULES and name.startswith(f"{package}.")]
        above = sorted(name for name in names if order.index(room_of(name)) > order.index(room_of(module)))
        assert not above, f"{module} imports {above} from above itself"
    loose = [module for module in own if module.count(".") == 1 and not is_package(module) and not module.endswith("__main__")]
    assert len(loose) <= MOST_LOOSE_FILES, loose


def circle_in(imported: dict[str, set[str]]) -> str:
    """Returns a circle of imports as text, "a -> b -> a"; "" if there is none. imported: what each name imports."""
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


FOLDERS = sorted({".".join(parts[:depth]) for parts in (m.split(".") for m in MODULES) for depth in range(1, len(parts))})


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_folders_beside_each_other_have_an_order(folder: str) -> None:
    """A folder within a folder is one idea, so it is above or below each file and folder beside it, not both. What a folder imports
    counts for all its files, which is stricter than a rule against circles of files. Counts what TYPE_CHECKING guards, too."""
    depth, inside = folder.count(".") + 1, [module for module in MODULES if module.startswith(f"{folder}.")]
    below: dict[str, set[str]] = {}
    for module in inside:
        part = module.split(".")[depth]
        names = {name.split(".")[depth] for name in imports()[module] if name in MODULES and name.startswith(f"{folder}.")}
        below.setdefault(part, set()).update(names - {part})
    circle = circle_in(below)
    assert not circle, f"{folder}: {circle}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_stands_alone(backend: str) -> None:
    """A kind of device is one folder: nothing above it asks which kind it has, and no other kind builds on it."""
    assert backend in MODULES, f"{backend} is gone"
    inside = (backend, f"{backend}.")
    for module, names in imports().items():
        if module != backend and not module.startswith(inside[1]) and module not in BACKENDS[backend]:
            known = sorted(name for name in names if name == inside[0] or name.startswith(inside[1]))
            assert not known, f"{module} imports {known}"


def device_questions_in(source: str) -> list[str]:
    """Returns the expressions of a module that ask which kind of device a tensor is on: `.type` of something named a device, and
    `is_cuda` and the like."""
    found = []
    if not re.search(r"is_cuda|is_cpu|\.\s*type\b", source):  # as in most modules, whose parsing takes longer than all else
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in {"is_cuda", "is_cpu"} or (node.attr == "type" and "device" in of.lower()):
                found.append(ast.unparse(node))
    return found


def test_no_file_above_a_backend_asks_which_kind_of_device_it_has() -> None:
    """What differs between kinds of devices is in a backend's folder, or the backend says it."""
    inside = tuple(f"{backend}." for backend in BACKENDS)
    assert any(device_questions_in(path.read_text()) for module, path in MODULES.items() if module.startswith(inside))
    for module, path in MODULES.items():
        if not module.startswith(inside):
            assert not device_questions_in(path.read_text()), module


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def test_api_layers_point_down() -> None:
    """bodies -> generation -> endpoints -> app: an endpoint is added without touching what the others share."""
    for layer in API_ORDER:
        assert any(module.startswith(layer) for module in MODULES), f"{layer} is gone"
    for module, names in imports().items():
        rank = next((i for i, prefix in enumerate(API_ORDER) if module.startswith(prefix)), None)
        if rank is not None:
            above = tuple(API_ORDER[rank + 1 :])
            assert not [name for name in names if above and name.startswith(above)], f"{module} imports from above itself"


def test_bodies_load_no_server() -> None:
    """Text workers read long bodies; aiohttp would cost each of them 15 MB. Measured in a fresh process."""
    code = "import sys, daemon.text.worker\nfor name in sys.argv[1:]: __import__(name)\nprint('aiohttp' in sys.modules)"
    bodies = [module for module in MODULES if module.startswith("daemon.api.bodies.")]
    assert len(bodies) > 5
    out = subprocess.run([sys.executable, "-c", code, *bodies], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("scheduler")])
def test_scheduler_is_pure(module: str) -> None:
    """Time comes in with the event, so every decision can be replayed and simulated faster than real time."""
    for name in imports()[module]:
        assert name.split(".")[0] not in PURE, f"{module} imports {name}"


def test_kernels_know_nothing_of_checkpoints() -> None:
    """What a kernel needs of a model is an argument: the sizes at which work is cut belong to who accounts for the memory. Kernels
    that decode packed weights share the format of the bytes with those that write them. Threads and files of the cache
    folder have nothing to do with checkpoints."""
    formats_of_bytes = {"loader.packing.checksum", "loader.packing.codec", "loader.files.frame", "loader.formats.packed_rows"}
    allowed = formats_of_bytes | {"loader.threads", "loader.cached_file"}
    rooms = ("engine.cpu.kernels.", "engine.cuda.kernels.")
    kernels = [module for module in MODULES if module.startswith(rooms) or module.endswith("_kernels")]
    assert len(kernels) > 30
    used = set()
    for module in kernels:
        of_loader = {name for name in imports()[module] if name.split(".")[0] == "loader"}
        assert of_loader <= allowed, module
        used |= of_loader
    assert used == allowed, f"no kernel imports {sorted(allowed - used)}, which the rule allows"


def test_no_import_circles() -> None:
    """A circle means two files are one idea cut in the wrong place, also where a local import or TYPE_CHECKING hides it."""
    circle = circle_in({module: {name for name in names if name in MODULES} - {module} for module, names in imports().items()})
    assert not circle, circle


def test_init_files_hold_a_docstring_only() -> None:
    """No re-exports: a name has one address."""
    for path in ROOT.glob("*/**/__init__.py"):
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, path
            assert isinstance(body[0], ast.Expr), path
            assert isinstance(body[0].value, ast.Constant), path


def test_no_long_lived_task_ends_unseen() -> None:
    """A task that nobody awaits and that fails is seen by no one, and what it did is not done any more. Those of `long_tasks` are
    logged, started again and shown in /healthz."""
    found = set()
    for module, path in MODULES.items():
        if not re.search("create_task|ensure_future", source := path.read_text()):
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
                if names & {"create_task", "ensure_future"}:
                    found.add((module, function.name))
    own = {where for where in found if where[0] == "daemon.process.long_tasks"}
    assert own, "the rule sees no task"
    assert found - own == BOUNDED_TASKS.keys()


def test_no_thread_can_hang_at_its_start() -> None:
    """threading.Thread.start may wait for ever where memory has run out: see loader/threads.py. ThreadPoolExecutor calls it for the
    first jobs."""
    found = set()
    for module, path in MODULES.items():
        if not re.search("Thread|Timer", source := path.read_text()):
            continue
        used: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                used.add(ast.unparse(node))
        if used & {"threading.Thread", "threading.Timer", "concurrent.futures.ThreadPoolExecutor"}:
            found.add(module)
    assert {module for module in found if not module.startswith("daemon.cli.")} == STARTS_THREADS.keys()


def managed_memory_in(source: str) -> list[str]:
    """Returns what a module says that asks for managed memory: names, attributes, imports, keywords and strings, by which functions
    of a library are looked up. Comments and docstrings do not count."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            said.append(node.id)
        elif isinstance(node, ast.Attribute):
            said.append(node.attr)
        elif isinstance(node, ast.alias):
            said.append(node.name)
        elif isinstance(node, ast.keyword):
            said.append(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in documents:
            said.append(node.value if isinstance(node.value, str) else node.value.decode(errors="replace"))
    return [text for text in said if MANAGED.search(text)]


@pytest.mark.parametrize("module", MODULES)
def test_no_managed_memory(module: str) -> None:
    """The driver moves pages of managed memory (CUDA's unified memory) between host and device as they are touched: nobody's budget
    counts them, a step waits for them unforeseen, and a device that lacks memory takes the host's in silence."""
    assert not managed_memory_in(MODULES[module].read_text())


@pytest.mark.parametrize(
    "planted",
    [
        "from cuda.bindings.driver import cuMemAllocManaged as take",
        "address = _call(driver.cuMemAllocManaged, 1 << 20, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)",
        "flags = driver.CUmemAttach_flags(1)",
        "cudart.cudaMallocManaged(1 << 20, 1)",
        "function = library['cudaMallocManaged']",
        "function = getattr(library, f'cuMem{kind}_v2' if kind else b'cuMemAllocManaged_v2'.decode())",
        "_call(driver.cuMemPrefetchAsync, address, num_bytes, device, stream)",
        "cudart.cudaMemAdvise(address, num_bytes, advice, device)",
        "pool.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED",
        "weights = torch.ops.fbgemm.new_managed_tensor(like, [4])",
        "weights = torch.ops.fbgemm.new_unified_tensor(like, [4], True)",
        "allocator = torch.cuda.memory.CUDAPluggableAllocator(path, 'managed_alloc', 'managed_free')",
        "cupy.cuda.set_allocator(cupy.cuda.malloc_managed)",
        "array = numba.cuda.managed_array(4)",
        "rmm.reinitialize(managed_memory=True)",
    ],
)
def test_planted_managed_memory_is_found(planted: str) -> None:
    assert managed_memory_in(f"def take():\n    {planted}\n")


def test_what_is_no_managed_memory_is_not_found() -> None:
    """Prefetches of other kinds, the driver's device file that contexts need, and words about managed memory."""
    source = '''"""Never cudaMallocManaged."""
import os
def take():
    """Instead of cuMemAllocManaged."""
    os.posix_fadvise(0, 0, 0, os.POSIX_FADV_WILLNEED)  # no cudaMemPrefetchAsync
    return os.path.exists("/dev/nvidia-uvm"), driver.cuMemCreate(1), driver.cuMemHostRegister(1), prefetch(managed_by=1)
'''
    assert managed_memory_in(source) == []


def test_no_systemd_import() -> None:
    """systemd/ holds units, no Python; `import systemd` would be an empty namespace package."""
    for module, names in imports().items():
        assert "systemd" not in {n.split(".")[0] for n in names}, module


def test_every_top_level_name_has_one_owner() -> None:
    """Another distribution shipping `daemon` or `config` would silently replace ours."""
    owners = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        assert set(owners.get(package, ["hearthd"])) == {"hearthd"}, f"{package} is also shipped by {owners[package]}"


@pytest.mark.parametrize("module", ["daemon.main", "daemon.text.__main__", "daemon.cli.main", "engine.protocol"])
def test_light_processes_load_no_torch(module: str) -> None:
    """Measured in a fresh process: what a static look misses."""
    code = f"import sys, {module}; print([m for m in ('torch', 'numba', 'triton', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_tests_mirror_packages() -> None:
    """`import daemon` must find the package, not the tests: every test folder is a package below `tests`."""
    for folder in {p.parent for p in (ROOT / "tests").rglob("*.py")}:
        assert (folder / "__init__.py").exists(), folder
