"""bench_prompt_tree: metrics from samples, and the upstream behind measured routers."""

import asyncio

from loadtest.bench_prompt_tree import metrics_from_samples
from loadtest.results import check_metrics
from loadtest.trivial_upstream import COMPLETION, Connection


def test_metrics_are_quantiles_and_what_a_router_adds():
    samples = [
        {"series": "calls", "times": {"lookup_us": [1.0, 2.0, 3.0]}, "metrics": {"lookup_redis_cpu_us": 9.0}},
        {"series": "placement", "times": {"place_ms": [4.0]}, "failed": 1},
        {"series": "router", "system": "direct", "policy": "", "whole_ms": [1.0, 1.0, 2.0]},
        {
            "series": "router",
            "system": "smg",
            "policy": "cache_aware",
            "whole_ms": [3.0, 4.0, 8.0],
            "closed_per_s": 500,
        },
    ]
    found = metrics_from_samples(samples)
    assert not check_metrics(found)
    assert found == {
        "lookup_p50_us": 2.0,
        "lookup_p99_us": 3.0,
        "lookup_redis_cpu_us": 9.0,
        "place_p50_ms": 4.0,
        "place_p99_ms": 4.0,
        "direct_p50_ms": 1.0,
        "direct_p99_ms": 2.0,
        "smg_cache_aware_added_p50_ms": 3.0,
        "smg_cache_aware_added_p99_ms": 6.0,
        "smg_cache_aware_closed_loop_ms_per_request": 2.0,
        "failed_requests": 1.0,
    }


class Written(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.out = []

    def write(self, data):
        self.out.append(bytes(data))


def test_the_trivial_upstream_answers_each_whole_request_once():
    connection, transport = Connection(), Written()
    connection.connection_made(transport)
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n12345"
    for piece in (request[:20], request[20:-2], request[-2:] + request, b"GET /health HTTP/1.1\r\n\r\n"):
        connection.data_received(piece)
    assert transport.out[:2] == [COMPLETION, COMPLETION]
    assert len(transport.out) == 3
    assert transport.out[2].startswith(b"HTTP/1.1 200")
