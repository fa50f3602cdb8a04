"""What happens to adapters: operators load and unload them under requests, and their files change, break, go, and hang. What waits
for a scan goes on behind other acts."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from engine.serve.adapter_loads import READ_LIMIT_S
from loader.models.adapter import CONFIG_NAME, WEIGHTS_NAME
from tests.chaos.cast import FIRST, GUEST, HUNG, MODELS, OF_GUEST, OF_RUST, RED, RUST, SECOND, version_folder
from tests.chaos.clients import (
    ANOTHER,
    BROKEN,
    BUSY,
    CHANGING,
    MISSING,
    SOCKET_LIMIT_S,
    Refused,
    Request,
    Told,
    ask,
    code_of,
    drawn,
)
from tests.chaos.mounts import LISTED_S, mounted, until_listed
from tests.chaos.world import World

NOT_SAVED = "state_not_saved"  # the code of an answer: applied, but not saved
MOST_AT_ONCE = 3  # requests that an act sends together
HUNG_S = READ_LIMIT_S + 4  # so that requests fail for it
_numbers = itertools.count(1)


class Loading:
    """The name that acts load, and the requests that they send for it."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world, self._draw = world, draw
        self._threads: list[threading.Thread] = []

    def ask_behind(self, version: str) -> None:
        """Sends some requests at once whose text is this version's."""
        for at in range(self._draw.randrange(1, MOST_AT_ONCE + 1)):
            request = drawn(self._draw, OF_GUEST)
            name = f"{threading.current_thread().name} {at} {version}"
            thread = threading.Thread(target=self._world.clients.one, args=(request, version), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def load(self, version: str) -> None:
        path = str(version_folder(self._world.node.folder, version))
        self._post("/v1/load_lora_adapter", {"lora_name": GUEST, "lora_path": path, "load_inplace": True})

    def unload(self) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": GUEST})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        """Gives an operator's order until it is carried out, as somebody would whose connection was cut. Another error than that
        it cannot be done just now is a complaint; so is a name that is unknown, unless an order before was not answered."""
        was_cut, end_s = False, time.monotonic() + LISTED_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, code, text = post(self._world.clients.url, path, body)
                if status == 200 or code == NOT_SAVED or (was_cut and code == "model_not_found"):
                    return
                if status not in BUSY or time.monotonic() > end_s:
                    self._world.complain(f"{path} {body}: {status}: {text}")
                    return
                time.sleep(0.5)
                continue
            was_cut = True
            time.sleep(0.2)


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Returns an answer's status, the code of its error or "", and its text."""
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOCKET_LIMIT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return answer.status, code_of(text), text[:300]


def load_adapter(world: World) -> None:
    """An operator loads an adapter, replaces it by another version and unloads it, each under requests. Those that run with the old
    one go on with it; who comes after the end is told that there is none."""
    draw = random.Random(world.draw.random())  # of its own, so that the order of acts does not depend on threads
    loading = Loading(world, draw)

    def come_and_go() -> None:
        loading.load(FIRST)
        with world.clients.changed("an adapter that is replaced", {*OF_GUEST}, ANOTHER, (SECOND,)):
            loading.ask_behind(FIRST)
            time.sleep(draw.random())
            loading.load(SECOND)
            loading.ask_behind(SECOND)
            time.sleep(draw.random())
            loading.join()
        loading.ask_behind(SECOND)
        time.sleep(draw.random() / 4)
        with world.clients.changed("an adapter that is unloaded", {*OF_GUEST}, ANOTHER | {"model_not_found"}):
            loading.unload()
            loading.join()
        _is_unknown(world, drawn(draw, OF_GUEST))

    world.behind("operator", come_and_go)


def _is_unknown(world: World, request: Request) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):  # a daemon that is killed
        try:
            ask(world.clients.url, request)
        except Told as told:
            if told.code == "model_not_found" or isinstance(told, Refused):
                return
        world.complain(f"{request} was not refused though its adapter is unloaded")


def break_adapter(world: World) -> None:
    """One of its files holds something else than an adapter."""
    name = world.draw.choice((CONFIG_NAME, WEIGHTS_NAME))
    content = world.draw.choice((b"", b"[[[", world.draw.randbytes(5000)))

    def break_it(folder: Path) -> None:
        (folder / name).write_bytes(content)

    _change_files(world, "an adapter's file is broken", BROKEN, break_it)


def cut_adapter_short(world: World) -> None:
    """Its file ends too soon, as that of a copy does which is under way."""
    part = world.draw.random()

    def cut(folder: Path) -> None:
        file = folder / WEIGHTS_NAME
        os.truncate(file, int(file.stat().st_size * part))

    _change_files(world, "an adapter's file is cut short", BROKEN, cut)


def swap_adapter(world: World) -> None:
    """Another version takes its place. Each request has the text of one of them, whole; nothing is broken meanwhile if a file is
    replaced at once, and may be if it is written over."""
    at_once = world.draw.random() < 0.5

    def swap(folder: Path) -> None:
        _put(world, SECOND, folder, at_once)

    _change_files(world, "an adapter is swapped", CHANGING if at_once else BROKEN, swap, at_once)


def remove_adapter(world: World) -> None:
    def remove(folder: Path) -> None:
        os.replace(folder, world.node.folder / "away")
        shutil.rmtree(world.node.folder / "away")

    _change_files(world, "an adapter is removed", MISSING, remove)


def _change_files(world: World, why: str, codes: Set[str], change: Callable[[Path], None], at_once: bool = True) -> None:
    """Changes the files of the adapter that is there for it, and puts the first version back after a while. codes: what its
    requests may be told until it answers as before. at_once: how it is put back."""
    folder, request, after_s = world.node.models / RUST, drawn(world.draw, OF_RUST), world.draw.random() * 3

    def change_and_mend() -> None:
        with world.clients.changed(why, {*OF_RUST}, codes, (SECOND,)):
            change(folder)
            time.sleep(after_s)
            _put(world, FIRST, folder, at_once)
            with _scanned(world):
                _until_it_answers(world, request)

    world.behind("files", change_and_mend)


def _put(world: World, version: str, folder: Path, at_once: bool) -> None:
    """Puts a version's files into a folder: each replaced at once, or written over."""
    folder.mkdir(exist_ok=True)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        source = version_folder(world.node.folder, version) / name
        if at_once:
            shutil.copyfile(source, folder.parent.parent / "put")
            os.replace(folder.parent.parent / "put", folder / name)
        else:
            shutil.copyfile(source, folder / name)


@contextlib.contextmanager
def _scanned(world: World) -> Iterator[None]:
    """A context that begins once a scan is over that has seen what is in the models folder now: an adapter that is still in memory
    may answer before that, and cannot be read again."""
    folder = world.node.models / f"told-{next(_numbers)}"
    folder.mkdir()
    _put(world, FIRST, folder, at_once=True)
    until_listed(world, folder.name, True)
    yield
    shutil.rmtree(folder)


def _until_it_answers(world: World, request: Request) -> None:
    """Waits until a request has the right text again."""
    end_s, last = time.monotonic() + LISTED_S, ""
    while time.monotonic() < end_s:
        try:
            last = ask(world.clients.url, request)
            if last == world.clients.expected[request.asks_the_same]:
                return
        except (Told, OSError, http.client.HTTPException, ValueError) as error:
            last = str(error)
        time.sleep(0.2)
    world.complain(f"{request} was not answered as before for {LISTED_S:g} s after its adapter's files were mended: {last[:300]}")


def hang_adapter(world: World) -> None:
    """An adapter's folder does not answer for longer than an adapter's files are waited for. Its requests are told so, and are
    answered when it answers again; others are answered meanwhile. No other act runs, as a process that reads there cannot be
    ended."""
    if not world.may_mount:
        return
    request, other = drawn(world.draw, (HUNG,))._replace(is_background=False), drawn(world.draw, (RED,))
    with mounted(world, HUNG) as mount, world.clients.changed("an adapter that hangs", {HUNG}, CHANGING):
        if not until_listed(world, HUNG, True):
            return
        world.join()
        with mount.hang():
            thread = threading.Thread(target=world.clients.one, args=(request,), name="hung adapter", daemon=True)
            thread.start()
            end_s, num_answered = time.monotonic() + HUNG_S, 0
            while time.monotonic() < end_s:
                num_answered += bool(ask_once(world, other))
            if not num_answered:
                world.complain(f"no request for {RED} was answered while the files of {HUNG} did not answer")
        thread.join()
        _until_it_answers(world, request)


def ask_once(world: World, request: Request) -> str:
    """Returns an answer's text; "" if there was none."""
    with contextlib.suppress(Told, OSError, http.client.HTTPException):
        return ask(world.clients.url, request)
    return ""


def unload_under_adapters(world: World) -> None:
    """The base is evicted while requests with its adapters run; they wait for it and go on."""
    requests = [drawn(world.draw, (RED, RUST)) for _ in range(MOST_AT_ONCE)]
    threads = [
        threading.Thread(target=world.clients.one, args=(request,), name=f"under {at}", daemon=True)
        for at, request in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    time.sleep(world.draw.random() / 2)
    world.cli("unload", MODELS[0], "--to", world.draw.choice(("warm", "cold")), codes=(0, 4, 5))
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def versions_loaded(world_folder: Path, url: str) -> Iterator[tuple[str, str]]:
    """A context in which both versions are served under names of their own, which it yields."""
    for version in (FIRST, SECOND):
        body = {"lora_name": version, "lora_path": str(version_folder(world_folder, version))}
        status, _, text = post(url, "/v1/load_lora_adapter", body)
        assert status == 200, text
    yield FIRST, SECOND
    for version in (FIRST, SECOND):
        status, _, text = post(url, "/v1/unload_lora_adapter", {"lora_name": version})
        assert status == 200, text
