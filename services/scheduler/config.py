"""Settings of the scheduler."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from services.scheduler.core.instances import InstanceLimits
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.policies import PolicyName
from services.scheduler.core.predict import CostSettings
from shared import settings
from shared.errors import SettingsError

ABOUT = "Says on which instances each attempt of a request runs (python -m services.scheduler)."  # for --help


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one scheduler."""

    instance: str = "scheduler-0"
    log_level: settings.LogLevel = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0
    admin_listen: str = "127.0.0.1:8106"

    listen: str = "tcp://127.0.0.1:8101"
    report_listen: str = "tcp://127.0.0.1:8102"
    coordinator_url: str = ""  # "": epochs are learnt from the workers alone
    coordinator_key: str = ""

    policy: PolicyName = "cost"  # behaves as prompt_tree where instances sent no coefficients
    dead_after_ms: int = 1_500  # without a report
    forget_after_ms: int = 60_000
    report_interval_ms: int = 250  # what workers are asked for
    membership_interval_ms: int = 1_000
    max_instances: int = 1_024
    overload_factor: float = 4.0  # requests on an instance / requests in one step of it, before it is full
    max_prefill_tokens: int = 1 << 20  # waiting on one instance, before it is full
    # how long a request waits here while no decode instance has room in its pages for it, before it is placed anyway;
    # less than gateway.placement_deadline_ms
    room_wait_ms: int = 5_000
    max_held: int = 1_024  # requests that wait so

    # auto: a whole request on one instance where that is predicted to be cheaper (policy cost only); always: pairs
    # where there are some; never: one instance for each request
    disaggregation: Literal["auto", "always", "never"] = "auto"
    kv_fetch: Literal["auto", "always", "never"] = "auto"  # eq 2; never: nothing from other spaces or hosts
    # a gain below the larger of both does not move a request from the holder of its prefix, ...
    hysteresis_ms: float = 5.0
    hysteresis_share: float = 0.1  # of the time until its first token
    # ... or a whole request to a prefill or decode instance. 0: wherever it is predicted to be cheaper (decision 0044)
    role_margin_ms: float = 0.0
    role_margin_share: float = 0.0
    panic_queue_ms: float = 10_000.0  # an instance with a longer queue is avoided, whatever it holds
    slowdown_weight: float = (
        1.0  # a millisecond that others lose, in milliseconds of the request's own; 0: selfish
    )
    # a millisecond of computing again what new pages push out, in milliseconds of the request's own (decision 0045)
    evict_weight: float = 4.0
    expected_output_tokens: int = 64  # decode steps that count, at most the request's max_tokens
    handoff_ms: float = 2.0  # of a hand-off, beside its bytes
    max_alternatives: int = 8  # in an answer: ways that were not taken


_POSITIVE = (
    "dead_after_ms", "forget_after_ms", "report_interval_ms", "membership_interval_ms", "max_instances",
    "overload_factor", "max_prefill_tokens", "panic_queue_ms", "expected_output_tokens",
)  # fmt: skip
_NOT_NEGATIVE = (
    "hysteresis_ms",
    "hysteresis_share",
    "role_margin_ms",
    "role_margin_share",
    "slowdown_weight",
    "evict_weight",
    "handoff_ms",
    "max_alternatives",
    "room_wait_ms",
    "max_held",
)


def check_values(found: SchedulerSettings) -> None:
    """Raises: SettingsError naming the key and what works."""
    settings.check_share("scheduler", "trace_sample_ratio", found.trace_sample_ratio)
    for name in _POSITIVE:
        if not getattr(found, name) > 0:
            raise SettingsError(f"setting scheduler.{name}: {getattr(found, name)} must be above 0")
    for name in _NOT_NEGATIVE:
        if not getattr(found, name) >= 0:
            raise SettingsError(f"setting scheduler.{name}: {getattr(found, name)} must not be negative")
    if found.dead_after_ms < 2 * found.report_interval_ms:
        raise SettingsError(
            f"setting scheduler.dead_after_ms: {found.dead_after_ms} must be at least two report intervals "
            f"({2 * found.report_interval_ms})"
        )


def load(argv: Sequence[str]) -> SchedulerSettings:
    """Defaults, TOML, QUIRE_SCHEDULER_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(SchedulerSettings, "scheduler", argv, about=ABOUT)
    check_values(found)
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
    return PlacementLimits(
        overload_factor=found.overload_factor,
        max_prefill_tokens=found.max_prefill_tokens,
        room_wait_ms=found.room_wait_ms,
        max_held=found.max_held,
    )


def cost_settings(found: SchedulerSettings) -> CostSettings:
    """The part that predictions need."""
    return CostSettings(
        disaggregation=found.disaggregation,
        fetch=found.kv_fetch,
        hysteresis_ms=found.hysteresis_ms,
        hysteresis_share=found.hysteresis_share,
        role_margin_ms=found.role_margin_ms,
        role_margin_share=found.role_margin_share,
        panic_queue_ms=found.panic_queue_ms,
        slowdown_weight=found.slowdown_weight,
        evict_weight=found.evict_weight,
        decode_tokens=found.expected_output_tokens,
        handoff_ms=found.handoff_ms,
        max_alternatives=found.max_alternatives,
    )
