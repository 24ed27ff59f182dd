"""Whose the places of full instances are. No I/O.

Engines give tenants who wait in them shares like their weights (shared/fair); but who waits in them is who was let in.
If each place that comes free went to whoever asks first, tenants would be served as often as they ask, whatever their
weights. So an instance that is full is not full for a tenant that holds fewer of its places than its weight's share:
the tenant is let in above the bound, and the others wait until as many have left. On every instance by itself, because
a tenant that has nobody waiting in an engine has no claim there; so a pair leaves its place at the prefill instance
when it has come to the other. Shares are among tenants that hold places, or asked of late.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.request import AttemptKey
from shared.ids import InstanceId

RECENT_MS = 2_000  # who asked within it wants places: a gateway asks again every quarter of a second
MAX_TENANTS = 4_096  # that are remembered; beyond, those that asked longest ago are forgotten
LEAST_WEIGHT = 1e-3


@dataclass(slots=True)
class _Tenant:
    weight: float = 1.0
    asked_at_ms: int = 0
    held: Counter[InstanceId] = field(default_factory=Counter)  # places, by instance


@dataclass(slots=True)
class Tenants:
    """Cost: two look-ups a placement; a pass over the tenants only for who finds everything full."""

    _known: dict[str, _Tenant] = field(default_factory=dict)
    _of: dict[AttemptKey, tuple[str, Sequence[InstanceId]]] = field(default_factory=dict)  # who holds places

    def asks(self, tenant: str, weight: float, now_ms: int) -> None:
        """It wants a place."""
        known = self._known.get(tenant)
        if known is None:
            if len(self._known) >= MAX_TENANTS:
                self._forget()
            known = self._known[tenant] = _Tenant()
        known.weight, known.asked_at_ms = max(LEAST_WEIGHT, weight), now_ms

    def holds(self, key: AttemptKey, tenant: str, instances: Sequence[InstanceId]) -> None:
        """An attempt of a tenant that asked was placed. Once for a key, until ended()."""
        self._known[tenant].held.update(instances)
        self._of[key] = tenant, instances

    def arrived(self, instance: InstanceId, keys: Iterable[AttemptKey]) -> None:
        """They have come to it: of pairs that decode there the first places are free. Others are ignored."""
        for key in keys:
            tenant, instances = self._of.get(key, ("", ()))
            if instance in instances[1:]:
                self._of[key] = tenant, instances[1:]
                self._give_back(tenant, instances[:1])

    def ended(self, key: AttemptKey) -> None:
        """Its places are free; also of an attempt that holds none."""
        self._give_back(*self._of.pop(key, ("", ())))

    def share(self, tenant: str, now_ms: int) -> float:
        """Of all places; 0 where nobody else wants any."""
        wanting = [
            (name, known.weight)
            for name, known in self._known.items()
            if known.held or known.asked_at_ms > now_ms - RECENT_MS
        ]
        mine = self._known.get(tenant)
        if mine is None or len(wanting) < 2:
            return 0.0
        return mine.weight / sum(weight for _, weight in wanting)

    def held(self, tenant: str) -> Mapping[InstanceId, int]:
        """Its places, by instance."""
        known = self._known.get(tenant)
        return known.held if known is not None else {}

    def places(self, most: int) -> dict[str, dict[InstanceId, int]]:
        """For people: who holds how many where, the `most` that hold the most."""
        held = sorted(self._known.items(), key=lambda item: (-item[1].held.total(), item[0]))
        return {name: dict(known.held) for name, known in held[:most] if known.held}

    def _give_back(self, tenant: str, instances: Sequence[InstanceId]) -> None:
        for instance in instances:
            held = self._known[tenant].held
            held[instance] -= 1
            if not held[instance]:
                del held[instance]

    def _forget(self) -> None:
        """The longest silent half of those that hold nothing."""
        idle = sorted((known.asked_at_ms, name) for name, known in self._known.items() if not known.held)
        for _, name in idle[: max(1, len(idle) // 2)]:
            del self._known[name]
