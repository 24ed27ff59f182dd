"""What the tests' own processes say of a test that asks for what is not there."""

import io

import pytest

from shared import http_get
from shared.testing.cluster import Cluster
from shared.testing.processes import ProcessFailed, ServiceProcess

METRICS = b"""# HELP quire_a_total Some.
# TYPE quire_a_total counter
quire_a_total{kind="x"} 2.0
quire_a_total{kind="y"} 3.0
# HELP quire_b_total None yet.
# TYPE quire_b_total counter
# TYPE quire_c_ms histogram
quire_c_ms_count 4.0
"""


@pytest.mark.parametrize("name", ["workers", "prefil-0", "decode-1", "redis", "gateway-2"])
def test_flags_of_no_process_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}.*decode-0"):
        Cluster(tmp_path, log_dir=tmp_path, num_gateways=2, flags={name: ["--threads", "1"]})


def test_flags_reach_the_processes_that_they_name(tmp_path):
    flags = {"worker": ["--threads", "1"], "decode-0": ["--threads", "2"], "gateway-1": ["--processes", "1"]}
    cluster = Cluster(tmp_path, log_dir=tmp_path, num_gateways=2, flags=flags)
    assert cluster["decode-0"].command[-4:] == ["--threads", "1", "--threads", "2"]
    assert cluster["prefill-0"].command[-2:] == ["--threads", "1"]
    assert cluster["gateway-1"].command[-2:] == ["--processes", "1"]
    assert "--processes" not in cluster["gateway"].command
    cluster.run_dir.rmdir()


def test_a_metric_that_nobody_exports_is_none_and_no_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(http_get, "open_url", lambda *_, **__: io.BytesIO(METRICS))
    process = ServiceProcess("p", [], tmp_path / "log")
    assert process.metric("quire_a_total") == 5.0
    assert process.metric("quire_b_total") == 0.0, "known, without a value of any label"
    assert process.metric("quire_c_ms_count") == 4.0
    for name in ("quire_a", "quire_d_total"):
        with pytest.raises(ProcessFailed, match=f"no metric {name}"):
            process.metric(name)
    assert process.metric("quire_d_total", default=1.0) == 1.0
