"""A small hub on loopback: the endpoints that the hub's client library asks a checkpoint of, and ways to fail."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

from aiohttp import web

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class SmallHub:
    """repos: name -> revision -> files. `with SmallHub() as hub: hub.url`. asked: (method, path, Range header) of every request."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}  # file -> connections to it end after so many bytes
        self.spoiled: set[str] = set()  # files of which other bytes are sent than the listing's digest says
        self.ignores_range = False
        self.status = 0  # answered to everything
        self.asked: list[tuple[str, str, str]] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, name: str, folder: Path, revision: str = "main") -> None:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos.setdefault(name, {})[revision] = files

    def bytes_of(self, name: str) -> int:
        return sum(map(len, self.repos[name]["main"].values()))

    def fetched(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> SmallHub:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/agent-harnesses":  # the library asks this of itself, once a day, for its User-Agent
            return web.json_response({})
        self.asked.append((request.method, request.path, request.headers.get("Range", "")))
        if self.status:
            return web.Response(status=self.status)
        parts = request.path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            return self._info(name, rest[1] if rest[:1] == ["revision"] else "main")
        return await self._file(request, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _info(self, name: str, revision: str) -> web.Response:
        if name not in self.repos:
            return _error(401, "RepoNotFound")
        revision = _named(revision)
        if revision not in self.repos[name]:
            return _error(404, "RevisionNotFound")
        siblings = [_sibling(path, data) for path, data in self.repos[name][revision].items()]
        return web.json_response({"id": name, "modelId": name, "sha": COMMITS[revision], "siblings": siblings})

    async def _file(self, request: web.Request, name: str, revision: str, path: str) -> web.StreamResponse:
        if name in self.gated and request.headers.get("Authorization") != "Bearer hf_right":
            return _error(403, "GatedRepo")
        data = self.repos[name][_named(revision)][path]
        if path in self.spoiled:
            data = bytes(len(data))
        begin = 0 if self.ignores_range else request.http_range.start or 0
        response = web.StreamResponse(status=206 if begin else 200)
        response.headers["X-Repo-Commit"] = revision
        response.headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        response.content_length = len(data) - begin
        if begin:
            response.headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        end = min(len(data), begin + self.cut.get(path, len(data)))
        await response.write(data[begin:end])
        if end < len(data):
            assert request.transport is not None
            request.transport.close()
        return response


def _named(revision: str) -> str:
    return next((name for name, commit in COMMITS.items() if commit == revision), revision)


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    row: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
    if path.endswith((".safetensors", ".bin")):
        row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return row


def _error(status: int, code: str) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code, "X-Error-Message": code})
