"""What one rank alone cannot have, no rank has, and none waits for it. Over gloo; GPUs' parts are stand-ins."""

from datetime import timedelta
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
FAILURES: dict[str, tuple[Exception, list[str]]] = {  # where, how, and what the other rank has to close
    "arena": (FusedRefused("no memory of peers"), ["arena"]),
    "fused": (FusedRefused("cuModuleLoadData"), ["fused", "arena"]),
    "rows": (torch.OutOfMemoryError("no memory"), ["fused", "arena"]),
    "calibrate": (torch.OutOfMemoryError("no memory"), ["fused", "arena"]),
    "": (FusedRefused(""), []),
}


def _rank(rank: int, folder: str) -> None:
    method, patience = f"file://{folder}/ranks", timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=patience)
    world = dist.group.WORLD
    tp = SimpleNamespace(device_group=None, cpu_group=world, rank_in_group=rank, ranks=[0, 1])
    weave_open.get_tp_group = weave_host.get_tp_group = lambda: tp
    torch.cuda.get_device_name = lambda device: "H100"
    weave_open.in_words = lambda fused: ""
    for where, (error, to_close) in FAILURES.items():
        closed: list[str] = []

        def made(name, what, where=where, error=error):
            if rank == 1 and name == where:
                raise error
            return what

        def part(closed=closed, **more):
            return SimpleNamespace(close=lambda: closed.append(more["name"]), **more)

        fused = part(
            name="fused", settings=SimpleNamespace(use_multicast=True), device="cuda", num_sms=132, world=2,
            hidden=1024, max_tokens=64, dtype=torch.bfloat16, use=lambda times: None,
        )  # fmt: skip
        arena = part(name="arena", multicast=7)
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
        said = error.message if isinstance(error, ClusterError) else str(error)
        assert bool(reason) is bool(where)
        assert rank == 0 or said in reason, (where, reason)
        assert (host.sums is None) is bool(where)
        assert closed == [name for name in to_close if rank == 0 or name != where], where
        dist.barrier(world)  # and both are where they should be
    dist.destroy_process_group()


def test_what_one_rank_cannot_have_no_rank_has_and_none_waits_for_it(tmp_path):
    run_ranks(_rank, str(tmp_path))
