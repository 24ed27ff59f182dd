"""Fetches of which eq 2 expects nothing, sent so that it may learn: nobody knows yet how fast their path is. No I/O.

Until it was measured a path counts with a careful rate, by which a GPU's mempool brings a prompt about as fast as the
GPU computes it, and another host far slower. Eq 2 then refuses every fetch, so that nothing is ever measured: two
colocated GPUs computed each other's prefixes again for good (decision 0040).
"""

from typing import Literal

from msgspec import structs

from services.scheduler.core.instances import Instance, Instances
from services.scheduler.core.policies import PolicyName
from services.scheduler.core.predict import FirstStage, moved_bytes
from shared.wire.requests import KvPlan

Fetch = Literal["auto", "always", "never"]
PROBE_MOST_MS = 200.0  # that one may take at the careful rate: what a wrong guess can cost one request
PROBE_EVERY_MS = 1_000  # of an instance: what the last one showed comes with the next report


def kv_plan(
    policy: PolicyName, fetch: Fetch, first: FirstStage | None, instances: Instances, now_ms: int
) -> tuple[KvPlan | None, str]:
    """What to tell the chosen instance, a clause on a probe. Policies that know no prefixes leave it to the mempool.

    Args: first: what is predicted of it; None: nothing is. Cost: O(1). Notes a probe with the instance.
    """
    if fetch == "never":
        return KvPlan(reach="own"), ""
    if first is None or policy not in ("cost", "prompt_tree"):
        return None, ""
    return _probed(first, instances, now_ms)


def _probed(first: FirstStage, instances: Instances, now_ms: int) -> tuple[KvPlan | None, str]:
    """Eq 2's verdict, or to fetch although it says no, where that shows a rate."""
    plan, known = first.kv, first.candidate.known
    if plan is None or not plan.recompute or plan.path in known.links.rates:
        return plan, ""
    if known.probed_at_ms is not None and now_ms - known.probed_at_ms < PROBE_EVERY_MS:
        return plan, ""
    num_bytes = moved_bytes(known, plan.tokens - first.local_tokens)
    if known.links.transfer_ms(plan.path, num_bytes) > PROBE_MOST_MS:
        return plan, ""
    address = _address(instances.source(plan.source, now_ms=now_ms)) if plan.path == "remote" else ""
    if plan.path == "remote" and not address:
        return plan, ""
    known.probed_at_ms = now_ms
    reach = "remote" if address else "host"
    why = f"; it fetches {plan.tokens} tokens of {plan.source} to learn how fast they come"
    return structs.replace(plan, reach=reach, source_mempool=address, recompute=False), why


def _address(holder: Instance | None) -> str:
    return holder.pool.address if holder is not None and holder.pool is not None else ""
