"""Processes of names that come once: `python -m tests.integration.many_names SOCKET FIRST COUNT DEVICE [lends]`.

One after the other, each in a process of its own that is forked from this one, attaches under its name and ends. Says
one line: what each heard, "" where it had its pages. DEVICE "": host memory of its own.
"""

import json
import os
import sys

from shared.aqua.own_space import OwnSpace
from shared.errors import ClusterError
from shared.ids import InstanceId

PAGE_BYTES = 2 << 20
NUM_PAGES = 4


def heard(socket: str, name: str, device: str, *, only_lends: bool) -> str:
    """Of a process of this name, which has ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            OwnSpace(
                socket, InstanceId(name), device or f"cpu:{name}", PAGE_BYTES, NUM_PAGES * PAGE_BYTES,
                only_lends=only_lends,
            )  # fmt: skip
        except ClusterError as error:
            said = f"{error.code}: {error.message}"
        except BaseException as error:  # noqa: BLE001  a forked child says what it can
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


if __name__ == "__main__":
    first, count = int(sys.argv[2]), int(sys.argv[3])
    device, lends = sys.argv[4], sys.argv[5:] == ["lends"]
    print(
        json.dumps(
            [heard(sys.argv[1], f"job-{i}", device, only_lends=lends) for i in range(first, first + count)]
        )
    )
