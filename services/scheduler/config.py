"""Settings of the scheduler."""

from collections.abc import Sequence

import msgspec

from services.scheduler.core.instances import InstanceLimits
from services.scheduler.core.placement import PlacementLimits
from services.scheduler.core.policies import PolicyName
from shared import settings
from shared.errors import SettingsError


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one scheduler."""

    instance: str = "scheduler-0"
    log_level: str = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0
    admin_listen: str = "127.0.0.1:8106"

    listen: str = "tcp://127.0.0.1:8101"
    report_listen: str = "tcp://127.0.0.1:8102"
    coordinator_url: str = ""  # "": epochs are learnt from the workers alone
    coordinator_key: str = ""

    policy: PolicyName = "prompt_tree"
    dead_after_ms: int = 1_500  # without a report
    forget_after_ms: int = 60_000
    report_interval_ms: int = 250  # what workers are asked for
    membership_interval_ms: int = 1_000
    max_instances: int = 1_024
    overload_factor: float = 4.0  # requests on an instance / requests in one step of it, before it is full
    max_prefill_tokens: int = 1 << 20  # waiting on one instance, before it is full


_POSITIVE = (
    "dead_after_ms", "forget_after_ms", "report_interval_ms", "membership_interval_ms", "max_instances",
    "overload_factor", "max_prefill_tokens",
)  # fmt: skip


def load(argv: Sequence[str]) -> SchedulerSettings:
    """Defaults, TOML, QUIRE_SCHEDULER_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(SchedulerSettings, "scheduler", argv)
    for name in _POSITIVE:
        if not getattr(found, name) > 0:
            raise SettingsError(f"setting scheduler.{name}: {getattr(found, name)} must be above 0")
    if found.dead_after_ms < 2 * found.report_interval_ms:
        raise SettingsError(
            f"setting scheduler.dead_after_ms: {found.dead_after_ms} must be at least two report intervals "
            f"({2 * found.report_interval_ms})"
        )
    return found


def instance_limits(found: SchedulerSettings) -> InstanceLimits:
    """The part that liveness needs."""
    return InstanceLimits(
        dead_after_ms=found.dead_after_ms,
        forget_after_ms=found.forget_after_ms,
        report_interval_ms=found.report_interval_ms,
        max_instances=found.max_instances,
    )


def placement_limits(found: SchedulerSettings) -> PlacementLimits:
    """The part that placement needs."""
    return PlacementLimits(overload_factor=found.overload_factor, max_prefill_tokens=found.max_prefill_tokens)
