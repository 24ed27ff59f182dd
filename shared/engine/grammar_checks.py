"""Grammars are tried out in a process of their own before an engine sees them (grammar_child.py says how).

vLLM validates on the worker's event loop, and whatever a grammar takes there, all requests of the worker wait for, or
die of: one asked for 1,000,000,000 items at least.
"""

import asyncio
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from traceback import walk_tb

import msgspec

from shared.engine import grammar_child
from shared.errors import InvalidRequest, ResourceError
from shared.wire.requests import StructuredSpec

MAX_PASSED = 4_096  # remembered by their sums


class GrammarChecks:
    """Owns the process, which starts with the first grammar. One grammar at a time; used only from the loop.

    Args: flexible: whether the engine's JSON may have blanks.
    """

    def __init__(self, *, flexible: bool) -> None:
        self._flexible = flexible
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, spec: StructuredSpec) -> None:
        """Returns when an engine may have this grammar.

        Raises: InvalidRequest when it is none or takes too much; ResourceError when there is no process to try it.
        Cost: milliseconds, once for each grammar; up to 10 s for one that takes too much.
        """
        key = sha256(f"{spec.kind}:{spec.value}".encode(errors="surrogatepass")).digest()
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        values = {"kind": spec.kind, "value": spec.value, "flexible": self._flexible}
        asked = asyncio.ensure_future(self._ask(msgspec.json.encode(values) + b"\n"))
        # whoever gives up leaves the answer to be read, or the next one would get it
        fault = await asyncio.shield(asked)
        if fault:
            raise InvalidRequest(fault)
        self._passed[key] = None
        if len(self._passed) > MAX_PASSED:
            self._passed.popitem(last=False)

    async def _ask(self, line: bytes) -> str:
        async with self._turn:
            for _ in range(2):  # the process may have been ended since the last time
                if self._closed:
                    break
                with suppress(OSError):
                    if answer := await self._exchange(line):
                        return msgspec.json.decode(answer, type=str)
                await self._end()
        raise ResourceError("the process that checks grammars has ended")

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None:
            pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            # -P: beside the script are names of other modules
            words = (sys.executable, "-P", grammar_child.__file__)
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=nowhere
            )
        process = self._process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        process.stdin.write(line)
        await process.stdin.drain()
        return await process.stdout.readline()

    async def close(self) -> None:
        """End the process, for good: whoever waits is answered with ResourceError."""
        self._closed = True
        if self._process is not None:
            _kill(self._process)
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await process.communicate()


def is_of_vllms_check(error: BaseException | None) -> bool:
    """Whether it was raised there, of a grammar."""
    frames = walk_tb(error and error.__traceback__)
    return any(frame.f_code.co_name == "_validate_structured_outputs" for frame, _ in frames)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        process.kill()
