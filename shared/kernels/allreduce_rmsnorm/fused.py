"""The fused call on GPUs: checks, parameters, one launch. What is computed is in fused.cu."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from shared.errors import InvalidRequest
from shared.kernels.allreduce_rmsnorm.arenas import Arena, addresses, rows_view
from shared.kernels.allreduce_rmsnorm.driver import FusedDriver, KernelDriver, Params
from shared.kernels.allreduce_rmsnorm.errors import FusedUnavailable, error_of
from shared.kernels.allreduce_rmsnorm.plan import (
    ELEMENT_BYTES,
    ENGINES,
    Algorithm,
    Engine,
    Plan,
    Times,
    Way,
    check_call,
    check_shape,
    make_plan,
    pick,
    way_of,
)
from shared.kernels.allreduce_rmsnorm.shapes import (
    OWN_SHARED_BYTES,
    SHARED_BYTES,
    ArenaLayout,
    KernelShape,
    Launch,
    arena_layout,
    push_tokens,
)

DTYPES = (torch.bfloat16, torch.float16)
TIMEOUT_MS = 20_000  # a peer may compile a kernel or capture a graph meanwhile
# So much longer ranks wait that hand on no output. A peer may come to the end of a call after one rank has given up and
# before another has, who then knows nothing of it: let the first rank be who gives up first. Kernels' waits for the end
# of a call begin within its run time of each other.
LATER_MS = 1_000
FIRST_BULK_CAPABILITY = (9, 0)
CHOICES = 1024  # of ways that are remembered
MIN_BULK_HIDDEN = 2048  # shorter rows keep too few threads of the bulk engine busy
_KERNELS = {
    Engine.PLAIN: "fused_plain",
    Engine.PUSH: "fused_push",
    Engine.BULK: "fused_bulk",
    Engine.MULTIMEM: "fused_multimem",
}


@dataclass(frozen=True, slots=True)
class FusedSettings:
    """What all ranks of a group agree on.

    Args:
        hidden: 1024..16384, a multiple of 8.
        max_tokens: rows of a lane's buffers: max_tokens * hidden * 2 bytes twice, three times with whole_residual, and
            up to 8 MiB of slots.
        timeout_ms: how long a kernel of rank 0 waits for a peer's before it gives up; others wait LATER_MS longer.
        times: rank 0's, of calibrate.py; None picks by the table in plan.py.
        max_ctas: of any call, 0 for one an SM; less where something else must run beside it, e.g. another rank.
        use_multicast: the caller knows that this machine's switch may be used; not run by us.
        links: see FusedAllReduceNorm.
    """

    hidden: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    num_lanes: int = 1
    whole_residual: bool = False
    timeout_ms: int = TIMEOUT_MS
    times: Times | None = None
    max_ctas: int = 0
    use_multicast: bool = False
    links: str = ""

    def layout(self) -> ArenaLayout:
        """Of every rank's arena. Raises: InvalidRequest."""
        return arena_layout(self.hidden, self.max_tokens, self.num_lanes, whole_residual=self.whole_residual)


class CudaFused:
    """See FusedAllReduceNorm. One rank, one GPU; `arena` is zeroed and its owner's to close after this.

    `driver` is a GPU's own unless a test brings one that acts the kernels out on the CPU (acted_driver.py).

    Raises: InvalidRequest; FusedUnavailable without a GPU or compiler; FusedRefused when the source does not compile.
    Cost: a compilation of about a second the first time a process meets a shape.
    """

    def __init__(
        self,
        settings: FusedSettings,
        arena: Arena,
        rank: int,
        device: torch.device,
        *,
        driver: FusedDriver | None = None,
    ) -> None:
        world = len(arena.bases)
        check_shape(world, rank, settings.hidden, settings.max_tokens)
        if settings.dtype not in DTYPES:
            raise InvalidRequest(f"{settings.dtype}: one of {DTYPES}")
        if settings.use_multicast and not arena.multicast:
            raise FusedUnavailable("use_multicast: the arena has no multicast address")
        self.rank, self.world, self.device = rank, world, arena.own.device
        self.hidden, self.max_tokens = settings.hidden, settings.max_tokens
        self.dtype, self.num_lanes = settings.dtype, settings.num_lanes
        self.push_tokens = push_tokens(world, settings.hidden, settings.max_tokens)  # the most that PUSH sums
        self.settings, self.links = settings, settings.links
        self.patience_ms = settings.timeout_ms + (LATER_MS if rank else 0)
        self._arena, self._layout = arena, settings.layout()
        if arena.own.numel() < self._layout.num_bytes:
            raise InvalidRequest(f"an arena of {arena.own.numel()} B; {self._layout.num_bytes} are needed")
        self.driver: FusedDriver = driver or _driver_of(device)
        self.num_sms = settings.max_ctas or self.driver.num_sms
        self.shape = KernelShape(
            world, settings.hidden, settings.dtype is torch.bfloat16,
            most_shared_bytes=min(SHARED_BYTES, self.driver.shared_bytes - OWN_SHARED_BYTES),
        )  # fmt: skip
        self._report = self.driver.allocate_word()
        self._failure = 0
        self._times = settings.times
        self._chosen = lru_cache(maxsize=CHOICES)(self._choose)  # a layer asks twice a step
        self._params = [self._lane_params(lane) for lane in range(settings.num_lanes)]
        self._views = {
            (kind, lane): rows_view(arena, offset, self.max_tokens, self.hidden, self.dtype)
            for lane, where in enumerate(self._layout.lanes)
            for kind, offset in (("input", where.input), ("out", where.out), ("whole", where.whole))
            if offset >= 0
        }
        engines = [Engine.PLAIN, Engine.PUSH, self.engine(Algorithm.TWO_SHOT)]
        engines += [Engine.MULTIMEM] * settings.use_multicast
        for name in ("gather_rows", "add_norm", *(_KERNELS[one] for one in engines)):
            self.driver.function(self.shape, name)

    def plan(self, num_tokens: int, num_sms: int = 0) -> Plan:
        """See FusedAllReduceNorm."""
        return self._chosen(num_tokens, num_sms)[0]

    def use(self, times: Times) -> None:
        """Pick by these from now on (calibrate.py); on all ranks, between two steps."""
        self._times = times
        self._chosen = lru_cache(maxsize=CHOICES)(self._choose)

    def way(self, algorithm: Algorithm, num_tokens: int | None = None, num_sms: int = 0) -> Way:
        """Who moves the bytes, from how many SMs: a choice of speed alone. Each gives the same bits, but a zero's sign.

        One-shot: rows are pushed where slots hold them, or read, whichever was measured to be shorter. Two-shot: bulk
        copies fill the links from few SMs; where all SMs may help, registers are often the shorter way (5 to 13% at
        TP 2 up to 8 MB, 3 to 4% at TP 4 from 128 MB up), by what was measured. Without `num_tokens`: for few SMs, and
        for any number.
        """
        engines = self._engines(algorithm, num_tokens)
        if num_tokens is None:
            return Way(engines[0], num_sms)
        return way_of(algorithm, num_tokens * self.hidden * ELEMENT_BYTES, engines, self._times, num_sms)

    def engine(self, algorithm: Algorithm) -> Engine:
        """Of few SMs; see way()."""
        return self.way(algorithm).engine

    @property
    def few_sms(self) -> int:
        """A budget for run() under other work, as measured; 0: nothing was."""
        return self._times.few_sms if self._times is not None else 0

    def input(self, num_tokens: int, lane: int = 0) -> torch.Tensor:
        """See FusedAllReduceNorm."""
        check_call(num_tokens, self.max_tokens, lane, self.num_lanes, 0)
        return self._views["input", lane][:num_tokens]

    def run(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        lane: int = 0,
        num_sms: int = 0,
        gemma: bool = False,
        whole_residual: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See FusedAllReduceNorm."""
        plan, way = self._chosen(partial.shape[0], num_sms)
        return self.run_as(
            plan, way.engine, partial, residual, weight, eps,
            lane=lane, num_sms=way.num_sms, gemma=gemma, whole_residual=whole_residual,
        )  # fmt: skip

    def run_as(
        self,
        plan: Plan,
        engine: Engine,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        lane: int = 0,
        num_sms: int = 0,
        gemma: bool = False,
        whole_residual: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() in a given way, for measurements. Raises: as run(); InvalidRequest: more is pushed than slots hold."""
        check_call(plan.num_tokens, self.max_tokens, lane, self.num_lanes, num_sms)
        scattered = plan.algorithm is not Algorithm.ONE_SHOT
        if engine is Engine.PUSH and (scattered or plan.num_tokens > self.push_tokens):
            raise InvalidRequest(f"{plan}: one-shot sums of up to {self.push_tokens} tokens are pushed")
        self._check("partial", partial, (plan.num_tokens, self.hidden))
        self._check("residual", residual, (plan.num_tokens, self.hidden))
        self._check("weight", weight, (self.hidden,))
        self.check()
        if partial.data_ptr() != self._params[lane].input[self.rank]:
            self.input(plan.num_tokens, lane).copy_(partial)
        params = self._call_params(lane, plan, residual, whole=whole_residual and scattered)
        params.weight, params.eps, params.gemma = weight.data_ptr(), eps, int(gemma)
        # budgets and measured ways know of no max_ctas
        most_ctas = min(num_sms or self.num_sms, self.num_sms)
        launch = self.shape.launch(engine, plan.algorithm, plan.num_tokens, most_ctas)
        self._launch(_KERNELS[engine], launch, params)
        out = self._views["out", lane][: plan.num_tokens]
        if whole_residual and scattered:
            residual = self._views["whole", lane][: plan.num_tokens]
        return out, residual

    def add_norm(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """vLLM's fused_add_rms_norm, both in place: after an all-reduce that somebody else made. Raises: as run()."""
        shape = (rows.shape[0], self.hidden)
        self._check("rows", rows, shape)
        self._check("residual", residual, shape)
        if not shape[0]:  # a grid of no CTAs is refused
            return
        params = Params(residual=residual.data_ptr(), weight=weight.data_ptr(), row_stop=shape[0], eps=eps)
        params.out[0] = rows.data_ptr()
        each = self.shape.rows_per_cta
        self._launch("add_norm", Launch(-(-shape[0] // each), self.shape.row_threads * each, 0), params)

    def gather_residual(self, residual: torch.Tensor, *, lane: int = 0, num_sms: int = 0) -> torch.Tensor:
        """See FusedAllReduceNorm."""
        plan = self.plan(residual.shape[0], num_sms)
        check_call(plan.num_tokens, self.max_tokens, lane, self.num_lanes, 0)
        self._check("residual", residual, (plan.num_tokens, self.hidden))
        self.check()
        if plan.algorithm is Algorithm.ONE_SHOT:
            return residual
        params = self._call_params(lane, plan, residual, whole=True)
        ctas = self.shape.launch(Engine.PLAIN, plan.algorithm, plan.num_tokens, self.num_sms).ctas
        self._launch("gather_rows", Launch(ctas, 512, 0), params)
        return self._views["whole", lane][: plan.num_tokens]

    def check(self) -> None:
        """See FusedAllReduceNorm."""
        self._failure = self._failure or self._report.read()
        if (error := error_of(self._failure, self.rank, self.patience_ms)) is not None:
            raise error

    def close(self) -> None:
        """See FusedAllReduceNorm. The arena is closed by who made it."""
        self.driver.synchronize()
        self._report.close()
        self.driver.close()

    def _engines(self, algorithm: Algorithm, num_tokens: int | None) -> Sequence[Engine]:
        """That can make such a sum; see ENGINES."""
        if algorithm is Algorithm.ONE_SHOT:
            can = num_tokens is not None and num_tokens <= self.push_tokens
        else:
            new = self.driver.capability >= FIRST_BULK_CAPABILITY
            can = new and self.hidden >= MIN_BULK_HIDDEN and self.shape.has_bulk
        return ENGINES[algorithm] if can or algorithm is Algorithm.MULTIMEM else (Engine.PLAIN,)

    def _choose(self, num_tokens: int, num_sms: int) -> tuple[Plan, Way]:
        """Raises: InvalidRequest."""
        check_call(num_tokens, self.max_tokens, 0, 1, num_sms)
        engines = {one: self._engines(one, num_tokens) for one in Algorithm}
        num_bytes, multicast = num_tokens * self.hidden * ELEMENT_BYTES, self.settings.use_multicast
        picked = pick(num_bytes, self.world, self._times, engines, num_sms, multicast=multicast)
        plan = make_plan(picked, num_tokens, self.world, self.rank)
        return plan, self.way(picked, num_tokens, num_sms)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        right = tensor.dtype is self.dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not right or tensor.device != self.device or tensor.data_ptr() % 16:
            raise InvalidRequest(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, contiguous and 16-byte aligned "
                f"{self.dtype} {shape} on {self.device} is needed"
            )

    def _lane_params(self, lane: int) -> Params:
        """What never changes."""
        where, bases, params = self._layout.lanes[lane], self._arena.bases, Params()
        places = {"input": where.input, "out": where.out, "flags": where.flags, "slots": where.slots}
        for field, offset in places.items():
            getattr(params, field)[: self.world] = addresses(bases, offset)
        if self._arena.multicast:
            params.input_all = self._arena.multicast + where.input
            params.out_all = self._arena.multicast + where.out
        params.epochs = bases[self.rank] + where.epochs
        params.turns = bases[self.rank] + where.turns
        params.slot_rows = self.push_tokens
        params.failed = bases[self.rank] + self._layout.failed
        params.report = self._report.address
        params.timeout_ns = self.patience_ms * 1_000_000
        params.rank = self.rank
        return params

    def _call_params(self, lane: int, plan: Plan, residual: torch.Tensor, *, whole: bool) -> Params:
        params = self._params[lane]
        offset = self._layout.lanes[lane].whole
        if whole and offset < 0:
            raise InvalidRequest("opened without whole_residual=True")
        targets = addresses(self._arena.bases, offset) if whole else [0] * self.world
        params.whole[: self.world] = targets
        params.residual = residual.data_ptr()
        params.row_start, params.row_stop = plan.start, plan.stop
        params.num_targets = 1 if plan.algorithm is Algorithm.ONE_SHOT else self.world
        return params

    def _launch(self, name: str, launch: Launch, params: Params) -> None:
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        self.driver.launch(self.driver.function(self.shape, name), launch, stream, params)


def _driver_of(device: torch.device) -> KernelDriver:
    torch.cuda.current_stream(device)  # the context exists from here on
    return KernelDriver(device.index or 0)
