"""`python -S -E shared/observe/probe.py http://127.0.0.1:8105/ready`: exit 0 when the answer is 200, else 1.
`unix:PATH` instead of a URL: exit 0 when a unix socket accepts.

The health check of a container, run every few seconds: it imports nothing but sockets, so that it costs
15 ms of CPU instead of an HTTP client's 60, and it needs no curl in the image.
"""

import socket
import sys

TIMEOUT_S = 2.0
MAX_STATUS_LINE_BYTES = 64


def status_of(url: str, timeout_s: float = TIMEOUT_S) -> int:
    """The HTTP status of a GET; 0 when there is no HTTP answer in time.

    Raises: ValueError when the URL is not http://HOST:PORT/PATH.
    """
    scheme, _, rest = url.partition("://")
    address, _, path = rest.partition("/")
    host, _, port = address.rpartition(":")
    if scheme != "http" or not host or not port.isdigit():
        raise ValueError(f"{url!r} is not http://HOST:PORT/PATH")
    request = f"GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            connection.sendall(request.encode())
            line = connection.makefile("rb").readline(MAX_STATUS_LINE_BYTES).split()
    except OSError:
        return 0
    return int(line[1]) if len(line) > 1 and line[0].startswith(b"HTTP/") and line[1].isdigit() else 0


def accepts(path: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether somebody listens on the unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


def main(argv: list[str]) -> int:
    """Exit code of the health check."""
    if len(argv) != 1:
        print("usage: probe.py http://HOST:PORT/PATH | unix:PATH", file=sys.stderr)  # noqa: T201 - a command line's answer
        return 2
    if argv[0].startswith("unix:"):
        found = 200 if accepts(argv[0].removeprefix("unix:")) else 0
    else:
        found = status_of(argv[0])
    print(f"{argv[0]}: {found or 'no answer'}")  # noqa: T201 - shown by `docker inspect`
    return 0 if found == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
