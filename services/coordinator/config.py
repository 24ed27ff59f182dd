"""Settings of the coordinator."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from services.coordinator.core.market_records import MarketLimits
from shared import settings
from shared.errors import SettingsError

# for --help
ABOUT = "Knows who is in the cluster, grants epochs, lends memory (python -m services.coordinator)."


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one coordinator. admin_listen stays empty: /health is on `listen`."""

    instance: str = "coordinator-0"
    log_level: settings.LogLevel = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0
    admin_listen: str = ""

    listen: str = "127.0.0.1:8103"
    redis_url: str = "redis://127.0.0.1:8104/0"  # "": no journal
    api_keys: list[str] = []  # none: everybody who can connect may register

    heartbeat_interval_ms: int = 500
    ttl_ms: int = 1_500
    forget_after_ms: int = 60_000
    max_members: int = 1_024
    journal_wait_ms: int = 500  # at start, for Redis to answer with the journal

    # Several coordinators may share one Redis: one leads, the others stand by and say where it is.
    # URL under which this one is reached, its own among all of them; "": http:// and what it listens on, or the host's
    # name where that is a wildcard
    advertise: str = ""
    leader_lease_ms: int = 3_000  # a leader that Redis has not heard from for so long is succeeded
    # what Redis must do with the market's journal before a grant is said: "any" (warns), or "always": memory is
    # lent only while its appendfsync is always
    journal_fsync: Literal["any", "always"] = "any"

    lease_ttl_ms: int = (
        10_000  # of memory leases, at the mempool, since the last renewal; no consumer gets more
    )
    ttl_margin_ms: int = (
        1_000  # so much less the consumer may count on; above a report's way and a call's timeout
    )
    present_ms: int = 3_000  # within which a grant is presented to its mempool
    report_interval_ms: int = 250  # of mempools that lend
    report_idle_ms: int = 1_000  # of others
    report_ttl_ms: int = 3_000  # a mempool that was silent for so long is not lent from, nor waited for
    orphan_deadline_ms: int = 5_000  # to vacate what a dead producer offered, and 0.5 s for each GB


def check_values(found: CoordinatorSettings) -> None:
    """Raises: SettingsError naming the key and what works."""
    settings.check_share("coordinator", "trace_sample_ratio", found.trace_sample_ratio)
    for name in (
        "heartbeat_interval_ms", "ttl_ms", "forget_after_ms", "max_members", "leader_lease_ms", "lease_ttl_ms",
        "ttl_margin_ms", "present_ms", "report_interval_ms", "report_idle_ms", "report_ttl_ms",
        "orphan_deadline_ms",
    ):  # fmt: skip
        if getattr(found, name) < 1:
            raise SettingsError(f"setting coordinator.{name}: {getattr(found, name)} must be at least 1")
    if found.journal_wait_ms < 0:
        raise SettingsError("setting coordinator.journal_wait_ms: must be 0 (no wait) or more, e.g. 500")
    if found.ttl_ms < 2 * found.heartbeat_interval_ms:
        raise SettingsError(
            f"setting coordinator.ttl_ms: {found.ttl_ms} must be at least two heartbeat intervals "
            f"({2 * found.heartbeat_interval_ms})"
        )
    if found.lease_ttl_ms < 2 * found.ttl_margin_ms:
        raise SettingsError(
            f"setting coordinator.lease_ttl_ms: {found.lease_ttl_ms} must be at least two margins "
            f"({2 * found.ttl_margin_ms})"
        )
    if found.report_ttl_ms < 2 * max(found.report_interval_ms, found.report_idle_ms):
        raise SettingsError(
            f"setting coordinator.report_ttl_ms: {found.report_ttl_ms} must be at least two report intervals "
            f"({2 * max(found.report_interval_ms, found.report_idle_ms)})"
        )
    if found.admin_listen:
        raise SettingsError(
            "setting coordinator.admin_listen: leave it empty, /health is on coordinator.listen"
        )


def load(argv: Sequence[str]) -> CoordinatorSettings:
    """Defaults, TOML, QUIRE_COORDINATOR_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(CoordinatorSettings, "coordinator", argv, about=ABOUT)
    check_values(found)
    return found


def market_limits(found: CoordinatorSettings) -> MarketLimits:
    """The part that the market's core bounds itself by."""
    names = msgspec.structs.asdict(found).keys() & MarketLimits.__dataclass_fields__.keys()
    return MarketLimits(**{name: getattr(found, name) for name in names})
