"""Time limits for a machine on which any process may get no core for seconds, for tests whose claim they are not."""

from collections.abc import Iterable, Mapping, Sequence

MS = 5_000
LIMITS_MS: dict[str, dict[str, int]] = {
    "coordinator": {"ttl_ms": MS},
    "scheduler": {"dead_after_ms": MS},
    "gateway": {"worker_silent_ms": MS, "place_reply_ms": MS},
    "worker": {
        "gateway_silent_ms": MS,
        # who waited in vain computes the prompt again: right, but not what a test of hand-offs counts
        "acquire_timeout_ms": 4 * MS,
        "fetch_wait_ms": 4 * MS,
        "handoff_wait_ms": 4 * MS,
    },
    # late copies are dropped, and computed again
    "mempool": {"copy_timeout_ms": 2 * MS, "out_timeout_ms": 2 * MS},
}


def environment(sections: Iterable[str] = tuple(LIMITS_MS)) -> dict[str, str]:
    """Variables of `quire up`; of these services only."""
    return {
        f"QUIRE_{section}_{name}".upper(): str(value)
        for section in sections
        for name, value in LIMITS_MS[section].items()
    }


def flags(more: Mapping[str, Sequence[str]] | None = None) -> dict[str, list[str]]:
    """Of shared.testing.cluster.Cluster: by section, `more` behind them."""
    found = {
        section: [word for name, ms in limits.items() for word in (f"--{name.replace('_', '-')}", str(ms))]
        for section, limits in LIMITS_MS.items()
    }
    for section, words in (more or {}).items():
        found[section] = [*found.get(section, []), *words]
    return found
