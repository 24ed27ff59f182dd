"""What this mempool asks of the market by itself, for the engines that report their load to it. No I/O.

    worker --ReportLoad--> desk --readings of each space--> shared/lending decides
        take back, renew, return: done here at once            offer, ask: a Wish, said to the coordinator
        MemoryShares to whoever reports <---- what of its space is offered, lent, borrowed

AQUA-LIB's northbound interface (AQUA 6): engines share their load, and hear what memory they have after each event. The
desk touches only offers and loans of its own; what others present through the market is theirs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from services.mempool.core.far_state import FarNeed, can_map, least_pages
from services.mempool.core.lending import Lending
from services.mempool.core.lending_budgets import LendingBudgets
from services.mempool.core.load_reports import LoadReports, bounded
from services.mempool.core.loan_pool import may_lend
from services.mempool.core.loan_state import LoanState
from services.mempool.core.loans import LoanRefused
from services.mempool.core.page_table import PageTable
from services.mempool.core.pool import Pool
from services.mempool.core.takers import Takers
from services.mempool.core.wishes import Answer, Wish, Word
from shared.ids import InstanceId, LeaseId, SpaceId
from shared.kv.page import PageState
from shared.lending.consumer import Ask, Borrowed, Consumer, Need, Renew, Return
from shared.lending.load import Load
from shared.lending.producer import MakeOffer, OnOffer, Producer, TakeBack
from shared.lending.rules import EngineProfile, LendingRules
from shared.wire.lending import (
    MAX_SPACES,
    AskLease,
    AskReclaim,
    Grant,
    OfferMemory,
    OfferView,
    ReclaimOrder,
    SpaceRef,
)
from shared.wire.mempool_lending import MemoryShares, ReportLoad


@dataclass(slots=True)
class _Party:
    """One space."""

    producer: Producer
    consumer: Consumer
    models: tuple[str, ...]
    heard_at_ms: int = -1  # newest report that was read
    held: set[LeaseId] = field(default_factory=set)
    preempted: int = 0  # by the last reading
    shares: MemoryShares | None = None  # told last


class Desk:
    """Of one mempool. decide() every so often, on_load() with each report.

    Args:
        name: of the mempool in the market.
        profiles: by model; a space whose engines have none is judged by what is seen.
        space_of: number of an instance's space; None when it has none here.
        touched: called with every pool that a later flush() must bring up to date.
        far_need: what a space's running requests read outside it; a refusal is said once.
    """

    def __init__(
        self,
        lending: Lending,
        pools: Mapping[int, Pool],
        rules: LendingRules,
        profiles: Mapping[str, EngineProfile],
        name: InstanceId,
        space_of: Callable[[InstanceId], int | None],
        touched: Callable[[Pool], None],
        far_need: Callable[[int], FarNeed],
    ) -> None:
        self.rules = rules
        self.budgets = LendingBudgets(rules, lending.copies)
        self.takers = Takers(pools, lending, rules.steady_ms)
        self._lending, self._pools, self._profiles, self._name = lending, pools, profiles, name
        lending.rules = rules
        self._space_of, self._touched, self._far_need = space_of, touched, far_need
        self._reports = LoadReports(rules.silent_ms)
        self.parties: dict[int, _Party] = {}
        self._num_wishes = 0
        self._wishes: list[Wish] = []
        self.words: list[Word] = []  # the shell takes them

    # -- what is heard ----------------------------------------------------------------------------

    def on_load(self, connection: int, instance: InstanceId, message: ReportLoad, now_ms: int) -> None:
        """An engine's front says how busy it is. One of a larger epoch takes the place of an earlier one."""
        self._reports.hear(connection, instance, bounded(message), now_ms)

    def on_closed(self, connection: int) -> None:
        """It reports no more."""
        self._reports.forget(connection)

    def excuse(self, late_ms: int, now_ms: int) -> None:
        """decide() comes so late: what was said meanwhile is not read yet, and nobody was silent."""
        self._reports.excuse(late_ms, now_ms)
        for party in self.parties.values():
            party.heard_at_ms = min(now_ms, party.heard_at_ms + late_ms)
            party.producer.excuse(late_ms, now_ms)

    def answered(self, wish: Wish, answer: Answer, now_ms: int) -> None:
        """The coordinator's answer; None: none came in time."""
        party = self.parties.get(wish.space)
        if party is None or isinstance(wish.body, AskReclaim) or isinstance(answer, ReclaimOrder):
            return
        if isinstance(answer, OfferView):
            self._offered(party, wish, answer, now_ms)
        elif isinstance(answer, Grant):
            party.consumer.answered(now_ms, granted=self._take(wish, answer, now_ms))
            self._tell()
        else:
            later_ms = max(self.rules.pause_ms, answer.retry_after_ms if answer is not None else 0)
            code = answer.code if answer is not None else "no answer"
            self._say("memory_wish_refused", space=wish.space, wish=type(wish.body).__name__, code=code)
            if isinstance(wish.body, OfferMemory):
                party.producer.answered(now_ms, retry_after_ms=later_ms)
            else:
                party.consumer.answered(now_ms, granted=False, retry_after_ms=later_ms)

    def _offered(self, party: _Party, wish: Wish, view: OfferView, now_ms: int) -> None:
        party.producer.answered(now_ms)
        offer_id = view.offer.offer_id
        try:
            made = self._lending.know(view.offer, now_ms)
        except LoanRefused as refused:
            self._say("memory_offer_refused", offer_id=offer_id, code=refused.code)
            return
        if not party.producer.wants_offer(now_ms):  # load rose while the coordinator was asked
            self._lending.reclaim(
                ReclaimOrder(reclaim_id="", offer_id=offer_id, keep_bytes=0, deadline_ms=0), now_ms
            )
            self._wish(wish.space, AskReclaim(offer_id=offer_id, producer=view.offer.producer, deadline_ms=0))
            return
        unit = self._lending.unit_bytes(wish.space)
        self._say("memory_offered", space=wish.space, offer_id=offer_id, num_bytes=made.limit * unit)

    def _take(self, wish: Wish, grant: Grant, now_ms: int) -> bool:
        try:
            self._lending.take(grant, now_ms)
        except LoanRefused as refused:
            self._say("memory_grant_refused", lease_id=grant.lease_id, code=refused.code)
            return False
        self._say(
            "memory_borrowed", space=wish.space, lease_id=grant.lease_id, num_bytes=grant.length_bytes,
            producer_space=grant.space,
        )  # fmt: skip
        return True

    # -- what is decided --------------------------------------------------------------------------

    def decide(self, now_ms: int) -> list[Wish]:
        """Look at every space; what takes effect here has done so. Returns: what the coordinator is to hear."""
        for number, pool in list(self._pools.items()):
            memory = pool.memory
            if memory is None or memory.is_behind:
                continue
            lends, devices = self._lending.is_lending(number), set(memory.devices.values())
            if (word := self.budgets.look(number, devices, is_lending=lends)) is not None:
                self.words.append(word)
            instances = {engine.instance for engine in memory.engines.attached.values()}
            if instances and (word := self.takers.look(number, now_ms)) is not None:
                self.words.append(word)
            if instances or number in self.parties:
                self._decide(number, self._party(number, instances), sorted(instances), now_ms)
        self._tell()
        wishes, self._wishes = self._wishes, []
        return wishes

    def _party(self, number: int, instances: set[InstanceId]) -> _Party:
        models = {self._reports[name].message.model for name in instances if name in self._reports}
        known = self.parties.get(number)
        if known is not None and (not models or known.models == tuple(sorted(models))):
            return known
        profiles = [self._profiles[model] for model in sorted(models) if model in self._profiles]
        made = _Party(Producer(self.rules, profiles), Consumer(self.rules, profiles), tuple(sorted(models)))
        if known is not None:
            made.held, made.preempted, made.shares = known.held, known.preempted, known.shares
        self.parties[number] = made
        return made

    def _decide(self, number: int, party: _Party, instances: Sequence[InstanceId], now_ms: int) -> None:
        load = self._load(number, instances, party, now_ms)
        offers = self.offers_of(number)
        loans = self.loans_of(number, now_ms)
        need = self._need(number)
        if need is not None:
            party.consumer.note(need, now_ms)
        party.producer.budget_bytes_per_s = self._lending.copies.limit_of(number)
        keeps, is_short = bool(loans) or bool(self.takers.why_none(number)), party.consumer.is_short
        for one in party.producer.decide(load, offers, now_ms, keeps=keeps, is_short=is_short):
            if isinstance(one, TakeBack):
                self._take_back(number, one, now_ms)
            else:
                self._offer(number, instances, one)
        held = {loan.lease_id for loan in loans if loan.is_held}
        if party.held - held:
            party.consumer.lost(now_ms)
        party.held = held
        lends = any(x.length_bytes or x.lent_bytes for x in offers) or party.producer.is_asking
        lives = bool(instances) and all(self._reports.is_fresh(name, now_ms) for name in instances)
        if need is None:
            return
        for one in party.consumer.decide(loans, now_ms, lends=lends, lives=lives):
            match one:
                case Renew():
                    self._lending.loans.renew(one.lease_id, one.ttl_ms, now_ms)
                case Return():
                    party.held.discard(one.lease_id)
                    self._say("memory_returned", space=number, lease_id=one.lease_id)
                    self._lending.loans.release(one.lease_id, now_ms)
                case Ask():
                    self._ask(number, instances, party, one, now_ms)

    def _offer(self, number: int, instances: Sequence[InstanceId], offer: MakeOffer) -> None:
        report = self._reports[instances[0]].message
        body = OfferMemory(
            producer=instances[0], producer_epoch=report.instance_epoch, mempool=self._name,
            boot_generation=self._lending.loans.boot_generation, space=SpaceId(number),
            length_bytes=offer.length_bytes,
        )  # fmt: skip
        self._wish(number, body)

    def _take_back(self, number: int, one: TakeBack, now_ms: int) -> None:
        known = self._lending.known_offers[one.offer_id]
        order = ReclaimOrder(
            reclaim_id="", offer_id=one.offer_id, keep_bytes=one.keep_bytes, deadline_ms=one.deadline_ms
        )
        with suppress(LoanRefused):
            self._lending.reclaim(order, now_ms)
        self._say(
            "memory_taken_back", space=number, offer_id=one.offer_id, keep_bytes=one.keep_bytes,
            deadline_ms=one.deadline_ms, reason=one.reason,
        )  # fmt: skip
        if not one.keep_bytes:  # of a part the next report says enough
            body = AskReclaim(offer_id=one.offer_id, producer=known.producer, deadline_ms=one.deadline_ms)
            self._wish(number, body)

    def _ask(
        self, number: int, instances: Sequence[InstanceId], party: _Party, ask: Ask, now_ms: int
    ) -> None:
        mine = self._pools[number]
        lenders = sorted(
            (n for n, pool in self._pools.items() if may_lend(pool, mine)),
            key=lambda n: (not self._on_gpus(n), n),
        )
        if ask.in_place:
            lenders = [n for n in lenders if can_map(mine, self._pools[n])]
        if not lenders:
            party.consumer.answered(now_ms, granted=False)
            return
        preempted = sum(self._reports[name].message.num_preempted for name in instances)
        purpose = "swap" if preempted > party.preempted else "overflow"
        party.preempted = preempted
        report = self._reports[instances[0]].message
        body = AskLease(
            consumer=instances[0], consumer_epoch=report.instance_epoch, length_bytes=ask.length_bytes,
            min_bytes=ask.least_bytes, purpose=purpose, ttl_ms=self.rules.ttl_ms,
            spaces=[SpaceRef(mempool=self._name, space=SpaceId(n)) for n in lenders[:MAX_SPACES]],
        )  # fmt: skip
        self._wish(number, body)

    # -- readings ---------------------------------------------------------------------------------

    def _load(self, number: int, instances: Sequence[InstanceId], party: _Party, now_ms: int) -> Load | None:
        """None: not every engine has reported, or nothing new since the last reading."""
        if not instances or not all(self._reports.is_fresh(name, now_ms) for name in instances):
            return None
        reports = [self._reports[name] for name in instances]
        newest = max(report.at_ms for report in reports)
        if newest == party.heard_at_ms:
            return None
        party.heard_at_ms = newest
        memory, unit = self._pools[number].memory, self._lending.unit_bytes(number)
        assert memory is not None
        needed = least = 0
        for engine in memory.engines.attached.values():
            said = self._reports[engine.instance].message
            if not engine.works_in_pages:
                needed += len(engine.held)
            elif said.num_pages_in_use is None:
                needed += round(said.kv_used_share * engine.num_pages)
            else:  # also what leases pin for it, which is none of its own pages
                needed += said.num_pages_in_use
            least += least_pages(engine, memory.engines)
        return Load(
            present_pages(memory.table) * unit, needed * unit, least * unit,
            sum(report.message.num_waiting for report in reports),
            sum(report.message.num_arrived for report in reports),
        )  # fmt: skip

    def _need(self, number: int) -> Need | None:
        """None: a space without host memory behind it cannot borrow."""
        back = self._lending.num_back(number)
        if back is None:
            return None
        unit, far, lending = self._lending.unit_bytes(number), self._far_need(number), self._lending
        return Need(
            back * unit, lending.num_moved(number) * unit, lending.num_read_by(number) * unit, far.short * unit,
            far.is_stuck,
        )  # fmt: skip

    def offers_of(self, number: int) -> list[OnOffer]:
        """Offers of this desk, oldest first."""
        lending, unit = self._lending, self._lending.unit_bytes(number)
        return [
            OnOffer(offer.offer_id, offer.limit * unit, lending.loans.lent(offer) * unit)
            for offer in lending.loans.offers.values()
            if offer.producer == number
            and (known := lending.known_offers.get(offer.offer_id)) is not None
            and known.key.startswith(self._prefix)
        ]

    def loans_of(self, number: int, now_ms: int) -> list[Borrowed]:
        """Loans that this desk took for the space."""
        lending = self._lending
        return [
            Borrowed(
                loan.lease_id, loan.num_pages * lending.unit_bytes(loan.offer.producer),
                max(0, loan.expires_at_ms - now_ms), loan.state is LoanState.HELD,
            )
            for loan in lending.loans.loans.values()
            if loan.space == number and lending.known_grants[loan.lease_id].key.startswith(self._prefix)
        ]  # fmt: skip

    def shares_of(self, number: int) -> MemoryShares:
        """What of the space is offered, lent and borrowed, whoever asked for it."""
        loans, unit_bytes = self._lending.loans, self._lending.unit_bytes
        memory = self._pools[number].memory
        assert memory is not None
        offers = [offer for offer in loans.offers.values() if offer.producer == number]
        return MemoryShares(
            total_bytes=present_pages(memory.table) * unit_bytes(number),
            offered_bytes=sum(offer.limit for offer in offers) * unit_bytes(number),
            lent_bytes=sum(loans.lent(offer) for offer in offers) * unit_bytes(number),
            borrowed_bytes=sum(
                loan.num_pages * unit_bytes(loan.offer.producer)
                for loan in loans.loans.values()
                if loan.space == number
            ),
        )

    # -- parts ------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"{self._name}-{self._lending.loans.boot_generation:x}-"

    def _wish(self, number: int, body: OfferMemory | AskLease | AskReclaim) -> None:
        self._num_wishes += 1
        self._wishes.append(Wish(number, body, f"{self._prefix}{self._num_wishes}"))

    def _tell(self) -> None:
        """Everybody who reports load hears of a change of the memory that its engine has."""
        for number, party in self.parties.items():
            shares = self.shares_of(number)
            if shares == party.shares:
                continue
            party.shares = shares
            for instance, report in self._reports.items():
                if self._space_of(instance) == number:
                    self._pools[number].say(report.connection, shares)
                    self._touched(self._pools[number])

    def _on_gpus(self, number: int) -> bool:
        memory = self._pools[number].memory
        return memory is not None and memory.pages_per_slab > 0

    def _say(self, event: str, **ids: object) -> None:
        self.words.append(Word(event, ids))

    def status(self) -> dict[str, Any]:
        """For people: by space, its engines, what they share, and what they would do."""
        out: dict[str, Any] = {}
        for number, party in self.parties.items():
            memory = self._pools[number].memory
            assert memory is not None
            shares = self.shares_of(number)
            out[str(number)] = {
                "instances": sorted({str(e.instance) for e in memory.engines.attached.values()}),
                "may_lend": party.producer.may_lend,
                "no_taker": self.takers.why_none(number),
                "total_bytes": shares.total_bytes, "offered_bytes": shares.offered_bytes,
                "lent_bytes": shares.lent_bytes, "borrowed_bytes": shares.borrowed_bytes,
                "budget_bytes_per_s": self._lending.copies.limit_of(number),
            }  # fmt: skip
        return out


def present_pages(table: PageTable) -> int:
    """That have memory, whoever has them: also those that are on offer, which engines cannot count on."""
    return table.num_present + table.counts[PageState.LEASED]
