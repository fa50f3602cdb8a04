"""Looks up the names of other hosts. A look-up by the event loop's own resolver would delay the end of the process until a name
server answers, and keep one of four threads until then; this one runs in a daemon thread of its own, which ends with the process.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from loader.threads import Thread


class DaemonThreadResolver(AbstractResolver):
    """Resolves host names for aiohttp, each look-up in a daemon thread. Concurrent calls for the same name wait for one look-up."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int, int], asyncio.Future[list[ResolveResult]]] = {}

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """Returns the addresses of a host. Raises OSError if the name cannot be resolved."""
        key = host, port, family
        answer = self._asked.get(key)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            try:
                Thread(target=_look_up, args=(loop, answer, *key), name="looking up a name").start()
            except MemoryError as error:
                raise OSError(f"{host}: {error}") from None
            self._asked[key] = answer
            answer.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(answer)

    async def close(self) -> None:
        for answer in list(self._asked.values()):
            answer.cancel()


def _look_up(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[list[ResolveResult]], host: str, port: int, family: int
) -> None:
    found: list[ResolveResult] = []
    error: OSError | None = None
    try:
        for kind, _, proto, _, address in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG):
            where: Any = address
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found.append(ResolveResult(hostname=host, host=where[0], port=where[1], family=kind, proto=proto, flags=flags))
    except OSError as failed:
        error = failed
    except UnicodeError as failed:  # a label of the name has more than 63 characters
        error = OSError(f"{host}: {failed}")

    def tell() -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
            answer.exception()  # marks the exception as retrieved: perhaps nothing waits for it any more
        else:
            answer.set_result(found)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the event loop is closed because the process ends
        return
