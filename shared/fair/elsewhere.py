"""What other engines serve the tenants of this one: their virtual time here goes on for it. No I/O.

Every engine says totals since its start; what counts is by how much they grew between two words of the same engine
about the same tenant. So a word that is lost, said twice or heard by a new scheduler changes nothing.
"""

from collections.abc import Mapping

MAX_TENANTS = 64  # that one engine speaks of, those that it served most

Totals = Mapping[str, int]  # tokens by tenant


def to_tell(served: Totals) -> dict[str, int]:
    """Totals of the tenants that this engine speaks of."""
    if len(served) <= MAX_TENANTS:
        return dict(served)
    most = sorted(served, key=lambda tenant: (-served[tenant], tenant))[:MAX_TENANTS]
    return {tenant: served[tenant] for tenant in most}


class Elsewhere:
    """Remembers the last word of every engine that there is."""

    def __init__(self) -> None:
        self._before: dict[str, Totals] = {}

    def news(self, said: Mapping[str, Totals]) -> dict[str, int]:
        """Tokens that others served since their words before, by tenant.

        Args: said: by engine; whoever is not in it is forgotten.
        """
        grown: dict[str, int] = {}
        for engine, totals in said.items():
            before = self._before.get(engine, {})
            for tenant, tokens in totals.items():
                more = tokens - before.get(tenant, tokens)
                if more > 0:
                    grown[tenant] = grown.get(tenant, 0) + more
        self._before = {engine: dict(totals) for engine, totals in said.items()}
        return grown
