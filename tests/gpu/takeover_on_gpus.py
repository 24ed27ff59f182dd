"""kill -9 of the mempool on GPUs: `python -m tests.gpu.takeover_on_gpus`; exit status 1 when anything differs.

`quire up` with the demo model, prefill and decode on a GPU each where there are two. The same greedy prompts are asked
before the kill and after it, and new ones after it twice: engines must be the same processes, the pages adopted from
the keeper, the answers equal, and prompts of before found in the adopted pages.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.local_cluster import LocalCluster


def ask(client: httpx.Client, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Token ids and receipt of a prompt of 300 tokens."""
    prompt = [300 + (seed * 7919 + i * 31) % 3000 for i in range(300)]
    body = {
        "model": "quire-demo", "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True,
        "quire_receipt": True,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["quire_receipt"]


def logs(home: Path) -> None:
    """What services said that may explain a failure."""
    words = ("not_kept", "error", "refused", "unusable", "anew", "adopted", "replaced", "RLIMIT", "exit")
    for path in sorted(home.glob("run/logs/*.log")):
        lines = [line[:300] for line in path.read_text().splitlines() if any(word in line for word in words)]
        print(f"==== {path.name}", *lines[-8:], sep="\n")


def main() -> int:
    """See the module's docstring."""
    print("descriptors:", resource.getrlimit(resource.RLIMIT_NOFILE))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        try:
            return check(home)
        except (AssertionError, httpx.HTTPError):
            logs(home)
            raise


def check(home: Path) -> int:
    """One cluster, one kill."""
    flags = ["--device", "cuda", "--topology", "disaggregated", "--set", "dtype=float32"]
    env = {"QUIRE_WORKER_ENFORCE_EAGER": "true", "HF_HUB_OFFLINE": "1"}
    with (
        LocalCluster(home, *flags, env=env) as cluster,
        httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client,
    ):
        before = {seed: ask(client, seed)[0] for seed in range(6)}
        pids = {name: cluster.pid_of(name) for name in ("prefill-0", "decode-0")}
        old_pool = cluster.pool()
        began = time.monotonic()
        old = cluster.kill("mempool")
        during = {seed: ask(client, seed)[0] for seed in range(6)}
        back_s = cluster.wait_replaced("mempool", old)
        time.sleep(1)
        pool = cluster.pool()
        again = {seed: ask(client, seed) for seed in range(6)}
        fresh = {seed: ask(client, seed)[0] for seed in range(10, 14)}
        repeat = {seed: ask(client, seed)[0] for seed in range(10, 14)}
        same = {name: cluster.pid_of(name) == pid for name, pid in pids.items()}
        after = cluster.pool()
    cached = [
        r["stages"][0].get("tokens_engine", 0) + r["stages"][0].get("tokens_pool", 0)
        for _, r in again.values()
    ]
    row = {
        "spaces": len(pool["spaces"]),
        "back_s": round(back_s, 2),
        "since_kill_s": round(time.monotonic() - began, 1),
        "same_processes": all(same.values()),
        "boot_grew": pool["boot_generation"] > old_pool["boot_generation"],
        "pages_inherited": pool["counters"].get("pages_inherited", 0),
        "during_equal": during == before,
        "after_equal": {seed: ids for seed, (ids, _) in again.items()} == before,
        "fresh_repeatable": fresh == repeat,
        "cached_tokens": cached,
        "states": {k: v for k, v in after["pages_by_state"].items() if v},
        "pulls": after["counters"].get("pulls", 0),
        "pulls_failed": after["counters"].get("pulls_failed", 0),
        "copies": after.get("copies", {}).get("paths", {}),
    }
    print(json.dumps(row))
    names = ("same_processes", "boot_grew", "during_equal", "after_equal", "fresh_repeatable")
    return 0 if all(row[name] for name in names) and row["pages_inherited"] and not row["pulls_failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
