"""Headless Chromium over its DevTools protocol: what a person with the page open would see.

async with Browser(tmp_path / "profile") as browser:
    page = await browser.open(node.url)
    await page.wait_for("document.title === 'hearthd'")
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

SAFETY_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--remote-debugging-port=0",
)


def find() -> str | None:
    """The path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Failed(AssertionError):
    """The browser or the page's own code has refused."""


class Page:
    """One tab. requests: the URLs it asked for · problems: what its console and the policy complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if (future := self._answers.pop(told.get("id"), None)) is not None:
                if not future.done():
                    future.set_result(told)
            elif told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(future, SAFETY_S)
        if "error" in told:
            raise Failed(f"{method}: {told['error']}")
        return told["result"]

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise Failed(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Polls until it is true and returns it. A page that is on its way is not there yet."""
        end, error = time.monotonic() + SAFETY_S, ""
        while time.monotonic() < end:
            try:
                if value := await self.evaluate(expression):
                    return value
            except Failed as failed:
                error = str(failed)
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"never true: {expression}\n{error}\n{self.problems}\n{await self.evaluate('document.body.innerText')}"
        )

    async def look(self, width: int, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """The size of the window and the colours its owner prefers."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def close(self) -> None:
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class Browser:
    """profile: a folder that is made. Nothing of the browser outlives the `async with`."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._pages: list[Page] = []

    async def __aenter__(self) -> Browser:
        self._port = await asyncio.to_thread(self._start)
        self._http = aiohttp.ClientSession()
        return self

    def _start(self) -> int:
        """Returns the port of the protocol."""
        path = find()
        assert path is not None, "no Chromium here"
        command = [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        active = self._profile / "DevToolsActivePort"
        end = time.monotonic() + SAFETY_S
        while not (active.exists() and active.read_text().count("\n")):
            if time.monotonic() > end or self._process.poll() is not None:
                self._stop()
                raise AssertionError(f"Chromium does not start: {self._process.returncode}")
            time.sleep(0.05)
        return int(active.read_text().split()[0])

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def open(self, url: str) -> Page:
        async with self._http.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
            target = await answer.json()
        page = Page(await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        self._pages.append(page)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.call("Page.navigate", url=url)
        return page

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for page in self._pages:
            await page.close()
        await self._http.close()
        await asyncio.to_thread(self._stop)
