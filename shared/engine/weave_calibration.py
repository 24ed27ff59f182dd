"""From how many tokens on weaving pays, measured at an engine's start on its own layers and kept for the next start.

A few layers compute random rows in the three ways, without attention, whose cost is the same in all of them; every rank
at once. Also found: the tiles with which the layer's products are computed, from their kernels' names. Kept in
`worker.state_dir` as weave-KEY.json, in the format of shared/weave/threshold.py.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, set_forward_context

from shared.engine.vllm_setup import installed_vllm
from shared.engine.weave_cuts import CutStep
from shared.engine.weave_host import MAX_EXTRA_RATIO, HostedWeave
from shared.engine.weave_kept import key_of, machine_parts, read_kept, write_kept
from shared.weave.smart_split import TokenSplit
from shared.weave.threshold import Measured, Mode, Timing, WeaveRule, decide, pack_measured, unpack_measured
from shared.weave.tiles import DEFAULT_TILE, tile_of
from shared.weave.turns import turns
from shared.weave.waves import Tile

logger = logging.getLogger(__name__)

LEAST_TOKENS, MOST_TOKENS = 512, 32_768
TILE_TOKENS = 2048  # of the step whose kernels are looked at
LAYERS = 4
WARM_UP, REPEATS = 2, 5
_MODES: tuple[Mode, ...] = ("off", "fuse", "full")
_RULES = {"off": WeaveRule(), "fuse": WeaveRule(fuse_min_tokens=1), "full": WeaveRule(fuse_min_tokens=1)}


def prepare(host: HostedWeave) -> None:
    """On every rank, while nothing else runs, before graphs are captured: where steps are cut, and from where on.

    With a threshold that was set, or chosen by `auto`, only the tiles are found out: kept ones, or their kernels'.
    Raises: what the layers raise.
    """
    if host.is_measured:
        calibrate(host)
    elif host.has_waves:
        found = _shared(_read(_path(host)) if host.rank == 0 else None)
        kept = [Tile(tokens, columns) for tokens, columns in found.tiles] if found is not None else None
        host.cut_by(kept or _tiles(host))


def calibrate(host: HostedWeave) -> None:
    """On every rank, while nothing else runs, before graphs are captured. Raises: what the layers raise."""
    assert host.sums is not None
    if host.sums.fused.max_tokens < LEAST_TOKENS:  # on every rank: of the same settings
        host.follow(WeaveRule(fuse_min_tokens=1))
        if host.rank == 0:
            logger.info(
                "worker.weave = full: steps of at most %d tokens are never cut: from %d on it is measured",
                host.sums.fused.max_tokens, LEAST_TOKENS,
            )  # fmt: skip
        return
    path = _path(host)
    found = _shared(_read(path) if host.rank == 0 else None)
    if found is None:
        found = _shared(_measure(host))
        if host.rank == 0:
            _write(path, found)
    assert found is not None
    rule = decide(found.timings)
    host.cut_by([Tile(tokens, columns) for tokens, columns in found.tiles])
    host.follow(WeaveRule(fuse_min_tokens=1, full_min_tokens=rule.full_min_tokens))
    if host.rank == 0:
        logger.info(
            "worker.weave = full: steps are cut from %d tokens on (0: never); %s", rule.full_min_tokens, found
        )


def _measure(host: HostedWeave) -> Measured:
    """Times of this rank, which are those of the slowest once shared. Leaves the rule to the caller."""
    assert host.sums is not None
    tiles = _tiles(host)
    host.cut_by(tiles)
    timings = []
    size, most = LEAST_TOKENS, min(MOST_TOKENS, host.sums.fused.max_tokens)
    while size <= most:
        times = _times_us(host, size)
        timings.append(
            Timing(
                num_tokens=size, off_us=times["off"], fuse_us=times["fuse"], full_us=times.get("full", 0.0)
            )
        )
        size *= 2
    return Measured(timings=timings, tiles=[(tile.tokens, tile.columns) for tile in tiles])


def _times_us(host: HostedWeave, size: int) -> dict[Mode, float]:
    """Medians of a few runs, modes taking turns; without `full` where the step cannot be cut."""
    inner = host.model.model
    end_layer = min(inner.start_layer + LAYERS, inner.end_layer)
    host.follow(_RULES["full"])
    split = host.split_of(size)
    modes = [mode for mode in _MODES if mode != "full" or split is not None]
    rows = torch.randn(size, host.config.model_config.get_hidden_size(), device=host.device)
    rows = rows.to(host.config.model_config.dtype)
    positions = torch.arange(size, device=host.device)
    taken: dict[Mode, list[float]] = {mode: [] for mode in modes}
    with set_forward_context(None, host.config, num_tokens=size), torch.inference_mode():
        for number in range(WARM_UP + REPEATS):
            for mode in turns(modes, number):
                host.follow(_RULES[mode])
                hidden, cut = rows.clone(), split if mode == "full" else None
                dist.barrier(get_tp_group().cpu_group)
                taken[mode].append(
                    _took_us(
                        host, lambda hidden=hidden, cut=cut: _once(host, hidden, positions, cut, end_layer)
                    )
                )
    return {mode: median(us[WARM_UP:]) for mode, us in taken.items()}


def _once(
    host: HostedWeave,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    split: TokenSplit | None,
    end_layer: int,
) -> None:
    if split is not None:
        _woven(host, hidden, positions, split, end_layer)
    else:
        _whole(host, hidden, positions, end_layer)


def _whole(host: HostedWeave, hidden: torch.Tensor, positions: torch.Tensor, end_layer: int) -> None:
    inner = host.model.model
    residual = None
    for layer in inner.layers[inner.start_layer : end_layer]:
        hidden, residual = layer(positions, hidden, residual)
    inner.norm(hidden, residual)


def _woven(
    host: HostedWeave, hidden: torch.Tensor, positions: torch.Tensor, split: TokenSplit, end_layer: int
) -> None:
    assert host.forward is not None
    tokens = (slice(0, split.first), slice(split.first, hidden.shape[0]))
    context = get_forward_context()
    host.forward.weave(hidden, positions, CutStep(tokens, (context, context)), end_layer)


def _took_us(host: HostedWeave, work: Callable[[], None]) -> float:
    if host.device.type == "cpu":
        begin_s = time.perf_counter()
        work()
        return (time.perf_counter() - begin_s) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _tiles(host: HostedWeave) -> list[Tile]:
    """Of qkv, o, gate and up, down, as the first rank sees them: steps are cut by them, so all ranks take the same.

    The default where the profiler or a kernel's name does not tell.
    """
    layer = host.model.model.layers[host.model.model.start_layer]
    products = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    found = [DEFAULT_TILE] * len(products)
    if host.rank == 0 and host.device.type != "cpu":
        for index, linear in enumerate(products):
            names = _kernels_of(host, linear)
            found[index] = next((tile for name in names if (tile := tile_of(name))), DEFAULT_TILE)
    table = torch.tensor([[tile.tokens, tile.columns] for tile in found])
    dist.broadcast(table, get_tp_group().ranks[0], group=get_tp_group().cpu_group)
    return [Tile(tokens, columns) for tokens, columns in table.tolist()]


def _kernels_of(host: HostedWeave, linear: Any) -> list[str]:
    """Names of the kernels of one product."""
    rows = torch.zeros(TILE_TOKENS, getattr(linear, "input_size_per_partition", linear.input_size))
    rows = rows.to(host.device, host.config.model_config.dtype)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            linear.quant_method.apply(linear, rows, None)
            torch.cuda.synchronize(host.device)
        return [event.name for event in profile.events() or ()]
    except RuntimeError as error:
        logger.warning("worker.weave: the profiler does not tell tiles: %s", error)
        return []


def _shared(found: Measured | None) -> Measured | None:
    """The first rank's tiles and every rank's longest times, on every rank; None where the first one has none."""
    group = get_tp_group().cpu_group
    first = get_tp_group().ranks[0]
    count = torch.tensor([len(found.timings) if found is not None else 0])
    dist.broadcast(count, first, group=group)
    if not int(count):
        return None
    table = torch.zeros(int(count), 4, dtype=torch.float64)
    tiles = torch.zeros(4, 2, dtype=torch.int64)
    if found is not None:
        rows = [[t.num_tokens, t.off_us, t.fuse_us, t.full_us] for t in found.timings]
        table, tiles = torch.tensor(rows, dtype=torch.float64), torch.tensor(found.tiles)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    dist.broadcast(tiles, first, group=group)
    timings = [
        Timing(num_tokens=int(n), off_us=off, fuse_us=fuse, full_us=full)
        for n, off, fuse, full in table.tolist()
    ]
    return Measured(timings=timings, tiles=[(tokens, columns) for tokens, columns in tiles.tolist()])


def _path(host: HostedWeave) -> Path | None:
    folder = host.config.additional_config["quire_weave"]["state_dir"]
    return Path(folder, f"weave-{_key(host)}.json") if folder else None


def _key(host: HostedWeave) -> str:
    assert host.sums is not None
    model, config = host.config.model_config, host.config
    return key_of(
        type(host.model).__name__, model.get_hidden_size(), model.hf_text_config.intermediate_size,
        model.hf_text_config.num_attention_heads, model.get_total_num_kv_heads(), model.get_head_size(),
        str(model.dtype), str(model.quantization), config.parallel_config.tensor_parallel_size,
        _device_name(host), host.num_sms, config.scheduler_config.max_num_batched_tokens,
        installed_vllm(), MAX_EXTRA_RATIO, host.sums.fused.links, machine_parts(),
    )  # fmt: skip


def _device_name(host: HostedWeave) -> str:
    return "cpu" if host.device.type == "cpu" else torch.cuda.get_device_name(host.device)


def _read(path: Path | None) -> Measured | None:
    data = read_kept(path)
    return unpack_measured(data, _key_in(path)) if path is not None and data is not None else None


def _write(path: Path | None, found: Measured | None) -> None:
    if path is not None and found is not None:
        write_kept(path, pack_measured(_key_in(path), found))


def _key_in(path: Path) -> str:
    return path.stem.removeprefix("weave-")
