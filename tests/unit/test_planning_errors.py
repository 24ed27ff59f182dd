"""What `quire advise`, `profile` and `place` say of files and options that do not do: the cause, and no traceback."""

import json

import pytest
from typer.testing import CliRunner

from deploy.local import placement_file
from deploy.local.cli import app
from loadtest.reports.summary import Slo
from loadtest.results import load_result
from loadtest.simulator.advise import Advisor, Question, default_slo
from loadtest.simulator.hardware import from_data_sheet, from_file
from loadtest.simulator.sustained import MOST_MS
from loadtest.workloads.trace_files import TraceError, read
from shared.errors import InvalidRequest, SettingsError
from shared.placer.place import place
from shared.wire.placer import PlacementQuestion, PlacerModel, PlacerServer, Unplaceable
from tests.support.simulated import plain

GB = 10**9
MACHINE = from_data_sheet("h200", "llama-8b")


def test_a_model_that_no_server_has_room_for_alone_is_said_to_be_one():
    servers = [
        PlacerServer(name="few", gpus=1, gpu_memory_bytes=80 * GB),
        PlacerServer(name="small", gpus=8, gpu_memory_bytes=40 * GB),
    ]
    models = [PlacerModel(model="p", role="producer", tp=2, bytes_per_gpu=60 * GB, count=3)]
    answer = place(PlacementQuestion(servers=servers, models=models), lambda: 0.0)
    assert isinstance(answer, Unplaceable)
    assert answer.reasons == [
        "tensor parallelism 2 with 60000000000 bytes to lend of each GPU: no server has both as many GPUs and as much "
        "memory in each: 3 instance(s)"
    ]


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_a_model_whose_config_is_no_object_is_refused_by_the_files_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match=r"config\.json has to be an object"):
        from_data_sheet("h200", str(tmp_path))


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("key", "value"), [("head_dim", "-1"), *((key, value) for key in SIZES for value in ("0", "-1", "1e999"))]
)
def test_a_model_whose_config_has_a_size_that_none_can_have_is_refused(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert from_data_sheet("h200", str(tmp_path)).memory_tokens > 0
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {key: json.loads(value)}))
    with pytest.raises(SettingsError, match=r"config\.json does not say the model's sizes"):
        from_data_sheet("h200", str(tmp_path))


QUESTION = {
    "servers": [{"name": "a", "gpus": 2, "gpu_memory_bytes": "80 GB"}], "models": [{"profile": "p.json"}],
}  # fmt: skip


def test_a_list_is_told_what_the_file_has_to_be(tmp_path):
    path = tmp_path / "q.json"
    path.write_text("[1]")
    with pytest.raises(SettingsError, match=r"q\.json has to be an object with servers and models"):
        placement_file.read(path, time_limit_ms=1)
    path.write_text(json.dumps(QUESTION))
    (tmp_path / "p.json").write_text("[1]")
    wanted = r"p\.json has to be an object with model, role, tp, bytes_per_gpu, as `quire profile` saves it"
    with pytest.raises(SettingsError, match=wanted):
        placement_file.read(path, time_limit_ms=1)


def test_half_of_a_surrogate_pair_in_a_files_text_is_refused_by_the_files_name(tmp_path):
    """No terminal, file or message takes such text; both halves are a character."""
    path, profile = tmp_path / "q.json", {"model": "m", "role": "neutral", "tp": 1, "bytes_per_gpu": 0}
    for text in (QUESTION | {"models": [profile | {"model": "a\ud800"}]}, {"\udfff": 1}):
        path.write_text(json.dumps(text))
        with pytest.raises(SettingsError, match=r"q\.json is not JSON: .*half of a surrogate pair"):
            placement_file.read(path, time_limit_ms=1)
        with pytest.raises(SettingsError, match=r"q\.json is not JSON: .*half of a surrogate pair"):
            from_file(path)
    path.write_text(json.dumps(QUESTION | {"models": [profile | {"model": "a\U0001f600"}]}))
    assert placement_file.read(path, time_limit_ms=1).models[0].model == "a\U0001f600"


MODEL_ROW = {"part": "model", "profile": -1}


@pytest.mark.parametrize(
    "row",
    [1, MODEL_ROW, MODEL_ROW | {"coefficients": 3}, MODEL_ROW | {"coefficients": {"shape": []}}],
    ids=["no object", "no coefficients", "a number for them", "no shape"],
)
def test_a_sample_without_coefficients_is_none_of_costs(tmp_path, row):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"samples": [row]}))
    for words in ({}, {"gpu": "h200", "model": "llama-8b"}):
        with pytest.raises(SettingsError, match=r"c\.json (is a result file without cost|has no cost) coeff"):
            from_file(path, **words)


def test_samples_in_a_file_whose_name_is_no_text_cannot_be_read(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"samples_file": 3}')
    with pytest.raises(ValueError, match=r"c\.json has its samples in 3, which is no name of a file"):
        load_result(path)
    with pytest.raises(SettingsError, match="no name of a file"):
        from_file(path)
    path.write_text('["samples_file"]')
    assert load_result(path) == ["samples_file"]


@pytest.mark.parametrize("size", ["80e9", "80_000_000_000.0", "8E10"])
def test_whole_floats_are_sizes(tmp_path, size):
    path = tmp_path / "q.toml"
    path.write_text(
        f'[[servers]]\nname = "a"\ngpus = 2\ngpu_memory_bytes = {size}\n[[models]]\nmodel = "m"\nbytes_per_gpu = 0\n'
    )
    (server,) = placement_file.read(path, time_limit_ms=1).servers
    assert server.gpu_memory_bytes == 80 * GB
    for wrong in ("80.5", "inf", "nan"):
        path.write_text(path.read_text().replace(size, wrong))
        with pytest.raises(SettingsError, match=f"{wrong} is no size"):
            placement_file.read(path, time_limit_ms=1)
        path.write_text(path.read_text().replace(wrong, size))


def test_lengths_of_a_csv_may_be_written_as_whole_floats(tmp_path):
    path = tmp_path / "t.csv"
    head = "timestamp,input_length,output_length\n"
    path.write_text(f"{head}0,100.0,20.0\n5,1e2,20\n")
    assert [(one.prompt_tokens, one.output_tokens) for one in read(path)] == [(100, 20), (100, 20)]
    for wrong in ("100.5", "inf", "nan", "", "x"):
        path.write_text(f"{head}0,{wrong},20\n")
        with pytest.raises(TraceError, match=r"t\.csv:2: no line of an Azure trace"):
            read(path)


def test_a_prompt_that_has_no_room_is_what_is_said_and_no_limit_that_nobody_set():
    requests = [plain(0, 0.0, 1_900_000, 10), plain(1, 1000.0, 5, 10)]
    slo = default_slo(requests, MACHINE)
    assert slo.ttft_ms == MOST_MS
    for each in (slo, Slo(2 * MOST_MS, 50.0)):
        with pytest.raises(InvalidRequest, match="a request of 1900010 tokens has no room"):
            Advisor(Question(requests, MACHINE, 2, each), lambda: 0.0, 1.0)


def test_advise_refuses_a_negative_number_of_tokens(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("timestamp,input_length,output_length\n0,10,5\n1000,10,5\n")
    done = CliRunner().invoke(app, ["advise", str(path), "--memory-tokens", "-5"])
    assert done.exit_code != 0
    assert isinstance(done.exception, SettingsError)
    assert "--memory-tokens" in str(done.exception)
