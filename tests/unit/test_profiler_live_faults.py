"""What a profile of a cluster says when requests are refused, and when gateway or workers are gone."""

import time

import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from loadtest.profiler import live, runner
from loadtest.profiler.core.search import SearchLimits
from loadtest.profiler.live import LiveOptions, LiveRunner, RequestRefused
from loadtest.profiler.requests import Lengths
from loadtest.profiler.runner import NeedUnknown, Profiler
from shared.errors import PeerGone
from tests.support.serving_stub import serving
from tests.unit.test_profiler import Line, settings

SHORT = Lengths("short", [(8, 1)])


def live_runner(stub):
    options = LiveOptions(url=stub.url, statuses=(f"{stub.url}/status",), max_lag_ms=60_000.0, timeout_s=5.0)
    return LiveRunner(options)


def gone(stub):
    stub.shutdown()
    stub.server_close()


def profile_of(stub, *words):
    fast = (
        "--rates 20:20 --max-rate 20 --step 10 --repeats 1 --seconds 0.2 --requests 4 --burst 2 --burst-s 0.2"
    )
    at = ["--url", stub.url, "--status", f"{stub.url}/status", "--max-lag-ms", "60000"]
    return CliRunner().invoke(app, ["profile", *fast.split(), *at, *map(str, words)])


@pytest.mark.parametrize(("asked", "most"), [(8_192, 64), (0, 64), (32, 32)])
def test_lengths_are_cut_to_what_the_served_model_takes(tmp_path, asked, most):
    with serving(max_model_len=64) as stub:
        told = profile_of(stub, "--context", asked, "--out", tmp_path / "p.json")
    assert told.exit_code == 0, told.output + str(told.exception)
    longest = max(len(body["prompt"]) + body["max_tokens"] for body in stub.bodies)
    assert longest == most
    assert ("the served model takes no more" in told.output) == (asked != 32)


def test_a_request_that_is_refused_ends_the_run_and_is_no_missed_slo():
    with serving() as stub:
        stub.status = 400
        began_s = time.monotonic()
        with pytest.raises(RequestRefused, match=r"status 400: .*said so"):
            live_runner(stub).run(SHORT.at_rate(50.0, 60.0, 20, 1))
    assert time.monotonic() - began_s < 30, "the rest of the minute's requests is not sent"


def test_what_says_that_it_has_too_much_to_do_has_missed_the_slo():
    with serving() as stub:
        stub.status = 429
        assert not any(one.ok for one in live_runner(stub).run(SHORT.at_rate(50.0, 0.1, 3, 1)).outcomes)


def test_a_gateway_that_is_gone_ends_the_run_and_is_named():
    with serving() as stub, serving() as gateway:
        options = LiveOptions(url=gateway.url, statuses=(f"{stub.url}/status",), max_lag_ms=60_000.0)
        found = LiveRunner(options)
        gone(gateway)
        with pytest.raises(PeerGone, match=f"{gateway.url} does not answer"):
            found.run(SHORT.at_rate(50.0, 60.0, 20, 1))


def test_workers_without_a_status_page_are_gone_and_not_busy(monkeypatch):
    monkeypatch.setattr(live, "GONE_LIMIT_S", 0.2)
    with serving() as stub:
        found = live_runner(stub)
        gone(stub)
        with pytest.raises(PeerGone, match=f"{stub.url}/status does not answer"):
            found.run(SHORT.at_rate(50.0, 0.1, 3, 1))


def failing(fails):
    """Every request of bursts, which have more of them than runs, fails."""
    limits = SearchLimits(0.5, 1.0, 4.0, 8.0)
    line = Line(slots=8, service_ms=2000, pool_tokens=2400)

    class Failing:
        def __getattr__(self, name):
            return getattr(line, name)

        def run(self, requests):
            observed = line.run(requests)
            if len(requests) in fails:
                for one in observed.outcomes:
                    one.output_tokens, one.error = 0, "broke"
            return observed

    return Profiler(Failing(), Lengths("small", [(100, 20), (300, 40)]), settings(), limits)


def test_a_burst_of_which_most_failed_says_no_need(monkeypatch):
    whole = failing(()).profile()
    sizes = {f"{one['factor']:g}": one["num_requests"] for one in whole.bursts}
    with pytest.raises(NeedUnknown, match=r"of the 2x burst failed"):
        failing({sizes["2"]}).profile()
    found = failing({sizes["5"]}).profile()
    assert found.swap_bytes == {key: whole.swap_bytes[key] for key in ("2", "3")}
    assert found.bytes_per_gpu == whole.bytes_per_gpu


def test_an_interrupted_profile_says_that_nothing_was_saved(tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Profiler, "profile", interrupted)
    words = ["profile", "--simulate", "llama-8b", "--context", "2048", "--out", str(tmp_path / "p.json")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 130
    assert "nothing was saved" in told.output
    assert not list(tmp_path.iterdir())
