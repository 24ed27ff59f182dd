"""A pretended worker for the zygote to fork."""

import http.server
import os
import signal

from tests.integration.supervised_dummy import Handler


def main(argv):
    port, journal = int(argv[0]), argv[1]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with open(journal, "a") as out:
        out.write(f"start w {os.getpid()}\n")
    print("forked says", os.environ["SUPERVISED_FORKED"], flush=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.ready_at, server.ready_when, server.in_flight = 0, "/", 0
    server.serve_forever()


if __name__ == "__main__":
    raise SystemExit("forked only")
