"""Requests by a process of its own, so many at a time: `python -m loadtest.closed_client URL MODEL --count 256 ...`.

Prompts are random token ids, answers greedy and as long as asked. One line of JSON on stdout: see Ran.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.http_client import Client, Reply
from loadtest.load import closed_loop

FIRST_ID, LAST_ID = 300, 4_000  # plain words of any vocabulary
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Ran:
    """begin_s, end_s: of time.time(), first request and last answer. cpu_s: of this process meanwhile. tokens: made, as
    the servers count them. cached_tokens: of prompts, found in prefix caches. num_events: of streams; ttft_ms: of each.
    """

    begin_s: float
    end_s: float = 0.0
    cpu_s: float = 0.0
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    num_events: int = 0
    ttft_ms: list[float] = field(default_factory=list)


def bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All requests. Lengths of answers are even between half and one and a half of --tokens, so that they do not begin
    and end in step.
    """
    rng = random.Random(
        f"{options.seed}/{options.count}/{options.stream}"
    )  # no run asks another's prompts again
    out = []
    for _ in range(options.count):
        prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(options.prompt_tokens)]
        most = rng.randrange(options.tokens // 2, options.tokens * 3 // 2 + 1)
        body = {
            "model": options.model,
            "prompt": prompt,
            "max_tokens": most,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if options.stream:
            # with ids there is an event for every token: random weights say hardly any text
            body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        out.append(body)
    return out


def usage_of(reply: Reply) -> tuple[int, int]:
    """(Tokens of the answer, cached ones of its prompt). Raises: ValueError, KeyError when it does not say."""
    text = reply.body.decode()
    if text.startswith("data:"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        text = next(event for event in reversed(events) if '"usage":{' in event.replace('": ', '":'))
    usage = json.loads(text)["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return int(usage["completion_tokens"]), int(details.get("cached_tokens") or 0)


async def run(options: argparse.Namespace) -> Ran:
    """Send all, --width at a time."""
    client = Client(options.url)
    requests = [client.request_bytes("/v1/completions", body) for body in bodies(options)]
    if options.at > time.time():
        await asyncio.sleep(options.at - time.time())
    ran, cpu_s = Ran(time.time()), time.process_time()
    replies: list[Reply] = []
    _, ran.failed = await closed_loop(client, requests, options.width, timeout_s=TIMEOUT_S, replies=replies)
    ran.end_s, ran.cpu_s = time.time(), time.process_time() - cpu_s
    client.close()
    ran.requests = options.count
    used = [usage_of(reply) for reply in replies]  # when nobody waits for it
    ran.tokens, ran.cached_tokens = sum(made for made, _ in used), sum(cached for _, cached in used)
    if options.stream:
        ran.num_events = sum(reply.num_events for reply in replies)
        ran.ttft_ms = [round((reply.pieces[0][0] - reply.started) * 1e3, 2) for reply in replies]
    return ran


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, mean")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--at", type=float, default=0.0, help="begin then, seconds since the epoch")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit status 1 when a request failed."""
    ran = asyncio.run(run(parse(argv)))
    print(json.dumps(asdict(ran)), flush=True)
    return 1 if ran.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
