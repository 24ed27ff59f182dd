"""A diffusion model's process lends while it is idle: a consumer's tensor is on it, and off it when a burst comes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from shared.aqua.consumer import Aqua
from shared.aqua.tensor import AquaTensor
from tests.integration.mempool_rig import ROOT, until
from tests.support.aqua_rig import PAGE_BYTES, AquaRig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S = 120.0


@pytest.fixture
def rig(tmp_path):
    made = AquaRig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def producer(rig, tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "loadtest.producers.serve", "--model", "tiny-unet", "--device", "cpu",
                "--batch", "1", "--rate", "0.001", "--seconds", "3600", "--burst-jobs", "40",
                "--instance", "unet", "--socket", str(rig.mempool.socket), "--coordinator-url", rig.coordinator.url,
                "--lend-bytes", str(8 * PAGE_BYTES), "--page-bytes", str(PAGE_BYTES), "--steady-ms", "200",
                "--hold-ms", "3000000", "--deadline-ms", "60000",
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_tensor_is_on_the_producer_until_work_comes(rig, producer):
    with Aqua(rig.consumer(borrow_bytes=8 * PAGE_BYTES)) as aqua:
        data = torch.randn(PAGE_BYTES // 2)
        tensor = AquaTensor.from_tensor(data, aqua)

        def is_on_peer() -> bool:
            aqua.step()
            return tensor.location == "peer"

        until(is_on_peer, "the idle producer lends", LIMIT_S)
        producer.send_signal(signal.SIGUSR1)
        until(lambda: tensor.location == "dram", "it takes its memory back", LIMIT_S)
        assert torch.equal(tensor.to_compute(), data)
        until(lambda: rig.mempool.counts().get("leased", 0) == 0, "nothing of it is lent", LIMIT_S)
        end_s = time.monotonic() + LIMIT_S
        while (line := json.loads(producer.stdout.readline()))["jobs"] < 40 or line["lent_bytes"]:
            assert time.monotonic() < end_s
        producer.terminate()
        told = json.loads(producer.stdout.read().splitlines()[-1])
        assert told["summary"]
        assert told["jobs"] >= 40
        assert [each["reason"].split()[0] for each in told["reclaims"]] == ["queue"]
        assert producer.wait(LIMIT_S) == 0


def test_a_producer_whose_mempool_is_gone_ends_soon_with_its_summary_and_prints_json_alone(
    rig, producer, tmp_path
):
    end_s = time.monotonic() + LIMIT_S
    while not json.loads(producer.stdout.readline())["lent_bytes"]:
        assert time.monotonic() < end_s
    rig.mempool.kill()
    producer.terminate()
    began_s = time.monotonic()
    lines = [json.loads(line) for line in producer.stdout.read().splitlines()]
    assert producer.wait(LIMIT_S) == 0
    assert time.monotonic() - began_s < 20, "5 s for a mempool that does not answer, and slow machines"
    assert lines[-1]["summary"]
    said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert said[-1]["event"] == "not_taken_back"
    assert said[-1]["instance"] == "unet"
