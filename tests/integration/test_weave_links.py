"""What starts keep of sums belongs to links of one kind, which every rank names alike.

In process: it imports vLLM.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from shared.engine import weave_kept, weave_open
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, times_from_rows
from tests.support.ranks import run_ranks


def _links(rank: int, folder: str) -> None:
    """Each on a GPU of its own, and each sees a row of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    weave_kept.links_from = lambda own, others: [10 * own + other for other in others]
    found = weave_kept.links_between(torch.device("cuda", 3 - rank), dist.group.WORLD)
    assert found == "[[33, 32], [23, 22]]"
    dist.destroy_process_group()


def test_links_are_every_ranks_and_every_rank_says_the_same_of_them(tmp_path):
    run_ranks(_links, str(tmp_path))


def test_sums_that_were_kept_with_other_links_are_measured_anew(tmp_path, monkeypatch):
    group = SimpleNamespace(rank_in_group=0, ranks=[0], cpu_group=None)
    monkeypatch.setattr(weave_open, "get_tp_group", lambda: group)
    monkeypatch.setattr(weave_open, "shared_bytes", lambda data, *_: data)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    fused = SimpleNamespace(
        device="cuda", num_sms=108, world=2, hidden=1024, max_tokens=64, dtype=torch.bfloat16,
        settings=SimpleNamespace(use_multicast=False),
    )  # fmt: skip
    asked = []

    def measure():
        asked.append(1)
        return times_from_rows([(1, {Algorithm.ONE_SHOT: 1.0, Algorithm.TWO_SHOT: 1.0})])

    for links in ("[[-1, 3], [3, -1]]", "[[-1, 3], [3, -1]]", "[[-1, 5], [5, -1]]"):
        weave_open._times(fused, measure, str(tmp_path), links)
    assert len(asked) == 2
    assert len(list(tmp_path.iterdir())) == 2
