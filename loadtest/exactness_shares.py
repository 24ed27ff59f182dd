"""Answers beside stock vLLM's, token by token, and how near a tie was where they part. No process is started here.

Where a choice is unlike both answers of stock vLLM, stock is asked at the first differing token (of the answer that
agrees longer). Plain greedy cases: the prompt and the common tokens, one more token forced by a large bias, its log
probability as it was without the bias; share = p(ours) / p(stock's). All others (sampled, structured, penalties,
biases) are asked again as they are, our token's logit raised little by little: share = exp(-raise / temperature) of
the least raise with which stock draws our token there, so at most one step of NUDGES below the true one. That compares
what the sampler compares, noise of a seed, filters and grammar included.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# 0.8 is 0.22 between two logits. The last bits of 16-bit arithmetic move a logit by a few steps of bfloat16 (0.06
# where logits are 8 to 16), those of float32 by far less; a wrong, missing or stale block of KV, by whole units.
LEAST_SHARE = 0.8
NUDGES = (1.0, 0.9999, 0.999, 0.99, 0.95, 0.9, LEAST_SHARE, 0.5, 0.1)  # from no raise on
FORCING = 100.0  # a logit's bias that no difference between two logits outweighs
PLAIN = {"temperature", "max_tokens", "ignore_eos", "logprobs", "stop"}  # nothing of which token is best

VERDICTS = ("equal", "like_cached", "near_tie", "not_judged", "wrong")

Case = Mapping[str, Any]


def kind_of(case: Case) -> str:
    """greedy, sampled or structured."""
    if "structured" in case:
        return "structured"
    return "sampled" if case["params"]["temperature"] > 0 else "greedy"


def first_difference(ours: Sequence[int], stock: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter one's length where the other goes on; None: all are equal."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), min(len(ours), len(stock))
    )
    return None if at == len(ours) == len(stock) else at


def compared(case: Case, ours: list[list[int]], stock: Mapping[str, Any]) -> dict[str, Any]:
    """One case of a run: the tokens of every choice, ours and stock's two, and whether they are the same."""
    first = [choice["token_ids"] for choice in stock["choices"]]
    cached = [choice["token_ids"] for choice in stock["cached_choices"]]
    found = {"id": case["id"], "kind": kind_of(case), "ours": ours, "stock": first, "cached": cached}
    return {**found, "equal": ours == first, "unlike_either": bool(unlike_choices(found))}


def unlike_choices(row: Mapping[str, Any]) -> list[int]:
    """Choices that are like neither of stock's. Choices that only one side has are, too."""
    count = max(len(row["ours"]), len(row["stock"]))
    pairs = (row["stock"], row["cached"])
    return [i for i in range(count) if all(row["ours"][i : i + 1] != answers[i : i + 1] for answers in pairs)]


def question(row: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """What stock is to be asked about one unlike choice; `ours` and `stock` are None where an answer has ended."""
    found: dict[str, Any] = {"case": row["id"], "choice": choice, "at": 0, "ours": None, "stock": None}
    found |= {"cached": False, "common": []}
    if choice >= min(len(row["ours"]), len(row["stock"])):
        return found
    ours = row["ours"][choice]
    for name in ("stock", "cached"):
        tokens = row[name][choice]
        at = first_difference(ours, tokens)
        if at is None or (at <= found["at"] and name == "cached"):
            continue  # of two that part at the same token, the first
        found |= {"at": at, "cached": name == "cached", "common": ours[:at]}
        found |= {"ours": (ours[at : at + 1] or [None])[0], "stock": (tokens[at : at + 1] or [None])[0]}
    return found


def questions_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of all cases of a run."""
    return [question(case, choice) for case in row["cases"] for choice in unlike_choices(case)]


def can_ask(asked: Mapping[str, Any]) -> bool:
    """Two tokens are there to be compared."""
    return asked["ours"] is not None and asked["stock"] is not None


def is_plain(case: Case) -> bool:
    """Stock's logits alone decide."""
    return kind_of(case) == "greedy" and set(case["params"]) <= PLAIN


def cases_to_ask(
    number: int, asked: Mapping[str, Any], case: Case, stock: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Cases for stock_reference that answer a question. `stock`: what it said of this case, prompt and all."""
    if is_plain(case):
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 1}
        prompt = [*stock["prompt"], *asked["common"]]
        return [
            {
                "id": f"{number}-{name}",
                "prompt": prompt,
                "params": {**params, "logit_bias": {str(asked[name]): FORCING}},
            }
            for name in ("ours", "stock")
        ]
    given = {"structured": case["structured"]} if "structured" in case else {}
    token = str(asked["ours"])
    cases = []
    for share in NUDGES:
        bias = dict(stock["params"].get("logit_bias") or {})
        bias[token] = bias.get(token, 0.0) - math.log(share) * (stock["params"]["temperature"] or 1.0)
        params = {**stock["params"], "logit_bias": bias}
        cases.append({"id": f"{number}-{share}", "prompt": stock["prompt"], "params": params, **given})
    return cases


def share_of(number: int, asked: Mapping[str, Any], case: Case, answers: Mapping[str, Any]) -> float | None:
    """From stock's answers to cases_to_ask(); None where they do not say."""
    if is_plain(case):
        logprobs = []
        for name in ("ours", "stock"):
            said = answers[f"{number}-{name}"]["choices"][0]
            if said["token_ids"] != [asked[name]] or not said["logprobs"]:
                return None
            logprobs.append(said["logprobs"][0])
        share = math.exp(min(logprobs[0] - logprobs[1], 700.0))
        return share if math.isfinite(share) else None
    wanted = [*asked["common"], asked["ours"]]
    key = "cached_choices" if asked["cached"] else "choices"
    for share in NUDGES:
        choices = answers[f"{number}-{share}"][key]
        if choices[asked["choice"]]["token_ids"][: len(wanted)] == wanted:
            return share
    return None


def verdict(mode: str, case: Mapping[str, Any], shares: Sequence[float | None]) -> str:
    """One of VERDICTS. `shares`: of the case's unlike choices, one for each.

    In 16 bits, sampled and structured cases that are unlike either are not judged; in float32 all are.
    """
    if case["equal"]:
        return "equal"
    if not case["unlike_either"]:
        return "like_cached"
    if case["kind"] != "greedy" and not mode.startswith("float32"):
        return "not_judged"
    is_near = bool(shares) and all(share is not None and share >= LEAST_SHARE for share in shares)
    return "near_tie" if is_near else "wrong"
