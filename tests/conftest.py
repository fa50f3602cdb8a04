"""Triton reads this when it is first imported, which may be in any test module: without a GPU its kernels are interpreted."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

from engine.host import processor

processor.limit_libraries()  # torch reads it when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to other tests, instead of spinning
# Clients and daemons read all authorities that the machine trusts when they start, a twentieth of a second; tests need none.
os.environ.update(SSL_CERT_FILE=str(Path(__file__).with_name("one_authority.pem")), SSL_CERT_DIR="/nonexistent")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's own threads spin whatever they are told

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import file_order, imported_later, interpreter, process_environment  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LOG_LINES = 200  # of each node, in the report of a failed test
REPORTED = "reported"  # a property of a test whose value is printed at the end of the run

# Around each part of a test pytest attaches itself to all loggers that tell the root nothing: torch has 42.
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
imported_later.import_later(*imported_later.CLIENTS)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects no garbage while ten thousand tests are collected, and looks at none of them, nor at their modules, later."""
    gc.disable()
    try:
        if "PYTEST_XDIST_WORKER" in os.environ:
            _import_some_first(session)
        yield
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # looking for garbage after every 700 objects takes a tenth of the time


def _import_some_first(session: pytest.Session) -> None:
    """Imports the test modules of the whole suite, beginning at another one in each worker. In a fresh clone none of them is
    compiled, which takes longer than all else about collecting: workers that import them in one order compile each of them at the
    same moment, each for itself."""
    worker, num_workers = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if session.config.args != session.config.getini("testpaths"):
        return
    ignored = {os.path.normpath(path) for path in session.config.getoption("ignore") or ()}
    found = sorted(path.relative_to(ROOT) for folder in session.config.args for path in (ROOT / folder).rglob("test_*.py"))
    modules = [".".join(path.with_suffix("").parts) for path in found if str(path) not in ignored]
    first = worker * len(modules) // num_workers
    importlib.import_module("tests.engine.cpu_ops")  # which says where numba's kernels are kept, before any of them is imported
    for module in (*modules[first:], *modules[:first]):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # it is imported again to be collected, and tells it then
            importlib.import_module(module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files into the order of tests/file_order.py where several workers take them (--no-loadscope-reorder keeps it)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = file_order.ordered(item.nodeid.partition("::")[0] for item in items)
        places = {file: at for at, file in enumerate(files)}
        items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    process_environment.keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Restores the environment after the last test of a file: those of other files, and the daemons that they start, are not to
    depend on the files that their worker took before."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        process_environment.restore()
    return result


def pytest_runtest_setup() -> None:
    interpreter.quicken()  # where one was imported, by the test's module or by a test before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the logs of a failed test's nodes to its report: their folders may be gone when somebody asks."""
    report = yield
    if report.failed:
        given = getattr(item, "funcargs", {}).values()  # tmp_path, or a node that several tests share
        folders = {folder for one in given if isinstance(folder := getattr(one, "folder", one), Path)}
        for folder in sorted(folders):
            for log in sorted(folder.rglob("hearthd.log")):
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                report.sections.append((f"{log.relative_to(folder)}, its last {len(lines)} lines", "\n".join(lines)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure at once, where the workers report: if one of them dies, the summary may never come."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(f"\nfailed: {report.nodeid} ({report.when}): {getattr(crash, 'message', '')[:400]}", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests that run others in a process of their own have to say of those, whichever worker they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == REPORTED:
                terminalreporter.write_line(str(value))
