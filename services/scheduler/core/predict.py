"""What a placement would take, in ms: MemServe's exec(x, y) and transfer() over the load view. No I/O.

    eq 1 (MemServe 5.3.1): ms(p) = sum of exec(x', y'_p) over what p has not prefilled yet + exec(x, y_p)
    eq 2: fetch what p' holds beyond p's own prefix when transfer(y_p, y'_p) <= exec(x, y_p) - exec(x, y'_p)

Beyond the paper: eq 2 is decided for every candidate before eq 1 chooses among them, so that a cheap fetch attracts
a request to an idle instance; decode's step, what a request costs those that run already, and the hand-off count too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from services.scheduler.core.instances import Instance, PoolKey, SpaceKey
from services.scheduler.core.policies import Candidate
from services.scheduler.core.rates import Rates
from services.scheduler.core.request import PlacementRequest
from shared.costmodel.model import CostModel
from shared.costmodel.transfer import should_fetch
from shared.ids import InstanceId
from shared.wire.requests import KvPlan

Path = Literal["alias", "peer", "dram", "remote"]


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Of the `cost` policy. Defaults are the scheduler's (config.py says what each is good for)."""

    disaggregation: Literal["auto", "always", "never"] = "auto"
    fetch: Literal["auto", "always", "never"] = "auto"
    hysteresis_ms: float = 5.0
    hysteresis_share: float = 0.1
    role_margin_ms: float = 0.0
    role_margin_share: float = 0.0
    panic_queue_ms: float = 10_000.0
    slowdown_weight: float = 1.0
    evict_weight: float = 4.0
    decode_tokens: int = 64
    handoff_ms: float = 2.0
    max_alternatives: int = 8


class FirstStage(Struct, frozen=True, gc=False):
    """A prefill, or the prompt's part of a colocated stage, on one instance."""

    candidate: Candidate
    local_tokens: int  # in the instance's own space: no byte moves
    cached_tokens: int  # with what is fetched
    queue_ms: float
    fetch_ms: float
    compute_ms: float
    latency_ms: float  # all three: until the first token is sampled there
    slowdown_ms: float  # of those that decode there, all together, weighted
    evict_ms: float  # of computing again what its new pages push out (pressure.py), weighted
    kv: KvPlan | None


class DecodeStage(Struct, frozen=True, gc=False):
    """The output on one instance."""

    candidate: Candidate
    local_tokens: int  # of the prompt
    wait_ms: float
    step_ms: float  # with the new request in the batch
    decode_ms: float  # wait, and the expected number of steps
    slowdown_ms: float  # of those that decode there already, all together, weighted


def path_between(reader: Instance, holder: Instance) -> Path | None:
    """How the reader gets pages that the holder has, which are cut anew where their ranks differ. None: it does not."""
    here, there = reader.pool_key, holder.pool_key
    if here is None or there is None or reader.family_key != holder.family_key:
        return None
    if here == there:
        return "alias" if reader.space_key is not None and reader.space_key == holder.space_key else "peer"
    return "remote" if reader.crosses_hosts and holder.crosses_hosts else None


def moved_bytes(known: Instance, tokens: int) -> int:
    """KV of so many tokens, of all ranks; whole blocks."""
    layout = known.description
    if layout.block_tokens <= 0 or tokens <= 0:
        return 0
    return -(-tokens // layout.block_tokens) * layout.block_bytes * layout.num_ranks


class Holders:
    """Who holds a prefix of one prompt, looked up by where the reader is.

    Args: holders: instances with the leading tokens in their own memory, and those with the host memory behind it.
    Cost: O(holders) to make, O(hosts that hold some of it) a look-up.
    """

    def __init__(self, holders: Iterable[tuple[Instance, int, int]]) -> None:
        self.tokens: dict[InstanceId, int] = {}
        self.spaces: dict[SpaceKey, int] = {}
        self.pools: dict[str, dict[PoolKey, list[tuple[int, Instance, Path]]]] = {}  # by family
        for known, tokens, with_dram in holders:
            self.tokens[known.instance] = tokens
            if known.pool_key is None:
                continue
            space = known.space_key
            if space is not None:
                self.spaces[space] = max(tokens, self.spaces.get(space, 0))
            found = self.pools.setdefault(known.family_key, {}).setdefault(known.pool_key, [])
            found.append((tokens, known, "peer"))
            if with_dram > tokens:
                found.append((with_dram, known, "dram"))

    def local(self, reader: Instance) -> int:
        """Tokens in the reader's own space, by whichever engine of it."""
        own = self.tokens.get(reader.instance, 0)
        if reader.space_key is None or not self.spaces:
            return own
        return max(own, self.spaces.get(reader.space_key, 0))

    def sources(self, reader: Instance) -> list[tuple[int, Instance, Path]]:
        """By path, the holder of most tokens that come by it. Empty where the reader has no mempool."""
        mine = reader.pool_key
        if mine is None or not self.pools:
            return []
        best: dict[Path, tuple[int, Instance, Path]] = {}
        for pool, found in self.pools.get(reader.family_key, {}).items():
            is_far = pool != mine
            if is_far and not reader.crosses_hosts:
                continue
            for tokens, known, medium in found:
                if is_far and not known.crosses_hosts:
                    continue
                path: Path = "remote" if is_far else medium
                if path == "peer" and path_between(reader, known) != "peer":
                    continue  # in the reader's own space
                if path not in best or tokens > best[path][0]:
                    best[path] = (tokens, known, path)
        return list(best.values())


class Predictor:
    """Predictions for one request. Calls of a model are remembered: instances with equal coefficients share one."""

    def __init__(
        self,
        request: PlacementRequest,
        holders: Holders,
        settings: CostSettings,
        evict_ms_per_token: float = 0.0,
    ) -> None:
        self.request = request
        self.holders = holders
        self.settings = settings
        self.evict_ms_per_token = settings.evict_weight * evict_ms_per_token
        self._exec: dict[tuple[CostModel, int], float] = {}
        self._firsts: dict[InstanceId, FirstStage] = {}
        self._decodes: dict[InstanceId, DecodeStage] = {}
        most = request.max_tokens or settings.decode_tokens
        self.num_steps = max(0, min(most, settings.decode_tokens) - 1)  # the first token is prefill's

    def exec_ms(self, known: Instance, cached_tokens: int) -> float:
        """MemServe's exec(x, y) on this instance, corrected by what it measured. At least one token is computed."""
        assert known.model is not None
        return self._exec_ms(known.model, cached_tokens) * known.prefill_correction

    def _exec_ms(self, model: CostModel, cached_tokens: int) -> float:
        key = model, cached_tokens
        found = self._exec.get(key)
        if found is None:
            found = self._exec[key] = model.prefill_ms(self.request.num_prompt_tokens, cached_tokens)
        return found

    def transfer_ms(self, reader: Instance, path: Path, tokens: int) -> float:
        """KV of so many tokens into the reader's space."""
        if path == "alias" or tokens <= 0:
            return 0.0
        return reader.links.transfer_ms(path, moved_bytes(reader, tokens))

    def first(self, candidate: Candidate) -> FirstStage:
        """The prompt on this instance, with eq 2's verdict."""
        return self.firsts((candidate,))[0]

    def firsts(self, candidates: Iterable[Candidate]) -> list[FirstStage]:
        """first() of each. Cost: no call for an instance that has nothing to fetch, and no others that decode."""
        out, known_firsts, execs = [], self._firsts, self._exec
        holders, weight = self.holders, self.settings.slowdown_weight
        tokens_of = None if holders.spaces else holders.tokens
        may_fetch = bool(holders.pools)
        prompt_tokens, evict_ms_per_token = self.request.num_prompt_tokens, self.evict_ms_per_token
        own = KvPlan(reach="own") if self.settings.fetch == "never" else None
        for candidate in candidates:
            found = known_firsts.get(candidate.name)
            if found is None:
                known, rates, name = candidate.known, candidate.rates, candidate.name
                assert rates is not None, "the caller checks"
                local = tokens_of.get(name, 0) if tokens_of is not None else holders.local(known)
                fetch_ms, cached, kv = 0.0, local, own
                if may_fetch:
                    alone_ms, fetch_ms, cached, kv = self._fetch_or_recompute(known, local)
                else:
                    exec_ms = execs.get((rates.model, local))
                    if exec_ms is None:
                        exec_ms = self._exec_ms(rates.model, local)
                    alone_ms = exec_ms * rates.prefill_correction
                compute_ms, slowdown_ms, queue_ms = alone_ms, 0.0, candidate.view.queue_ms
                if rates.num_decodes:  # they share its steps
                    compute_ms += self._shared_steps_ms(known, rates, cached, alone_ms)
                    slowdown_ms = weight * rates.num_decodes * alone_ms
                found = known_firsts[name] = FirstStage(
                    candidate, local, cached, queue_ms, fetch_ms, compute_ms,
                    queue_ms + fetch_ms + compute_ms, slowdown_ms,
                    evict_ms_per_token * (prompt_tokens - local), kv,
                )  # fmt: skip
            out.append(found)
        return out

    def _shared_steps_ms(self, known: Instance, rates: Rates, cached: int, alone_ms: float) -> float:
        """How much longer the prompt's steps take with requests that decode in them: a row and a context each."""
        new = max(1, self.request.num_prompt_tokens - cached)
        num_steps = -(-new // known.load.max_batched_tokens)
        return num_steps * (rates.reading_ms + rates.num_decodes * alone_ms / new)

    def _fetch_or_recompute(self, known: Instance, local: int) -> tuple[float, float, int, KvPlan | None]:
        """Eq 2: (ms of computing, ms of fetching, tokens cached then, what to tell the instance)."""
        compute_ms = self.exec_ms(known, local)
        best = (compute_ms, 0.0, local)
        chosen: KvPlan | None = None
        refused: KvPlan | None = None
        for tokens, holder, path in self.holders.sources(known):
            if tokens <= local or self.settings.fetch == "never":
                continue
            address = holder.pool.address if holder.pool is not None and path == "remote" else ""
            fetch_ms = self.transfer_ms(known, path, tokens - local)
            left_ms = self.exec_ms(known, tokens)
            plan = KvPlan(
                reach="remote" if address else "host",
                source=holder.instance, tokens=tokens, path=path, source_mempool=address,
            )  # fmt: skip
            if self.settings.fetch == "always" or should_fetch(fetch_ms, compute_ms, left_ms):
                if chosen is None or fetch_ms + left_ms < best[0] + best[1]:
                    best, chosen = (left_ms, fetch_ms, tokens), plan
            elif refused is None or path != "remote":
                reach: Literal["own", "host"] = "host" if path == "remote" else "own"
                refused = KvPlan(
                    reach=reach, source=holder.instance, tokens=tokens, path=path, recompute=True
                )
        if self.settings.fetch == "never":
            return (*best, KvPlan(reach="own"))
        return (*best, chosen or refused)

    def decode(self, candidate: Candidate) -> DecodeStage:
        """The output on this instance, on top of what decodes there."""
        return self.decodes((candidate,))[0]

    def decodes(self, candidates: Iterable[Candidate]) -> list[DecodeStage]:
        """decode() of each."""
        out, known_decodes, holders = [], self._decodes, self.holders
        steps, x, weight = self.num_steps, self.request.num_prompt_tokens, self.settings.slowdown_weight
        tokens_of = None if holders.spaces else holders.tokens
        for candidate in candidates:
            name = candidate.name
            found = known_decodes.get(name)
            if found is None:
                rates = candidate.rates
                assert rates is not None, "the caller checks"
                step_ms = rates.step_ms + rates.token_ms * x
                own_ms, slowdown_ms = steps * step_ms, 0.0
                if rates.num_decodes and step_ms > rates.before_ms:
                    slowdown_ms = weight * rates.num_decodes * (step_ms - rates.before_ms) * steps
                wait_ms = own_ms * rates.wait_share
                local = tokens_of.get(name, 0) if tokens_of is not None else holders.local(candidate.known)
                found = known_decodes[name] = DecodeStage(
                    candidate, local, wait_ms, step_ms, wait_ms + own_ms, slowdown_ms
                )
            out.append(found)
        return out

    def handoff_ms(self, first: FirstStage, decode: DecodeStage) -> float:
        """From prefill's first token until decode can run: the pages that it lacks, or computing them again."""
        if not self.num_steps:
            return 0.0  # the first token is the whole answer
        prefill = first.candidate.known
        known, local = decode.candidate.known, decode.local_tokens
        path = path_between(known, prefill)
        if path is None:
            return self.settings.handoff_ms + self.exec_ms(known, local)
        lacking = self.request.num_prompt_tokens - local
        whole_ms = self.transfer_ms(known, path, lacking)
        if not prefill.sends_ahead or path == "remote" or whole_ms == 0.0:  # ahead: within a mempool only
            return self.settings.handoff_ms + whole_ms
        new = max(1, self.request.num_prompt_tokens - first.cached_tokens)
        num_steps = -(-new // prefill.load.max_batched_tokens)
        last = new - (num_steps - 1) * prefill.load.max_batched_tokens
        # the link is free for it from the prompt's begin, where prefill had some of it, or from the first step's end
        idle_ms = 0.0 if lacking > new else first.compute_ms / num_steps
        late_ms = whole_ms - (first.compute_ms - idle_ms)
        return self.settings.handoff_ms + max(self.transfer_ms(known, path, min(last, lacking)), late_ms)
