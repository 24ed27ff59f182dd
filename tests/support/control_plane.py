"""Builders and process helpers for tests of the scheduler, the coordinator and the prompt tree."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from shared.kv.layout import EngineDescription
from shared.wire.membership import Register
from shared.wire.placement import Place, PrefixHit
from shared.wire.reports import Hello, Report

ROOT = Path(__file__).resolve().parents[2]


def description(model="demo", fingerprint="f1", **more):
    fields = {"block_tokens": 32, "max_model_len": 4096, **more}
    return EngineDescription(
        model=model,
        fingerprint=fingerprint,
        dtype="float32",
        layout="layers-blocks",
        backend="CPU_ATTN",
        **fields,
    )


def hello(name, epoch=1, role="prefill", **more):
    fields = {
        "endpoint": f"tcp://127.0.0.1:1/{name}", "description": description(),
        "max_running": 8, "max_batched_tokens": 1024, "num_kv_blocks": 1000, **more,
    }  # fmt: skip
    return Hello(instance=name, epoch=epoch, role=role, **fields)


def report(name, epoch=1, seq=0, **more):
    return Report(instance=name, epoch=epoch, seq=seq, **more)


def place(request="r1", attempt=1, tokens=100, hits=None, **more):
    pairs = [PrefixHit(name, n) for name, n in (hits or {}).items()]
    return Place(request_id=request, attempt=attempt, num_prompt_tokens=tokens, hits=pairs, **more)


def register(name="prefill-0", role="prefill", **more):
    fields = {"endpoint": "tcp://127.0.0.1:8120", "host": "boot-1", "description": description(), **more}
    return Register(instance=name, role=role, **fields)


async def until(condition, timeout_s=60.0):
    """Wait for a plain condition; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "never became true"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def until_async(condition, timeout_s=60.0):
    """As until(), for a condition that must be awaited."""
    start = time.monotonic()
    while not await condition():
        assert time.monotonic() - start < timeout_s, "never became true"
        await asyncio.sleep(0.01)


class ServiceProcess:
    """`python -m module flags`, its log lines parsed; wait_log() finds the addresses it took."""

    def __init__(self, module, *flags):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def events(self):
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def wait_log(self, event, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for found in self.events():
                if found["event"] == event:
                    return found
            assert self.process.poll() is None, f"it ended: {''.join(self.lines)}"
            time.sleep(0.01)
        raise AssertionError(f"no {event} in {''.join(self.lines)}")

    def kill(self):
        """SIGKILL, harmless when it has ended."""
        self._end(signal.SIGKILL)

    def stop(self, timeout_s=60.0):
        """SIGTERM; the exit status."""
        return self._end(signal.SIGTERM, timeout_s)

    def _end(self, number, timeout_s=60.0):
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        self.process.stderr.close()
        return status


def get_json(url, timeout_s=30.0):
    with urllib.request.urlopen(url, timeout=timeout_s) as reply:
        return json.loads(reply.read())
