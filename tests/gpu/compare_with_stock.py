"""The exactness cases on GPUs: `python -m tests.gpu.compare_with_stock [DTYPE[+graphs][+tp2|+ptp2] ...]`.

It prints a table. With "+graphs" both sides use torch.compile and CUDA graphs; else both are eager. "+tp2": our engine
has two ranks and is colocated; "+ptp2": prefill has two and decode one (three GPUs, or two that share); stock always
has one. For each mode, stock vLLM and then `quire up` on the same machine, colocated and with prefill and decode apart.
A prompt position that is computed alone differs in its last bits from one computed within a prompt, in stock vLLM too,
so near ties may fall the other way: "different" is unlike stock vLLM with an empty prefix cache, "unlike_either" unlike
stock vLLM with its prompt cached, too.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support.exactness_cases import build_cases
from tests.support.local_cluster import ROOT, LocalCluster

TENSOR_PARALLEL = {  # (topology, settings of the cluster)
    "tp2": ("colocated", ["--set", "tensor_parallel=2"]),
    "ptp2": ("disaggregated", ["--set", "prefill_tensor_parallel=2"]),
}
MODEL = ROOT / "deploy" / "models" / "quire-demo"


def stock(folder: Path, cases: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Stock vLLM's answers."""
    (folder / "cases.json").write_text(json.dumps(cases))
    how = [word for word in mode.split("+") if word not in TENSOR_PARALLEL]
    words = [str(MODEL), str(folder / "cases.json"), str(folder / "out.json"), *how]
    subprocess.run(
        [sys.executable, "-m", "tests.support.stock_reference", *words], cwd=ROOT, check=True, timeout=300
    )
    return json.loads((folder / "out.json").read_text())


def body_of(case: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The same case for HTTP."""
    body = {
        "model": "quire-demo",
        "prompt": resolved["prompt"],
        "return_token_ids": True,
        "quire_receipt": True,
        **resolved["params"],
    }
    if "structured" in case:
        schema = {"name": "answer", "schema": json.loads(case["structured"])}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def ask(client: httpx.Client, case: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """It over HTTP."""
    answer = client.post("/v1/completions", json=body_of(case, resolved))
    assert answer.status_code == 200, answer.text
    return answer.json()


def compare(
    folder: Path,
    topology: str,
    mode: str,
    cases: list[dict[str, Any]],
    want: dict[str, Any],
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One row of the table. `settings`: of the workers, besides."""
    started = time.monotonic()
    dtype, *how = mode.split("+")
    graphs = "graphs" in how
    flags = ["--device", "cuda", "--topology", topology, "--set", f"dtype={dtype}"]
    flags += [flag for word in how if word in TENSOR_PARALLEL for flag in TENSOR_PARALLEL[word][1]]
    env = {"HF_HUB_OFFLINE": "1", **({} if graphs else {"QUIRE_WORKER_ENFORCE_EAGER": "true"})}
    env |= {f"QUIRE_WORKER_{key.upper()}": value for key, value in (settings or {}).items()}
    row: dict[str, Any] = {
        "topology": topology,
        "mode": mode,
        "different": [],
        "unlike_either": [],
        "moved_blocks": 0,
    }
    cluster = LocalCluster(folder / f"home-{topology}-{mode}", *flags, env=env)
    try:
        with cluster:
            row["ready_s"] = round(time.monotonic() - started, 1)
            with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
                for case in cases:
                    answer = ask(client, case, want[case["id"]])
                    ids = [c["token_ids"] for c in sorted(answer["choices"], key=lambda c: c["index"])]
                    stock_says = want[case["id"]]
                    if ids != [c["token_ids"] for c in stock_says["choices"]]:
                        row["different"].append(case["id"])
                        if ids != [c["token_ids"] for c in stock_says["cached_choices"]]:
                            row["unlike_either"].append(case["id"])
                    receipt = answer["quire_receipt"]
                    row["moved_blocks"] += sum(s["blocks_moved"] for s in receipt["stages"])
                    row[receipt["placement"]] = row.get(receipt["placement"], 0) + 1
            if topology == "disaggregated" and not row.get(topology):
                for name in ("prefill-0", "decode-0", "mempool"):
                    print(
                        f"==== {name}", (cluster.home / f"run/logs/{name}.log").read_text()[-3000:], sep="\n"
                    )
            pool = cluster.pool()
            row["pool"] = {k: v for k, v in pool["pages_by_state"].items() if v}
            row["spaces"] = len(pool["spaces"])
            names = ("blocks_pulled", "pulls", "pulls_failed", "pulls_without_pages", "pages_asked_back")
            row |= {name: pool["counters"].get(name, 0) for name in names}
    except Exception:
        for log in sorted(cluster.home.glob("run/logs/*.log")):
            lines = [x for x in log.read_text().splitlines() if "Error" in x or "raise" in x]
            print(f"==== {log.name}", *lines[-12:], sep="\n")
        raise
    return row


def main() -> None:
    """See the module's docstring."""
    modes = sys.argv[1:] or ["bfloat16"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        eos = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"][0]
        cases = build_cases(MODEL, eos)
        rows = []
        for mode in modes:
            want = stock(folder, cases, mode)
            ranks = [TENSOR_PARALLEL[word][0] for word in mode.split("+") if word in TENSOR_PARALLEL]
            topologies = ranks or ["disaggregated", "colocated"]
            rows += [compare(folder, topology, mode, cases, want) for topology in topologies]
        for row in rows:
            print(
                json.dumps({**row, "num_cases": len(cases), "num_same": len(cases) - len(row["different"])})
            )


if __name__ == "__main__":
    main()
