"""Settings of the coordinator."""

from collections.abc import Sequence

import msgspec

from shared import settings
from shared.errors import SettingsError


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one coordinator. admin_listen stays empty: /health is on `listen`."""

    instance: str = "coordinator-0"
    log_level: str = "info"
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


def load(argv: Sequence[str]) -> CoordinatorSettings:
    """Defaults, TOML, QUIRE_COORDINATOR_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(CoordinatorSettings, "coordinator", argv)
    for name in ("heartbeat_interval_ms", "ttl_ms", "forget_after_ms", "max_members"):
        if getattr(found, name) < 1:
            raise SettingsError(f"setting coordinator.{name}: {getattr(found, name)} must be at least 1")
    if found.ttl_ms < 2 * found.heartbeat_interval_ms:
        raise SettingsError(
            f"setting coordinator.ttl_ms: {found.ttl_ms} must be at least two heartbeat intervals "
            f"({2 * found.heartbeat_interval_ms})"
        )
    if found.admin_listen:
        raise SettingsError(
            "setting coordinator.admin_listen: leave it empty, /health is on coordinator.listen"
        )
    return found
