"""Settings of the local cluster: precedence, refusals that name the right key, files' places."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deploy.local import config, plan, run_supervisor, terminal
from deploy.local.cluster_settings import ClusterSettings
from services.coordinator import config as coordinator
from services.gateway import config as gateway
from services.mempool import config as mempool
from services.prefill import config as prefill
from services.scheduler import config as scheduler
from shared import settings
from shared.errors import SettingsError
from shared.observe.otlp import CollectorExporter
from shared.settings import MOST_MS

SERVICES = {
    "gateway": gateway, "scheduler": scheduler, "coordinator": coordinator, "mempool": mempool, "worker": prefill
}  # fmt: skip


WORKER_FLOATS = [f.name for f in msgspec.structs.fields(prefill.WorkerSettings) if f.type is float]
NO_LESS_THAN_ZERO = (
    "threads", "max_model_len", "kv_cache_bytes", "mempool_bytes", "dram_bytes", "gateway_processes"
)  # fmt: skip


def load(argv=(), env=None, toml=None):
    return config.load(argv, environ=env or {}, toml_path=toml)


def test_defaults_are_loopback_and_the_demo_model():
    found = load()
    assert (found.host, found.port, found.base_port) == ("127.0.0.1", 8000, 8100)
    assert found.home == str(config.REPO / ".quire")
    assert found.model == ""


def test_flags_beat_variables_and_variables_beat_the_file(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text(
        '[cluster]\nport = 1001\nnum_decode = 3\ndevice = "cpu"\n[gateway]\ntokenizer_threads = 2\n'
    )
    found = load(["--port", "1003"], {"QUIRE_CLUSTER_PORT": "1002", "QUIRE_CLUSTER_NUM_DECODE": "2"}, file)
    assert (found.port, found.num_decode, found.device) == (1003, 2, "cpu")


@pytest.mark.parametrize(
    ("env", "right"),
    [
        ({"QUIRE_CLUSTER_MODLE": "x"}, "QUIRE_CLUSTER_MODEL"),
        ({"QUIRE_CLUSTER_PROT": "1"}, "QUIRE_CLUSTER_PORT"),
        ({"QUIRE_GATEWAY_PROCESES": "2"}, "QUIRE_GATEWAY_PROCESSES"),
        ({"QUIRE_GATWAY_LISTEN": "x"}, "QUIRE_GATEWAY_LISTEN"),
        ({"QUIRE_WORKER_DTYP": "x"}, "QUIRE_WORKER_DTYPE"),
        ({"QUIRE_REDIS_ULR": "x"}, "QUIRE_REDIS_URL"),
        ({"QUIRE_MODEL": "x"}, "QUIRE_CLUSTER_MODEL"),
    ],
)
def test_unknown_variables_of_every_section_are_refused_with_the_nearest_right_one(env, right):
    with pytest.raises(SettingsError, match="unknown variable") as refused:
        load(env=env)
    assert right in refused.value.message


def test_set_takes_cluster_settings_with_or_without_their_section_and_names_the_variable_of_others():
    assert config.cluster_key("port") == config.cluster_key("cluster.port") == "port"
    with pytest.raises(SettingsError, match="set QUIRE_GATEWAY_TOKENIZER_THREADS"):
        config.cluster_key("gateway.tokenizer-threads")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("[clutser]\nport = 1\n", "'cluster'"),
        ("[cluster]\nprot = 1\n", "'port'"),
        ("[mempool]\ncapacity = 1\n", "'capacity_bytes'"),
    ],
)
def test_unknown_keys_of_the_file_are_refused_with_the_nearest_right_one(tmp_path, text, right):
    file = tmp_path / "quire.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="unknown") as refused:
        load(toml=file)
    assert right in refused.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-prefill", "0"],
        ["--port", "70000"],
        ["--port", "8103"],
        ["--base-port", "65530"],
        ["--trace-sample-ratio", "2"],
        ["--device", "tpu"],
        ["--launcher", "zygote", "--engine", "mock"],
        ["--host", ""],
    ],
)
def test_wrong_values_are_refused_by_name(argv):
    with pytest.raises(SettingsError) as refused:
        load(argv)
    assert argv[0][2:].replace("-", "_") in refused.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, -1) for key in NO_LESS_THAN_ZERO),
        ("gateway_processes", 1_000),
        ("threads", 1_000_000),
        *((key, 1 << 60) for key in ("max_model_len", "kv_cache_bytes", "mempool_bytes", "dram_bytes")),
        *(("trace_endpoint", text) for text in ("foo", "ftp://here", "http://", "http://127.0.0.1:99999")),
        *(("redis_url", text) for text in ("foo", "http://127.0.0.1:6379", "redis://")),
        ("ready_timeout_s", 10**12),
        ("ready_timeout_s", 604_801),
        ("ready_timeout_s", 0),
    ],
)
def test_what_no_service_could_start_with_is_refused_before_any_does(key, value):
    with pytest.raises(SettingsError, match=rf"setting cluster\.{key}: "):
        load([f"--{key.replace('_', '-')}", str(value)])


def test_a_wrong_redis_address_is_refused_without_its_password():
    with pytest.raises(SettingsError) as refused:
        load(env={"QUIRE_REDIS_URL": "http://:open-sesame@127.0.0.1:6379"})
    assert "open-sesame" not in refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://me:open-sesame@h:4318",
        "http://open-sesame@h",
        "http://h/?key=open-sesame",
        "ftp://h#open-sesame",
    ],
)
def test_a_secret_in_a_trace_endpoint_is_refused_and_not_repeated(url):
    wanted = r"^setting cluster\.trace_endpoint: .* OTEL_EXPORTER_OTLP_HEADERS"
    with pytest.raises(SettingsError, match=wanted) as refused:
        load(["--trace-endpoint", url])
    assert "open-sesame" not in refused.value.message
    with pytest.raises(SettingsError, match=wanted.replace(r"cluster\.", "")) as refused:
        CollectorExporter(url, "quire-test", "test-0")
    assert "open-sesame" not in refused.value.message


def test_the_least_and_the_most_of_a_setting_are_taken():
    assert load(["--ready-timeout-s", "604800"]).ready_timeout_s == 604_800
    for key in NO_LESS_THAN_ZERO:
        assert getattr(load([f"--{key.replace('_', '-')}", "0"]), key) == 0
    for url in ("http://127.0.0.1:4318", "https://collector.example/otlp"):
        assert load(["--trace-endpoint", url]).trace_endpoint == url


@pytest.mark.parametrize("text", [",", "one,", " , two", "one,,two"])
@pytest.mark.parametrize("section", ["cluster", "gateway", "coordinator"])
def test_an_empty_key_is_refused_and_does_not_switch_authentication_off(section, text, tmp_path):
    with pytest.raises(SettingsError, match=rf"{section}\.api_keys: an entry is empty"):
        load(env={f"QUIRE_{section.upper()}_API_KEYS": text})
    (tmp_path / "quire.toml").write_text(f'[{section}]\napi_keys = ["one", ""]\n')
    with pytest.raises(SettingsError, match=rf"{section}\.api_keys: an entry is empty"):
        load(toml=tmp_path / "quire.toml")


def test_a_list_has_no_blanks_around_its_commas_and_blank_text_is_an_empty_one():
    assert load(["--api-keys", " a, b ,c"]).api_keys == ["a", "b", "c"]
    for text in ("", " "):
        assert load(["--api-keys", text]).api_keys == []
    found = settings.load(mempool.MempoolSettings, "mempool", ["--allowed-uids", "1, 2"], environ={})
    assert found.allowed_uids == [1, 2]


def test_a_settings_file_that_is_no_text_is_refused_by_name(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_bytes(b'[cluster]\nmodel = "\xff"\n')
    with pytest.raises(SettingsError, match=r"quire\.toml: 'utf-8' codec"):
        load(toml=file)


def test_the_home_folder_of_nobody_is_refused_wherever_a_path_may_begin_with_one():
    with pytest.raises(SettingsError, match="'~nobody-here/x' names the home folder of a user"):
        load(env={"QUIRE_HOME": "~nobody-here/x"})
    with pytest.raises(SettingsError, match="~nobody-here"):
        plan.find_model(load(["--model", "~nobody-here/x"]))
    with pytest.raises(SettingsError, match="~nobody-here"):
        config.use_config_file(Path("~nobody-here/quire.toml"))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *((section, "log_level", "loud") for section in SERVICES),
        *((section, "trace_sample_ratio", value) for section in SERVICES for value in ("-0.1", "1.5", "nan")),
        ("gateway", "max_concurrent_per_tenant", "-1"),
        ("gateway", "shed_wait_ms", "-1"),
        ("gateway", "drain_deadline_ms", "-1"),
        ("gateway", "tokenizer_threads", "0"),
        *(("worker", key, value) for key in WORKER_FLOATS for value in ("nan", "inf", "-inf")),
        *(
            ("mempool", f"lending_{key}", value)
            for key in ("rate_slack", "rate_rise")
            for value in ("nan", "inf")
        ),
        *(
            ("gateway", f"retry_{key}", value)
            for key in ("share", "floor_per_s", "burst")
            for value in ("nan", "inf")
        ),
        ("scheduler", "panic_queue_ms", "inf"),
        ("worker", "fair_swap_gb_per_s", "-1"),
        ("gateway", "tree_max_blocks", "-1"),
        ("coordinator", "journal_wait_ms", "-1"),
        *(("gateway", "request_deadline_ms", str(ms)) for ms in (1 << 63, MOST_MS + 1, 10**400)),
        ("gateway", "max_body_bytes", str(1 << 63)),
        ("scheduler", "max_held", str(1 << 64)),
    ],
)
def test_a_service_refuses_what_it_could_not_work_with_by_name(section, key, value):
    flag = f"--{key.replace('_', '-')}"
    with pytest.raises(SettingsError, match=rf"setting {section}\.{key}"):
        SERVICES[section].load([flag, value])


def test_a_deadline_may_be_as_long_as_a_timer_takes():
    flags = ["--request-deadline-ms", str(MOST_MS), "--model-dir", str(config.DEMO_MODEL)]
    assert gateway.load(flags).request_deadline_ms == MOST_MS


def test_zero_is_no_limit_no_waiting_and_no_traces_where_it_means_that():
    zeros = ("max_concurrent_per_tenant", "shed_wait_ms", "drain_deadline_ms", "trace_sample_ratio")
    flags = [word for key in zeros for word in (f"--{key}", "0")]
    found = gateway.load([*flags, "--model-dir", str(config.DEMO_MODEL)])
    assert [getattr(found, key) for key in zeros] == [0, 0, 0, 0]


def test_a_service_setting_that_the_cluster_decides_is_refused_with_the_right_one():
    with pytest.raises(SettingsError, match=r"gateway.listen .* set cluster.port, cluster.host"):
        config.check_overrides({"gateway": {"listen"}}, environ={"QUIRE_GATEWAY_LISTEN": "x"})
    config.check_overrides({"gateway": {"listen"}}, environ={"QUIRE_GATEWAY_TOKENIZER_THREADS": "2"})


def test_home_and_redis_come_from_the_global_variables():
    found = load(env={"QUIRE_HOME": "/elsewhere", "QUIRE_REDIS_URL": "redis://there:1/0"})
    assert (found.home, found.redis_url) == ("/elsewhere", "redis://there:1/0")
    assert load(env={"QUIRE_HOME": "/a", "QUIRE_CLUSTER_HOME": "/b"}).home == "/b"


def test_sockets_of_a_deep_clone_still_fit_into_a_unix_address():
    deep = config.paths_of("/" + "x" * 120)
    assert len(str(deep.control)) < 100
    assert deep.control != config.paths_of("/" + "y" * 120).control
    assert config.paths_of("/short").control == Path("/short/run/control.sock")


def test_the_effective_settings_survive_their_file(tmp_path):
    found = msgspec.structs.replace(load(), api_keys=["a", "b"], dtype="float32")
    assert msgspec.json.decode(msgspec.json.encode(found), type=ClusterSettings) == found


def test_a_model_is_a_folder_with_a_config_or_an_id(tmp_path):
    with pytest.raises(SettingsError, match="no folder"):
        plan.find_model(load(["--model", "./nothing"]))
    with pytest.raises(SettingsError, match=r"no config\.json"):
        plan.find_model(load(["--model", str(tmp_path)]))
    (tmp_path / "config.json").write_text("{}")
    found = plan.find_model(load(["--model", str(tmp_path)]))
    assert (found.folder, found.name) == (str(tmp_path.resolve()), tmp_path.name)
    assert plan.find_model(load(["--model", str(tmp_path), "--model-name", "mine"])).name == "mine"


@pytest.mark.parametrize("from_", ["cluster", "variable", "file", "nowhere"])
def test_up_prints_the_key_header_wherever_keys_were_set(monkeypatch, tmp_path, from_):
    if from_ == "variable":
        monkeypatch.setenv("QUIRE_GATEWAY_API_KEYS", "k")
    if from_ == "file":
        (tmp_path / "quire.toml").write_text('[gateway]\napi_keys_file = "keys.txt"\n')
        monkeypatch.setenv("QUIRE_CONFIG", str(tmp_path / "quire.toml"))
    found = load(["--engine", "mock", *(["--api-keys", "k"] if from_ == "cluster" else [])])
    start = run_supervisor.Start(settings=found, model=plan.find_model(found))
    made = plan.make_plan(found, config.paths_of(tmp_path), start.model)
    assert run_supervisor.describe(start, made)["authenticated"] is (from_ != "nowhere")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_address_that_up_prints_is_one_for_clients_too(monkeypatch, url):
    assert config.gateway_url(url) == "http://h:1"
    monkeypatch.setenv("QUIRE_URL", url)
    assert config.gateway_url() == "http://h:1"


def test_an_address_in_what_is_printed_has_no_pictures(capsys):
    terminal._console(stderr=False).print("fd00:a:b::1", markup=False)
    terminal._console(stderr=False).print("at [bold]fd00:a:b::1[/bold]", markup=True)
    assert capsys.readouterr().out == "fd00:a:b::1\nat fd00:a:b::1\n"


@pytest.mark.parametrize("named", ["", "/a/company/bundle.pem"])
def test_a_models_download_trusts_whom_the_system_trusts(monkeypatch, tmp_path, named):
    bundle = tmp_path / "ca.crt"
    bundle.write_text("")
    monkeypatch.setattr(config, "CA_FILES", ("/nowhere", str(bundle)))
    monkeypatch.setenv("SSL_CERT_FILE", named)
    trusted: list[str] = []

    def snapshot_download(model_id: str, **_: object) -> str:
        trusted.append(os.environ["SSL_CERT_FILE"])
        return f"/cache/{model_id}"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert plan.find_model(load(["--model", "owner/name"])).folder == "/cache/owner/name"
    assert trusted == [named or str(bundle)]


def test_a_hint_names_the_command_as_the_shell_finds_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/quire/deploy/local/__main__.py", "up"])
    monkeypatch.setenv("_QUIRE_TYPED", ".venv/bin/quire")  # the launcher's
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert terminal.program() == ".venv/bin/quire"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/quire")
    assert terminal.program() == "quire"
