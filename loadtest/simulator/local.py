"""Whose turn it is in each simulated engine, and where blocks of parked requests are meanwhile.

The names are a worker's: `local_policy`, `fair_for`, and the fields of FairRules (shared/fair/rules.py).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from loadtest.simulator.links import Rate, gb_per_s
from shared.engine.worker_config import WorkerSettings, fair_rules
from shared.errors import SettingsError
from shared.fair.rules import FairRules

LocalPolicyName = Literal["fcfs", "cfs"]
FairFor = Literal["shares", "bursts"]
# through the mempool, 64 pages of 8 MiB: results/h200x2-pool-transfer.json
PEER_GB_PER_S = 200.0
# pages between GPU and host memory: results/h200-swap.json
DRAM_GB_PER_S = 54.0
# from asking to the first byte, and from the last to the answer: what decision 0025 reckons with
WAIT_MS = 3.0
SWAP_BYTES = 90_000_000_000  # lent by a peer, as in results/h200x2-burst.json
_PLAIN = WorkerSettings()


@dataclass(frozen=True, slots=True)
class Local:
    """Args:
    policy: fcfs: order of arrival, who finds no memory is computed again; cfs: fair slices where memory is short.
    rules: of the slices.
    peer, peer_bytes: lent pages: the way to them, and how many bytes of them each engine has; they are taken first.
    dram, dram_bytes: of host memory behind each engine.
    counted_gb_per_s: of swap space, for the decision whether slices pay; 0: as measured, swap by swap.
    """

    policy: LocalPolicyName = "fcfs"
    rules: FairRules = field(default_factory=FairRules)
    peer: Rate = field(default_factory=lambda: gb_per_s(PEER_GB_PER_S, WAIT_MS))
    dram: Rate = field(default_factory=lambda: gb_per_s(DRAM_GB_PER_S, WAIT_MS))
    peer_bytes: int = SWAP_BYTES
    dram_bytes: int = SWAP_BYTES
    counted_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises: SettingsError."""
        if min(self.peer_bytes, self.dram_bytes) < 0 or self.counted_gb_per_s < 0.0:
            raise SettingsError(
                "swap space has no less than 0 bytes, and 0 GB/s: 0 GB is none, 0 GB/s as measured"
            )
        for name, rate, size in (("peer", self.peer, self.peer_bytes), ("dram", self.dram, self.dram_bytes)):
            if size and not rate.bytes_per_ms > 0.0:
                raise SettingsError(
                    f"swap space in {name} memory needs a rate above 0 GB/s; where there is none, give it 0 bytes"
                )


def rules_for(fair_for: FairFor, changes: Sequence[str] = (), slice_steps: int = 0) -> FairRules:
    """What a worker makes of `fair_for`, with these changes, each FIELD=NUMBER. Args: slice_steps: 0: a worker's.

    Raises: SettingsError naming what is wrong.
    """
    rules = FairRules(**fair_rules(WorkerSettings(fair_for=fair_for)))  # pyright: ignore[reportArgumentType]
    known: dict[str, type[Any]] = {one.name: type(one.default) for one in fields(FairRules)}
    said: dict[str, float] = {"slice_steps": slice_steps} if slice_steps else {}
    for change in changes:
        name, _, number = change.partition("=")
        if name not in known:
            raise SettingsError(
                f"--fair-rule {change}: expected FIELD=NUMBER with a field of {', '.join(known)}"
            )
        try:
            said[name] = known[name](number)
        except ValueError as error:
            raise SettingsError(f"--fair-rule {change}: {number!r} is no {known[name].__name__}") from error
    try:
        return replace(rules, **said)
    except ValueError as error:
        raise SettingsError(f"rules of fair slices: {error}") from error


def add_local_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line: read by local_of()."""
    parser.add_argument(
        "--local-policy", choices=get_args(LocalPolicyName), default="fcfs",
        help="whose turn it is in an engine: order of arrival, or fair slices where memory is short",
    )  # fmt: skip
    parser.add_argument(
        "--fair-for", choices=get_args(FairFor), default=_PLAIN.fair_for,
        help="what slices are for: shares by weight, or a first slice soon for everybody in a burst",
    )  # fmt: skip
    parser.add_argument("--fair-slice-steps", type=int, default=_PLAIN.fair_slice_steps, help="of a slice")
    parser.add_argument(
        "--fair-rule", action="append", default=[], metavar="FIELD=NUMBER",
        help="another rule of fair slices (shared/fair/rules.py), as often as there are",
    )  # fmt: skip
    add_swap = parser.add_argument
    add_swap("--swap-peer-gb", type=float, default=SWAP_BYTES / 1e9, help="lent to each engine; 0: none")
    add_swap("--swap-dram-gb", type=float, default=SWAP_BYTES / 1e9, help="host memory of each; 0: none")
    add_swap("--swap-peer-gb-per-s", type=float, default=PEER_GB_PER_S, help="to lent pages and back")
    add_swap("--swap-dram-gb-per-s", type=float, default=DRAM_GB_PER_S, help="to host memory and back")
    add_swap("--swap-wait-ms", type=float, default=WAIT_MS, help="of a swap, besides its bytes")
    add_swap(
        "--fair-swap-gb-per-s", type=float, default=_PLAIN.fair_swap_gb_per_s,
        help="that slices reckon with when they ask whether turns pay; 0: as measured",
    )  # fmt: skip


def local_of(options: argparse.Namespace) -> Local:
    """Raises: SettingsError naming the option."""
    if options.fair_slice_steps < 1:
        raise SettingsError(f"--fair-slice-steps {options.fair_slice_steps}: at least 1; try 8")
    if options.swap_wait_ms < 0.0:
        raise SettingsError(f"--swap-wait-ms {options.swap_wait_ms:g}: not below 0; try {WAIT_MS:g}")
    for name in ("peer", "dram"):
        size, rate = (getattr(options, f"swap_{name}_{unit}") for unit in ("gb", "gb_per_s"))
        if size < 0.0 or (size and not rate > 0.0):
            raise SettingsError(
                f"--swap-{name}-gb {size:g} at --swap-{name}-gb-per-s {rate:g}: both above 0, or --swap-{name}-gb 0"
            )
    return Local(
        options.local_policy,
        rules_for(options.fair_for, options.fair_rule, options.fair_slice_steps),
        gb_per_s(options.swap_peer_gb_per_s, options.swap_wait_ms),
        gb_per_s(options.swap_dram_gb_per_s, options.swap_wait_ms),
        round(options.swap_peer_gb * 1e9),
        round(options.swap_dram_gb * 1e9),
        options.fair_swap_gb_per_s,
    )
