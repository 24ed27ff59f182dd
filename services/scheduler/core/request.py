"""A placement request as the policies see it: what the wire allows, cut to what can be."""

import math
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from shared.ids import InstanceId, RequestId
from shared.wire.placement import MAX_CHOICES, Place

Stage = Literal["prefill", "decode", "colocated"]
AttemptKey = tuple[RequestId, int]


class PlacementRequest(Struct, frozen=True):
    """One attempt that wants instances. Hits are hints, at most num_prompt_tokens each."""

    key: AttemptKey
    num_prompt_tokens: int
    model: str = ""  # "": any
    session: str = ""  # "": none
    exclude: frozenset[InstanceId] = frozenset()
    must_colocate: bool = False
    max_tokens: int = 0  # of an answer; 0: not known
    num_choices: int = 1  # answers
    hit_tokens: dict[InstanceId, int] = {}  # in the instance's own memory
    dram_tokens: dict[InstanceId, int] = {}  # with the host memory behind it, where that has more
    seen_tokens: int = 0  # leading ones that the gateway was asked for before
    explain: bool = True  # the answer names ways that were not taken
    continues: bool = False  # a prefill stage's token is the client's
    tenant: str = ""
    weight: float = 1.0  # above 0
    gateway: str = ""  # who asks; "": not known

    def reach(self) -> dict[InstanceId, int]:
        """Leading prompt tokens within each instance's reach, as far as known."""
        out = self.hit_tokens | self.dram_tokens
        for instance, tokens in self.hit_tokens.items():
            out[instance] = max(tokens, out[instance])
        return out

    def holders(self) -> list[InstanceId]:
        """Instances with any of it, as they were told: equals are chosen among in the same order by every process."""
        return list(dict.fromkeys((*self.hit_tokens, *self.dram_tokens)))


def from_wire(place: Place, gateway: str = "") -> PlacementRequest:
    """Negative counts become 0, hits beyond the prompt are cut: the numbers come from a socket."""
    num_tokens = max(0, place.num_prompt_tokens)
    return PlacementRequest(
        key=(place.request_id, place.attempt),
        num_prompt_tokens=num_tokens,
        model=place.model,
        session=f"{place.tenant}\0{place.session}" if place.session else "",
        exclude=frozenset(place.exclude),
        must_colocate=place.must_colocate,
        max_tokens=max(0, place.max_tokens),
        num_choices=min(max(1, place.num_choices), MAX_CHOICES),
        hit_tokens=_clipped(((h.instance, h.tokens) for h in place.hits if h.medium != "dram"), num_tokens),
        dram_tokens=_clipped(((h.instance, h.tokens) for h in place.hits if h.medium == "dram"), num_tokens),
        seen_tokens=min(max(0, place.seen_tokens), num_tokens),
        explain=place.explain,
        continues=place.continues,
        tenant=place.tenant,
        weight=place.weight if 0.0 < place.weight < math.inf else 1.0,
        gateway=gateway,
    )


def _clipped(hits: Iterable[tuple[InstanceId, int]], num_tokens: int) -> dict[InstanceId, int]:
    return {instance: min(tokens, num_tokens) for instance, tokens in hits if tokens > 0}
