"""The fused operation of this rank, over gloo on a CPU and over symmetric memory on GPUs; shared/kernels has both."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group

from shared.engine.fused_pages import page_arena
from shared.engine.weave_kept import kept_or_measured, key_of, links_between, machine_parts, shared_bytes
from shared.errors import ClusterError
from shared.kernels.allreduce_rmsnorm.arenas import Arena, mapped_arena, torch_memory
from shared.kernels.allreduce_rmsnorm.calibrate import calibrate, calibration_rows
from shared.kernels.allreduce_rmsnorm.errors import FusedUnavailable
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.gloo import GlooFused
from shared.kernels.allreduce_rmsnorm.interface import FusedAllReduceNorm
from shared.kernels.allreduce_rmsnorm.plan import MAX_TOKENS, Times
from shared.kernels.allreduce_rmsnorm.times_file import pack_times, unpack_times

logger = logging.getLogger(__name__)

CPU_TIMEOUT_MS = 60_000  # of one exchange: ranks share cores with others
PAGES_TIMEOUT_S = 20.0  # ranks come to each other as one
NUM_LANES = 2  # one for each part of a step

T = TypeVar("T")
Opened = tuple[FusedAllReduceNorm, Callable[[], None]]


def open_fused(config: Any, device: torch.device) -> Opened:
    """And what closes it. All ranks call it at the same time, within together(). Raises: ClusterError when this rank
    cannot have it.

    Cost: on a GPU four buffers of a step's tokens (two lanes, what goes in and what comes out) and up to 16 MiB of
    slots, a compilation of about a second, and, unless `worker.state_dir` has it, two to three seconds to measure which
    way is the fastest at which size.
    """
    max_tokens = min(config.scheduler_config.max_num_batched_tokens, MAX_TOKENS)
    hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
    if device.type == "cpu":
        return _on_cpu(hidden, max_tokens, dtype)
    return _on_gpu(hidden, max_tokens, dtype, device, config.additional_config["quire_weave"])


def _on_cpu(hidden: int, max_tokens: int, dtype: torch.dtype) -> Opened:
    fused = GlooFused(
        get_tp_group().cpu_group, hidden, max_tokens, dtype, num_lanes=NUM_LANES, timeout_ms=CPU_TIMEOUT_MS
    )
    return fused, fused.close


def _on_gpu(
    hidden: int, max_tokens: int, dtype: torch.dtype, device: torch.device, weave: Mapping[str, Any]
) -> Opened:
    group = get_tp_group()
    links = links_between(device, group.cpu_group)
    settings = FusedSettings(hidden, max_tokens, dtype, num_lanes=NUM_LANES, links=links)
    num_bytes = settings.layout().num_bytes
    with contextlib.ExitStack() as kept:  # closed here unless all is well
        arena = _arena(num_bytes, device, group, use_multicast=weave["multicast"])
        kept.callback(arena.close)
        if weave["multicast"]:
            settings = replace(settings, use_multicast=everybody_has(arena.multicast, group.cpu_group))
        fused = together(
            lambda: CudaFused(settings, arena, group.rank_in_group, device), lambda made: made.close()
        )
        kept.callback(fused.close)
        fused.use(_times(fused, lambda: _measured(fused, group.device_group), weave["state_dir"], links))
        if group.rank_in_group == 0:
            logger.info(in_words(fused))
            if weave["multicast"] and not settings.use_multicast:
                logger.warning(
                    "worker.weave_multicast: no multicast address was given here; sums go as without it"
                )
        return fused, kept.pop_all().close


def _arena(num_bytes: int, device: torch.device, group: Any, *, use_multicast: bool) -> Arena:
    """Of torch's symmetric memory or, where a rank cannot have that, of our own pages, which have no multicast.

    All ranks call it at the same time and have the same. Raises: ClusterError, on every rank.
    """

    rank, is_first = group.rank_in_group, group.rank_in_group == 0
    try:
        return _torch_arena(num_bytes, device, group.device_group, use_multicast=use_multicast)
    except ClusterError as error:
        if is_first:
            logger.warning(
                "worker.weave: ranks hand each other pages of their own: torch's cannot be had: %s",
                error.message,
            )
    with contextlib.ExitStack() as left:  # nobody else may write where they meet
        mine = _folder(left).encode() if is_first else b""
        folder = shared_bytes(mine, group.ranks[0], group.cpu_group).decode()

        def pages() -> Arena:
            try:
                return page_arena(
                    num_bytes, device, rank, len(group.ranks), Path(folder), timeout_s=PAGES_TIMEOUT_S
                )
            except OSError as error:  # no such folder, for one
                raise FusedUnavailable(f"no pages to hand each other: {error}") from error

        return together(pages, _close)


def _torch_arena(num_bytes: int, device: torch.device, group: Any, *, use_multicast: bool) -> Arena:
    """Mapped once all ranks have their memory: who has none raises at once, and would be waited for there.

    Behind it all ranks are where the first call may come. Raises: ClusterError, on every rank.
    """
    own = together(lambda: torch_memory(num_bytes, device), lambda _: None)
    return together(lambda: mapped_arena(own, group, use_multicast=use_multicast), _close)


def _close(made: Arena) -> None:
    made.close()


def _folder(left: contextlib.ExitStack) -> str:
    """Ours alone, and gone with `left`; where none can be made, one that is not there: others wait for its name."""
    try:
        return left.enter_context(tempfile.TemporaryDirectory(prefix="quire-weave-"))
    except OSError:
        return "/dev/null/none"


def _measured(fused: CudaFused, group: dist.ProcessGroup | None) -> Times:
    """Raises: ClusterError."""
    rows = together(lambda: calibration_rows(fused), lambda _: None)
    try:
        return calibrate(fused, group, rows)
    except torch.OutOfMemoryError as error:
        raise FusedUnavailable(f"no memory to measure sums: {error}") from error


class RanksCannot(FusedUnavailable):
    """Every rank of the engine raises it, with the same words: the first one that cannot, and why."""


def first_reason(reason: str) -> str:
    """That of the first rank that has one, behind that rank's number, on every rank of the engine; "": none has.

    All call it at the same time.
    """
    group = get_tp_group()
    first = torch.tensor([group.rank_in_group if reason else len(group.ranks)])
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group.cpu_group)
    rank = int(first)
    if rank == len(group.ranks):
        return ""
    said = f"rank {rank}: {reason}".encode(errors="replace")
    return shared_bytes(said, group.ranks[rank], group.cpu_group).decode()


def together(make: Callable[[], T], close: Callable[[T], None]) -> T:
    """What this rank makes, once all have made theirs: a rank that failed alone would be awaited in vain.

    All ranks call it at the same time; within `make`, too. Raises: RanksCannot when one cannot; nothing is kept then.
    """
    reason = ""
    made: list[T] = []
    try:
        made.append(make())
    except RanksCannot:
        raise  # it is every rank's already
    except ClusterError as error:
        reason = error.message or error.code
    except torch.OutOfMemoryError as error:
        reason = f"no memory for sums of ranks: {error}"
    if reason := first_reason(reason):
        for one in made:
            close(one)
        raise RanksCannot(reason)
    return made[0]


def everybody_has(multicast: int, group: dist.ProcessGroup) -> bool:
    """Whether every rank of the group has a multicast address: all ranks take one way. All call it at the same time."""
    found = torch.tensor([int(multicast != 0)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return bool(found.item())


def in_words(fused: CudaFused) -> str:
    """What this machine can and what is used of it, in one line of the log."""
    if fused.settings.use_multicast:
        multicast = "large ones through NVLink's switch, which we have never run"
    elif fused.driver.has_multicast:
        multicast = "these GPUs have NVLink multicast, which is left alone"
    else:
        multicast = "these GPUs have no NVLink multicast, and none is needed"
    budget = f", under other work from {fused.few_sms} multiprocessors" if fused.few_sms else ""
    large = fused.plan(fused.max_tokens)
    way = fused.way(large.algorithm, large.num_tokens)
    return (
        f"worker.weave: sums of {fused.world} ranks go through memory that the GPUs map from each other "
        f"({multicast}): {large.num_tokens} tokens {large.algorithm} by {way.engine}{budget}"
    )


def _times(fused: CudaFused, measure: Callable[[], Times], state_dir: str, links: str) -> Times:
    """As every rank of the group has them."""
    group = get_tp_group()
    key = key_of(
        torch.cuda.get_device_name(fused.device), fused.num_sms, fused.world, fused.hidden, fused.max_tokens,
        str(fused.dtype), links, machine_parts(), *["multicast"] * fused.settings.use_multicast,
    )  # fmt: skip
    return kept_or_measured(
        Path(state_dir, f"weave-sums-{key}.json") if state_dir else None,
        lambda data: unpack_times(data, key),
        lambda times: pack_times(key, times),
        measure,
        lambda data: shared_bytes(data, group.ranks[0], group.cpu_group),
        is_first=group.rank_in_group == 0,
    )
