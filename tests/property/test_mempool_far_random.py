"""Far places under random engines, ranks, lenders, failures and deaths: what is mapped stays; all comes back."""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire.mempool_far import NO_PLACE, FarMoved, FarOut, FarPlaced
from tests.support.examples import examples
from tests.unit.mempool_harness import PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_far import RANK, FarMarket
from tests.unit.test_mempool_lending import LENDER
from tests.unit.test_mempool_spaces import PREFILL

CHAINS = [(chain(*(f"{c}{n}" for n in range(4))), [f"{c}{n}" for n in range(4)]) for c in "abcdef"]
READABLE = (PageState.SEALED, PageState.LEASED)


class World(FarMarket):
    """An engine that reads places until it drops them, one step later than it hears of anything."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(places=rng.choice([3, 8, 16]), dram_pages=rng.choice([2, 6, 16]))
        self.rng = rng
        self.asked_out: dict[int, list[str]] = {}  # by number: names of blocks
        self.reads: dict[int, str] = {}  # place: the block that the engine reads there
        self.heard = 0
        self.number = 0
        self.offers = 0
        self.is_dead = False

    def compute(self) -> None:
        """Seal a prompt, ask for it to be far, and let the mempool have its pages back."""
        free = len(self.granted[PREFILL])
        if free < 4:
            return
        hashes, names = self.rng.choice(CHAINS)
        pages = self.fill(PREFILL, 0, hashes, names)
        self.number += 1
        self.asked_out[self.number] = names
        self.say(PREFILL, FarOut(number=self.number, hashes=b"".join(hashes)))
        self.say(PREFILL, wire.Unpin(**page_lists(pages)))

    def hear(self) -> None:
        """What the mempool says is acted on at once; what is left is dropped at once, or later."""
        said, self.heard = self.sent[PREFILL][self.heard :], len(self.sent[PREFILL])
        for message in said:
            if isinstance(message, FarPlaced):
                names = self.asked_out.pop(message.number)
                for name, place in zip(names, u32_list(message.places), strict=True):
                    if place != NO_PLACE:
                        assert place not in self.reads, "a place that is read"
                        self.reads[place] = name
            elif isinstance(message, FarMoved):
                for old, new in zip(u32_list(message.places), u32_list(message.to), strict=True):
                    name = self.reads.pop(old, None)
                    if new != NO_PLACE:
                        assert new not in self.reads, "a place that is read"
                        if name is not None:
                            self.reads[new] = name
                        else:
                            self.drop(new)
                    if name is not None:
                        self.drop(old)

    def drop_some(self) -> None:
        places = self.rng.sample(sorted(self.reads), min(len(self.reads), self.rng.randint(1, 4)))
        for place in places:
            del self.reads[place]
        if places:
            self.drop(*places)

    def shrink(self) -> None:
        asked = sum(m.count for m in self.sent[PREFILL] if isinstance(m, wire.Shrink))
        stock = self.granted[PREFILL]
        if asked and stock:
            self.give_back(PREFILL, self.take(PREFILL, 1))

    def lend_some(self) -> None:
        self.sent[LENDER].clear()
        if len(self.granted[LENDER]) < 4:
            return
        self.offers += 1
        name = f"o{self.offers}"
        self.offer(self.rng.randint(1, 4), name)
        self.present(self.grant(self.rng.randint(1, 4), offer=name))

    def take_back(self) -> None:
        if self.offers:
            offer = f"o{self.rng.randint(1, self.offers)}"
            self.reclaim(0, self.rng.choice([0, 100_000, 100_000, 100_000]), offer)

    def end_copies(self) -> None:
        how = self.rng.choice([{}, {}, {"failed": True}])
        self.copied(**how)

    def let_ranks(self) -> None:
        self.obeys = self.rng.random() < 0.6
        if self.obeys:
            self.obey(
                is_ok=self.rng.random() < 0.95 or any(not isinstance(what, dict) for _, what in self.asked)
            )

    def die(self) -> None:
        self.is_dead = True
        for connection in (RANK, PREFILL):
            self.closed(connection)

    def check(self) -> None:
        """Whoever may read finds the block's bytes, in a page that nobody may write."""
        for place, name in self.reads.items():
            assert self.bytes[self.maps[place]] == name
        for space, page in self.maps.values():
            assert self.state_in(space, page) in READABLE
        self.counts()


@given(
    st.integers(0, 2**32), st.sampled_from([0, 100 * PAGE_BYTES])
)  # a page takes 10 ms: many copies are held
@example(561, 0)  # the engine died, and was forgotten, with a call of it half done
@settings(max_examples=examples(40), deadline=None)
def test_what_is_mapped_stays_what_it_is_and_everything_comes_back(seed, bytes_per_s):
    rng = random.Random(seed)
    world = World(rng)
    world.core.lending.copies.limit(bytes_per_s)
    steps = [
        world.compute,
        world.compute,
        world.hear,
        world.hear,
        world.drop_some,
        world.lend_some,
        world.take_back,
    ]
    steps += [
        world.end_copies,
        world.end_copies,
        world.let_ranks,
        world.shrink,
        lambda: world.advance(rng.choice([1, 60])),
    ]
    for _ in range(70):
        if world.killed and not world.is_dead:  # it may read on until it is proven dead
            world.check()
            world.die()
            break
        rng.choice(steps)()
        world.check()
    world.obeys = not world.is_dead
    if world.is_dead:
        world.dead(PREFILL)
    else:
        world.obey()
        for _ in range(6):
            world.copied()
            world.hear()
            if world.reads:
                world.drop(*world.reads)
                world.reads.clear()
    world.copied()
    world.advance(200_000)
    world.copied()
    world.advance(1)
    assert world.num_placed == 0
    if not world.is_dead:
        assert not world.maps
    assert world.core.status().num_pinned == 0
