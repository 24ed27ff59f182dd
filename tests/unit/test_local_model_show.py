"""What `quire model show` says of links, by which a prefix is fetched or computed again."""

import msgspec

from deploy.local.cmd_model import _rows
from deploy.local.instances import cost_of
from tests.unit.test_costmodel import CPU

CORRECTION = {"factor": 1.0, "error_ratio": 0.0, "num_observed": 0}
COST = {
    "coefficients": msgspec.to_builtins(CPU),
    "corrections": {"prefill": CORRECTION, "decode": CORRECTION},
}


def link(gb_per_s, latency_ms, num_measured=0, num_given_up=0):
    return {
        "gb_per_s": gb_per_s,
        "latency_ms": latency_ms,
        "num_measured": num_measured,
        "num_given_up": num_given_up,
    }


def test_each_link_has_a_row_that_tells_measured_from_assumed_and_none():
    links = {"peer": link(212.4, 1.0, 7), "dram": link(5.0, 1.0), "remote": link(0.01, 2.5, 6, 3)}
    known = {"p0": cost_of({"cost": COST, "links": links}), "older": cost_of({"cost": COST})}
    rows = dict(_rows(known))
    assert rows["KV from another space"] == ["212 GB/s, 1.0 ms (7 seen)", "-"]
    assert rows["KV from host memory"] == ["5 GB/s, 1.0 ms (assumed)", "-"]
    assert rows["KV from another host"] == ["0.01 GB/s, 2.5 ms (6 seen, 3 given up)", "-"]


def test_an_instance_without_a_model_or_an_answer_still_has_none():
    assert cost_of(None) == {}
    assert cost_of({"cost": {"coefficients": None}, "links": {"peer": link(5.0, 1.0)}}) == {
        "coefficients": None
    }
