"""The `quire` command as a user types it: exit codes, messages, and one whole cluster with mock engines."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from deploy.local import config
from deploy.local.cli import app
from deploy.local.config import DEMO_MODEL, paths_of
from shared.errors import SettingsError
from shared.free_ports import is_free
from tests.integration.mempool_rig import until
from tests.support import patience
from tests.support.local_cluster import free_base_port

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 150


class Shell:
    """Runs `quire` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        # a hand-off is expected, however long others keep a worker from the machine's cores
        self.env |= {"QUIRE_HOME": str(home), "COLUMNS": "200", **patience.environment()}

    def __call__(self, *words, env=None, code=0):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.local.cli", *words],
            cwd=self.home.parent,
            env={**self.env, "PYTHONPATH": str(REPO), **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert code in (None, done.returncode), f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def once_ready(self, *words):
        """Health is that of the last probe, and the machine may have kept whom it asked waiting."""
        until_s = time.monotonic() + 60
        while (done := self(*words, code=None)).returncode == 1 and time.monotonic() < until_s:
            time.sleep(0.5)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def quire(tmp_path):
    return Shell(tmp_path / "home")


def test_without_a_cluster_commands_say_so_by_exit_code(quire):
    for words in (["status"], ["kill", "redis"], ["chat", "hello", "--url", "http://127.0.0.1:9"]):
        assert "quire up" in quire(*words, code=3).stderr
    assert "nothing is running" in quire("down").stdout
    assert "nothing was started yet" in quire("logs", code=1).stderr
    assert "no spans" in quire("trace", "chatcmpl-0", code=1).stderr


def test_wrong_usage_is_exit_code_two(quire):
    assert "No such command" in quire("upp", code=2).stderr
    assert "did you mean 'num_decode'" in quire("up", "--set", "num_decod=1", code=2).stderr
    assert "QUIRE_REDIS_URL" in quire("up", env={"QUIRE_REDIS_ULR": "x"}, code=2).stderr
    assert "cluster.port" in quire("up", env={"QUIRE_GATEWAY_LISTEN": "127.0.0.1:1"}, code=2).stderr
    assert "no folder" in quire("up", "--model", "./none", code=2).stderr
    for words in (("up", "--set", "ready_timeout_s=1000000000000"), ("doctor", "--quick")):
        said = quire(*words, env={} if words[0] == "up" else {"QUIRE_CLUSTER_THREADS": "-1"}, code=2).stderr
        assert "setting cluster." in said
    assert "cluster.pd_caching" in quire("up", "--pd-caching", "4", code=2).stderr
    assert "auto, off, fuse, full" in quire("up", "--weave", "half", code=2).stderr


@pytest.mark.parametrize("words", [["version"], ["--help"], ["down"], ["up", "--set", "threads=-1"]])
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_behind_the_output_is_one_sentence(quire, words, both):
    command = [sys.executable, "-P", "-m", "deploy.local.cli", *words]
    env = {**quire.env, "PYTHONPATH": str(REPO)}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, env=env, stdout=full, stderr=full if both else subprocess.PIPE, timeout=LIMIT_S
        )
    assert done.returncode == (2 if words[0] == "up" else 1)
    if not both:
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--prefill", "num_prefill"),
        ("--decode", "num_decode"),
        ("--port", "port"),
        ("--base-port", "base_port"),
    ],
)
def test_a_zero_is_refused_like_any_other_wrong_number(flag, key):
    refused = CliRunner().invoke(app, ["up", flag, "0"]).exception
    assert isinstance(refused, SettingsError)
    assert f"setting cluster.{key}:" in refused.message


@pytest.mark.parametrize(
    "words",
    [
        *(["stages", "--last", text] for text in ("inf", "1e300")),
        ["profile", "--simulate", "llama-8b", "--max-rate", "inf"],
        *(
            ["advise", "nowhere.jsonl", flag, text]
            for flag in ("--slo-ttft-ms", "--slo-tpot-ms", "--link-gb-per-s", "--rate")
            for text in ("nan", "inf", "-1")
        ),
        *(
            ["place", "PLACE", "--apply", url]
            for url in ("http://127.0.0.1:99999", "http://a:b", "http://", "x")
        ),
        ["place", "NO-PROFILE"],
        *(["chat", "hello", "--url", url] for url in ("http://127.0.0.1:99999", "http://a..b", "there")),
        ["chat", "hello \udcff", "--url", "http://127.0.0.1:9"],
        ["chat", "hello", "--system", "\udcff", "--url", "http://127.0.0.1:9"],
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line(words, tmp_path):
    server = '[[servers]]\nname = "a"\ngpus = 1\ngpu_memory_bytes = "80 GB"\n[[models]]\n'
    model = 'model = "m"\ntp = 1\nbytes_per_gpu = "25 GB"\n'
    for name, text in (("PLACE", server + model), ("NO-PROFILE", server + 'profile = ""\n')):
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / word) if word in ("PLACE", "NO-PROFILE") else word for word in words]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, SettingsError), refused
    assert "\n" not in refused.message


@pytest.mark.parametrize("key", ["\u00e9", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(monkeypatch, key):
    monkeypatch.setenv("QUIRE_API_KEY", key)
    refused = CliRunner().invoke(app, ["chat", "hello", "--url", "http://127.0.0.1:9"]).exception
    assert isinstance(refused, SettingsError)
    assert "QUIRE_API_KEY" in refused.message
    assert key not in refused.message


class Other(BaseHTTPRequestHandler):
    """A web server that is no gateway: 200, and `models` or `answer`."""

    models = b'{"data": [{"id": "m"}]}'
    answer = b""

    def do_GET(self) -> None:
        self._say(self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._say(self.answer)

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def other():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


HTML, A_LIST, NO_TEXT = b"<html>", b"[1]", b"\xff"


@pytest.mark.parametrize(
    ("where", "body"),
    [
        *(("models", body) for body in (HTML, A_LIST, NO_TEXT, b"{}", b'{"data": 3}', b'{"data": ["m"]}')),
        *(("answer", b"data: %s\n\n" % body) for body in (HTML, A_LIST, NO_TEXT, b'{"choices": 3}')),
        ("answer", HTML),
    ],
)
def test_another_web_server_is_named_as_such_in_one_line(monkeypatch, other, where, body):
    monkeypatch.setattr(Other, where, body)
    done = CliRunner().invoke(app, ["chat", "hello", "--url", other])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    (line,) = done.output.strip().splitlines()
    assert line.startswith(f"error: {other} answers, but not as OpenAI's API: ")


def test_an_answer_is_shown_piece_by_piece_until_an_error_ends_it(monkeypatch, other):
    events = [
        {"id": "x", "choices": [{"delta": {"role": "assistant", "content": "caf\u00e9"}}], "usage": None}
    ]
    events += [
        {"id": "x", "choices": [{"delta": {"content": None}}]},
        {"error": {"message": "gone", "code": "c"}},
    ]
    monkeypatch.setattr(Other, "answer", b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events))
    done = CliRunner().invoke(app, ["chat", "hello", "--url", other + "/v1"])
    assert done.exit_code == 1
    assert "caf\u00e9" in done.output
    assert "the stream broke off: gone (c)" in done.output


def test_typed_text_that_is_not_utf8_is_refused(quire, other):
    command = [sys.executable, "-P", "-m", "deploy.local.cli", "chat", "--url", other]
    env = {**quire.env, "PYTHONPATH": str(REPO), "PYTHONUTF8": "1"}
    for errors in ("strict", "surrogateescape"):
        told = subprocess.run(
            command, env={**env, "PYTHONIOENCODING": f"utf-8:{errors}"}, input=b"\xff\n", capture_output=True
        )
        assert told.returncode == 2
        assert told.stderr.decode().strip() == "error: what is to be said is not UTF-8 text"


@pytest.mark.parametrize(
    ("words", "prefill", "decode"),
    [
        (["--weave", "full"], "full", "fuse"),
        (["--weave", "fuse"], "fuse", "fuse"),
        (["--weave", "off"], "off", "off"),
        (["--weave", "auto"], "auto", "auto"),
        (["--weave", "full", "--set", "decode_weave=off"], "full", "off"),
        ([], "", ""),
    ],
)
def test_one_flag_says_how_ranks_of_both_roles_add_up_and_set_says_it_of_one(
    monkeypatch, words, prefill, decode
):
    class Loaded(Exception):
        pass

    load, found = config.load, []

    def only_load(argv):
        found.append(load(argv, environ={}))
        raise Loaded

    monkeypatch.setattr(config, "load", only_load)
    result = CliRunner().invoke(app, ["up", *words])
    assert isinstance(result.exception, Loaded), result.output
    assert (found[0].prefill_weave, found[0].decode_weave) == (prefill, decode)


def test_every_command_explains_itself():
    runner = CliRunner()
    words = runner.invoke(app, ["--help"]).stdout
    for command in ("up", "down", "status", "logs", "chat", "trace", "doctor", "kill", "version"):
        assert command in words
        assert "Exit codes: 0 ok" in runner.invoke(app, [command, "--help"]).stdout


def test_no_help_text_has_brackets_which_the_console_would_leave_out():
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        assert not [text for text in texts if "[" in text], name


@pytest.mark.parametrize("how", ["variable", "file"])
def test_up_refuses_unequal_ranks_in_a_layout_that_cannot_hand_them_over(quire, tmp_path, how):
    words = ["up", "--engine", "mock", "--topology", "disaggregated", "--set", "decode_tensor_parallel=2"]
    words += ["--base-port", str(free_base_port())]
    env = {"QUIRE_WORKER_KV_LAYOUT": "token-major"} if how == "variable" else {}
    if how == "file":
        (tmp_path / "quire.toml").write_text('[worker]\nkv_layout = "token-major"\n')
        words += ["--config", str(tmp_path / "quire.toml")]
    with socket.socket() as taken:  # nothing is started, whatever is refused first
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words += ["--port", str(taken.getsockname()[1])]
        said = " ".join(quire(*words, env=env, code=2).stderr.split())
    assert "worker.kv_layout" in said
    assert "cluster.decode_tensor_parallel" in said


def test_up_names_the_setting_of_a_host_that_cannot_be_listened_on(quire):
    words = ["--host", "no-such-host.invalid", "--base-port", str(free_base_port())]
    said = " ".join(quire("up", "--engine", "mock", *words, code=2).stderr.split())
    assert said.startswith("error: cannot listen on no-such-host.invalid: ")
    assert said.endswith("; see cluster.host")


def test_a_taken_port_is_refused_with_its_owner(quire):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = str(free_base_port())
        done = quire("up", "--engine", "mock", "--port", str(port), "--base-port", base, code=2)
    assert f"port {port}, wanted by gateway" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    assert not paths_of(quire.home).control.exists()


def test_doctor_names_what_is_wrong_and_exits_one(quire):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = quire("doctor", "--quick", "--json", env={"QUIRE_CLUSTER_PORT": port}, code=1)
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    assert rows["ports"]["verdict"] == "fail"
    assert "QUIRE_CLUSTER_PORT" in rows["ports"]["fix"]
    assert rows["python"]["verdict"] == "ok"
    assert rows["redis"]["verdict"] == "ok"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_from_up_to_down(quire, tmp_path):
    base = free_base_port()
    up = ["up", "--engine", "mock", "--port", str(base + 90), "--base-port", str(base)]
    up += [
        "--set",
        "memory_market=true",
        "--set",
        "api_keys=sk-one",
        "--model",
        str(DEMO_MODEL),
        "--topology",
        "disaggregated",
    ]
    url = f"http://127.0.0.1:{base + 90}"
    try:
        first = quire(*up)
        assert f"Quire serves quire-demo at {url}/v1" in first.stdout
        assert "curl -N" in first.stdout
        assert "already running" in quire.once_ready(*up).stdout
        assert "other settings" in quire(*up, "--decode", "2", code=1).stderr
        assert re.search(r"decode-0 +ready +ok", quire.once_ready("status").stdout)

        key = {"QUIRE_API_KEY": "sk-one"}
        assert "invalid_api_key" in quire("chat", "hello", code=1).stderr
        chat = quire("chat", "hello", "--max-tokens", "8", env=key)
        assert chat.stdout.strip()
        assert re.search(r"decode +decode-0", chat.stderr)
        request_id = re.search(r"quire trace (chatcmpl-\w+)", chat.stderr).group(1)
        until(lambda: "decode-0" in quire("trace", request_id).stdout, "decode's spans")
        assert "gateway.receive" in quire("trace", request_id).stdout

        models = json.loads(quire("model", "show", "--json").stdout)
        assert models["prefill-0"]["coefficients"]["step_overhead_ms"] == 10.0
        assert models["decode-0"]["corrections"]["decode"]["num_observed"] > 0
        assert models["prefill-0"]["links"]["remote"]["num_measured"] == 0
        sizes = {"kv_tokens": models["decode-0"]["engine"]["kv_tokens"], "dram_tokens": 0}
        sizes |= {"max_num_seqs": 64, "pd_caching": "3"}
        assert models["decode-0"]["engine"] == sizes
        trace = tmp_path / "trace.csv"
        rows = "".join(f"{1_000 * second},50,5\n" for second in range(10))
        trace.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
        flags = ("--cost", "running", "--gpus", "2", "--requests", "10", "--json", "--slo-ttft-ms", "0.01")
        advice = json.loads(quire("advise", str(trace), *flags).stdout)
        assert advice["engine"]["memory_tokens"] == sizes["kv_tokens"] > 0
        assert "decode x" in advice["costs"]
        shown = quire("model", "show").stdout
        assert re.search(r"per step, ms +10 +10", shown)
        assert "GB/s" in shown

        # both engines are in one space: there is nobody to lend to
        says = r"lending  decode-0, prefill-0: (.*)"
        while not (lending := re.search(says, quire.once_ready("status").stdout)):
            continue
        assert lending.group(1).startswith("nothing of 1.0 GiB")

        status = json.loads(quire.once_ready("status", "--json").stdout)
        old = next(s["pid"] for s in status["services"] if s["name"] == "decode-0")
        assert f"pid {old}" in quire("kill", "decode-0").stdout
        assert "no service 'nobody'" in quire("kill", "nobody", code=1).stderr
        assert "gateway" in quire("logs", "-n", "3").stdout
    finally:
        down = quire("down")
    assert "stopped in" in down.stdout
    assert float(re.search(r"stopped in ([\d.]+) s", down.stdout).group(1)) < 30
    quire("status", code=3)
    assert is_free("127.0.0.1", base + 90)
    assert "gateway" in quire("logs", "gateway", "-n", "1").stdout or quire("logs", "gateway").stdout
