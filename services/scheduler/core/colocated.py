"""What is left where no pair is free: one instance for a whole request, or places of full ones. No I/O."""

from collections.abc import Mapping, Sequence

from services.scheduler.core.instances import Instance
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.predict import CostSettings
from services.scheduler.core.request import PlacementRequest, Stage
from shared.ids import InstanceId


def claimed_of(
    usable: Sequence[Instance],
    held: Mapping[InstanceId, int],
    share: float,
    limits: PlacementLimits,
    now_ms: int,
) -> list[Instance]:
    """Full ones on which a tenant holds fewer places than its share, up to excess_factor. Args: held: its places."""
    found = []
    for known in usable:
        view = known.load.view(now_ms=now_ms)
        is_full = view.requests_share >= limits.overload_factor
        most = limits.overload_factor * limits.excess_factor
        places = limits.overload_factor * known.load.max_running
        if (
            is_full
            and view.requests_share < most
            and view.prefill_tokens < limits.max_prefill_tokens
            and held.get(known.instance, 0) < share * places
        ):
            found.append(known)
    return found


def has_pair(usable: Sequence[Instance]) -> bool:
    """Whether a prefill and a decode instance hold KV alike, full or not."""
    decode_keys = {i.family_key for i in usable if i.role == "decode"}
    return any(i.role == "prefill" and i.family_key in decode_keys for i in usable)


def why_colocated(request: PlacementRequest, usable: Sequence[Instance], cost: CostSettings) -> str:
    """One clause."""
    if request.must_colocate:
        return "the request asked for one instance"
    if cost.disaggregation == "never":
        return "disaggregation is off"
    if has_pair(usable):
        return "the prefill and decode instances are full"
    roles: set[Stage] = {i.role for i in usable}
    if "prefill" in roles and "decode" in roles:
        return "no prefill and decode instance hold KV alike"
    missing = (
        "prefill and decode" if roles == {"colocated"} else "prefill" if "prefill" not in roles else "decode"
    )
    return f"no {missing} instance to pair with"
