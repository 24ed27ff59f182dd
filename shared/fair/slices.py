"""Which requests run in the next slice: completely fair scheduling of an engine's slots. No I/O.

    waiting --admit--> running --park (keeps its KV)--> parked --resume--> running

A plan is made every k steps; between two plans only vacant slots are filled. Source: AQUA 7 (slices of k iterations;
p = b - d tokens for the prefills that were computed least, d = as many decodes as fit, those that generated least
first, spare slots to prefills; with units of service p is that of all k). Two departures: tenants come before phases,
so that a flood of prompts takes no decode's share; and who has waited `patience_slices` goes first in its tenant, so
that every wait is bounded.

Where all requests fit, and where moving pages would cost too much, the order is that of arrival and nobody is parked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from shared.fair.accounts import Account, Accounts
from shared.fair.rules import FairRules, Room, switch_share

FORGIVE_AFTER = 8  # times patience_slices: far longer than engines take to hear of each other


@dataclass(frozen=True, slots=True)
class Plan:
    """What changes at this step.

    Args:
        park: running requests that leave their slots, in the order in which they came.
        start: waiting and parked ones that get a slot, the first first.
        is_fair: False: order of arrival.
        moved_pages: that leave the engine's memory and come back, for this plan.
    """

    park: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    is_fair: bool = False
    moved_pages: int = 0


class FairSlices:
    """Of one engine. Before each step call plan(), or what stands in for it where there is nothing to decide; what came
    of it, started(), parked() and served() say.
    """

    def __init__(self, rules: FairRules) -> None:
        self.rules = rules
        self.accounts = Accounts()
        self.slice = 0  # plans so far
        self._steps_left = 0
        self._pays = False
        self._was_calm = True  # nobody waited since the last plan

    # -- what happens ---------------------------------------------------------------------------------

    def add(self, request_id: str, tenant: str, weight: float, prompt_tokens: int) -> None:
        """A request came. Raises: ValueError for a weight that is not positive, or a request that is here."""
        self.accounts.add(request_id, tenant, weight, prompt_tokens, self.slice)

    def remove(self, request_id: str) -> None:
        """It is over, or aborted; also when it is not here."""
        if self._was_calm:  # plan() levels where calm ends: too late for who has left by then
            self.accounts.level(None)
        self.accounts.remove(request_id)

    def holds(self, request_id: str, pages: int, resident: int, away: int = 0, *, ready: bool = True) -> None:
        """Pages that it needs in memory to run for a slice, has there, and has elsewhere; whether it could start."""
        accounts = self.accounts
        account = accounts.requests[request_id]
        accounts.pages += pages - account.pages
        accounts.resident += resident - account.resident
        account.pages, account.resident, account.away, account.ready = pages, resident, away, ready

    def started(self, request_id: str) -> None:
        """It has a slot."""
        account = self.accounts.requests[request_id]
        account.running = True
        self.accounts.tenants[account.tenant].ran_at = self.slice

    def parked(self, request_id: str) -> None:
        """It has lost its slot."""
        account = self.accounts.requests[request_id]
        account.running, account.waiting_since = False, self.slice

    def served(self, request_id: str, tokens: int, prompt_left: int) -> None:
        """A step computes so many of its tokens; so many of its prompt are left then."""
        self.accounts.served(request_id, tokens, prompt_left)

    @property
    def pays(self) -> bool:
        """Whether the last plan took turns, and pages may move for it."""
        return self._pays

    @property
    def is_calm(self) -> bool:
        """Whether nobody waited when the last plan was made."""
        return self._was_calm

    # -- what to do -----------------------------------------------------------------------------------

    def calm_step(self) -> None:
        """In place of plan(), where nobody waits. Cost: none."""
        self._was_calm, self._pays = True, False
        self._steps_left -= 1

    def next_step(self, *, vacant: bool) -> bool:
        """Whether plan() has something to decide for the step that comes: a slice ended, or a slot is vacant. Else
        the step goes by without it.
        """
        if self._steps_left > 0 and not vacant:
            self._steps_left -= 1
            return False
        return True

    def prompt_tokens(self, step_tokens: int, step_ms: float) -> int:
        """p of AQUA 7: what prompts may take of the step that comes, beside a token for each that decodes.

        While turns are taken what waits is spread over `spread_ms`, so that a burst of prompts neither stops those who
        decode nor is computed far ahead of its turn; chunks of `chunk_tokens` go beside decodes at next to no cost.
        """
        rules = self.rules
        if not rules.spread_ms or not self._pays:
            return step_tokens
        paced = self.accounts.prompt_left * step_ms / rules.spread_ms
        return min(step_tokens, max(rules.chunk_tokens, ceil(paced)))

    def plan(self, room: Room) -> Plan:
        """For the step that comes. Cost: O(n log n) of all requests at a border, of those that wait between."""
        requests = self.accounts.requests.values()
        running = [a for a in requests if a.running]
        waiting = [a for a in requests if not a.running]
        for account in running:
            self.accounts.tenants[account.tenant].ran_at = self.slice
        is_border = self._steps_left <= 0
        self._steps_left = (self.rules.slice_steps if is_border else self._steps_left) - 1
        self.slice += is_border
        fits = self._all_fit(running, waiting, room)
        # with a slot and without its pages somebody waits, too; without units that is left to who looks for pages
        calm = fits or not (waiting or self.rules.has_units)
        if calm or self._was_calm:
            self.accounts.level(None)
        begins, self._was_calm = self._was_calm and not calm, calm
        if calm:
            self._pays = False
            for tenant in self.accounts.tenants.values():
                tenant.turn_at = self.slice
            return Plan(start=[a.request_id for a in _by_arrival(waiting) if a.ready])
        if is_border or begins:  # or the rest of a slice would pass before pages may leave for who waits
            fair = self._replan(running, waiting, room)
            if fair is not None:
                return fair
        return self._fill(running, waiting, room)

    def _prompt_tokens(self, room: Room, num_decodes: int) -> int:
        return min(self.prompt_tokens(room.step_tokens, room.step_ms), max(0, room.step_tokens - num_decodes))

    def _all_fit(self, running: Sequence[Account], waiting: Sequence[Account], room: Room) -> bool:
        """Whether memory is not short: nobody has to wait for another's slot or pages."""
        fits = len(running) + len(waiting) <= room.slots
        return fits and (not room.pages or self.accounts.pages <= room.pages)

    def _replan(self, running: Sequence[Account], waiting: Sequence[Account], room: Room) -> Plan | None:
        """All slots anew; None where switching does not pay."""
        ready = [a for a in waiting if a.ready]
        tokens = self._prompt_tokens(room, room.slots)  # d = slots is what decodes can take
        chosen = self._pick([*running, *ready], room.slots, tokens, room.pages)
        names = {a.request_id for a in chosen}
        park = [a for a in _by_arrival(running) if a.request_id not in names]
        start = [a for a in chosen if not a.running]
        moved = self._moved_pages(chosen, room)
        limit = self.rules.max_switch_share * (self.rules.stay_ratio if self._pays else 1.0)
        self._pays = switch_share(moved, room, self.rules.turn_steps) <= limit
        if not self._pays:
            return None
        left = {a.tenant for a in waiting if a.request_id not in names} | {a.tenant for a in park}
        self.accounts.level(left or None)
        return Plan([a.request_id for a in park], [a.request_id for a in start], True, moved)

    def _fill(self, running: Sequence[Account], waiting: Sequence[Account], room: Room) -> Plan:
        """Vacant slots only: nobody is parked."""
        vacant = room.slots - len(running)
        ready = [a for a in waiting if a.ready]
        if vacant <= 0 or not ready:
            return Plan(is_fair=self._pays)
        if (
            not self._pays
        ):  # who has pages goes on first, as one that was never parked would have: here, then elsewhere
            ready.sort(key=lambda a: (not (a.resident or a.away), a.away > 0, a.arrival))
            return Plan(start=[a.request_id for a in ready])
        tokens = self._prompt_tokens(room, len(running))
        pages = max(1, room.pages - sum(a.pages for a in running)) if room.pages else 0
        chosen = self._pick(ready, vacant, tokens, pages)
        return Plan(start=[a.request_id for a in chosen], is_fair=True)

    def _pick(
        self, candidates: Sequence[Account], slots: int, prefill_tokens: int, pages: int
    ) -> list[Account]:
        """AQUA 7's partition, tenant by tenant. Who does not fit into the pages is passed over until overdue."""
        steps = self.rules.slice_steps
        if self.rules.has_units:
            prefill_tokens *= steps
        queues: dict[str, _Queue] = {}
        for account in candidates:
            queues.setdefault(account.tenant, _Queue()).add(account)
        for queue in queues.values():
            queue.sort(self)
        starving = {name for name in queues if self._starves(name)}
        for name in queues:
            if self.slice - self.accounts.tenants[name].turn_at > FORGIVE_AFTER * self.rules.patience_slices:
                self.accounts.forgive(name)
        expected = {name: self.accounts.tenants[name].virtual for name in queues}
        # who needs less than anybody does not fit either, and with nobody overdue all others are passed over
        least = (
            0
            if any(queue.overdue for queue in queues.values())
            else min((a.pages for a in candidates), default=0)
        )
        chosen: list[Account] = []
        pages_left = pages
        while len(chosen) < slots and queues:
            if pages and chosen and pages_left < least:
                for name in queues.keys() - starving:
                    self.accounts.tenants[name].turn_at = self.slice
                break
            name = min(queues, key=lambda n: (n not in starving, expected[n], queues[n].first_arrival, n))
            if name in starving:
                starving.discard(name)
            else:
                self.accounts.tenants[name].turn_at = self.slice
            account = queues[name].pop(prefill_first=prefill_tokens > 0)
            if not queues[name]:
                del queues[name]
            if pages and account.pages > pages_left and chosen:
                if self.is_overdue(account):
                    break  # what is left is saved up for it
                continue
            pages_left -= account.pages
            chosen.append(account)
            taken = min(account.prompt_left, max(1, prefill_tokens)) if account.in_prefill else 1
            prefill_tokens -= taken if account.in_prefill else 0
            tokens = min(account.prompt_left, taken * steps) if account.in_prefill else steps
            expected[name] += tokens / self.accounts.tenants[name].weight
        return chosen

    def _moved_pages(self, chosen: Sequence[Account], room: Room) -> int:
        """Pages that have to leave for this choice, and those of it that have to come."""
        if not room.pages:
            return 0
        names = {a.request_id for a in chosen}
        others = sum(a.resident for a in self.accounts.requests.values() if a.request_id not in names)
        out = max(0, others + sum(a.pages for a in chosen) - room.pages)
        return out + sum(a.away for a in chosen)

    def _starves(self, tenant: str) -> bool:
        """However much it was served elsewhere, it is not to wait without end here."""
        return self.slice - self.accounts.tenants[tenant].ran_at > self.rules.patience_slices

    def order_key(self, account: Account) -> tuple[float, bool, int]:
        """Least served first; a running request keeps its slot against its equals. In units of several tokens: whoever
        came first, so that slots change hands only where somebody is a whole unit ahead.
        """
        held = self.rules.hysteresis_tokens if account.running else 0
        if self.rules.has_units:
            return (account.virtual - held) // self.rules.quantum_tokens, False, account.arrival
        return account.virtual - held, not account.running, account.arrival

    def is_overdue(self, account: Account) -> bool:
        """It has waited so long that it goes first."""
        return not account.running and self.slice - account.waiting_since > self.rules.patience_slices


class _Queue:
    """Candidates of one tenant, by phase."""

    def __init__(self) -> None:
        self.overdue: list[Account] = []
        self.prefill: list[Account] = []
        self.decode: list[Account] = []
        self.first_arrival = -1
        self._all: list[Account] = []

    def __bool__(self) -> bool:
        return bool(self.overdue or self.prefill or self.decode)

    def add(self, account: Account) -> None:
        self._all.append(account)

    def sort(self, slices: FairSlices) -> None:
        """The last of each list comes first: pop() is cheap."""
        self.first_arrival = min(a.arrival for a in self._all)
        for account in sorted(self._all, key=slices.order_key, reverse=True):
            if slices.is_overdue(account):
                self.overdue.append(account)
            else:
                (self.prefill if account.in_prefill else self.decode).append(account)
        self.overdue.sort(key=lambda a: (a.waiting_since, a.arrival), reverse=True)

    def pop(self, *, prefill_first: bool) -> Account:
        if self.overdue:
            return self.overdue.pop()
        if self.prefill and (prefill_first or not self.decode):
            return self.prefill.pop()
        return self.decode.pop()


def _by_arrival(accounts: Sequence[Account]) -> list[Account]:
    return sorted(accounts, key=lambda a: a.arrival)
