"""A process for tests of loadtest/child_commands.py: says back what it is told, and fails when told so."""

import asyncio

from loadtest.child_commands import serve


async def echo(**words):
    print("for the log")
    return words


async def fail():
    raise ValueError("told so")


if __name__ == "__main__":
    asyncio.run(serve({"echo": echo, "fail": fail}))
