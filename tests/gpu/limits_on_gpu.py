"""Requests at the edge of what an engine has room for: `python -m tests.gpu.limits_on_gpu [cpu]`.

vLLM's second model runner, which GPUs have, raises in a step where a request has more than it holds, and ends with all
that it runs (docs/bugs.md). `quire up` with the demo model: each request is answered, or refused, a plain one behind it
gets the same tokens as ever, and the worker is the same process; else the exit status is 1.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from shared.wire.requests import MAX_LOGIT_BIAS, MAX_STOP_IDS
from tests.support.local_cluster import LocalCluster

IDS = list(range(300, 4_000))
PLAIN: dict[str, Any] = {
    "model": "quire-demo", "prompt": IDS[:50], "max_tokens": 8, "temperature": 0, "return_token_ids": True,
}  # fmt: skip
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("as many biases as may be", 200, {"logit_bias": {str(i): 1 for i in IDS[:MAX_LOGIT_BIAS]}}),
    ("one bias more", 400, {"logit_bias": {str(i): 1 for i in IDS[: MAX_LOGIT_BIAS + 1]}}),
    ("as many stop ids as may be", 200, {"stop_token_ids": IDS[:MAX_STOP_IDS], "min_tokens": 4}),
    ("one stop id more", 400, {"stop_token_ids": IDS[: MAX_STOP_IDS + 1], "min_tokens": 4}),
    ("a thousand stop ids without min_tokens", 200, {"stop_token_ids": IDS[:1_000]}),
    ("the largest seed, two choices", 200, {"seed": 2**63 - 1, "n": 2, "temperature": 1}),
    ("a seed below zero, two choices", 200, {"seed": -2, "n": 2, "temperature": 1}),
    ("a temperature that counts as greedy", 200, {"temperature": 1e-6}),
    ("a low temperature", 200, {"temperature": 0.005, "seed": 1}),
    ("a scored prompt", 200, {"prompt": IDS, "echo": True, "logprobs": 5, "max_tokens": 0}),
    ("two choices of a scored prompt", 200, {"prompt": IDS, "echo": True, "logprobs": 5, "n": 2, "temperature": 1}),
    ("penalties", 200, {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 2, "top_k": 1}),
]  # fmt: skip


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    device = argv[0] if argv else "cuda"
    flags = ["--device", device, "--topology", "colocated", "--decode", "1"]
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(Path(name) / "home", *flags, env={"HF_HUB_OFFLINE": "1"}) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client,
    ):
        pid = cluster.pid_of("colocated-0")
        first = client.post("/v1/completions", json=PLAIN).json()["choices"][0]["token_ids"]
        for what, status, fields in CASES:
            reply = client.post("/v1/completions", json={**PLAIN, **fields})
            behind = client.post("/v1/completions", json=PLAIN)
            is_right = reply.status_code == status and behind.status_code == 200
            is_right = is_right and behind.json()["choices"][0]["token_ids"] == first
            wrong += not is_right
            said = "" if reply.status_code == 200 else reply.text[:120]
            print(f"{'ok   ' if is_right else 'WRONG'} {what:40} {reply.status_code} {said}", flush=True)
        same = cluster.pid_of("colocated-0") == pid
    print(f"{wrong} of {len(CASES)} wrong; the same process: {same}")
    return int(bool(wrong) or not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
