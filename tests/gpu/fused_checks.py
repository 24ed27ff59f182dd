"""What is asked of the fused all-reduce on GPUs: errors, equal bits, replays, late and dead peers."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import PeerTimeout
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, make_plan
from shared.kernels.allreduce_rmsnorm.reference import reference
from shared.kernels.allreduce_rmsnorm.shapes import Engine
from tests.gpu.fused_bed import CAPTURE, EPS, WAYS, Bed, errors, fits, make, say, stock

HIDDENS = (1024, 1032, 2880, 4096, 5120, 8192, 16384)
VARIANTS = 4


class Opened:
    """The group of the hidden size and type that is tried now; one at a time."""

    def __init__(self, bed: Bed, most_elements: int) -> None:
        self.bed, self.most = bed, most_elements
        widest = FusedSettings(1024, most_elements // 1024, num_lanes=2, whole_residual=True).layout()
        self._arenas = bed.arenas(widest.num_bytes + (1 << 20))
        self.fused: dict[int, CudaFused] = {}

    def change(self, hidden: int, dtype: torch.dtype) -> None:
        """Another group in the same memory."""
        self.close()
        settings = FusedSettings(
            hidden, self.most // hidden, dtype, num_lanes=2, whole_residual=True, timeout_ms=5000
        )
        self.fused = self.bed.open(settings, self._arenas)

    def close(self) -> None:
        """The memory stays."""
        for one in self.fused.values():
            one.close()


@dataclass(frozen=True)
class Case:
    """A random call."""

    number: int
    num_tokens: int
    gemma: bool
    whole: bool
    sms: int
    seed: int


def draw_case(draw: random.Random, number: int, world: int, room: int, budget: int) -> Case:
    """Few tokens as often as many."""
    sizes = [1, 2, 3, world, draw.randint(1, 64), draw.randint(1, 600), draw.randint(1, room), room]
    return Case(
        number=number,
        num_tokens=min(room, draw.choice(sizes)),
        gemma=draw.random() < 0.3,
        whole=draw.random() < 0.3,
        sms=min(draw.choice([0, 0, 1, 2, 5, 16]), budget),
        seed=draw.getrandbits(30),
    )


def check_case(bed: Bed, fused: dict[int, CudaFused], case: Case) -> list[str]:
    """In every way that takes it; what is wrong with it."""
    first = fused[bed.local[0]]
    partials, residual, weight = make(
        case.seed, bed.world, case.num_tokens, first.hidden, first.dtype, bed.device
    )
    want = reference(partials, residual, weight, EPS, gemma=case.gemma)
    base = stock(bed, partials, residual, weight, case.gemma)
    limits = [errors(got, right) for got, right in zip(base, want, strict=True)]
    wrong = []
    for algorithm, engine in (way for way in WAYS if fits(first, way[1], case.num_tokens)):
        lane = case.number % 2
        held = {rank: residual.clone() for rank in bed.local}
        for rank in bed.local:
            fused[rank].input(case.num_tokens, lane).copy_(partials[rank])
        plans = {rank: make_plan(algorithm, case.num_tokens, bed.world, rank) for rank in bed.local}
        bed.meet()

        def call(
            rank: int, *, lane: int = lane, held: Any = held, plans: Any = plans, engine: Any = engine
        ) -> Any:
            one = fused[rank]
            return one.run_as(
                plans[rank], engine, one.input(case.num_tokens, lane), held[rank], weight, EPS, lane=lane,
                num_sms=case.sms, gemma=case.gemma, whole_residual=case.whole,
            )  # fmt: skip

        found = bed.each(call)
        said = []
        for rank in bed.local:
            fused[rank].check()
            normed, carried = found[rank]
            own = slice(plans[rank].start, plans[rank].stop)
            rows = slice(0, case.num_tokens) if case.whole else own
            off = [errors(normed, want[0]), errors(carried[rows], want[1][rows])]
            for what, mine, theirs in zip(("normed", "residual"), off, limits, strict=True):
                if not all(a <= 2 * b + 1e-9 for a, b in zip(mine, theirs, strict=True)):
                    said.append(f"rank {rank} {what} off by {mine}, stock by {theirs}")
            if not torch.equal(held[rank][own], carried[own]):
                said.append(f"rank {rank}: own rows of the residual are not what went around")
        if not bed.same({rank: found[rank][0] for rank in bed.local}):
            said.append("bits differ between ranks")
        if case.whole and not bed.same({rank: found[rank][1] for rank in bed.local}):
            said.append("the residual's bits differ between ranks")
        wrong += [f"{algorithm}/{engine} hidden {first.hidden} {first.dtype} {case}: {text}" for text in said]
    return wrong


def check_shapes(bed: Bed, count: int, seed: int, most_elements: int = 0) -> bool:
    """Random shapes, some of each hidden size in turn; of at most so many elements, else what a GPU has room for."""
    draw = random.Random(seed)
    opened = Opened(bed, most_elements or (8 << 20 if bed.virtual else 64 << 20))
    wrong, begun = [], time.monotonic()
    each = max(5, min(40, count // 14))
    for number in range(count):
        if number % each == 0:
            opened.change(draw.choice(HIDDENS), draw.choice([torch.bfloat16, torch.float16]))
        room = opened.fused[bed.local[0]].max_tokens
        wrong += check_case(bed, opened.fused, draw_case(draw, number, bed.world, room, bed.budget))
        if not bed.all_good(len(wrong) < 20):
            break
    opened.close()
    good = bed.all_good(not wrong)
    for text in wrong[:8]:
        print(text, flush=True)
    took = time.monotonic() - begun
    say(bed, f"shapes: {count} in {took:.0f} s, {len(wrong)} wrong here: {'ok' if good else 'WRONG'}")
    return good


def check_replays(bed: Bed, count: int, way: tuple[Algorithm, Engine], num_tokens: int, hidden: int) -> bool:
    """A graph of three calls, inputs chosen on the GPU by a counter, ranks delayed unequally; all compared there."""
    settings = FusedSettings(hidden, num_tokens, timeout_ms=5000)
    arenas = bed.arenas(settings.layout().num_bytes)
    fused = bed.open(settings, arenas)
    cases = [
        make(100 + i, bed.world, num_tokens, hidden, torch.bfloat16, bed.device) for i in range(VARIANTS)
    ]
    weight = cases[0][2]
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    inputs = {rank: torch.stack([case[0][rank] for case in cases]) for rank in bed.local}
    residuals = torch.stack([case[1] for case in cases])
    outs = {
        rank: torch.zeros(VARIANTS, num_tokens, hidden, dtype=torch.bfloat16, device=bed.device)
        for rank in bed.local
    }
    held = {rank: torch.empty_like(residuals[0]) for rank in bed.local}
    plan = {rank: make_plan(way[0], num_tokens, bed.world, rank) for rank in bed.local}
    sms = min(8, bed.budget)
    for i in range(VARIANTS):
        for rank in bed.local:
            fused[rank].input(num_tokens).copy_(inputs[rank][i])
            held[rank].copy_(residuals[i])
        bed.meet()
        found = bed.each(
            lambda rank: fused[rank].run_as(
                plan[rank], way[1], fused[rank].input(num_tokens), held[rank], weight, EPS, num_sms=sms
            )[0]
        )
        for rank in bed.local:
            outs[rank][i].copy_(found[rank])
    counter = {rank: torch.zeros(1, dtype=torch.int64, device=bed.device) for rank in bed.local}
    bad = {rank: torch.zeros(1, dtype=torch.int64, device=bed.device) for rank in bed.local}
    bed.meet()
    for rank in bed.local:
        graphs[rank] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rank], stream=bed.streams[rank], capture_error_mode=CAPTURE):
            for call in range(3):
                counter[rank].add_(1)
                which = counter[rank] % VARIANTS
                target = fused[rank].input(num_tokens)
                target.copy_(torch.index_select(inputs[rank], 0, which)[0])
                held[rank].copy_(torch.index_select(residuals, 0, which)[0])
                if (rank + call) % 3 == 0:
                    torch.cuda._sleep(2000 * (1 + rank))
                out, _ = fused[rank].run_as(plan[rank], way[1], target, held[rank], weight, EPS, num_sms=sms)
                bad[rank].add_((out != torch.index_select(outs[rank], 0, which)[0]).any())
    bed.meet()
    begun = time.monotonic()
    for _ in range(count):
        for rank in bed.local:
            with torch.cuda.stream(bed.streams[rank]):
                graphs[rank].replay()
    torch.cuda.synchronize(bed.device)
    took = time.monotonic() - begun
    failed = sum(int(one.item()) for one in bad.values())
    for one in fused.values():
        one.check()
    good = bed.all_good(failed == 0 and all(int(one.item()) == 3 * count for one in counter.values()))
    say(
        bed,
        f"replays {way[0]}/{way[1]} T={num_tokens}: {count} x 3 calls in {took:.1f} s, {failed} differ: "
        f"{'ok' if good else 'WRONG'}",
    )
    graphs.clear()
    for one in fused.values():
        one.close()
    return good


def check_peers(bed: Bed, way: tuple[Algorithm, Engine]) -> bool:
    """A late peer is awaited; a dead one is named within the limit, and later calls return at once."""
    num_tokens, hidden, timeout_ms = 64, 4096, 3000
    settings = FusedSettings(hidden, num_tokens, timeout_ms=timeout_ms)
    arenas = bed.arenas(settings.layout().num_bytes)
    fused = bed.open(settings, arenas)
    partials, residual, weight = make(5, bed.world, num_tokens, hidden, torch.bfloat16, bed.device)
    want, _ = reference(partials, residual, weight, EPS)
    held = {rank: residual.clone() for rank in bed.local}
    plans = {rank: make_plan(way[0], num_tokens, bed.world, rank) for rank in bed.local}
    for rank in bed.local:
        fused[rank].input(num_tokens).copy_(partials[rank])
    bed.meet()
    last = bed.world - 1

    def call(rank: int) -> torch.Tensor:
        one = fused[rank]
        return one.run_as(plans[rank], way[1], one.input(num_tokens), held[rank], weight, EPS)[0]

    def late(rank: int) -> torch.Tensor:
        if rank == last:
            torch.cuda._sleep(1_500_000_000)  # about a second
        return call(rank)

    begun = time.monotonic()
    found = bed.each(late)
    waited = time.monotonic() - begun
    good = all(errors(found[rank], want)[1] < 0.1 for rank in bed.local)
    for one in fused.values():
        one.check()
    say(bed, f"{way[0]}/{way[1]}, late peer: {waited:.2f} s, {'ok' if good else 'WRONG'}")
    bed.meet()
    said = []
    begun = time.monotonic()
    for rank in bed.local:
        if rank == last:
            continue
        with torch.cuda.stream(bed.streams[rank]):
            for _ in range(3):
                call(rank)
    torch.cuda.synchronize(bed.device)
    waited = time.monotonic() - begun
    for rank in bed.local:
        if rank == last:
            continue
        try:
            fused[rank].check()
            said.append(f"rank {rank} noticed nothing")
            good = False
        except PeerTimeout as error:
            said.append(error.message)
            good &= f"for rank {last}" in error.message
    good &= waited < 3 * timeout_ms / 1000
    good = bed.all_good(good)
    say(
        bed,
        f"{way[0]}/{way[1]}, dead peer: {waited:.2f} s for 3 calls, limit {timeout_ms} ms a group: "
        f"{'ok' if good else 'WRONG'} {said[:1]}",
    )
    for one in fused.values():
        one.close()
    return good
