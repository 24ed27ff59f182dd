"""Settings of the local cluster: precedence, refusals that name the right key, files' places."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deploy.local import config, plan, terminal
from deploy.local.config import ClusterSettings
from shared.errors import SettingsError


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
    monkeypatch.setattr("sys.argv", [".venv/bin/quire", "up"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert terminal.program() == ".venv/bin/quire"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/quire")
    assert terminal.program() == "quire"
