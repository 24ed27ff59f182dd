"""What one rank alone cannot have, no rank has, and none waits for it. Over gloo; GPUs' parts are stand-ins."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from shared.engine import weave_host, weave_open
from shared.engine.weave_host import HostedWeave
from shared.errors import ClusterError
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, times_from_rows
from tests.support.ranks import run_ranks

TIMES = times_from_rows([(1, {Algorithm.ONE_SHOT: 1.0, Algorithm.TWO_SHOT: 1.0})])
FAILURES: dict[
    str, tuple[set[str], Exception, list[str]]
] = {  # what fails, how, and what the other rank has to close
    "arena": ({"arena"}, FusedRefused("no memory of peers"), ["arena"]),  # pages of our own are in its place
    "pages": ({"arena", "pages"}, FusedRefused("no memory of peers"), ["arena", "pages"]),
    "folder": ({"arena", "pages"}, OSError("no folder"), ["arena", "pages"]),
    "fused": ({"fused"}, FusedRefused("cuModuleLoadData"), ["fused", "arena"]),
    "behind pages": ({"arena", "fused"}, FusedRefused("cuModuleLoadData"), ["arena", "fused", "pages"]),
    "rows": ({"rows"}, torch.OutOfMemoryError("no memory"), ["fused", "arena"]),
    "calibrate": ({"calibrate"}, torch.OutOfMemoryError("no memory"), ["fused", "arena"]),
    "": (set(), FusedRefused(""), []),
}
IS_HAD = {"arena", ""}


def _rank(rank: int, folder: str) -> None:
    method, patience = f"file://{folder}/ranks", timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=patience)
    world = dist.group.WORLD
    tp = SimpleNamespace(device_group=None, cpu_group=world, rank_in_group=rank, ranks=[0, 1])
    weave_open.get_tp_group = weave_host.get_tp_group = lambda: tp
    torch.cuda.get_device_name = lambda device: "H100"
    weave_open.in_words = lambda fused: ""
    said: list[str] = []
    weave_open.logger.warning = lambda text, *values: said.append(text % values)
    folders: set[str] = set()
    for where, (fails, error, to_close) in FAILURES.items():
        closed: list[str] = []

        def made(name, what, fails=fails, error=error):
            if rank == 1 and name in fails:
                raise FusedRefused("torch has none") if name == "arena" else error
            return what

        def part(closed=closed, **more):
            return SimpleNamespace(close=lambda: closed.append(more["name"]), **more)

        fused = part(
            name="fused", settings=SimpleNamespace(use_multicast=True), device="cuda", num_sms=132, world=2,
            hidden=1024, max_tokens=64, dtype=torch.bfloat16, use=lambda times: None,
        )  # fmt: skip
        arena, pages = part(name="arena", multicast=7), part(name="pages", multicast=0)

        def paged(num_bytes, device, of_rank, world, path, *, timeout_s, made=made, pages=pages):
            assert (of_rank, world, path.stat().st_mode & 0o777) == (rank, 2, 0o700)
            folders.add(str(path))
            return made("pages", pages)

        weave_open.page_arena = paged
        weave_open.torch_arena = lambda *_, made=made, arena=arena, **__: made("arena", arena)
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
        words = error.message if isinstance(error, ClusterError) else str(error)
        assert bool(reason) is (where not in IS_HAD)
        assert rank == 0 or where in IS_HAD or words in reason, (where, reason)
        assert (host.sums is None) is (where not in IS_HAD)
        assert closed == [name for name in to_close if rank == 0 or name not in fails], where
        dist.barrier(world)  # and both are where they should be
    assert len(folders) == 4
    assert not any(Path(folder).exists() for folder in folders)
    by_pages = [line for line in said if "pages of their own" in line]
    assert len(by_pages) == (4 if rank == 0 else 0), said
    dist.destroy_process_group()


def test_what_one_rank_cannot_have_no_rank_has_and_none_waits_for_it(tmp_path):
    run_ranks(_rank, str(tmp_path))
