"""Imports vLLM once and forks workers: `python -m shared.engine.zygote --socket PATH`.

Protocol: unix stream socket, one JSON object per line. The supervisor connects and sends
{"op":"spawn","name":N,"module":"services.prefill","argv":[...],"log":PATH,"env":{...}}, and now and then
{"op":"ping","number":K}, which is answered with {"event":"pong","number":K}. It answers with
{"event":"ready"} when its imports are done, {"event":"spawned","name":N,"pid":P} and
{"event":"exited","name":N,"pid":P,"status":S} (S < 0: signal); {"event":"spawn_failed","name":N,"error":E}
instead of both where the kernel refuses a process. P is reaped at {"op":"reap","pid":P}: a supervisor that stands still
would else take whoever gets the number for P. When the connection closes, it kills its children and exits.
The zygote starts no thread, no OpenMP region and no CUDA context: it only forks.
"""

import argparse
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import setproctitle  # comes with vLLM, which names its own processes with it

from shared.engine.vllm_setup import check_version, die_with_parent, prepare_environment, quick_imports
from shared.observe.log import bear_full_disk, flush_streams

MAX_LINE_BYTES = 1 << 20

PRELOAD = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.model_executor.models.llama",
    "shared.engine.vllm_engine",
    "shared.engine.connector",
    "services.prefill.__main__",
    "services.decode.__main__",
)


class Zygote:
    """One connection, many children."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.children: dict[int, str] = {}  # "": its end is told, and it waits to be reaped
        self._buffer = b""

    def say(self, **event: Any) -> None:
        """Send one event line."""
        self.connection.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        """Until the supervisor goes away."""
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.connection, selectors.EVENT_READ, "supervisor")
        selector.register(wake_r, selectors.EVENT_READ, "signal")
        self.say(event="ready")
        while True:
            for key, _ in selector.select():
                if key.data == "signal":
                    os.read(wake_r, 4096)
                    self._tell_ends()
                elif not self._read():
                    return

    def _read(self) -> bool:
        chunk = self.connection.recv(65536)
        if not chunk:
            return False
        self._buffer += chunk
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            message = json.loads(line)
            if message.get("op") == "spawn":
                self._spawn(message)
            elif message.get("op") == "ping":
                self.say(event="pong", number=message["number"])
            elif message.get("op") == "reap" and self.children.get(message["pid"]) == "":
                del self.children[message["pid"]]
                os.waitpid(message["pid"], 0)
        if len(self._buffer) > MAX_LINE_BYTES:
            raise ValueError("line too long")
        return True

    def _spawn(self, message: dict[str, Any]) -> None:
        flush_streams()
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no process, or no memory for one, just now: what runs goes on
            with contextlib.suppress(OSError), open(_log_of(message), "a") as out:
                out.write(f"cannot be forked: {error}\n")
            self.say(event="spawn_failed", name=message["name"], error=str(error))
            return
        if pid == 0:
            self._child(message, zygote)
        self.children[pid] = message["name"]
        self.say(event="spawned", name=message["name"], pid=pid)

    def _child(self, message: dict[str, Any], zygote: int) -> None:
        """In the forked process: become the service. Never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.connection.close()
            os.setsid()
            die_with_parent(zygote)
            log = _log_of(message)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            bear_full_disk()
            os.environ.update(message.get("env", {}))  # noqa: TID251  this is the exec of a forked service
            setproctitle.setproctitle(f"quire {message['name']}")
            module = importlib.import_module(message["module"] + ".__main__")
            status = module.main(message["argv"]) or 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001  the process ends here; its log must say why
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            flush_streams()
            os._exit(status)

    def _tell_ends(self) -> None:
        for pid, name in self.children.items():
            if name and (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                _kill_group(pid)  # what it had started itself
                self.children[pid] = ""
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self.say(event="exited", name=name, pid=pid, status=status)

    def kill_children(self) -> None:
        """SIGKILL and reap every child."""
        for pid in list(self.children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _kill_group(pid)
        for pid in list(self.children):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _log_of(message: dict[str, Any]) -> int:
    return os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def main(argv: Sequence[str] | None = None) -> int:
    """Listen, import, serve one supervisor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--socket", required=True, help="unix socket to listen on")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of each engine")
    args = parser.parse_args(argv)
    check_version()
    prepare_environment(
        args.device, args.threads, in_pages=True
    )  # each engine decides for itself after the fork
    with contextlib.suppress(FileNotFoundError):
        os.unlink(args.socket)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    listener.bind(args.socket)
    os.umask(old_mask)
    listener.listen(1)
    with quick_imports():
        for module in PRELOAD:
            importlib.import_module(module)
    connection, _ = listener.accept()
    listener.close()
    os.unlink(args.socket)
    zygote = Zygote(connection)
    try:
        zygote.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        zygote.kill_children()
    return 0


if __name__ == "__main__":
    sys.exit(main())
