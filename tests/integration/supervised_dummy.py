"""A pretended service: /ready over HTTP, with a few ways to misbehave. Standard library only."""

import argparse
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() >= self.server.ready_at and pathlib.Path(self.server.ready_when).exists()
        body = json.dumps({"in_flight": self.server.in_flight}).encode()
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-after-s", type=float, default=0)
    parser.add_argument("--ready-when", default="/", help="this path is there")
    parser.add_argument("--journal", type=pathlib.Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--in-flight", type=int, default=0, help="answers under way, until a second SIGTERM")
    args = parser.parse_args()
    with args.journal.open("a") as journal:
        journal.write(f"start {args.name} {os.getpid()}\n")
    if args.crash:
        sys.exit(f"{args.name}: the disk is on fire")
    if args.grandchild:
        child = subprocess.Popen(["sleep", "600"])
        with args.journal.open("a") as journal:
            journal.write(f"grandchild {args.name} {child.pid}\n")

    told = []

    def stop(*_):
        told.append(1)
        if server.in_flight and len(told) == 1:
            return
        with args.journal.open("a") as journal:
            journal.write(f"stop {args.name} {os.getpid()}\n")
        os._exit(0)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.in_flight = args.in_flight
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.deaf else stop)
    server.ready_at = time.monotonic() + args.ready_after_s
    server.ready_when = args.ready_when
    print(f"{args.name} listens", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
