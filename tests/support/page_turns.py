"""Twelve requests take turns in four slots of an engine without a model (page_engine.py); pages are not short."""

import itertools
import random
from collections import Counter

from tests.support import page_shrinks
from tests.support.page_engine import MAX_RUNNING, STEP_TOKENS, SimEngine
from tests.support.page_world import World, hashes_of
from tests.unit.mempool_harness import BLOCK_TOKENS

NUM_PAGES = 400
MOST_TURNS = 2_000


def run_all() -> None:
    """Both schedulers, for both of vLLM's model runners."""
    for depth, v2_runner in itertools.product((1, 2), (False, True)):
        run(depth=depth, v2_runner=v2_runner)
        run_one_too_many(depth=depth, v2_runner=v2_runner)
        run_short_of_pages(depth=depth, v2_runner=v2_runner)
        run_by_the_rules_of_a_burst(depth=depth, v2_runner=v2_runner)
        run_lost_blocks(depth=depth, v2_runner=v2_runner)
        run_kept_blocks(depth=depth, v2_runner=v2_runner)
        run_beside_leased_prompts(depth=depth, v2_runner=v2_runner)
        run_prompts_with_logprobs(depth=depth, v2_runner=v2_runner)
    for depth, slice_steps, number in itertools.product((1, 2), (2, 4), (6, 9, 11)):
        run_short_of_pages_by_chance(number, depth=depth, slice_steps=slice_steps)
    for depth, is_leased, number in itertools.product((1, 2), (False, True), (1, 4, 5)):
        run_shared_prompts_by_chance(number, depth=depth, is_leased=is_leased)
    run_one_too_many(depth=3, v2_runner=False)
    run_one_too_long()
    run_a_crowd_in_little_memory()
    page_shrinks.run_all()
    run_weights()


def run_one_too_long() -> None:
    """A prompt that takes nearly all pages comes while others are parked in them: they go on first, then it runs."""
    world = World("long", 26)
    engine = SimEngine(world, "e", "long", slice_steps=1)
    _ask(engine, "few", MAX_RUNNING + 2, prompt_tokens=3)
    for _ in range(6):
        engine.turn()
        world.pump()
    assert engine.scheduler._parked
    engine.add("long", bytes(j % 3 for j in range(22 * BLOCK_TOKENS)), 4, {})
    _ask(engine, "more", MAX_RUNNING, prompt_tokens=3)
    _finish(engine)


def run_one_too_many(*, depth: int, v2_runner: bool) -> None:
    """Five requests, slices of one step: whoever is parked with its step under way is the only one that waits."""
    world = World("five", NUM_PAGES)
    engine = SimEngine(world, "e", "five", depth=depth, v2_runner=v2_runner, slice_steps=1)
    _ask(engine, "few", MAX_RUNNING + 1)
    _finish(engine)
    counts = engine.scheduler.fair_counts
    assert counts["times_parked"] >= 20, counts
    assert (counts["recomputed_tokens"], counts["times_dropped"]) == (0, 0), counts


def run_short_of_pages(*, depth: int, v2_runner: bool) -> None:
    """Memory for about four of twelve: their blocks leave and come back, and nothing is computed twice."""
    world = World("short", 80, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "short", depth=depth, v2_runner=v2_runner, slice_steps=4, swaps=True)
    counts = engine.scheduler.fair_counts
    _ask(engine, "whole")
    _finish(engine)
    assert counts["times_parked"] >= 80, counts
    assert counts["swapped_in_blocks"] >= 100, counts
    assert (counts["recomputed_tokens"], counts["times_dropped"], counts["swap_blocks_lost"]) == (0, 0, 0), (
        counts
    )
    _ask(engine, "left")
    for turn in range(40):
        engine.turn()
        world.pump()
        absences = engine.scheduler.swapper.absences
        gone = [swap.request_id for swap in absences.all() if swap.request_id in engine.unfinished]
        if turn % 8 == 7 and gone:
            engine.abort(gone[-1])
    _finish(engine)
    assert counts["recomputed_tokens"] == 0, counts
    assert not engine.scheduler.swapper.absences.all()
    assert world.mempool.swap.swaps.num_kept == 0


def run_short_of_pages_by_chance(number: int, *, depth: int, slice_steps: int) -> None:
    """Eight random requests in memory for two or three, a swap takes as long as a step: nothing is computed twice, and
    in most turns somebody runs.

    Found: who was back and needed no page waited behind who needed one, and there was none, until one of them was
    computed again; running requests were, too, where a slot was kept for who was away.
    """
    world = World("chance", 34, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "chance", depth=depth, slice_steps=slice_steps, swaps=True)
    counts, rng = engine.scheduler.fair_counts, random.Random(number)
    idle = before = turns = 0
    for i in range(8):
        prompt = bytes(rng.choices(range(3), k=rng.randint(20, 44)))
        engine.add(f"r{i}", prompt, rng.randint(16, 32), {})
    while engine.unfinished and turns < MOST_TURNS:
        engine.turn()
        world.mempool.now_ms += 10
        world.pump()
        idle, before = idle + (counts["computed_tokens"] == before), counts["computed_tokens"]
        turns += 1
    _finish(engine)
    assert (counts["recomputed_tokens"], counts["times_dropped"]) == (0, 0), counts
    assert idle <= turns / 2, (idle, turns, counts)


def run_shared_prompts_by_chance(number: int, *, depth: int, is_leased: bool) -> None:
    """Twelve requests with six prompts between them in memory for two or three: nothing is computed twice, and in most
    turns somebody runs. `is_leased`: most of them come with leases of what the engine has cached of their prompts.

    Found: blocks that several parked requests shared stayed, until all pages held such blocks, or the last ones of who
    was away: nobody ran for 0.3 to 5 s at a time, while slots were kept for who found no pages, and then one after the
    other was computed again.
    """
    world = World("shared", 34, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "shared", depth=depth, slice_steps=4, swaps=True)
    front, counts, rng = world.client(engine.instance), engine.scheduler.fair_counts, random.Random(number)
    prompts = [bytes(rng.choices(range(3), k=rng.randint(20, 44))) for _ in range(6)]
    if is_leased:
        for i, prompt in enumerate(prompts):
            engine.add(f"before-{i}", prompt, 1, {})
        _finish(engine)
    idle = before = turns = 0
    for i in range(12):
        prompt = rng.choice(prompts) + bytes(rng.choices(range(3), k=rng.choice((0, 0, 3))))
        held = world.acquired(front, hashes_of(prompt)) if is_leased and rng.random() < 0.7 else {}
        engine.add(f"r{i}", prompt, rng.randint(16, 40), held)
    while engine.unfinished and turns < MOST_TURNS:
        engine.turn()
        world.advance(10)
        world.pump()
        idle, before = idle + (counts["computed_tokens"] == before), counts["computed_tokens"]
        turns += 1
    _finish(engine)
    assert (counts["recomputed_tokens"], counts["times_dropped"]) == (0, 0), counts
    assert counts["times_parked"] >= 40, counts
    assert idle <= turns / 2, (idle, turns, counts)


def run_beside_leased_prompts(*, depth: int, v2_runner: bool) -> None:
    """Two requests hold all pages but those that fronts have leased for two more: these have their first tokens before
    the others their last, and nothing is computed twice.

    Found: all fitted with pages that were to come and did not, since leases pinned them. A running request that found
    none was computed again, or had one that was parked computed again.
    """
    world = World("leased", 44, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "leased", depth=depth, v2_runner=v2_runner, slice_steps=4, swaps=True)
    front, counts = world.client(engine.instance), engine.scheduler.fair_counts
    rng = random.Random(1)
    prompts = [bytes(rng.choices(range(3), k=10 * BLOCK_TOKENS)) for _ in range(4)]
    for i, prompt in enumerate(prompts[:2]):
        engine.add(f"before-{i}", prompt, 1, {})
    _finish(engine)
    cached = [world.acquired(front, hashes_of(prompt)) for prompt in prompts[:2]]
    assert [quire["hashes"] for quire in cached] == [b"".join(hashes_of(p)) for p in prompts[:2]]
    for i, prompt in enumerate(prompts[2:]):
        engine.add(f"first-{i}", prompt, 7 * BLOCK_TOKENS, {})
    while not all(answer.text for answer in engine.answers.values()):
        engine.turn()
        world.pump()
    for i, prompt in enumerate(prompts[:2]):
        engine.add(f"later-{i}", prompt, 7 * BLOCK_TOKENS, cached[i])
    for _ in range(MOST_TURNS):
        if any(engine.answers[f"first-{i}"].finished for i in range(2)):
            break
        engine.turn()
        world.advance(10)
        world.pump()
    assert all(answer.text for answer in engine.answers.values()), engine.describe()
    _finish(engine)
    assert (counts["recomputed_tokens"], counts["times_dropped"]) == (0, 0), counts


def run_by_the_rules_of_a_burst(*, depth: int, v2_runner: bool) -> None:
    """The same memory; order of arrival behind the first slices, prompts in chunks beside the decodes."""
    world = World("burst", 80, swap_pages=NUM_PAGES)
    rules = {"quantum_tokens": 1 << 20, "patience_slices": 2, "spread_ms": 50.0, "chunk_tokens": 2}
    engine = SimEngine(
        world, "e", "burst", depth=depth, v2_runner=v2_runner, slice_steps=4, rules=rules, swaps=True
    )
    counts, num_paced = engine.scheduler.fair_counts, 0
    _ask(engine, "whole")
    for turn in range(MOST_TURNS):
        engine.turn()
        world.pump()
        num_paced += engine.scheduler._step_tokens < STEP_TOKENS
        if turn == 30:
            _ask(engine, "late")
        if not engine.unfinished:
            break
    _finish(engine)
    assert num_paced >= 20, num_paced
    assert counts["times_parked"] >= 24, counts
    assert counts["swapped_in_blocks"] >= 50, counts
    assert (counts["recomputed_tokens"], counts["times_dropped"], counts["swap_blocks_lost"]) == (0, 0, 0), (
        counts
    )


def run_a_crowd_in_little_memory() -> None:
    """Sixty requests in memory for one: the last blocks of the parked leave room to run in.

    Found: nothing ran for 6 to 10 s at a time.
    """
    world = World("crowd", 26, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "crowd", depth=2, slice_steps=4, swaps=True)
    rng = random.Random(1)
    for i in range(60):
        prompt = bytes(rng.randrange(3) for _ in range(rng.randint(1, 30)))
        engine.add(f"r{i}", prompt, rng.randint(1, min(40, 90 - len(prompt))), {})
    idle = before = 0
    for _ in range(600):
        engine.turn()
        world.mempool.now_ms += 10
        world.pump()
        computed = engine.scheduler.fair_counts["computed_tokens"]
        idle, before = (idle + 1 if computed == before else 0), computed
        assert idle <= 60, (computed, engine.scheduler.fair_counts)
    assert engine.scheduler.fair_counts["times_parked"] >= 60
    for name in engine.unfinished:
        engine.abort(name)
    _finish(engine)


def run_lost_blocks(*, depth: int, v2_runner: bool) -> None:
    """Copies fail, then the mempool dies with all that it kept: what is lost is computed again, answers stay right."""
    world = World("lost", 80, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "lost", depth=depth, v2_runner=v2_runner, slice_steps=4, swaps=True)
    counts = engine.scheduler.fair_counts
    _ask(engine, "whole")
    world.holds_copies = True
    for turn in range(60):
        engine.turn()
        world.pump()
        world.end_copy(turn, failed=turn % 3 == 2)
        world.settle()
    world.holds_copies = False
    while not any(s.state == "away" for s in engine.scheduler.swapper.absences.all()):
        engine.turn()
        world.pump()
    world.lose_mempool()
    for _ in range(3):
        engine.turn()
    world.start_successor()
    engine.scheduler._answer_pool()
    _finish(engine)
    assert counts["swap_blocks_lost"] > 0, counts
    assert counts["recomputed_tokens"] > 0, counts
    assert not engine.scheduler.swapper.absences.all()


def run_kept_blocks(*, depth: int, v2_runner: bool) -> None:
    """The mempool dies and its successor still has what was in host memory: all of it comes back from there.

    Found: the successor's word that it keeps them was taken for blocks that were about to leave, and their requests
    went on with the null block in their places.
    """
    world = World("kept", 80, swap_pages=NUM_PAGES)
    engine = SimEngine(world, "e", "kept", depth=depth, v2_runner=v2_runner, slice_steps=4, swaps=True)
    counts, absences = engine.scheduler.fair_counts, engine.scheduler.swapper.absences
    _ask(engine, "whole")
    while not any(s.state == "away" for s in absences.all()):
        engine.turn()
        world.pump()
    world.lose_mempool()
    engine.turn()
    world.start_successor(keep_swapped=True)
    engine.scheduler._answer_pool()
    asked = {swap.request_id: len(swap.blocks) for swap in absences.all() if swap.state == "away"}
    world.pump()
    engine.scheduler.swapper.hear(engine.scheduler.requests)
    assert {request_id: absences.num_away(request_id) for request_id in asked} == asked
    _finish(engine)
    assert counts["swap_blocks_lost"] == 0, counts
    assert counts["swapped_in_blocks"] >= sum(asked.values()) > 0, counts
    assert not absences.all()


def run_prompts_with_logprobs(*, depth: int, v2_runner: bool) -> None:
    """Prompts of many steps, some with log probabilities of their tokens: these keep their slots until they are
    computed, with memory for all and for few; the others are parked in the middle.

    Found: vLLM's second runner forgot the first tokens' with the slot, and the client had those of the rest alone.
    """
    for name, num_pages, slice_steps in (("rows", NUM_PAGES, 1), ("rows-short", 42, 4)):
        world, swaps = World(name, num_pages, swap_pages=NUM_PAGES), num_pages < NUM_PAGES
        engine = SimEngine(
            world, "e", name, depth=depth, v2_runner=v2_runner, slice_steps=slice_steps, swaps=swaps
        )
        rng, parked = random.Random(1), Counter[tuple[bool, bool]]()
        for i in range(2 * MAX_RUNNING):
            engine.add(f"r{i}", bytes(rng.choices(range(3), k=50)), 32, {})
            if i % 2:
                engine.scheduler.requests[f"r{i}"].sampling_params.prompt_logprobs = 0
        for _ in range(MOST_TURNS):
            for request in engine.scheduler._parked.values():
                is_begun = 0 < request.num_computed_tokens < request.num_prompt_tokens
                parked[request.sampling_params.prompt_logprobs is not None, is_begun] += 1
            if not engine.unfinished:
                break
            engine.turn()
            world.mempool.now_ms += 10
            world.pump()
        _finish(engine)
        assert parked[False, True] > 0, parked
        assert parked[True, False] > 0, parked
        assert parked[True, True] == 0, parked


def run_weights() -> None:
    """Tenants of weights 4 and 1, both with more than fits: so are the tokens that they are served."""
    world = World("weights", NUM_PAGES)
    engine = SimEngine(world, "e", "weights", slice_steps=2)
    for i in range(4 * MAX_RUNNING):
        tenant = {"tenant": "large", "weight": 4.0} if i % 2 else {"tenant": "small"}
        engine.add(f"{tenant['tenant']}-{i}", bytes(i * j % 3 for j in range(8)), 60, tenant)
    while not any(answer.finished for answer in engine.answers.values()):
        engine.turn()
        world.pump()
    served = {"large": 0, "small": 0}
    for name, answer in engine.answers.items():
        served[name.partition("-")[0]] += len(answer.text)
    told = engine.scheduler.exchange({"other/1": {"small": 10}})["served"]
    assert sum(told.values()) == engine.scheduler.fair_counts["computed_tokens"]
    before = engine.scheduler.slices.accounts.tenants["small"].virtual
    engine.scheduler.exchange({"other/1": {"small": 17}})
    assert engine.scheduler.slices.accounts.tenants["small"].virtual == before + 7
    assert 3.0 <= served["large"] / served["small"] <= 5.0, served
    _finish(engine)


def run(*, depth: int, v2_runner: bool) -> None:
    """Every answer is right and no token is computed twice; then the same with clients that leave, and with an engine
    that forgets all that it has computed.
    """
    world = World("turns", NUM_PAGES)
    engine = SimEngine(world, "e", "turns", depth=depth, v2_runner=v2_runner, slice_steps=4)
    counts = engine.scheduler.fair_counts
    _ask(engine, "whole")
    _finish(engine)
    assert counts["times_parked"] >= 80, counts
    assert (counts["recomputed_tokens"], counts["times_dropped"]) == (0, 0), counts
    _ask(engine, "left")
    for turn in range(40):
        engine.turn()
        world.pump()
        parked = [name for name in engine.scheduler._parked if name in engine.unfinished]
        if turn % 8 == 7 and parked:
            engine.abort(parked[-1])
    _finish(engine)
    assert counts["recomputed_tokens"] == 0, counts
    _ask(engine, "again")
    for _ in range(30):
        engine.turn()
        world.pump()
    engine.schedule()
    assert engine.scheduler._parked
    while engine.steps:  # a step whose output comes later would count tokens that its request has forgotten
        engine.execute()
        engine.finish()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.scheduler._parked
    _finish(engine)
    assert counts["recomputed_tokens"] > 0, counts
    assert not engine.scheduler.slices.accounts.requests
    assert not engine.scheduler._computed


def _ask(engine: SimEngine, name: str, count: int = 3 * MAX_RUNNING, prompt_tokens: int = 10) -> None:
    for i in range(count):
        prompt = bytes((len(name) + i * j) % 3 for j in range(prompt_tokens + i))
        engine.add(f"{name}-{i}", prompt, 6 * prompt_tokens, {"tenant": f"t{i % 2}"})


def _finish(engine: SimEngine) -> None:
    for _ in range(MOST_TURNS):
        if not engine.unfinished and not engine.steps:
            break
        engine.turn()
        engine.world.pump()
    assert not engine.unfinished, engine.describe()
    engine.assert_books()
