"""What an engine that weaves finds out at its start, keeps, and does where its ranks refuse.

In process: it imports vLLM.
"""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shared.engine import weave_calibration, weave_host, weave_kept, weave_open, weave_restart
from shared.engine.weave_host import DEFAULT_SMS, HostedWeave
from shared.engine.weave_kept import kept_or_measured, key_of
from shared.engine.weave_probe import REPEATS, kv_bytes, measured
from shared.engine.weave_restart import StartsAnew, refuse, started
from shared.engine.weave_worker import WeaveWorkerMixin
from shared.kernels.allreduce_rmsnorm import driver
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, Engine, Plan, Way
from shared.weave.threshold import Measured, Timing
from shared.weave.waves import Tile
from tests.support.ranks import run_ranks

SEEN = [Tile(256, 128), Tile(128, 128), Tile(128, 256), Tile(64, 128)]
KEPT = [Tile(64, 64)] * 4


def host_of(**changes):
    """What prepare() asks of a host; `cut` is by which tiles it was told to cut."""
    found = SimpleNamespace(is_measured=False, has_waves=True, rank=0, cut=None, **changes)
    found.cut_by = lambda tiles: setattr(found, "cut", list(tiles))
    return found


@pytest.fixture
def start(monkeypatch):
    """prepare() with a profiler that sees SEEN, and `kept` in the file."""
    found = SimpleNamespace(kept=None, looked=0, measured=[])

    def look(host):
        found.looked += 1
        return SEEN

    monkeypatch.setattr(weave_calibration, "_tiles", look)
    monkeypatch.setattr(weave_calibration, "_path", lambda host: None)
    monkeypatch.setattr(weave_calibration, "_read", lambda path: found.kept)
    monkeypatch.setattr(weave_calibration, "_shared", lambda one: one)
    monkeypatch.setattr(weave_calibration, "calibrate", found.measured.append)
    return found


def test_steps_are_cut_by_the_layers_own_tiles_also_where_the_threshold_is_set(start):
    host = host_of()
    weave_calibration.prepare(host)
    assert (host.cut, start.measured) == (SEEN, [])
    start.kept = Measured(
        timings=[Timing(num_tokens=1, off_us=1, fuse_us=1)], tiles=[(t.tokens, t.columns) for t in KEPT]
    )
    weave_calibration.prepare(host)
    assert (host.cut, start.looked) == (KEPT, 1), "an earlier start looked at them"


def test_an_engine_without_waves_looks_at_no_tile_and_one_without_a_threshold_measures(start):
    host = host_of()
    host.has_waves = False
    weave_calibration.prepare(host)
    assert (host.cut, start.looked, start.measured) == (None, 0, [])
    host.is_measured = True
    weave_calibration.prepare(host)
    assert start.measured == [host]


# -- what is kept ---------------------------------------------------------------------------------------------


def test_times_are_measured_once_and_by_all_ranks_or_by_none(tmp_path):
    path, asked = tmp_path / "deep" / "one.json", []

    def start(is_first: bool, others: bytes = b""):
        return kept_or_measured(
            path, lambda data: data.decode() if data != b"odd" else None, str.encode,
            lambda: asked.append(is_first) or "measured", lambda mine: mine if is_first else others,
            is_first=is_first,
        )  # fmt: skip

    assert start(False, b"") == "measured", "the first rank has no file: all measure"
    assert not path.exists(), "the first rank keeps it"
    assert start(True) == "measured"
    assert start(True) == "measured"
    assert asked == [False, True], "read the second time"
    path.write_bytes(b"kept")
    assert start(True) == "kept"
    assert start(False, b"first's") == "first's", "whatever this rank's file holds"
    path.write_bytes(b"odd")
    assert start(True) == "measured"
    assert path.read_bytes() == b"measured"


def test_a_file_that_cannot_be_kept_or_read_is_said_and_fails_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        weave_kept.write_kept(tmp_path / "file" / "one.json", b"1")
        assert weave_kept.read_kept(tmp_path) is None
    assert [record.getMessage().split(" is ")[1].split(":")[0] for record in caplog.records] == [
        "not kept", "not read",
    ]  # fmt: skip
    assert weave_kept.read_kept(None) is None


def test_another_driver_or_another_kernel_has_times_of_its_own(tmp_path, monkeypatch):
    version = tmp_path / "version"
    monkeypatch.setattr(weave_kept, "DRIVER_VERSION", version)
    none = key_of(1, weave_kept.machine_parts())
    version.write_text("580.159.04\n")
    assert weave_kept.driver_version() == "580.159.04"
    here = key_of(1, weave_kept.machine_parts())
    assert here == key_of(1, weave_kept.machine_parts()) != none
    source = tmp_path / "fused.cu"
    source.write_bytes(driver.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(driver, "SOURCE", source)
    driver.source_digest.cache_clear()
    assert key_of(1, weave_kept.machine_parts()) != here
    driver.source_digest.cache_clear()


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("model", {"hidden": 2048}), ("model", {"dtype": torch.float16}), ("config", {"tp": 4}),
        ("config", {"max_tokens": 4096}), ("host", {"num_sms": 8}), ("gpu", {"name": "NVIDIA H100"}),
        ("links", {"links": "[[-1, 1], [1, -1]]"}),
    ],
)  # fmt: skip
def test_a_kept_threshold_is_of_one_gpu_its_links_shape_dtype_ranks_step_and_budget(
    where, other, monkeypatch
):
    def key(**changes) -> str:
        found = {
            "hidden": 4096,
            "dtype": torch.bfloat16,
            "tp": 2,
            "max_tokens": 2048,
            "num_sms": 16,
            "name": "H200",
            "links": "[[-1, 3], [3, -1]]",
        }
        found |= changes
        model = SimpleNamespace(
            get_hidden_size=lambda: found["hidden"], get_total_num_kv_heads=lambda: 8, get_head_size=lambda: 128,
            hf_text_config=SimpleNamespace(intermediate_size=14336, num_attention_heads=32), dtype=found["dtype"],
            quantization=None,
        )  # fmt: skip
        config = SimpleNamespace(
            model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=found["tp"]),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=found["max_tokens"]),
        )  # fmt: skip
        monkeypatch.setattr(weave_calibration, "_device_name", lambda host: found["name"])
        sums = SimpleNamespace(fused=SimpleNamespace(links=found["links"]))
        host = SimpleNamespace(model=None, config=config, num_sms=found["num_sms"], sums=sums)
        return weave_calibration._key(host)

    assert key() == key() != key(**other), where


def _rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for mine in (b"first's", b""):
        found = weave_kept.shared_bytes(mine if rank == 0 else b"another's, longer", 0, group)
        assert found == mine
    dist.destroy_process_group()


def test_every_rank_goes_by_the_first_ranks_bytes(tmp_path):
    run_ranks(_rank, str(tmp_path))


# -- what is said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "uses", "says"),
    [
        (True, False, "have NVLink multicast, which is left alone"), (False, False, "have no NVLink"),
        (True, True, "through NVLink's switch, which we have never run"),
    ],
)  # fmt: skip
def test_a_start_says_whether_the_gpus_have_multicast_and_how_sums_are_made(has, uses, says):
    fused = SimpleNamespace(
        settings=SimpleNamespace(use_multicast=uses), driver=SimpleNamespace(has_multicast=has), few_sms=8, world=4,
        max_tokens=8192,
        plan=lambda n: Plan(Algorithm.TWO_SHOT, n, 0, 1), way=lambda *_: Way(Engine.PLAIN),
    )  # fmt: skip
    line = weave_open.in_words(fused)
    assert says in line
    assert "sums of 4 ranks" in line
    assert "8192 tokens two_shot by plain, under other work from 8 multiprocessors" in line
    assert "\n" not in line


def _asks_for_multicast(rank: int, folder: str) -> None:
    """In a process of its own: rank 1's arena has the address that it is given, rank 0's always has one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    found = [weave_open.everybody_has(7 if rank == 0 else other, dist.group.WORLD) for other in (9, 0)]
    assert found == [True, False], "a rank without one is enough"
    dist.destroy_process_group()


def test_the_switch_is_used_only_where_every_rank_has_its_address(tmp_path):
    run_ranks(_asks_for_multicast, str(tmp_path))


@pytest.mark.parametrize(("asked", "given", "uses"), [(False, 7, False), (True, 7, True), (True, 0, False)])
def test_the_switch_is_used_where_it_is_asked_for_and_the_machine_gives_its_address(
    monkeypatch, caplog, asked, given, uses
):
    """On GPUs, whose memory and kernels stand-ins are here."""
    seen: dict[str, object] = {}

    def arena(own, group, *, use_multicast):
        seen["asks torch"] = use_multicast
        return SimpleNamespace(multicast=given if use_multicast else 0, close=lambda: None)

    def fused(settings, arena, rank, device):
        seen["uses"] = settings.use_multicast
        return SimpleNamespace(settings=settings, use=lambda times: None, close=lambda: None)

    group = SimpleNamespace(device_group=None, cpu_group=None, rank_in_group=0)
    monkeypatch.setattr(weave_open, "get_tp_group", lambda: group)
    monkeypatch.setattr(weave_open, "torch_memory", lambda num_bytes, device: None)
    monkeypatch.setattr(weave_open, "mapped_arena", arena)
    monkeypatch.setattr(weave_open, "CudaFused", fused)
    monkeypatch.setattr(weave_open, "everybody_has", lambda multicast, _: multicast != 0)
    monkeypatch.setattr(weave_open, "links_between", lambda device, _: "")
    monkeypatch.setattr(weave_open, "first_reason", lambda reason: reason)
    monkeypatch.setattr(weave_open, "in_words", lambda _: "")
    monkeypatch.setattr(weave_open, "_times", lambda *_: None)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        model_config=SimpleNamespace(get_hidden_size=lambda: 1024, dtype=torch.bfloat16),
        additional_config={"quire_weave": {"state_dir": "", "multicast": asked}},
    )
    with caplog.at_level(logging.WARNING):
        weave_open.open_fused(config, torch.device("cuda"))
    assert seen == {"asks torch": asked, "uses": uses}
    assert ("no multicast address" in caplog.text) is (asked and not uses)


@pytest.mark.parametrize(("asked", "left_alone"), [(False, "1"), (True, None)])
def test_torch_leaves_multicast_alone_unless_the_setting_asks_for_it(monkeypatch, asked, left_alone):
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)

    class Stock:
        def init_device(self):
            self.found = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")

    class Worker(WeaveWorkerMixin, Stock):
        vllm_config = SimpleNamespace(additional_config={"quire_weave": {"multicast": asked}})

    worker = Worker()
    worker.init_device()
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    assert worker.found == left_alone


def test_a_setting_of_multiprocessors_goes_before_what_was_measured(monkeypatch):
    def num_sms(wanted: int, found: int) -> int:
        sums = SimpleNamespace(fused=SimpleNamespace(few_sms=found))
        monkeypatch.setattr(HostedWeave, "_open", lambda host: setattr(host, "sums", sums) or "")
        monkeypatch.setattr(weave_host, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
        monkeypatch.setattr(weave_host, "why_not_fused", lambda model, config: "")
        monkeypatch.setattr(weave_host, "fuse_layers", lambda *_, **__: None)
        hosted = {"mode": "fuse", "fuse_min_tokens": 1, "min_tokens": 8, "sms": wanted}
        config = SimpleNamespace(additional_config={"quire_weave": hosted})
        return HostedWeave(SimpleNamespace(model=None), config, torch.device("cpu")).num_sms

    assert [num_sms(12, 8), num_sms(0, 8), num_sms(0, 0)] == [12, 8, DEFAULT_SMS]


# -- ranks that refuse ----------------------------------------------------------------------------------------


def config_of(starts_anew: bool, **more):
    return SimpleNamespace(
        additional_config={"quire_weave": {"mode": "full", "starts_anew": starts_anew}, **more},
        kv_transfer_config="ours",
    )


def test_where_ranks_refuse_the_engine_starts_again_as_it_would_be_without_weaving(
    tmp_path, monkeypatch, caplog
):
    folders = []
    monkeypatch.setattr(weave_restart, "host_ranks", folders.append)
    tried = []

    def begin(config):
        tried.append(config)
        hosted = config.additional_config.get("quire_weave")
        if hosted:
            with pytest.raises(StartsAnew, match="no way to each other"):
                refuse(
                    hosted, "no way to each other"
                )  # whichever rank it is: it may be the only one that comes so far
            raise RuntimeError("Engine core initialization failed")
        return "engine"

    stock = SimpleNamespace(additional_config={}, kv_transfer_config=None)
    with caplog.at_level(logging.WARNING):
        engine, config = started(
            begin, config_of(True, quire={"instance": "p"}), lambda: stock, str(tmp_path)
        )
    assert (engine, config) == ("engine", stock)
    assert len(tried) == 2
    assert stock.additional_config == {"quire": {"instance": "p"}}
    assert stock.kv_transfer_config == "ours"
    (folder,) = folders
    assert Path(folder).parent == tmp_path, "its ranks meet elsewhere than those that have ended"
    (record,) = caplog.records
    assert record.getMessage().startswith("worker.weave = full: vLLM's own all-reduce and norm are used")
    assert record.getMessage().endswith("no way to each other")


@pytest.mark.parametrize("starts_anew", [True, False])
def test_an_engine_that_fails_for_another_reason_is_not_started_again(tmp_path, starts_anew):
    def begin(config):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        started(begin, config_of(starts_anew), lambda: pytest.fail("a second start"), str(tmp_path))


def test_ranks_that_gave_up_nothing_go_on_in_vllms_way():
    refuse({"mode": "full", "starts_anew": False}, "any")
    refuse({"mode": "full"}, "any")


# -- the short engines ----------------------------------------------------------------------------------------


def test_the_short_engines_take_the_cache_that_they_need_and_no_more():
    shape = {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "num_hidden_layers": 8}
    token_bytes = 2 * 8 * 2 * 128 * 2  # of one of four ranks
    found = kv_bytes(shape, 4, 32_768)
    assert 32_768 + 256 <= found / token_bytes <= 1.2 * 32_768
    assert kv_bytes(shape, 4, 512) >= 32 * 256 * token_bytes, "decode steps of 32 requests"
    assert kv_bytes(shape | {"torch_dtype": "float32"}, 4, 512) == 2 * kv_bytes(shape, 4, 512)
    assert kv_bytes(shape, 16, 512) == kv_bytes(shape, 8, 512), "a rank has one head at least"


class Timed:
    """An engine of kind weave that takes a second a prompt."""

    kind = "weave"

    def __init__(self, clock):
        self.clock, self.order, self.mode = clock, [], ""

    def switch(self, mode):
        self.mode = mode

    def woven_steps(self):
        return len(self.order)

    def prefill_ms(self, prompt):
        self.clock.now_s += 1
        self.order.append(self.mode)
        return 1.0

    def decode_ms(self, batch):
        return 1.0


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.5, 3), (1e6, REPEATS + 1)])
def test_the_short_engines_ways_take_turns_and_stop_at_their_budget(monkeypatch, budget_s, rounds):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("shared.engine.weave_probe.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    engine = Timed(clock)
    found = measured(engine, [512], [1], budget_s)
    assert set(found) == {512, 1}
    assert len(engine.order) == 2 * rounds
    assert engine.order[:4] == ["fuse", "full", "full", "fuse"]
