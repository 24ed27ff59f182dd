"""What /metrics says of a mempool's pages, and that nothing is counted which it does not show."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.mempool import collector
from services.mempool.collector import API_COUNTERS, COUNTERS, PoolCollector
from services.mempool.core.actions import PoolLimits
from services.mempool.shell import MempoolShell
from shared.ids import Epoch
from shared.transport.clock import MonotonicClock
from tests.support.control_plane import ROOT
from tests.unit.mempool_harness import Harness, chain
from tests.unit.test_mempool_pins import unpin, worker

LENDING = {  # of lending_metrics.py, as lending_NAME, or in /status alone
    "blocks_dropped", "lending_refused", "loans_", "loans_excused", "loans_taken", "offers_settled", "pages_returned",
    "replies_of_old_leaders",
}  # fmt: skip
TIERS = re.compile(r"blocks_(dropped|evicted|freed|in|out)|copies_(dropped|failed)")  # as dram_NAME
SUFFIXES = ("dram", "peer")
BY_KIND = {"failed "}  # of the nine calls, by code


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """A harness whose pool is the shell's, and a function that scrapes."""
    registry = CollectorRegistry()
    monkeypatch.setattr(collector, "REGISTRY", registry)
    shell = MempoolShell(tmp_path / "m.sock", PoolLimits(capacity_bytes=1 << 20), Epoch(1), MonotonicClock())
    pool = Harness(num_pages=8)
    shell.pool.pools[0] = pool.pool
    PoolCollector(shell)

    def scraped(name: str) -> float:
        (found,) = re.findall(rf"^quire_mempool_{name} ([\d.]+)$", generate_latest(registry).decode(), re.M)
        return float(found)

    yield pool, scraped
    del shell.pool.pools[0]
    shell.close()


def test_leased_pages_are_zero_when_nobody_reads_and_what_an_engine_caches_is_kept_apart(rig):
    """pinned_pages said that it was leases and handoffs, and never came back to zero."""
    pool, scraped = rig
    worker(pool, 1, quota=4)
    pages = pool.save(1, chain("a", "b"))
    pool.client(2)
    assert [scraped(f"{name}_pages") for name in ("pinned", "kept", "leased")] == [2, 2, 0]
    lease = pool.acquire(2, chain("a", "b"))
    pool.acquire(2, chain("a"))
    pool.ready(1, "h", chain("a"))
    assert [scraped(f"{name}_pages") for name in ("pinned", "kept", "leased")] == [2, 2, 2], "each page once"
    unpin(pool, 1, pages)
    assert [scraped(f"{name}_pages") for name in ("pinned", "kept", "leased")] == [2, 0, 2]
    pool.release(2, lease.lease_id)
    assert scraped("leased_pages") == 1
    pool.advance(2_000)
    assert [scraped(f"{name}_pages") for name in ("pinned", "kept", "leased")] == [0, 0, 0]


def counted() -> dict[str, str]:
    """Every name under which the core counts, and where; of one that is made of parts its first part."""
    found = {}
    for path in (ROOT / "services/mempool/core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("counters"):
                found |= dict.fromkeys(_names(node.slice), f"{Path(path).name}: {ast.unparse(node)}")
    return found


def _names(index: ast.expr) -> list[str]:
    match index:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp(body=body, orelse=other):
            return _names(body) + _names(other)
        case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_]):
            return [first]
    return []


def test_what_the_core_counts_is_on_metrics():
    """A third of it was in /status alone."""
    shown = {*COUNTERS, *API_COUNTERS}
    found = counted()
    assert len(found) > 90
    missing = {
        name: where
        for name, where in found.items()
        if name not in shown | LENDING | BY_KIND
        and not (TIERS.fullmatch(name) and f"dram_{name}" in shown)
        and not (name.endswith("_") and all(f"{name}{kind}" in shown for kind in SUFFIXES))
    }
    assert missing == {}


def test_names_that_the_core_picks_while_it_runs_are_on_metrics(rig):
    names = (
        "far_blocks_back",
        "far_blocks_moved",
        "blocks_pulled",
        "blocks_pushed_back",
        "swap_blocks_in_here",
    )
    assert [rig[1](f"{name}_total") for name in names] == [0] * len(names)
    assert len(set(COUNTERS) | set(API_COUNTERS)) == len(COUNTERS) + len(API_COUNTERS), "each once"
