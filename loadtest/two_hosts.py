"""Two hosts on one: network namespaces joined by a veth pair, and a process in each that transfers. Root only.

The control channel is a socket pair, which namespaces do not cut: what is cut is the network, as when a data link
fails and the management network does not.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from loadtest.packet_relay import open_tun
from loadtest.registry import ROOT

LINES_TIMEOUT_S = 60
CARRIER_S = 5
NOWHERE = "02:00:00:00:00:99"
DEVICES = ("quire-a", "quire-b")


def why_not() -> str:
    """Why two hosts cannot be made here; "" when they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs {tool} (iproute2)"
    name = f"quire-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def why_not_impaired() -> str:
    """Why TwoHosts.impaired() cannot be had; "" when it can."""
    try:
        os.close(open_tun(f"quire-probe-{os.getpid() % 1000}"))
    except OSError as error:
        return f"no TUN device: {error}"
    return ""


def run(*command: str) -> None:
    """Raises: RuntimeError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _wait_for_carrier(namespace: str, device: str) -> None:
    """UCX leaves out a device that is not running yet."""
    deadline_s = time.monotonic() + CARRIER_S
    while time.monotonic() < deadline_s:
        shown = subprocess.run(
            ["ip", "-n", namespace, "-j", "link", "show", device], capture_output=True, text=True, check=True
        )
        if json.loads(shown.stdout)[0]["operstate"] == "UP":
            return
        time.sleep(0.05)
    raise RuntimeError(f"{device} has no carrier after {CARRIER_S} s")


class TwoHosts:
    """Namespaces a and b, 10.213.7.1 and .2. Removed at the end of the with block."""

    def __init__(self) -> None:
        self.names = tuple(f"quire-{os.getpid()}-{side}" for side in "ab")

    def __enter__(self) -> "TwoHosts":
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            a, b = self.names
            run(
                "ip",
                "-n",
                a,
                "link",
                "add",
                DEVICES[0],
                "type",
                "veth",
                "peer",
                "name",
                DEVICES[1],
                "netns",
                b,
            )
            for number, (name, device) in enumerate(zip(self.names, DEVICES, strict=True)):
                run("ip", "-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
            for name, device in zip(self.names, DEVICES, strict=True):
                _wait_for_carrier(name, device)
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextlib.contextmanager
    def impaired(
        self, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss_share: float = 0.0, seed: int = 1
    ) -> Iterator[dict[str, int]]:
        """Packets between the hosts come later, in another order, or not at all (packet_relay.py), also those of
        connections that are open already. Not while they are parted: that would not part them.

        Yields: how many packets have "passed" and were "lost", filled in at the end. Raises: OSError without TUN;
        RuntimeError.
        """
        devices = [f"quire-tun-{side}" for side in "ab"]
        fds = [open_tun(device) for device in devices]
        words = [
            "--delay-ms", str(delay_ms), "--jitter-ms", str(jitter_ms), "--loss-share", str(loss_share),
            "--seed", str(seed),
        ]  # fmt: skip
        command = [sys.executable, "-m", "loadtest.packet_relay", *map(str, fds), *words]
        counts: dict[str, int] = {}
        relay = subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdout=subprocess.PIPE, text=True)
        try:
            for fd in fds:
                os.close(fd)  # the devices, and the routes by them, are gone with the relay
            assert relay.stdout is not None
            if not relay.stdout.readline():
                raise RuntimeError(f"the relay ended with {relay.wait()}")
            for name, device in zip(self.names, devices, strict=True):
                run("ip", "link", "set", device, "netns", name)
                run("ip", "-n", name, "link", "set", device, "up")
            for number, (name, device) in enumerate(zip(self.names, devices, strict=True)):
                route = [f"10.213.7.{2 - number}/32", "dev", device, "src", f"10.213.7.{number + 1}"]
                run("ip", "-n", name, "route", "replace", *route)
            yield counts
        finally:
            relay.terminate()
            told = relay.communicate()[0]
            counts.update(json.loads(told) if told else {})

    def limit(self, bytes_per_s: int, *, burst_bytes: int = 1 << 17, queue_bytes: int = 64 << 20) -> None:
        """No more than so many bytes a second in either direction, by a token bucket; 0: as fast as it goes.

        Its queue is longer than what TCP has under way, so that packets wait and none is lost. Raises: RuntimeError.
        """
        for name, device in zip(self.names, DEVICES, strict=True):
            remove = ["tc", "-n", name, "qdisc", "del", "dev", device, "root"]
            subprocess.run(remove, capture_output=True, check=False)
            if bytes_per_s:
                words = [
                    "rate",
                    f"{bytes_per_s * 8}bit",
                    "burst",
                    str(burst_bytes),
                    "limit",
                    str(queue_bytes),
                ]
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *words)

    def partition(self) -> None:
        """Everything is lost, and nobody is told: each end believes the other at an address that nobody has."""
        self._neighbours("replace", "lladdr", NOWHERE, "nud", "permanent")

    def cut(self) -> None:
        """The cable is pulled: both ends see it."""
        run("ip", "-n", self.names[0], "link", "set", DEVICES[0], "down")

    def mend(self) -> None:
        """Undo cut()."""
        run("ip", "-n", self.names[0], "link", "set", DEVICES[0], "up")
        for name, device in zip(self.names, DEVICES, strict=True):
            _wait_for_carrier(name, device)

    def prefix(self, number: int) -> tuple[str, ...]:
        """Words before a command that runs it on one of the hosts: 0 is at 10.213.7.1, 1 at 10.213.7.2."""
        return ("ip", "netns", "exec", self.names[number])

    def heal(self) -> None:
        """Undo partition()."""
        self._neighbours("del")

    def _neighbours(self, action: str, *arguments: str) -> None:
        for number, (name, device) in enumerate(zip(self.names, DEVICES, strict=True)):
            other = f"10.213.7.{2 - number}"
            command = ["ip", "-n", name, "neigh", action, other, *arguments, "dev", device]
            subprocess.run(command, capture_output=True, check=action == "replace")


class Ends:
    """A server in namespace b, a puller in namespace a that takes orders."""

    def __init__(self, hosts: TwoHosts, *, page_bytes: int, num_pages: int) -> None:
        ours, theirs = socket.socketpair()
        self._processes: list[subprocess.Popen[str]] = []
        for side, sock in (("puller", ours), ("server", theirs)):
            number = 0 if side == "puller" else 1
            command = [
                "ip",
                "netns",
                "exec",
                hosts.names[number],
                sys.executable,
                "-m",
                "loadtest.two_hosts_end",
            ]
            arguments = [side, str(sock.fileno()), DEVICES[number], str(page_bytes), str(num_pages)]
            self._processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    cwd=ROOT,
                    pass_fds=[sock.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={name: value for name, value in os.environ.items() if not name.startswith("UCX_")},  # noqa: TID251
                )
            )
        ours.close()
        theirs.close()
        try:
            for process in self._processes:
                self._line(process)
        except RuntimeError:
            self.close()
            raise

    def order(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Have the puller do something. Raises: RuntimeError with what it said."""
        process = self._processes[0]
        assert process.stdin is not None
        process.stdin.write(json.dumps({"order": name, **arguments}) + "\n")
        process.stdin.flush()
        return self._line(process)

    def kill_server(self, signum: int) -> None:
        """Send a signal to the process in namespace b."""
        self._processes[1].send_signal(signum)

    @staticmethod
    def _line(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        line = next((text for text in process.stdout if text.startswith("{")), "")  # UCX logs to stdout too
        if not line:
            raise RuntimeError(f"an end of the transfer ended with {process.wait(LINES_TIMEOUT_S)}")
        return json.loads(line)

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()
