"""A scripted coordinator and scheduler for tests of real worker processes."""

import asyncio
import json
from contextlib import suppress

import msgspec

from shared.free_ports import free_port
from shared.ids import Epoch
from shared.transport.zmq_channel import RouterServer
from shared.wire.membership import Heartbeat, HeartbeatReply, Register, Registered
from shared.wire.reports import (
    REPORT_REPLIES,
    REPORTS,
    Goodbye,
    Hello,
    Refused,
    Report,
    Resync,
    Welcome,
)


async def until(condition, what="it", timeout_s=60.0):
    """Poll another object's state."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  the condition is another object's state
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {timeout_s} s") from None


class ScriptedCoordinator:
    """Registers everybody, counts heartbeats, forgets on demand. One HTTP request per connection or many."""

    def __init__(self, ttl_ms=1500, interval_ms=100, first_epoch=1000):
        self.ttl_ms, self.interval_ms = ttl_ms, interval_ms
        self.next_epoch = first_epoch
        self.members: dict[str, tuple[int, Register]] = {}
        self.registers: list[Register] = []
        self.heartbeats: list[Heartbeat] = []
        self.left: list[str] = []
        self.port = free_port()  # that it has again after stop()
        self._server = None
        self._writers = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def stop(self):
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer = self._answer(method, path, body)
                writer.write(
                    f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(answer)}\r\n\r\n".encode()
                    + answer
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, method, path, body):
        path, _, _ = path.partition("?")
        parts = path.strip("/").split("/")
        if method == "POST" and parts == ["v1", "instances"]:
            register = msgspec.json.decode(body, type=Register)
            self.next_epoch += 1
            self.members[register.instance] = (self.next_epoch, register)
            self.registers.append(register)
            reply = Registered(
                epoch=Epoch(self.next_epoch), heartbeat_interval_ms=self.interval_ms, ttl_ms=self.ttl_ms
            )
            return 201, msgspec.json.encode(reply)
        if method == "POST" and parts[-1] == "heartbeat":
            beat = msgspec.json.decode(body, type=Heartbeat)
            known = self.members.get(parts[2])
            if known is None or known[0] != beat.epoch:
                return (404 if known is None else 409), json.dumps({"error": "unknown"}).encode()
            self.heartbeats.append(beat)
            return 200, msgspec.json.encode(HeartbeatReply(ttl_ms=self.ttl_ms))
        if method == "DELETE":
            self.left.append(parts[2])
            self.members.pop(parts[2], None)
            return 200, b"{}"
        return 404, b"{}"


class ScriptedScheduler:
    """Welcomes everybody and records."""

    def __init__(self, address=""):
        """`address`: that of an earlier one; else it gets one that is its own."""
        self.hellos: list[Hello] = []
        self.reports: list[Report] = []
        self.goodbyes: list[Goodbye] = []
        self.answer_hello = Welcome(report_interval_ms=50)
        self.unknown = False  # answer Reports with Resync
        self.router = RouterServer(
            address or f"tcp://127.0.0.1:{free_port()}",
            into=REPORTS,
            out=REPORT_REPLIES,
            on_message=self._on_message,
        )

    async def start(self):
        await self.router.start()
        return self

    @property
    def address(self):
        return self.router.address

    def _on_message(self, identity, _seq, message, _raw):
        if isinstance(message, Hello):
            self.hellos.append(message)
            self.unknown = False
            if self.answer_hello is not None:
                self.router.send(identity, self.answer_hello)
        elif isinstance(message, Report):
            self.reports.append(message)
            if self.unknown:
                self.router.send(identity, Resync())
        else:
            self.goodbyes.append(message)

    def refuse_next(self):
        """The next Report is answered as from an old epoch."""
        self.answer_hello = Refused(code="epoch.stale", reason="a larger epoch is known")
        self.unknown = True

    def close(self):
        self.router.close()
