"""Whether a space lends: how much it offers while its load is steady, and when it wants that back. No I/O.

    silent --reports--> watching --steady for steady_ms, enough to spare--> offering
    offering --queue or rate rises, or silence--> everything back --hold_ms--> watching
    offering --its own blocks come back from host memory--> everything back --hold_ms--> watching
        soon behind the offer: twice as long each time; after a long stay: hold_ms again
    offering --running requests need more--> as much back as they need --hold_ms--> watching

The truth about offers is the mempool's: every decision is told what is on offer now, so that a lost answer, a settled
offer or an order of the coordinator's needs no bookkeeping here. AQUA 4 (who is a producer) and 6 (control loop); the
paper has no hysteresis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.lending.load import Load, LoadWindow
from shared.lending.rules import EngineProfile, LendingRules

MAX_HOLDS = 64  # times hold_ms, for who lent what its own cache needs
LONG_STAY = 10  # on offer for so many holds, it was no mistake to lend


@dataclass(frozen=True, slots=True)
class OnOffer:
    """An offer of the space as its mempool knows it."""

    offer_id: str
    length_bytes: int  # that it is worth
    lent_bytes: int = 0  # on loan, also what is on its way back


@dataclass(frozen=True, slots=True)
class MakeOffer:
    """Offer so many bytes, all in one; answered by Producer.answered()."""

    length_bytes: int


@dataclass(frozen=True, slots=True)
class TakeBack:
    """From now on the offer is worth keep_bytes, and by the deadline its loans fit. `reason`: for people."""

    offer_id: str
    keep_bytes: int
    deadline_ms: int
    reason: str


class Producer:
    """Of one space. Same readings, same decisions.

    Args: profiles: of the engines in the space; with none, what is seen decides who lends.
    """

    def __init__(self, rules: LendingRules, profiles: Sequence[EngineProfile] = ()) -> None:
        self._rules = rules
        self._profiles = tuple(profiles)
        self._window = LoadWindow(rules.window_ms, rules.peak_ms)
        self._steady_since_ms: int | None = None
        self._held_until_ms, self._hold_ms = 0, rules.hold_ms
        self._on_offer_since_ms: int | None = None
        self._heard_at_ms: int | None = None
        self._offered_rate: float | None = None  # at which memory was offered
        self.is_asking = False  # an offer is on its way to the coordinator
        self.budget_bytes_per_s = rules.fixed_budget_bytes_per_s  # the caller says what was measured

    @property
    def may_lend(self) -> bool:
        """Whether no profile says otherwise (AQUA 4.1)."""
        return all(profile.role == "producer" for profile in self._profiles)

    def reserve_bytes(self, load: Load) -> int:
        """Kept beside what running requests hold."""
        return max(load.least_bytes, int(self._rules.reserve_share * load.total_bytes))

    def spare_bytes(self, load: Load, needed_bytes: int) -> int:
        """What is left when requests need so much; negative: they lack some."""
        return load.total_bytes - needed_bytes - self.reserve_bytes(load)

    def answered(self, now_ms: int, *, retry_after_ms: int = 0) -> None:
        """MakeOffer has its answer. retry_after_ms: refused, or nobody answered: not before."""
        self.is_asking = False
        if retry_after_ms:
            self._held_until_ms = max(self._held_until_ms, now_ms + retry_after_ms)

    def wants_offer(self, now_ms: int) -> bool:
        """Whether memory that was to be offered still is: load may have risen while the coordinator was asked."""
        return now_ms >= self._held_until_ms

    def excuse(self, late_ms: int, now_ms: int) -> None:
        """decide() comes so late that reports may lie unread: that time is no silence."""
        if self._heard_at_ms is not None:
            self._heard_at_ms = min(now_ms, self._heard_at_ms + late_ms)

    def decide(
        self,
        load: Load | None,
        offers: Sequence[OnOffer],
        now_ms: int,
        *,
        keeps: bool = False,
        is_short: bool = False,
    ) -> list[MakeOffer | TakeBack]:
        """Args: load: a new reading, None: nothing was reported since; keeps: nothing is offered: the space borrows
        itself, or nobody could borrow from it; is_short: what was cached in the space is wanted again.
        """
        if load is None:
            return self._on_silence(offers, now_ms)
        self._heard_at_ms = now_ms
        self._window.add(load, now_ms)
        self._note_offers(any(offer.length_bytes for offer in offers), now_ms)
        if reason := self._rises(load, now_ms):
            return self._take_all_back(offers, now_ms, reason)
        if is_short:
            return self._on_short(offers, now_ms)
        spare_bytes = self.spare_bytes(load, load.needed_bytes)
        offered_bytes = sum(offer.length_bytes for offer in offers)
        if offers and offered_bytes > spare_bytes:
            return self._shrink(offers, max(0, spare_bytes), now_ms)
        if load.num_waiting > self._rules.queue_limit:
            self._steady_since_ms = None
            return []
        if self._steady_since_ms is None:
            self._steady_since_ms = now_ms
        return self._offer(load, offered_bytes, now_ms, keeps=keeps)

    # -- parts ------------------------------------------------------------------------------------

    def _note_offers(self, is_offering: bool, now_ms: int) -> None:
        if not is_offering:
            self._on_offer_since_ms = None
            if not self.is_asking:  # learned anew by the next offer; else a rate above it bars that for good
                self._offered_rate = None
        elif self._on_offer_since_ms is None:
            self._on_offer_since_ms = now_ms
        elif now_ms - self._on_offer_since_ms >= LONG_STAY * self._hold_ms:
            self._hold_ms = self._rules.hold_ms

    def _rises(self, load: Load, now_ms: int) -> str:
        """What of the load rises; "" when nothing does."""
        rules, window = self._rules, self._window
        if window.queue_growth(now_ms) > rules.queue_limit:
            return f"queue grew to {load.num_waiting}"
        if window.num_arrived(now_ms) < rules.least_arrivals:
            return ""
        rate = window.rate_per_s(now_ms)
        if self._profiles:
            limit = sum(profile.rate_per_instance_per_s for profile in self._profiles) * (
                1 + rules.rate_slack
            )
        elif self._offered_rate is not None:
            least = rules.least_arrivals * 1_000 / rules.window_ms
            limit = max(least, self._offered_rate * (1 + rules.rate_rise))
        else:
            return ""
        return f"{rate:.2f} requests/s are above {limit:.2f}" if rate > limit else ""

    def _on_silence(self, offers: Sequence[OnOffer], now_ms: int) -> list[MakeOffer | TakeBack]:
        if self._heard_at_ms is None:
            self._heard_at_ms = now_ms
        if now_ms - self._heard_at_ms < self._rules.silent_ms:
            return []
        self._window.clear()
        return self._take_all_back(offers, now_ms, "no load report")

    def _on_short(self, offers: Sequence[OnOffer], now_ms: int) -> list[MakeOffer | TakeBack]:
        """It lent what its own cache needs: it is so the next time too, so that is later each time."""
        out = self._take_all_back(offers, now_ms, "its own blocks come back from host memory")
        if out:
            self._hold_ms = min(2 * self._hold_ms, MAX_HOLDS * self._rules.hold_ms)
        return out

    def _take_all_back(
        self, offers: Sequence[OnOffer], now_ms: int, reason: str
    ) -> list[MakeOffer | TakeBack]:
        self._steady_since_ms = None
        wanted = [offer for offer in offers if offer.length_bytes]
        if wanted or self.is_asking:
            self._hold(now_ms)
            self._offered_rate = None  # also of one on its way, which nobody wants now
        return [self._take(offer, 0, reason) for offer in wanted]

    def _shrink(self, offers: Sequence[OnOffer], keep_bytes: int, now_ms: int) -> list[MakeOffer | TakeBack]:
        """The newest offers give first. What is left may be less than the threshold: it is lent already."""
        self._steady_since_ms = None
        self._hold(now_ms)
        out: list[MakeOffer | TakeBack] = []
        for offer in offers:
            share = min(offer.length_bytes, keep_bytes)
            keep_bytes -= share
            if share < offer.length_bytes:
                out.append(self._take(offer, share, "running requests need it"))
        return out

    def _take(self, offer: OnOffer, keep_bytes: int, reason: str) -> TakeBack:
        lent_bytes = max(0, offer.lent_bytes - keep_bytes)
        return TakeBack(
            offer.offer_id, keep_bytes, self._rules.deadline_ms(lent_bytes, self.budget_bytes_per_s), reason
        )

    def _hold(self, now_ms: int) -> None:
        self._held_until_ms = max(self._held_until_ms, now_ms + self._hold_ms)

    def _offer(
        self, load: Load, offered_bytes: int, now_ms: int, *, keeps: bool
    ) -> list[MakeOffer | TakeBack]:
        assert self._steady_since_ms is not None
        is_steady = now_ms - self._steady_since_ms >= self._rules.steady_ms
        if not is_steady or now_ms < self._held_until_ms or self.is_asking or keeps or not self.may_lend:
            return []
        spare_bytes = self.spare_bytes(load, self._window.peak_bytes(now_ms))
        if self._profiles:
            spare_bytes = min(spare_bytes, sum(profile.num_bytes for profile in self._profiles))
        spare_bytes -= offered_bytes
        if spare_bytes <= max(0, self._rules.threshold_bytes):
            return []
        self.is_asking = True
        if self._offered_rate is None:
            self._offered_rate = self._window.rate_per_s(now_ms)
        return [MakeOffer(spare_bytes)]
