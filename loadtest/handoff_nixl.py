"""vLLM's own way of handing a prompt off, for bench_handoff.py: two stock engines with NixlConnector, a GPU each.

    python -m loadtest.handoff_nixl prefill|decode MODEL_DIR --port N     started by NixlPair, a line of JSON each way

The prefill engine computes the prompt and holds its blocks; the decode engine reads them by NIXL (UCX) and answers.
There is no HTTP, no gateway and no scheduler between them: a handoff is measured from the moment at which the prefill
engine has answered to the decode engine's first token (CLOCK_MONOTONIC, which both share).
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.registry import ROOT
from loadtest.results import quantile

ALIAS = """import sys
from nixl_cu13 import *
from nixl_cu13 import _api, _bindings
sys.modules["nixl._api"], sys.modules["nixl._bindings"] = _api, _bindings
"""
READY = "ready"
START_S = 240.0


class NixlUnavailable(Exception):
    """vLLM's NixlConnector does not run here."""


def nixl_path(folder: Path) -> list[str]:
    """Folders on which an engine finds the package `nixl` that vLLM imports. Raises: NixlUnavailable.

    Where only `nixl_cu13` is installed, a package of two lines stands for it, as the meta package does.
    """
    if importlib.util.find_spec("nixl") is not None:
        return sys.path
    if importlib.util.find_spec("nixl_cu13") is None:
        raise NixlUnavailable("nixl-cu13 is not installed")
    package = folder / "nixl-path" / "nixl"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(ALIAS)
    return [str(package.parent), *sys.path]


def serve(options: argparse.Namespace) -> int:
    """Answer until standard input ends."""
    # vLLM's settings: where the ends exchange what they need before the first read
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"  # noqa: TID251
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.port)  # noqa: TID251
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=False)
    from shared.engine import measured_nixl

    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[options.end]
    sizes: dict[str, Any] = (
        {"kv_cache_memory_bytes": options.kv_cache_bytes} if options.kv_cache_bytes else {}
    )
    engine = measured_nixl.NixlEngine(
        options.model_dir, role, max_model_len=options.max_model_len, enforce_eager=options.eager, max_num_seqs=8,
        max_num_batched_tokens=8_192, gpu_memory_utilization=options.utilization, block_size=options.block_tokens,
        enable_prefix_caching=False, **sizes,
    )  # fmt: skip
    print(json.dumps({"state": READY}), flush=True)
    asyncio.run(_answer(engine, options.end))
    engine.close()
    return 0


async def _answer(engine: Any, end: str) -> None:
    for number in itertools.count():
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        asked = json.loads(line)
        begin = time.perf_counter()
        if end == "prefill":
            transfer = await engine.prefill(f"p{number}", asked["prompt"])
            said = {"begin_s": begin, "end_s": time.perf_counter(), "transfer": transfer}
        else:
            stream = engine.decode(f"d{number}", asked["prompt"], asked["max_tokens"], asked["transfer"])
            outputs = [(time.perf_counter(), loaded) async for loaded in stream]
            said = {"begin_s": begin, "at_s": [at for at, _ in outputs], "loaded_tokens": outputs[0][1]}
        print(json.dumps(said), flush=True)


class NixlPair:
    """Both ends, from `with` on. Raises: NixlUnavailable, with the reason."""

    def __init__(self, model: Path, folder: Path, device: str, flags: list[str]) -> None:
        self._words = [str(model), "--device", device, *flags]
        self._device, self._folder = device, folder
        self._ends: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> "NixlPair":
        found = [str(Path(word or ".").resolve()) for word in nixl_path(self._folder)]
        for number, end in enumerate(("prefill", "decode")):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            words = [sys.executable, "-m", "loadtest.handoff_nixl", end, *self._words, "--port", str(port)]
            where = [f"CUDA_VISIBLE_DEVICES={number}"] if self._device == "cuda" else []
            words = ["env", f"PYTHONPATH={os.pathsep.join(found)}", *where, *words]
            with (self._folder / f"nixl-{end}.log").open("wb") as log:
                self._ends[end] = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, text=True
                )
        try:
            for end in self._ends:
                found = self._read(end)
                if found.get("state") != READY:
                    raise NixlUnavailable(found.get("unavailable", str(found)))
        except NixlUnavailable:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._ends.values():
            assert child.stdin is not None
            child.stdin.close()
        for child in self._ends.values():
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _read(self, end: str) -> dict[str, Any]:
        """The next line that is one of ours: vLLM writes there too."""
        child = self._ends[end]
        assert child.stdout is not None
        deadline = time.monotonic() + START_S
        while (line := child.stdout.readline()) and time.monotonic() < deadline:
            if line.startswith("{"):
                return json.loads(line)
        log = (self._folder / f"nixl-{end}.log").read_text(errors="replace")
        raise NixlUnavailable(f"the {end} engine ended: ...{log[-1_500:]}")

    def _call(self, end: str, message: dict[str, Any]) -> dict[str, Any]:
        child = self._ends[end]
        assert child.stdin is not None
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()
        return self._read(end)

    def one(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A sample of bench_handoff.py. Raises: NixlUnavailable when an end dies, or nothing was handed off."""
        first = self._call("prefill", {"prompt": prompt})
        if not first["transfer"].get("remote_block_ids"):
            raise NixlUnavailable(f"the prefill engine holds no blocks: {first['transfer']}")
        asked = {"prompt": prompt, "max_tokens": max_tokens, "transfer": first["transfer"]}
        second = self._call("decode", asked)
        if second["loaded_tokens"] < len(prompt) // 2:
            raise NixlUnavailable(f"the decode engine read {second['loaded_tokens']} of {len(prompt)} tokens")
        at = second["at_s"]
        gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(at)]
        return {
            "prompt_tokens": len(prompt),
            "ttft_ms": round((at[0] - first["begin_s"]) * 1e3, 3),
            "gap_ms": round(quantile(gaps, 0.5), 3),
            "handoff_ms": round((at[0] - first["end_s"]) * 1e3, 3),
            "loaded_tokens": second["loaded_tokens"],
            "recompute_ms": round((first["end_s"] - first["begin_s"]) * 1e3, 3),
        }


def main(argv: list[str]) -> int:
    """Serve one end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("end", choices=("prefill", "decode"))
    parser.add_argument("model_dir")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=32_832)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    parser.add_argument("--utilization", type=float, default=0.85)
    return serve(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
