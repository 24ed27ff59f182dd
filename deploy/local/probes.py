"""Probes: one HTTP GET, one PING of Redis or one question to the keeper, with a deadline. No client library."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

from deploy.local.supervision import Health
from shared.transport.unix_framing import pack_message
from shared.wire import keeper as wire

MAX_HEAD_BYTES = 16 << 10
MAX_ANSWER_BYTES = 64 << 10
MAX_SAID_CHARS = 100


async def probe_http(host: str, port: int, path: str, *, timeout_s: float) -> Health:
    """OK on 200, NOT_READY on any other answer, SILENT on none."""
    status = await _http_status(host, port, path, timeout_s=timeout_s)
    if status is None:
        return Health.SILENT
    return Health.OK if status == 200 else Health.NOT_READY


async def in_flight(host: str, port: int, path: str, *, timeout_s: float) -> int:
    """What is under way at a service that was told to end, by its own answer; 0 where it gives none."""
    answer = await _answer(host, port, _get(host, port, path), _whole, timeout_s=timeout_s)
    try:
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
    except (ValueError, RecursionError):
        return 0
    count = found.get("in_flight") if isinstance(found, dict) else 0
    return count if isinstance(count, int) else 0


async def probe_redis(host: str, port: int, *, timeout_s: float) -> tuple[Health, str]:
    """OK on any reply, SILENT on none: the kernel accepts for a server that is stopped.

    NOT_READY, with what it says, while it loads its file or takes no writes because its disk is full.
    """
    reply = (await _first_line(host, port, b"PING\r\n", timeout_s=timeout_s)).decode(errors="replace").strip()
    if reply.startswith(("-LOADING", "-MISCONF")):
        return Health.NOT_READY, reply[1 : MAX_SAID_CHARS + 1]
    return (Health.OK, "") if reply else (Health.SILENT, "")


async def probe_keeper(path: str, *, timeout_s: float) -> Health:
    """OK if it answers a question that needs no floor; the kernel accepts for a keeper that is stopped."""
    writer, answer = None, b""
    question = pack_message(wire.TO_KEEPER.pack(wire.ListSpaces()), num_fds=0, max_fds=wire.MAX_FDS)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(question)
            writer.write_eof()  # it ends the connection: a peer that left with an answer unread would be in its log
            answer = await reader.read()
    except (OSError, TimeoutError):
        return Health.SILENT
    finally:
        if writer is not None:
            writer.close()
    return Health.OK if answer else Health.SILENT


async def _http_status(host: str, port: int, path: str, *, timeout_s: float) -> int | None:
    words = (await _first_line(host, port, _get(host, port, path), timeout_s=timeout_s)).split()
    try:
        return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None
    except ValueError:
        return None


def _get(host: str, port: int, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()


async def _first_line(host: str, port: int, request: bytes, *, timeout_s: float) -> bytes:
    """Of the answer; b"" when there is none in time."""
    return await _answer(host, port, request, asyncio.StreamReader.readline, timeout_s=timeout_s)


async def _whole(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while len(found) < MAX_ANSWER_BYTES and (piece := await reader.read(MAX_ANSWER_BYTES)):
        found += piece
    return found


async def _answer(
    host: str,
    port: int,
    request: bytes,
    take: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    *,
    timeout_s: float,
) -> bytes:
    """What `take` makes of the answer; b"" when it does not in time."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
            writer.write(request)
            return await take(reader)
    except (OSError, TimeoutError, ValueError):
        return b""
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
