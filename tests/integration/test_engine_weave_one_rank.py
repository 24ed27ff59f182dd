"""What one rank alone cannot have, no rank has, and none waits for it; all say why it cannot, and which it is.

Over gloo; GPUs' parts are stand-ins, which wait for other ranks where theirs do.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.engine import weave_host, weave_open
from shared.engine.weave_host import HostedWeave
from shared.engine.weave_restart import StartsAnew
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, times_from_rows
from tests.support.ranks import run_ranks

NO_MEMORY, NO_PEERS = torch.OutOfMemoryError("80 GiB"), FusedRefused("no memory of peers")
NO_MODULE = FusedRefused("cuModuleLoadData")
TIMES = times_from_rows([(1, {Algorithm.ONE_SHOT: 1.0, Algorithm.TWO_SHOT: 1.0})])
ANY = {"arena", "pages"}
# what fails, on which ranks, how, what others have to close, and what all say; "": pages of our own are in its place
FAILURES: list[tuple[set[str], set[int], Exception, list[str], str]] = [
    ({"memory"}, {1}, NO_PEERS, [], ""),
    ({"memory", "pages"}, {0}, NO_PEERS, ["pages"], "rank 0: no memory of peers"),
    ({"arena"}, {1}, NO_PEERS, ["arena"], ""),
    ({"arena"}, {0, 1}, NO_PEERS, ["arena"], ""),
    (ANY, {1}, NO_PEERS, ["arena", "pages"], "rank 1: no memory of peers"),
    (ANY, {0, 1}, NO_PEERS, ["arena", "pages"], "rank 0: no memory of peers"),
    (ANY, {1}, OSError("no folder"), ["arena", "pages"], "rank 1: no pages to hand each other: no folder"),
    ({"fused"}, {1}, NO_MODULE, ["fused", "arena"], "rank 1: cuModuleLoadData"),
    ({"fused"}, {0}, FusedRefused(""), ["fused", "arena"], "rank 0: fused.refused"),
    ({"arena", "fused"}, {1}, NO_MODULE, ["arena", "fused", "pages"], "rank 1: cuModuleLoadData"),
    ({"rows"}, {1}, NO_MEMORY, ["fused", "arena"], "rank 1: no memory for sums of ranks: 80 GiB"),
    ({"calibrate"}, {1}, NO_MEMORY, ["fused", "arena"], "rank 1: no memory to measure sums: 80 GiB"),
    (set(), set(), FusedRefused(""), [], ""),
]  # fmt: skip
NUM_BY_PAGES = sum(not fails.isdisjoint({"memory", "arena"}) for fails, *_ in FAILURES)
TORCHS = "torch.distributed._symmetric_memory"


def _torchs(made: Callable[[str, Any], Any]) -> Any:
    """In place of torch's symmetric memory; `memory` of it: what was given, as long as somebody has it."""

    def empty(num_bytes, dtype, device):
        found = made("memory", torch.empty(num_bytes, dtype=dtype))
        torchs.memory.append(weakref.ref(found))
        return found

    def rendezvous(own, group_name):
        dist.barrier()  # as torch's: a rank that does not come is waited for
        return made("arena", SimpleNamespace(buffer_ptrs=[own.data_ptr()] * 2, multicast_ptr=7))

    torchs = SimpleNamespace(empty=empty, rendezvous=rendezvous, memory=[])
    return torchs


def _rank(rank: int, folder: str) -> None:
    method, patience = f"file://{folder}/ranks", timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=patience)
    world = dist.group.WORLD
    tp = SimpleNamespace(device_group=None, cpu_group=world, rank_in_group=rank, ranks=[0, 1])
    weave_open.get_tp_group = weave_host.get_tp_group = lambda: tp
    torch.cuda.get_device_name = lambda device: "H100"
    weave_open.in_words = lambda fused: ""
    lines: list[str] = []
    weave_open.logger.warning = lambda text, *values: lines.append(text % values)
    torch.cuda.synchronize = lambda device: None
    mapped_arena = weave_open.mapped_arena
    folders: set[str] = set()
    for fails, failing, error, to_close, said in FAILURES:
        closed: list[str] = []

        def made(name, what, fails=fails, failing=failing, error=error):
            if rank in failing and name in fails:
                raise RuntimeError(f"no {name}") if name in {"memory", "arena"} else error
            return what

        def mapped(*args, closed=closed, **more):
            return replace(mapped_arena(*args, **more), close=lambda: closed.append("arena"))

        def part(closed=closed, **more):
            return SimpleNamespace(close=lambda: closed.append(more["name"]), **more)

        fused = part(
            name="fused", settings=SimpleNamespace(use_multicast=True), device="cuda", num_sms=132, world=2,
            hidden=1024, max_tokens=64, dtype=torch.bfloat16, use=lambda times: None,
        )  # fmt: skip
        pages = part(name="pages", multicast=0)
        sys.modules[TORCHS] = torchs = _torchs(made)

        def paged(
            num_bytes, device, of_rank, world, path, *, timeout_s, made=made, pages=pages, torchs=torchs
        ):
            assert not any(one() is not None for one in torchs.memory), "torch's is given back before"
            assert (of_rank, world, path.stat().st_mode & 0o777) == (rank, 2, 0o700)
            folders.add(str(path))
            return made("pages", pages)

        weave_open.page_arena = paged
        weave_open.mapped_arena = mapped
        weave_open.CudaFused = lambda *_, made=made, fused=fused: made("fused", fused)
        weave_open.calibration_rows = lambda _, made=made: made("rows", None)
        weave_open.calibrate = lambda *_, made=made: made("calibrate", TIMES)
        weave = {"multicast": True, "state_dir": ""}
        weave_host.open_fused = lambda _, device, weave=weave: weave_open._on_gpu(
            1024, 64, torch.bfloat16, device, weave
        )
        host = object.__new__(HostedWeave)
        host.config, host.device, host.sums = None, torch.device("cuda"), None
        reason = host._open()
        assert reason == said, (fails, failing, reason)
        assert (host.sums is None) is bool(said)
        assert closed == [name for name in to_close if rank not in failing or name not in fails], (
            fails,
            failing,
        )
        dist.barrier(world)  # and both are where they should be
    assert len(folders) == NUM_BY_PAGES
    assert not any(Path(found).exists() for found in folders)
    by_pages = [line for line in lines if "pages of their own" in line]
    assert len(by_pages) == (NUM_BY_PAGES if rank == 0 else 0), lines
    assert rank or by_pages[0].endswith("cannot be had: rank 1: no symmetric memory: no memory"), by_pages
    _says_why_the_second_cannot(rank, Path(folder))
    dist.destroy_process_group()


def _says_why_the_second_cannot(rank: int, folder: Path) -> None:
    """The first rank in the log, where the engine goes on; every rank for the next start, where it does not."""

    def opened(config, device):
        if rank == 1:
            raise FusedRefused("no memory of peers")
        return SimpleNamespace(), lambda: None

    weave_host.open_fused, weave_host.why_not_fused = opened, lambda model, config: ""
    lines: list[str] = []
    weave_host.logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    wanted = {"mode": "fuse", "fuse_min_tokens": 1, "min_tokens": 8, "sms": 0}
    config = SimpleNamespace(additional_config={"quire_weave": wanted})
    assert HostedWeave(None, config, torch.device("cpu")).sums is None
    own = "worker.weave = fuse: vLLM's own all-reduce and norm are used: rank 1: no memory of peers"
    assert lines == ([own] if rank == 0 else [])
    said = folder / f"said-{rank}"
    wanted |= {"starts_anew": True, "said": str(said)}
    with pytest.raises(StartsAnew):
        HostedWeave(None, config, torch.device("cpu"))
    assert said.read_text() == "rank 1: no memory of peers"


def test_what_one_rank_cannot_have_no_rank_has_and_none_waits_for_it(tmp_path):
    run_ranks(_rank, str(tmp_path))
