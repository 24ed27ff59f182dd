"""Settings of lending by itself: keys of section `mempool`, one for each rule of shared/lending/rules.py. See there."""

from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import SettingsError
from shared.lending.rules import DEFAULT_RULES, EngineProfile, LendingRules, decode_profile

_R = DEFAULT_RULES


class LendingKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Part of MempoolSettings. Bytes are of all GPUs of an engine together."""

    # auto: where a coordinator is named, engines report their load, and lend and borrow by it
    lending: Literal["auto", "off"] = "auto"
    lending_profiles: list[
        str
    ] = []  # files of `quire profile`; a model without one is judged by what is seen
    lending_interval_ms: int = 250  # between two load reports, and two decisions
    lending_threshold_bytes: int = _R.threshold_bytes
    lending_reserve_share: float = _R.reserve_share
    lending_steady_ms: int = _R.steady_ms
    lending_hold_ms: int = _R.hold_ms
    lending_window_ms: int = _R.window_ms
    lending_peak_ms: int = _R.peak_ms
    lending_rate_slack: float = _R.rate_slack
    lending_rate_rise: float = _R.rate_rise
    lending_least_arrivals: int = _R.least_arrivals
    lending_queue_limit: int = _R.queue_limit
    lending_silent_ms: int = _R.silent_ms
    lending_reclaim_deadline_ms: int = _R.reclaim_deadline_ms
    # of copies only: far blocks (worker.far_bytes) are read in place by a consumer's attention, which nothing bounds
    lending_budget_bytes_per_s: int = _R.budget_bytes_per_s
    lending_ask_bytes: int = _R.ask_bytes
    lending_borrow_bytes: int = _R.borrow_bytes
    lending_idle_ms: int = _R.idle_ms
    lending_pause_ms: int = _R.pause_ms
    lending_max_pause_ms: int = _R.max_pause_ms
    lending_ttl_ms: int = _R.ttl_ms


def lending_rules(found: LendingKeys) -> LendingRules:
    """Raises: SettingsError naming the rule."""
    rules = LendingRules(
        **{name: getattr(found, f"lending_{name}") for name in LendingRules.__dataclass_fields__}
    )
    if found.lending_interval_ms < 1 or rules.silent_ms < 2 * found.lending_interval_ms:
        raise SettingsError(
            f"setting mempool.lending_interval_ms: {found.lending_interval_ms} must be at least 1 and at most half of "
            f"mempool.lending_silent_ms ({rules.silent_ms}); try 250"
        )
    return rules


def read_profiles(found: LendingKeys) -> dict[str, EngineProfile]:
    """By model. Raises: SettingsError when a file cannot be read or is no profile."""
    out: dict[str, EngineProfile] = {}
    for name in found.lending_profiles:
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            raise SettingsError(f"setting mempool.lending_profiles: {name}: {error.strerror}") from error
        profile = decode_profile(data, name)
        out[profile.model] = profile
    return out
