"""A process for tests of loadtest/child_commands.py: says back what it is told, and fails when told so."""

import asyncio
import atexit
import sys
import time

from loadtest.child_commands import serve


async def echo(**words):
    print("for the log")
    return words


def say_late():
    """As engines do: after the answer, and with a line that would fill a page."""
    time.sleep(0.3)
    print("why it died", file=sys.stderr)
    print("and its configuration: " + "x" * 20_000, file=sys.stderr)


async def fail():
    atexit.register(say_late)
    raise ValueError("told so")


if __name__ == "__main__":
    asyncio.run(serve({"echo": echo, "fail": fail}))
