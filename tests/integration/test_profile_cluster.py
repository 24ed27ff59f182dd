"""`quire profile` of a real cluster with mock engines: load through the gateway, memory from the workers."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from loadtest.profiler.core.profile import decode
from loadtest.profiler.live import LiveOptions, LiveRunner
from shared.errors import PeerGone, SettingsError
from shared.testing.cluster import Cluster
from tests.support import patience

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "quire-demo"
BLOCKS = 512


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = patience.flags({"worker": ["--mock-step-ms", "20", "--mock-kv-blocks", str(BLOCKS)]})
    with Cluster(MODEL, log_dir=tmp_path_factory.mktemp("cluster"), flags=flags) as found:
        yield found


def status_of(cluster, name):
    return f"{cluster[name].admin_url}/status"


def test_a_cluster_is_profiled_through_its_gateway_with_its_workers_memory(cluster, tmp_path):
    target = tmp_path / "profile.json"
    words = ["profile", "--url", cluster.url, "--out", str(target), "--json", "--max-lag-ms", "60000"]
    for name in ("prefill-0", "decode-0"):
        words += ["--status", status_of(cluster, name)]
    words += [
        "--slo-ttft-ms",
        "1e6",
        "--slo-tbt-ms",
        "1e6",
        "--rates",
        "10:10",
        "--max-rate",
        "10",
        "--step",
        "5",
    ]
    words += ["--repeats", "1", "--seconds", "1", "--requests", "8", "--burst", "2", "--burst-s", "1"]
    words += ["--scale", "0.05", "--context", "400", "--threshold-bytes", "1"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output + str(told.exception) + cluster.logs()
    found = decode(target.read_bytes())
    assert json.loads(told.stdout)["model"] == found.model == cluster.model_name
    assert found.stable_rate_per_s == 10
    assert "highest rate that is tried" in found.reason
    assert found.num_instances == 1, "decode-0 alone holds contexts"
    worker = cluster["decode-0"].status()
    assert found.settings["chunk_tokens"] == cluster["prefill-0"].status()["max_batched_tokens"] != 512
    assert found.pool_bytes == BLOCKS * worker["block_bytes"] > 0
    assert 0 < found.peak_kv_bytes <= found.pool_bytes
    assert found.free_bytes == found.pool_bytes - found.peak_kv_bytes
    assert (found.role, found.bytes_per_gpu) == ("producer", found.free_bytes)
    assert all(run["num_failed"] == 0 for run in found.runs)
    assert found.bursts[0]["num_requests"] > 25
    assert found.bursts[0]["demand_bytes"] > 0


def test_pages_that_are_no_decode_workers_are_refused(cluster):
    def runner(*statuses):
        return LiveRunner(LiveOptions(url=cluster.url, statuses=statuses))

    with pytest.raises(SettingsError, match="decode worker"):
        runner(status_of(cluster, "prefill-0"))
    with pytest.raises(SettingsError, match="no status page of a worker"):
        runner(status_of(cluster, "scheduler"))
    with pytest.raises(PeerGone, match="does not answer"):
        runner("http://127.0.0.1:9/status")
