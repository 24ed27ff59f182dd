"""A light open-loop driver for any OpenAI-compatible server.

    python -m loadtest.drive --url http://127.0.0.1:8000 --workload sharegpt --rate 2 --seconds 60 --seed 1
    python -m loadtest.drive --url ... --trace trace.jsonl --scale 0.05     Mooncake JSONL or Azure CSV
    python -m loadtest.drive --url ... --trace lengths.csv --rate 2         CSV of lengths alone: Poisson arrivals
    python -m loadtest.drive --list

Writes one JSONL file (a line per request, see outcomes.py) and prints a summary; loadtest.report compares files. Exit
status 0: a valid run; 1: more than --max-failed of the requests failed; 2: it was not begun, and why; 3: the client was
the bottleneck; 130: Ctrl-C cut it short, and what there was by then is in the file.
"""

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtest.http_client import Client
from loadtest.open_loop import OpenLoop, Plan, lag_p99_ms, verdict
from loadtest.option_checks import check_numbers
from loadtest.outcomes import Run, write_run
from loadtest.reports.summary import Slo, Summary, one_line, summarise
from loadtest.results import machine
from loadtest.workloads import catalogue, trace_files
from loadtest.workloads.request import Request, check, clipped, salted, scaled
from loadtest.workloads.stats import infinite_cache_hit_ratio
from loadtest.workloads.tokens import TokenRange
from shared import http_get

TOKENS = "256:4096"
CLIENT_BOUND, INTERRUPTED = 3, 130
LEAST = {
    "rate": 0, "seconds": 0, "requests": 0, "context": 0, "output_scale": 0, "max_lag_ms": 0, "max_failed": 0,
    "max_in_flight": 1, "block_tokens": 1,
}  # fmt: skip
NOT_OF_A_RUN = {"bearer", "list", "write_trace", "out", "name", "url"}  # options that its head does not have
ABOVE_0 = ("speed", "scale", "timeout_s", "slo_ttft_ms", "slo_tpot_ms")


def main(argv: Sequence[str]) -> int:
    """Exit status: see the module."""
    options = _parser().parse_args(argv)
    if options.list:
        for one in catalogue.WORKLOADS.values():
            takes = ", ".join(sorted(one.takes)) or "nothing more"
            print(f"{one.name:22} {one.about}; {one.rate_per_s:g}/s; takes {takes}")
        return 0
    try:
        check_numbers(options, LEAST, above_0=ABOVE_0)
        _refuse_idle(options)
        requests, real_history = _requests(options)
        if not requests:
            raise ValueError("there is no request to send: see --seconds, --requests and --rate")
        if options.write_trace:
            number = trace_files.write_mooncake(Path(options.write_trace), requests)
            print(f"{number} requests in {options.write_trace}")
            return 0
        if options.salt:
            requests = salted(requests, options.salt)
        _check_out(options.out)
        url = _server(options.url)
        client = Client(url, bearer=options.bearer)
        plan = _plan(options, options.model or _first_model(url, options.bearer), real_history)
        hit_bound = infinite_cache_hit_ratio(requests, options.block_tokens, answers=True)
    except (ValueError, trace_files.TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_drive(options, requests, client, plan, hit_bound))
    except KeyboardInterrupt:  # once more, while the file was written
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--list", action="store_true", help="the workloads, and end")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", default="sharegpt", choices=sorted(catalogue.WORKLOADS))
    source.add_argument("--trace", type=Path, help="replay a Mooncake JSONL or an Azure CSV file")
    parser.add_argument(
        "--rate", type=float, default=0.0,
        help="requests/s; 0: the workload's own. Of a trace: for a CSV without times, which needs it",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="of arrivals; 60 where nothing else ends the run"
    )
    parser.add_argument("--requests", type=int, default=0, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--salt", default=secrets.token_hex(4),
        help="of the prompts' tokens; default: another one each time, so that no cache knows them from an earlier run. "
        "The salt of a run's head asks its prompts again, '' those of the workload itself",
    )  # fmt: skip
    parser.add_argument("--speed", type=float, default=1.0, help="of a trace: 2 replays it twice as fast")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths; sharing stays")
    parser.add_argument("--output-scale", type=float, default=0.0, help="of outputs; 0: --scale")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens that the model takes; longer prompts are cut"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="option of the workload"
    )
    parser.add_argument(
        "--history", choices=("real", "planned"), help="what later turns carry; default: the workload's"
    )
    parser.add_argument("--text", action="store_true", help="chat messages of words instead of token ids")
    parser.add_argument("--tokens", default=TOKENS, help="range of the prompts' token ids")
    parser.add_argument(
        "--token-ids", action="store_true",
        help="ask for token ids (Quire, vLLM): tokens that show no text are seen then",
    )  # fmt: skip
    parser.add_argument("--no-receipts", action="store_true", help="do not ask for Quire's receipts")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--bearer", default="", help="API key")
    parser.add_argument("--max-in-flight", type=int, default=512)
    parser.add_argument("--max-lag-ms", type=float, default=50.0)
    parser.add_argument("--max-failed", type=float, default=0.01, help="share of the requests")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--slo-ttft-ms", type=float, default=2_000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0)
    parser.add_argument("--block-tokens", type=int, default=32, help="of the server, for the bound of hits")
    parser.add_argument("--name", default="", help="of the run in reports; default: the file's")
    parser.add_argument("--out", type=Path, default=Path("out/run.jsonl"))
    parser.add_argument(
        "--write-trace", default="", help="write the workload as a Mooncake trace instead of running it"
    )
    return parser


def _refuse_idle(options: argparse.Namespace) -> None:
    """Options that would be asked for and change nothing. Raises: ValueError."""
    is_trace = options.trace is not None
    for name, value, has_effect, why in (
        ("speed", options.speed if options.speed != 1.0 else None, is_trace, "on a workload: see --rate"),
        ("set", " ".join(options.set) or None, not is_trace, "on a trace"),
        ("history", options.history, not is_trace, "on a trace, whose turns carry what the file says"),
        ("tokens", options.tokens if options.tokens != TOKENS else None, not options.text, "with --text"),
    ):
        if value is not None and not has_effect:
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ValueError(f"--{name} {shown} has no effect {why}")


def _requests(options: argparse.Namespace) -> tuple[list[Request], bool]:
    """The workload, and whether later turns carry real answers. Raises: ValueError, TraceError, OSError."""
    if options.trace is not None:
        requests = trace_files.read(
            options.trace, speed=options.speed, limit=options.requests, rate_per_s=options.rate, seed=options.seed
        )  # fmt: skip
        if options.seconds:
            requests = [one for one in requests if one.arrival_ms < options.seconds * 1000]
        real = False
    else:
        requests = catalogue.build(options.workload, _workload_options(options))
        real = catalogue.WORKLOADS[options.workload].real_history
    if options.scale != 1.0 or options.output_scale:
        requests = scaled(requests, options.scale, output_factor=options.output_scale or None)
    if options.context:
        requests = clipped(requests, options.context)
    try:
        check(requests)
    except ValueError as error:
        raise ValueError(f"{error}: see --scale, --output-scale and --context") from None
    return requests, real if options.history is None else options.history == "real"


def _workload_options(options: argparse.Namespace) -> catalogue.Options:
    more = catalogue.settings(options.set)
    whole = options.workload == "loogle"  # ends with its sessions
    seconds = options.seconds or (0.0 if options.requests or whole else 60.0)
    return catalogue.Options(
        rate_per_s=options.rate, seconds=seconds, num_requests=options.requests, seed=options.seed, **more
    )


def _server(url: str) -> str:
    """Without the path that `quire up` and other servers print behind it. Raises: ValueError."""
    base = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path.strip("/"):
        raise ValueError(f"--url {url}: want http://HOST:PORT, as http://127.0.0.1:8000")
    return base


def _check_out(path: Path) -> None:
    """That the run can be written is known before it is begun. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a"):
        pass
    if is_new:
        path.unlink()


def _plan(options: argparse.Namespace, model: str, real_history: bool) -> Plan:
    """Raises: ValueError."""
    first, _, end = options.tokens.partition(":")
    try:
        ids = TokenRange(int(first), int(end))
    except ValueError as error:
        raise ValueError(f"--tokens {options.tokens}: want FIRST:END, as 256:4096: {error}") from None
    return Plan(
        model=model,
        text=options.text,
        real_history=real_history,
        token_ids=options.token_ids,
        receipts=not options.no_receipts,
        ids=ids,
        max_in_flight=options.max_in_flight,
        timeout_s=options.timeout_s,
        max_lag_ms=options.max_lag_ms,
    )


def rate_per_s(options: argparse.Namespace, requests: Sequence[Request]) -> float:
    """That was offered: as told, the workload's own, or of a trace as it is replayed; 0: all come at once."""
    if options.trace is None:
        return options.rate or catalogue.WORKLOADS[options.workload].rate_per_s
    took_s = (requests[-1].arrival_ms - requests[0].arrival_ms) / 1000
    return round((len(requests) - 1) / took_s, 4) if took_s else 0.0


async def _drive(
    options: argparse.Namespace, requests: list[Request], client: Client, plan: Plan, hit_bound: float
) -> int:
    loop = OpenLoop(client, plan, progress=_Progress(len(requests)))
    started, is_cut_short = time.time(), False
    try:
        outcomes = await loop.run(requests)
    except asyncio.CancelledError:  # Ctrl-C
        outcomes, is_cut_short = loop.so_far(), True
    finally:
        client.close()
    run = Run(
        {
            **_head(options, requests, plan),
            "started_unix_s": round(started, 3),
            "hit_bound": round(hit_bound, 4),
            "most_in_flight": loop.most_in_flight,
            "client_verdict": verdict(outcomes, plan),
            "cut_short": is_cut_short,
            "machine": machine(),
        },
        outcomes,
    )
    write_run(options.out, run)
    found = _say(run, options, loop.most_in_flight)
    if is_cut_short:
        print(
            f"the run was cut short after {len(outcomes)} of {len(requests)} requests: {options.out}",
            file=sys.stderr,
        )
        return INTERRUPTED
    if why := run.head["client_verdict"]:
        print(
            f"error: the client was the bottleneck, this run says nothing about the server: {why}",
            file=sys.stderr,
        )
        return CLIENT_BOUND
    return 1 if found.num_failed > options.max_failed * max(1, found.num_requests) else 0


def _head(options: argparse.Namespace, requests: Sequence[Request], plan: Plan) -> dict[str, Any]:
    """What the run is."""
    told = {name: value for name, value in vars(options).items() if name not in NOT_OF_A_RUN}
    return {
        "name": options.name or options.out.stem,
        "workload": str(options.trace.name) if options.trace else options.workload,
        "rate_per_s": rate_per_s(options, requests),
        "seed": options.seed,
        "salt": options.salt,
        "scale": options.scale,
        "options": options.set,
        "driver": {**told, "trace": str(options.trace.name) if options.trace else ""},
        "real_history": plan.real_history,
        "model": plan.model,
    }


def _say(run: Run, options: argparse.Namespace, most_in_flight: int) -> Summary:
    """The summary, for a terminal."""
    outcomes = run.outcomes
    found = summarise(run, Slo(options.slo_ttft_ms, options.slo_tpot_ms))
    print(f"\n{one_line(found)}")
    print(f"hits of an infinite cache: {run.head['hit_bound']:.1%} of prompt tokens, in whole blocks")
    print(f"lag p99 {lag_p99_ms(outcomes):.1f} ms, most in flight {most_in_flight}; {options.out}")
    if unseen := sum(one.ok and not one.ttft_ms for one in outcomes):
        print(
            f"  {unseen} answers showed no text: they have no TTFT, and are not within the SLO; see --token-ids"
        )
    for text in sorted({one.error for one in outcomes if one.error})[:5]:
        print(f"  error: {text[:300]}")
    return found


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next_s = time.monotonic() + 5

    def __call__(self, num_done: int, num_in_flight: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 5
            print(f"  {num_done} of {self._total} done, {num_in_flight} in flight", file=sys.stderr)


def _first_model(url: str, bearer: str) -> str:
    """Raises: ValueError."""
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    try:
        with http_get.open_url(f"{url}/v1/models", timeout_s=10, headers=headers) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (*http_get.NO_ANSWER, LookupError, TypeError) as error:
        raise ValueError(
            f"{url}/v1/models lists no model ({error or type(error).__name__}): is the server up? --model names one"
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
