"""Producers' models, their loop of work, and when they lend."""

import json

import pytest
import torch
from typer.testing import CliRunner

from deploy.local.cli import app
from loadtest.producers import audio, models, serve, unet
from loadtest.profiler.core.profile import decode
from shared.errors import PeerGone


@pytest.mark.slow
def test_the_diffusion_model_has_the_published_shape():
    with torch.device("meta"):
        model = unet.UNet(unet.SDXL)
        out = model(
            torch.empty(2, 4, 128, 128), torch.empty(2), torch.empty(2, 77, 2048), torch.empty(2, 2816)
        )
    assert sum(weight.numel() for weight in model.parameters()) == 2_567_463_684
    assert out.shape == (2, 4, 128, 128)


def test_the_audio_model_has_medium_size():
    with torch.device("meta"):
        model = audio.AudioTransformer(audio.MEDIUM)
    assert 1.7e9 < sum(weight.numel() for weight in model.parameters()) < 1.9e9


def test_tiny_models_compute_a_batch():
    images = models.KINDS["tiny-unet"].run(models.build("tiny-unet", "cpu"), 3)
    assert images.shape == (3, 4, unet.TINY.latent, unet.TINY.latent)
    assert bool(images.isfinite().all())
    clips = models.KINDS["tiny-audio"].run(models.build("tiny-audio", "cpu"), 2)
    assert clips.shape == (2, audio.TINY.codebooks, audio.TINY.steps)
    assert int(clips.max()) < audio.TINY.cardinality


def test_every_audio_step_sees_the_steps_before_it():
    torch.manual_seed(1)
    shape = audio.AudioShape(1, 32, 4, 2, 16, 3, 0.1)
    layer = audio.AudioTransformer(shape).layers[0]
    assert isinstance(layer, torch.nn.Module)
    x, text = torch.randn(2, shape.steps, 32), torch.randn(2, 3, 32)
    cache = torch.zeros(2, 2, 4, shape.steps, 8)
    with torch.inference_mode():
        first = [layer(x[:, at : at + 1], cache, at, text) for at in range(shape.steps)]
        changed = x.clone()
        changed[:, 0] *= -1
        cache.zero_()
        second = [layer(changed[:, at : at + 1], cache, at, text) for at in range(shape.steps)]
    assert not torch.allclose(first[-1], second[-1]), "the first step is seen by the last"
    assert bool(cache[:, :, :, -1].abs().sum() > 0)


@pytest.mark.parametrize("name", ["tiny_unet", "tiny_audio"])
def test_quire_profile_runs_on_them(name, tmp_path):
    target = tmp_path / "profile.json"
    words = [
        "profile",
        "--callable",
        f"loadtest.producers.models:{name}",
        "--max-batch",
        "2",
        "--device",
        "cpu",
    ]
    told = CliRunner().invoke(app, [*words, "--out", str(target), "--json", "--threshold-bytes", "1"])
    assert told.exit_code == 0, told.output + str(told.exception)
    found = decode(target.read_bytes())
    assert json.loads(told.stdout)["model"] == found.model
    assert found.stable_rate_per_s > 0
    assert found.batches[0]["batch"] == 1


def test_jobs_arrive_evenly_and_a_burst_at_once():
    queue = serve.Queue(10.0, batch=4)
    assert queue.num_waiting(0.35) == 3
    assert queue.take(0.35) == 3
    assert queue.take(0.36) == 0
    queue.burst(6)
    assert (queue.num_waiting(0.4), queue.num_arrived(0.4)) == (7, 10)
    assert (queue.take(0.4), queue.take(0.4), queue.take(0.4)) == (4, 3, 0)


def test_a_batch_always_waits_where_no_rate_is_given():
    queue = serve.Queue(0.0, batch=2)
    assert [queue.take(at_s) for at_s in (0.0, 0.0, 9.0)] == [2, 2, 2]
    queue.burst(3)
    assert queue.num_waiting(9.0) == 5
    assert [queue.take(9.0) for _ in range(3)] == [2, 2, 2]
    assert queue.num_waiting(9.0) == 2


def test_a_run_ends_and_is_summed_up():
    done = []
    loop = serve.Loop(done.append, serve.Queue(0.0, 3), None, lambda line: None)

    def work(count):
        done.append(count)
        if len(done) == 5:
            loop.stop()

    loop._work = work
    told = serve.summary(loop.run(3_600.0), [("queue grew to 9", 0.25)])
    assert told["jobs"] == 15
    assert told["jobs_per_s"] > 0
    assert told["reclaims"] == [{"reason": "queue grew to 9", "seconds": 0.25}]
    assert serve.summary(serve.Served(), [])["jobs_per_s"] == 0.0


LENDS = ("--lend-bytes", "4096", "--page-bytes", "4096", "--socket", "s", "--coordinator-url", "http://c")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "-1"], "--batch"),
        (["--rate", "inf"], "--rate"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--seconds", "0"], "--seconds"),
        (["--device", "gpu"], "--device"),
        (["--device", "meta"], "--device"),
        (["--device", "cuda:99"], "--device"),
        (["--lend-bytes", "-1"], "--lend-bytes"),
        (["--lend-bytes", str(1 << 30), "--instance", "p"], "--socket and --coordinator-url"),
        ([*LENDS], "--instance"),
        ([*LENDS, "--instance", "p", "--page-bytes", "8192"], "--page-bytes"),
        ([*LENDS, "--instance", "p", "--page-bytes", "0"], "--page-bytes"),
    ],
)
def test_options_that_lend_nothing_or_cannot_work_are_refused_by_name(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.options(["--model", "tiny-audio", *words])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_options_that_work_are_taken():
    assert serve.options(["--model", "tiny-audio", "--rate", "0.5", "--device", "cpu"]).batch == 1
    assert serve.options(["--model", "tiny-audio", *LENDS, "--instance", "p"]).instance == "p"


def test_without_its_mempool_a_producer_says_so_in_one_line(monkeypatch, capsys):
    def gone(*_):
        raise PeerGone("mempool s does not answer")

    monkeypatch.setattr(serve, "lender_of", gone)
    monkeypatch.setattr(serve.log, "setup", lambda *_: None)
    assert serve.main(["--model", "tiny-audio", "--device", "cpu", *LENDS, "--instance", "p"]) == 1
    assert capsys.readouterr().err == "mempool s does not answer\n"
