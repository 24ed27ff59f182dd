"""What other engines serve the tenants of this one: their virtual time here goes on for it. No I/O.

Every engine says totals since its start; what counts is by how much they grew between two words of the same engine
about the same tenant. So a word that is lost, said twice or heard by a new scheduler changes nothing.
"""

from collections.abc import Mapping

MAX_TENANTS = 64  # that one engine speaks of in a word
MAX_ABSENT = 256 * MAX_TENANTS  # totals that are remembered of whom the last word says nothing

Totals = Mapping[str, int]  # tokens by tenant


class Here:
    """What this engine says to others."""

    def __init__(self) -> None:
        self._told: Totals = {}

    def word(self, served: Totals) -> dict[str, int]:
        """Totals of the tenants that it speaks of now: first those of whom most was not told yet, so that it comes to
        speak of all that are served, then the largest.
        """
        told = {tenant: self._told.get(tenant, 0) for tenant in served}
        order = sorted(served, key=lambda tenant: (told[tenant] - served[tenant], -served[tenant], tenant))
        said = {tenant: served[tenant] for tenant in order[:MAX_TENANTS]}
        self._told = told | said
        return said


class Elsewhere:
    """Remembers the last totals of every engine, also while it is not heard of or does not speak of a tenant."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], int] = {}  # by engine and tenant, those heard last at the end

    def news(self, said: Mapping[str, Totals]) -> dict[str, int]:
        """Tokens that others served since their words before, by tenant.

        Args: said: by engine. What is not in it is remembered, MAX_ABSENT totals of it.
        """
        grown: dict[str, int] = {}
        heard = {
            (engine, tenant): tokens for engine, totals in said.items() for tenant, tokens in totals.items()
        }
        for key, tokens in heard.items():
            more = tokens - self._before.pop(key, tokens)
            if more > 0:
                grown[key[1]] = grown.get(key[1], 0) + more
        absent = list(self._before.items())[-MAX_ABSENT:]
        self._before = dict(absent) | heard
        return grown
