"""Prefill steps of engines with several ranks: vLLM's all-reduce and norm, fused, woven, and without communication.

    python -m loadtest.bench_weave [--groups 70b:4:4,8b:2:16] [--parts steps,serving,ffn] [--budget-s S] [--keep FILE]

writes loadtest/results/h200-weave.json; a short table last (TokenWeave's Figures 2, 9, 11, 12, 13 and 16). A group is
SHAPE:RANKS:LAYERS, random weights. Each engine (weave_engine.py) is a process, forked from one that has imported vLLM;
what is timed is the model's forward pass of a step that is one new prompt, on the slowest rank, embedding and last norm
included, sampling not. With `--keep FILE` a run that was cut short goes on where it was (weave_jobs.py).

stock: vLLM as it comes, compiled, its own choice of all-reduce, but without its fusion of all-reduce and norm.
stock-fused: with it (FlashInfer; failed, with the reason, where it is not installed). Nothing asks for multicast.
stock-alone: ranks add nothing up.
weave: one eager engine in four modes: off (vLLM's operations), fuse, full, alone.

`prefill_gain_ratio`: the better stock over full, median over 4K to 32K tokens, of the 70B shape on the most ranks that
were measured (`prefill_gain_ranks_count`); `communication_recovered_ratio`: of the time that stock loses to
communication, there.

serving: requests of ShareGPT's lengths, or all of one length, asked at once, in steps of `--chunks` tokens (Figures 12
and 13): stock against fuse and full, whose steps from 1K tokens on are cut. `serving_gain_CHUNK_ratio`: tokens per
second of full over stock's.
ffn: one rank's FFN whole, in equal halves and as smart splitting cuts it, on one GPU (Figure 9; weave_ffn.py).
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest import weave_metrics
from loadtest.bench_pages import LLAMA_8B
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, commit_of, machine, write_result
from loadtest.weave_jobs import START_S, Job, Kept, impossible, jobs_of, runner
from loadtest.weave_metrics import table

NAME = "h200-weave"
CLAIM = (
    "Prefill steps whose sums are fused and woven are faster than stock vLLM's on the same GPUs; the share of the "
    "communication time that is won back is stated."
)
SHAPES = {
    "8b": LLAMA_8B,
    "70b": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    "tiny": LLAMA_8B  # to try the script on a CPU
    | {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
       "vocab_size": 4096},
}  # fmt: skip
ENGINES = ("weave", "stock", "stock-alone", "stock-fused")
SERVING = ("weave", "stock", "stock-fused")  # engines whose answers are counted
PARTS = frozenset({"steps", "serving", "ffn"})
TOKENS = "1024,2048,4096,8192,16384,32768"
FFN_LIMIT_S = 40.0


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module, and weave_metrics.py."""
    return weave_metrics.metrics_from_samples(samples)


def model_folder(folder: Path, shape: str, layers: int) -> Path:
    """A model without weights."""
    made = folder / f"{shape}-{layers}"
    if not made.exists():
        made.mkdir()
        (made / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": layers}))
    return made


def words_of(job: Job, model: Path, options: argparse.Namespace, left_s: float) -> tuple[str, list[str]]:
    """Module and arguments; OUT stands for the file of samples."""
    common = [
        "--tp",
        str(job.ranks),
        "--tokens",
        options.tokens if "steps" in options.parts else "",
        "--device",
        options.device,
    ]
    if job.engine == "ffn":
        return "shared.engine.weave_ffn", [
            str(model),
            "OUT",
            "--tp",
            str(job.ranks),
            "--device",
            options.device,
        ]
    words = [
        job.engine,
        str(model),
        "OUT",
        *common,
        "--rounds",
        str(options.rounds),
        "--sms",
        str(options.sms),
    ]
    words += ["--budget-s", str(options.engine_budget_s), "--left-s", f"{left_s:.0f}"]
    if "serving" in options.parts and job.engine in SERVING:
        words += ["--serve", str(options.requests), "--serve-rounds", str(options.serve_rounds)]
        words += ["--serve-budget-s", str(options.serve_budget_s), "--workloads", options.workloads]
        words += ["--chunks", ",".join(str(chunk) for chunk in options.chunks)]
        words += ["--most-prompt-tokens", str(options.most_prompt_tokens)]
        words += ["--most-answer-tokens", str(options.most_answer_tokens)]
    return "loadtest.weave_engine", words


def groups_of(text: str) -> list[tuple[str, int, int]]:
    """ "70b:4:4,8b:2:32" -> shape, ranks, layers. Raises: ValueError."""
    out = []
    for word in text.split(","):
        shape, ranks, layers = word.split(":")
        if shape not in SHAPES:
            raise ValueError(f"{shape} is none of {', '.join(SHAPES)}")
        out.append((shape, int(ranks), int(layers)))
    return out


def parts_of(text: str) -> frozenset[str]:
    """Raises: ValueError."""
    found = frozenset(text.split(","))
    if not found <= PARTS:
        raise ValueError(f"{', '.join(found - PARTS)} is none of {', '.join(PARTS)}")
    return found


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--groups", type=groups_of, default=groups_of("70b:4:4,8b:2:16"))
    add("--engines", type=lambda text: text.split(","), default=list(ENGINES))
    add("--tokens", default=TOKENS)
    add("--parts", type=parts_of, default=PARTS, help="steps,serving,ffn")
    add("--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 2048, 4096, 8192])
    add("--workloads", default="sharegpt", help="sharegpt, PROMPTxANSWER; all but the first in steps of 2048")
    add("--requests", type=int, default=64, help="that are served at once")
    add("--most-prompt-tokens", type=int, default=6144)
    add("--most-answer-tokens", type=int, default=1024)
    add("--rounds", type=int, default=5)
    add("--serve-rounds", type=int, default=1)
    add("--sms", type=int, default=16, help="for the sums of a part under the other's compute")
    add("--device", default="cuda")
    add("--budget-s", type=float, default=540)
    add("--engine-budget-s", type=float, default=25, help="of an engine's steps, after the first round")
    add("--serve-budget-s", type=float, default=45, help="of an engine's requests")
    add(
        "--keep", type=Path, help="samples go there as they come; those that are there are not measured again"
    )
    add("--no-fork", action="store_true", help="each engine imports vLLM by itself")
    add("--no-result", action="store_true", help="only print")
    add("--out", default=str(RESULTS))
    add("--commit", default="")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """What samples belong to, but for the time that was given to them."""
    return {
        "tokens": options.tokens, "sms": options.sms, "chunks": options.chunks, "workloads": options.workloads,
        "requests": options.requests, "most_prompt_tokens": options.most_prompt_tokens,
        "most_answer_tokens": options.most_answer_tokens, "shapes": SHAPES,
    }  # fmt: skip


def measured(options: argparse.Namespace, kept: Kept, num_gpus: int) -> None:
    """Samples of all jobs for which there is time, the most important first."""
    deadline = time.monotonic() + options.budget_s
    jobs = [job for job in jobs_of(options) if job.name not in kept.done]
    possible = []
    for job in jobs:
        if why := impossible(job, num_gpus, options.device):
            kept.add(job, [{"kind": "failed", **job.about(), "why": why}], is_done=True)
            print(f"{job.name}: {why}", flush=True)
        else:
            possible.append(job)
    may_fork = not options.no_fork and any(job.engine != "ffn" for job in possible)
    with tempfile.TemporaryDirectory(prefix="quire-weave-") as name:
        folder = Path(name)
        with runner(options.device, folder, may_fork=may_fork) as engines:
            for job in possible:
                engines.prepare(job)  # it may wait for vLLM's import
                left_s = deadline - time.monotonic()
                if left_s < START_S:
                    print(f"no time left for {job.name}", flush=True)
                    continue
                limit_s = min(left_s, FFN_LIMIT_S) if job.engine == "ffn" else left_s
                model = model_folder(folder, job.shape, job.layers)
                samples, is_done = engines.run(job, *words_of(job, model, options, limit_s), limit_s)
                kept.add(job, samples, is_done=is_done)


def main(argv: Sequence[str]) -> int:
    """Measure, write the result file, print the table."""
    options = parsed(argv)
    began = time.monotonic()
    gpus = machine().get("gpu", [])
    commit = options.commit or commit_of(ROOT)[0]
    kept = Kept(options.keep, {"commit": commit, "gpu": gpus[:1], "settings": settings_of(options)})
    measured(options, kept, len(gpus))
    samples = kept.plain()
    metrics: Mapping[str, float] = metrics_from_samples(samples)
    is_any = any(sample["kind"] != "failed" for sample in samples)
    if is_any and not options.no_result:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_weave", *argv]),
            settings={
                "groups": options.groups,
                "engines": options.engines,
                "num_gpus": len(gpus),
                **settings_of(options),
            },
            metrics=dict(metrics),
            samples=samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    print(*table(samples), sep="\n")
    for key in sorted(metrics):
        if key.endswith(("_ratio", "_count", "_tokens_per_s")):
            print(f"{key:56} {metrics[key]:8.3f}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(not is_any)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
