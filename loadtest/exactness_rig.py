"""What bench_exactness starts: stock vLLM in a process of its own, and clusters as `quire up` makes them."""

import argparse
import collections
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.local.plan import find_gpus
from loadtest import exactness_shares as shares

RANKS = {"prefill-tp2": "prefill_tensor_parallel=2", "decode-tp2": "decode_tensor_parallel=2"}
LAYOUTS = ("token-major", "layer-major")
REQUEST_S = 120.0
KV_CACHE_BYTES = 2 << 30  # of the demo model's, on a GPU


def cases() -> list[dict[str, Any]]:
    """Of the claim "tokens equal stock vLLM's", for the demo model."""
    from tests.gpu.compare_with_stock import MODEL
    from tests.support.exactness_cases import build_cases

    eos = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    return build_cases(MODEL, eos[0] if isinstance(eos, list) else eos)


def layout_of(mode: str) -> str:
    """The request layout that a mode asks for; "": the default."""
    return next((word for word in mode.split("+") if word in LAYOUTS), "")


def stock_mode(mode: str) -> str:
    """The mode of stock's answers: it has no such layouts."""
    return "+".join(word for word in mode.split("+") if word not in LAYOUTS)


def stock_answers(folder: Path, asked: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """By case, both with an empty prefix cache and with the prompt cached.

    Raises: subprocess.SubprocessError when it ends badly or not in time.
    """
    from tests.gpu import compare_with_stock

    return compare_with_stock.stock(Path(tempfile.mkdtemp(dir=folder)), asked, mode)


def worker_settings(mode: str, device: str) -> dict[str, str]:
    """Of the workers, beside the data type."""
    from tests.gpu.test_gpu_contiguous import settings_of

    found = {}
    if device == "cuda" and "graphs" not in mode.split("+"):
        found["enforce_eager"] = "true"
    if layout := layout_of(mode):  # on the CPU, block size and kernel are the layout's own defaults
        given = settings_of(layout, mode.split("+")[0], "torch_sdpa")
        found |= given if device == "cuda" else {"kv_layout": layout}
    return found


def cluster_answers(
    folder: Path,
    options: argparse.Namespace,
    mode: str,
    topology: str,
    asked: list[dict[str, Any]],
    stock: dict[str, Any],
) -> dict[str, Any]:
    """A sample: every case, one after another, through a cluster of its own. Logs are shown when it fails.

    Raises: RuntimeError when nothing was handed off where that is what is to be shown; and whatever went wrong.
    """
    from tests.gpu.compare_with_stock import ask
    from tests.support.local_cluster import LocalCluster

    began_s = time.monotonic()
    apart = "colocated" if topology == "colocated" else "disaggregated"
    flags = ["--device", options.device, "--topology", apart, "--set", f"dtype={mode.split('+')[0]}"]
    if topology in RANKS:
        flags += ["--set", RANKS[topology]]
    env = {"HF_HUB_OFFLINE": "1", "QUIRE_CLUSTER_READY_TIMEOUT_S": f"{options.ready_s:.0f}"}
    env |= {f"QUIRE_WORKER_{k}".upper(): value for k, value in worker_settings(mode, options.device).items()}
    if options.device == "cuda":  # little memory is enough, and other calls may have the rest
        flags += ["--set", "gpu_memory_utilization=0.1", "--set", f"kv_cache_bytes={KV_CACHE_BYTES}"]
        if topology == apart:
            env["CUDA_VISIBLE_DEVICES"] = find_gpus()[0]
    placements: collections.Counter[str] = collections.Counter()
    rows, moved = [], 0
    cluster = LocalCluster(Path(tempfile.mkdtemp(dir=folder)) / "home", *flags, env=env)
    try:
        with cluster:
            ready_s = time.monotonic() - began_s
            with httpx.Client(base_url=cluster.url, timeout=REQUEST_S, trust_env=False) as client:
                for case in asked:
                    answer = ask(client, case, stock[case["id"]])
                    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                    ours = [choice["token_ids"] for choice in choices]
                    receipt = answer["quire_receipt"]
                    placements[receipt["placement"]] += 1
                    moved += sum(stage["blocks_moved"] for stage in receipt["stages"])
                    rows.append(shares.compared(case, ours, stock[case["id"]]))
            if not placements[apart]:
                raise RuntimeError(f"no answer was handed off: {dict(placements)}")
    except BaseException:
        _show_logs(cluster.home)
        raise
    return {
        "kind": "answers", "mode": mode, "topology": topology, "device": options.device, "cases": rows,
        "placements": dict(placements), "blocks_moved": moved, "ready_s": round(ready_s, 1),
        "all_s": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


def _show_logs(home: Path) -> None:
    for log in sorted(home.glob("run/logs/*.log")):
        lines = log.read_text(errors="replace").splitlines()
        wrong = [line[:400] for line in lines if "Error" in line or "raise " in line]
        print(f"==== {log.name}", *(wrong or lines)[-12:], sep="\n", flush=True)


def shares_row(
    folder: Path, run: dict[str, Any], asked: list[dict[str, Any]], stock: dict[str, Any]
) -> dict[str, Any]:
    """A sample: what stock says of every choice of a run that is unlike either of its answers.

    Raises: subprocess.SubprocessError as stock_answers() does.
    """
    by_id = {case["id"]: case for case in asked}
    questions = shares.questions_of(run)
    to_ask = [
        case
        for i, one in enumerate(questions)
        if shares.can_ask(one)
        for case in shares.cases_to_ask(i, one, by_id[one["case"]], stock[one["case"]])
    ]
    answers = stock_answers(folder, to_ask, stock_mode(run["mode"])) if to_ask else {}
    found = []
    for i, one in enumerate(questions):
        case = by_id[one["case"]]
        share = shares.share_of(i, one, case, answers) if shares.can_ask(one) else None
        how = "logprobs" if shares.is_plain(case) else "nudged"
        found.append({**{k: v for k, v in one.items() if k != "common"}, "share": share, "how": how})
    return {**{key: run[key] for key in ("mode", "topology", "device")}, "kind": "shares", "shares": found}
