"""Prefill and decode on two hosts have unequal tensor parallelism: blocks are cut anew, tokens equal stock vLLM's.

The mempools are in network namespaces that a veth pair joins, as in test_exactness_two_hosts.py.
"""

import httpx
import pytest

from shared.testing.cluster import Cluster
from tests.integration.mempool_rig import MempoolProcess
from tests.integration.test_exactness import BLOCK_TOKENS, CASES, MODEL, assert_same, complete, stage
from tests.integration.test_exactness_two_hosts import status_of, until_at_rest
from tests.support import patience

NAMES = [
    "greedy-5", "greedy-64", "greedy-257", "second-257", "greedy-1500", "seeded-100", "logprobs-greedy", "json-schema",
    "penalties", "max-tokens-2",
]  # fmt: skip
PATIENCE_MS = 20_000  # ranks that wait for each other busily leave others no CPU for seconds

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["prefill-2-decode-1", "prefill-1-decode-2"])
def two(request, hosts, tmp_path_factory):
    """The cluster, and the mempools of the two hosts: of prefill, and of decode."""
    pools = []
    worker = [
        "--dtype", "float32", "--threads", "1", "--kv-cache-bytes", str(64 << 20),
        "--handoff-wait-ms", str(PATIENCE_MS), "--acquire-timeout-ms", str(PATIENCE_MS),
    ]  # fmt: skip
    flags = patience.flags({"worker": worker})
    try:
        for number, (role, ranks) in enumerate(zip(("prefill", "decode"), request.param, strict=True)):
            settings = {
                "peer-listen": f"tcp://10.213.7.{number + 1}:8107", "ucx-tls": "tcp", "capacity-bytes": 256 << 20,
                "peer-silent-ms": PATIENCE_MS, "copy-timeout-ms": PATIENCE_MS,
            }  # fmt: skip
            folder = tmp_path_factory.mktemp("host")
            pools.append(
                MempoolProcess(folder, prefix=hosts.prefix(number), instance=f"mempool-{number}", **settings)
            )
            flags[f"{role}-0"] = [
                "--mempool-socket", str(pools[-1].socket), "--tensor-parallel-size", str(ranks),
            ]  # fmt: skip
        with Cluster(MODEL, log_dir=tmp_path_factory.mktemp("two"), engine="vllm", flags=flags) as running:
            yield running, pools
    finally:
        for pool in pools:
            pool.stop()


def test_tokens_equal_stock_and_prompts_are_not_computed_twice(reference, two):
    cluster, pools = two
    wrong = []
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for number in range(20):  # the first link between two mempools has a second to come about
            body = {"model": MODEL.name, "prompt": [3 + number] * (4 * BLOCK_TOKENS), "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
            if status_of(pools[1]).counters.get("remote_blocks"):
                break
        for name in NAMES:
            answer = complete(client, CASES[name], reference[name])
            decode = stage(answer, "decode")
            try:
                assert_same(name, answer, reference[name])
                assert decode["tokens_computed"] == 1, f"{name}: {decode}"
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)
    there, here = until_at_rest(pools)
    assert here.counters["remote_blocks_recut"] == here.counters["remote_blocks"] > 1500 // BLOCK_TOKENS
    assert not here.counters.get("remote_pulls_failed")
    assert not there.counters.get("peer_misses_other_cut")
    assert status_of(pools[0]).pages_by_state["quarantined"] == 0
