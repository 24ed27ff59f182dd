"""Prometheus metrics, read from the pool when they are scraped: nothing is counted twice on the hot path."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.mempool.mover_metrics import mover_metrics
from services.mempool.shell import MempoolShell

_PREFIX = "quire_mempool"
# Counters exist from the start, so that a rate over them is right from the first event.
COUNTERS = (
    "acquires", "acquires_waited", "attaches_refused", "blocks_ahead", "blocks_ahead_let_go",
    "blocks_ahead_refused", "blocks_by_layer", "blocks_by_layer_lost", "blocks_condemned", "blocks_hit",
    "blocks_missed", "blocks_pulled", "blocks_pulled_from_dram", "blocks_pulled_from_peer", "blocks_pushed_back",
    "calls_refused", "dram_blocks_dropped", "dram_blocks_evicted", "dram_blocks_freed", "dram_blocks_in",
    "dram_blocks_out", "dram_copies_dropped", "dram_copies_failed", "dram_refused", "engines_lost",
    "far_blocks_back", "far_blocks_moved", "far_blocks_out_dram", "far_blocks_out_peer", "far_blocks_without_room",
    "far_calls_refused", "far_copies_failed", "far_engines_killed", "far_maps_failed", "far_pages_freed",
    "far_unmaps_failed", "handoffs", "handoffs_expired", "handoffs_refused", "layers_not_for_here",
    "layers_refused", "leases_expired", "messages_stale", "pages_acknowledged", "pages_asked_back",
    "pages_asked_unpinned", "pages_evicted", "pages_granted", "pages_inherited", "pages_punched", "pages_recovered",
    "pages_regained", "pages_released", "pages_sealed", "peer_acquires", "peer_blocks_out", "peer_blocks_pinned",
    "peer_calls_staged", "peer_misses", "peer_misses_other_cut", "peer_pages_stale", "peer_waits_expired",
    "pull_portions", "pulls", "pulls_by_layer", "pulls_failed", "pulls_shortened", "pulls_without_pages",
    "push_backs", "push_backs_dropped", "push_backs_refused", "push_backs_told", "releases_unknown",
    "remote_blocks", "remote_blocks_recut", "remote_blocks_stale", "remote_late", "remote_links_lost",
    "remote_malformed", "remote_misses", "remote_pulls", "remote_pulls_failed", "remote_pulls_late",
    "remote_pulls_lost", "remote_readers_late", "remote_refusals", "remote_refused", "seals_duplicate",
    "spaces_dropped", "spaces_ended", "swap_blocks_in_dram", "swap_blocks_in_here", "swap_blocks_in_peer",
    "swap_blocks_known", "swap_blocks_lost", "swap_blocks_out_dram", "swap_blocks_out_peer", "swap_blocks_without_room",
    "swap_copies_failed", "swap_made_way_dram", "swap_made_way_peer", "swap_pages_stale", "swaps_refused",
    "twins_merged", "waits_expired",
)  # fmt: skip
# of callers of the nine calls
API_COUNTERS = (
    "instances_of_one_key", "pages_evacuated", "pages_evacuating", "pages_lost", "transfers_direct",
    "transfers_direct_bytes", "transfers_mediated",
)  # fmt: skip


class PoolCollector(Collector):
    """Registers itself; one per process."""

    def __init__(self, shell: MempoolShell) -> None:
        self._shell = shell
        REGISTRY.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        status = self._shell.pool.status()
        pages = GaugeMetricFamily(f"{_PREFIX}_pages", "Pages by state", labels=["state"])
        for state, count in status.pages_by_state.items():
            pages.add_metric([state], count)
        yield pages
        by_space = GaugeMetricFamily(
            f"{_PREFIX}_space_pages", "Pages by space and state", labels=["space", "state"]
        )
        for space in status.spaces:
            for state, count in space.pages_by_state.items():
                by_space.add_metric([str(space.number), state], count)
        yield by_space
        num_leased = sum(pool.leases.num_pages() for pool in self._shell.pool.pools.values())
        gauges = {
            "indexed_pages": ("Sealed pages that can be found by hash", status.num_indexed),
            "pinned_pages": (
                "Indexed pages that may not be evicted: engines work in them, readers or copies use them",
                status.num_pinned,
            ),
            "kept_pages": ("Indexed pages that engines work in, their cache included", status.num_kept),
            "leased_pages": ("Indexed pages that a lease or handoff keeps", num_leased),
            "leases": ("Leases held by readers", status.num_leases),
            "handoffs": ("Handoffs not yet acquired", status.num_handoffs),
            "attachments": ("Connected engines and clients", len(status.attachments)),
            "resident_bytes": ("Memory behind the pages", self._shell.spaces.resident_bytes()),
            "checks_failing_spaces": (
                "Spaces whose pages get no checksums, for they cannot be mapped",
                len(self._shell.checks.failing),
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)
        for name in COUNTERS:
            text = f"{name.replace('_', ' ')} since the start"
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=status.counters.get(name, 0))
        for name in API_COUNTERS:
            text = f"{name.replace('_', ' ')} since the start"
            value = self._shell.pool.api.api.counters.get(name, 0)
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)
        for name, value in self._shell.checks.counters.items():
            text = f"{name.replace('_', ' ')} since the start"
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)
        server = self._shell.server
        peers = CounterMetricFamily(f"{_PREFIX}_peers_ended", "Connections ended", labels=["reason"])
        peers.add_metric(["refused"], server.num_refused)
        peers.add_metric(["malformed"], server.num_malformed)
        yield peers
        yield from mover_metrics(self._shell.spaces.status())
