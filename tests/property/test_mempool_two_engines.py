"""Two engines of one space, each with stock, requests and a cache, beside what the mempool wants for itself: whoever
lacks pages for a request gets them as soon as the other's requests are over, whatever either caches or has in stock,
and so does the mempool. What an engine is asked for in a long step is no more than is lacking, however often.

The engines do what page_pool.py does: they let go of the least recently used cached blocks when their stock is short,
expect as many pages for them, and give what they are asked for from their stock first, as a rule behind a step.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.mempool.core.claims import SPARE_PART, Claim
from services.mempool.core.entry import Entry
from services.mempool.core.supply import ASK_AGAIN_MS
from shared.ids import BlockHash, InstanceId
from shared.wire import mempool as wire
from tests.support.examples import examples
from tests.unit.mempool_harness import (
    BLOCK_TOKENS,
    DESCRIPTION,
    SEED,
    Harness,
    Owned,
    chain,
    check_stock,
    page_lists,
)

NUM_PAGES = 16
LONGEST = 6  # blocks of a request
ROUNDS = 8  # of words between the engines and the mempool, until a request has its pages
ENGINES = (1, 2)

engines = st.sampled_from(ENGINES)


@dataclass
class Engine:
    """As one process knows it. `cached`: sealed pages that no request uses, the least recently used first."""

    connection: int
    in_step: bool = False  # it hears, and does nothing about it
    granted: list[Owned] = field(default_factory=list)  # as it has heard
    shrink: int = 0
    uncache: int = 0
    stock: list[Owned] = field(default_factory=list)
    cached: OrderedDict[Owned, BlockHash] = field(default_factory=OrderedDict)
    running: list[dict[Owned, BlockHash]] = field(default_factory=list)
    num_expected: int = 0
    num_read: int = 0  # of the mempool's messages


class TwoEngines(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.rig = Harness(NUM_PAGES)
        self.names = count()
        self.connections = count(1)
        self.claims: list[Claim] = []
        self.engines: dict[int, Engine] = {}
        for number in ENGINES:
            self.starts(number)
        self.hear()

    # -- what engines do ----------------------------------------------------------------------------

    def starts(self, number: int) -> None:
        connection = next(self.connections)
        self.rig.engine(
            connection, quota=NUM_PAGES, works_in_pages=True, instance=InstanceId(f"e{number}"),
            description=msgspec.structs.replace(DESCRIPTION, max_model_len=LONGEST * BLOCK_TOKENS),
        )  # fmt: skip
        self.engines[number] = Engine(connection)

    def hear(self) -> None:
        """Both hear what was said to them, until there is nothing more."""
        while any(self.hears(engine) for engine in self.engines.values()):
            pass

    def hears(self, engine: Engine) -> bool:
        said = self.rig.sent[engine.connection][engine.num_read :]
        engine.num_read += len(said)
        granted, self.rig.granted[engine.connection] = self.rig.granted[engine.connection], []
        engine.granted += granted
        shrinks = [message for message in said if isinstance(message, wire.Shrink)]
        engine.uncache += sum(message.count for message in shrinks if message.cached)
        engine.shrink += sum(message.count for message in shrinks if not message.cached)
        if not engine.in_step:
            self.absorbs(engine)
        return bool(said)

    def absorbs(self, engine: Engine) -> None:
        engine.in_step = False
        engine.stock += engine.granted
        engine.num_expected = max(0, engine.num_expected - len(engine.granted))
        engine.granted = []
        self.gives_spare(engine)
        if engine.shrink:
            self.lets_go(engine, engine.shrink)
            asked, engine.shrink = engine.shrink, 0
            self.rig.give_back(engine.connection, [], answers=asked)
        unpinned, engine.uncache = engine.uncache, 0
        self.lets_go(engine, unpinned)

    def gives_spare(self, engine: Engine) -> None:
        """Of its stock, what it is asked for."""
        given, engine.stock = engine.stock[: engine.shrink], engine.stock[engine.shrink :]
        engine.shrink -= len(given)
        if given:
            self.rig.give_back(engine.connection, given)

    def lets_go(self, engine: Engine, most: int) -> int:
        pages = [engine.cached.popitem(last=False)[0] for _ in range(min(most, len(engine.cached)))]
        if pages:
            self.rig.say(engine.connection, wire.Unpin(**page_lists(pages)))
        return len(pages)

    def begins(self, engine: Engine, parent: BlockHash, num_blocks: int) -> bool:
        """Whether the request has its pages; else they are on their way, if there are any."""
        self.absorbs(engine)
        if len(engine.stock) < num_blocks:
            engine.num_expected += self.lets_go(engine, num_blocks - len(engine.stock) - engine.num_expected)
            return False
        pages, engine.stock = engine.stock[:num_blocks], engine.stock[num_blocks:]
        hashes = chain(*(f"{next(self.names)}" for _ in pages))
        self.rig.write(engine.connection, pages)
        self.seal(engine, pages, hashes, parent)
        engine.running.append(dict(zip(pages, hashes, strict=True)))
        return True

    def seal(self, engine: Engine, pages: list[Owned], hashes: list[BlockHash], parent: BlockHash) -> None:
        parents = [parent, *hashes][: len(hashes)]
        lists = {"hashes": b"".join(hashes), "parents": b"".join(parents)}
        tokens = BLOCK_TOKENS.to_bytes(4, "little") * len(pages)
        self.rig.say(engine.connection, wire.Sealed(**page_lists(pages), **lists, valid_tokens=tokens))

    # -- what happens -------------------------------------------------------------------------------

    @rule(number=engines, num_blocks=st.integers(1, LONGEST))
    def a_request_begins(self, number, num_blocks):
        self.begins(self.engines[number], SEED, num_blocks)
        self.hear()

    @rule(number=engines, num_blocks=st.integers(1, LONGEST), num_more=st.integers(1, 2))
    def a_prompt_goes_from_one_to_the_other(self, number, num_blocks, num_more):
        """As from prefill to decode: blocks of one engine behind those of the other, and nobody uses either."""
        one, other = (self.engines[n] for n in (number, 3 - number))
        parent = SEED
        for engine, count_of in ((one, num_blocks), (other, num_more)):
            if not self.begins(engine, parent, count_of):
                break
            parent = list(engine.running[-1].values())[-1]
            self.ends(engine, len(engine.running) - 1)
        self.hear()

    @rule(number=engines, pick=st.integers(0, 30))
    def a_request_ends(self, number, pick):
        engine = self.engines[number]
        if engine.running:
            self.ends(engine, pick % len(engine.running))

    def ends(self, engine: Engine, at: int) -> None:
        blocks = engine.running.pop(at)
        engine.cached.update(reversed(blocks.items()))  # the last block goes first

    def requests_are_over(self) -> None:
        for engine in self.engines.values():
            while engine.running:
                self.ends(engine, 0)
            self.absorbs(engine)

    @rule(number=engines, begins=st.booleans())
    def a_step_begins_or_ends(self, number, begins):
        if begins:
            self.engines[number].in_step = True
        else:
            self.absorbs(self.engines[number])
            self.hear()

    @rule(number=engines)
    def an_engine_gives_what_it_has_in_stock_beside_its_step(self, number):
        self.gives_spare(self.engines[number])
        self.hear()

    @rule(number=engines)
    def an_engine_dies_and_is_started_again(self, number):
        dead = self.engines[number].connection
        self.rig.closed(dead)
        self.rig.dead(dead)
        self.starts(number)
        self.hear()

    @rule(
        num_pages=st.integers(1, 8), keeps=st.booleans(), is_last=st.booleans(), busy=st.sets(engines)
    )  # fmt: skip
    def the_mempool_wants_pages(self, num_pages, keeps, is_last, busy):
        """`busy`: in a step by then."""
        for number in busy:
            self.engines[number].in_step = True
        before = self.all_asked()
        self.claims.append(self.rig.pool.claim(num_pages, keeps=keeps, is_last=is_last))
        self.no_more_than_is_lacking(before)

    @rule(pick=st.integers(0, 8), times=st.integers(1, 3))
    def it_asks_again(self, pick, times):
        for _ in range(times if self.claims else 0):
            before = self.all_asked()
            self.rig.pool.ask_again(self.claims[pick % len(self.claims)])
            self.no_more_than_is_lacking(before)

    @rule(pick=st.integers(0, 8))
    def it_wants_them_no_more(self, pick):
        if self.claims:
            self.rig.pool.cancel(self.claims.pop(pick % len(self.claims)))
            self.rig.run(self.rig.pool.flush())
            self.hear()

    def all_asked(self) -> list[int]:
        attached = self.rig.pool.memory.engines.attached
        return [attached[engine.connection].asked for engine in self.engines.values()]

    def no_more_than_is_lacking(self, before: list[int]) -> None:
        """Of each engine, with what it has not answered for; of what nobody waits for a part of its stock."""
        lacking = sum(claim.lacking for claim in self.claims if not claim.is_last)
        for old, new in zip(before, self.all_asked(), strict=True):
            assert new <= max(old, lacking, NUM_PAGES // SPARE_PART)
        self.rig.run(self.rig.pool.flush())
        self.hear()

    @rule()
    def it_is_content_with_what_it_has(self):
        if self.claims:
            claim = self.claims.pop(0)
            claim.wanted = len(claim.pages)
            self.rig.pool.begin_writing(claim)
            hashes = chain(*(f"{next(self.names)}" for _ in claim.pages))
            pairs = zip(claim.pages, hashes, [SEED, *hashes], strict=False)
            self.rig.pool.take_in([Entry(h, parent, page, BLOCK_TOKENS) for page, h, parent in pairs])
            self.rig.run(self.rig.pool.flush())
            self.hear()

    @rule(ms=st.sampled_from([1, ASK_AGAIN_MS]))
    def time_goes_by(self, ms):
        self.rig.advance(ms)
        for engine in self.engines.values():
            engine.num_expected = 0
        self.hear()

    @rule(number=engines)
    def who_lacks_pages_gets_them_when_the_others_requests_are_over(self, number):
        while self.claims:
            self.it_is_content_with_what_it_has()
        self.requests_are_over()
        engine = self.engines[number]
        for _ in range(ROUNDS):
            has_begun = self.begins(engine, SEED, LONGEST)
            self.hear()
            if has_begun:
                return
            self.time_goes_by(ASK_AGAIN_MS)
        raise AssertionError(
            f"{engine}: no pages; {self.rig.counts()}, {self.rig.pool.index.num_pinned} pinned"
        )

    @rule(pick=st.integers(0, 8))
    def what_the_mempool_wants_it_gets_when_the_requests_are_over(self, pick):
        waiting = [claim for claim in self.claims if not claim.is_last]
        if not waiting:
            return
        claim = waiting[pick % len(waiting)]
        self.claims.remove(claim)
        while self.claims:
            self.it_wants_them_no_more(0)
        self.claims.append(claim)
        self.requests_are_over()
        for _ in range(ROUNDS):
            self.hear()
            if not claim.lacking:
                return
            self.it_asks_again(0, 1)
            self.time_goes_by(ASK_AGAIN_MS)
        raise AssertionError(f"{claim}; {self.rig.counts()}, {self.rig.pool.index.num_pinned} pinned")

    @invariant()
    def every_page_is_somebodys(self):
        check_stock(self.rig.pool)
        table = self.rig.pool.memory.table
        assert sum(table.counts) == NUM_PAGES
        for engine in self.engines.values():
            known = self.rig.pool.memory.engines.attached[engine.connection]
            assert {page for page, _ in (*engine.stock, *engine.granted)} == known.stock
            assert engine.shrink == known.asked
            sealed = {*engine.cached, *(own for blocks in engine.running for own in blocks)}
            assert {page for page, _ in sealed} == set(known.pinned)


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(
    max_examples=examples(100), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
