"""Settings of the mempool, and the only place of this service that knows where they come from."""

import contextlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from services.mempool.core.actions import PoolLimits
from services.mempool.lending_keys import LendingKeys, lending_rules
from services.mempool.system_memory import CopyOptions
from shared import settings
from shared.errors import SettingsError
from shared.kv.page import STOCK_PART

ABOUT = "Owns every KV page of this host (python -m services.mempool --socket PATH)."  # for --help

MAX_MOVER_THREADS = 64
MAX_FLOOR_GB_PER_S = 2_000.0  # more than any two GPUs copy


class MempoolSettings(LendingKeys, frozen=True, kw_only=True):
    """Effective settings of one mempool process."""

    instance: str = "mempool-0"
    log_level: settings.LogLevel = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0
    admin_listen: str = "127.0.0.1:8105"

    socket: str = ".quire/run/mempool.sock"
    api_socket: str = ""  # for callers of the nine calls (shared/mempool/api.py); "": nobody may call them
    redis_url: str = ""  # of the prompt tree, in which spaces say what they hold; "": they do not
    keeper_socket: str = ""  # of the keeper, which holds the memory for the next mempool; "": none
    capacity_bytes: int = (
        1 << 30
    )  # address space of the pages of each space in host memory; memory is used only as pages are written
    device_capacity_bytes: int = 0  # of pages on GPUs, all ranks of an engine together; 0: what it found free
    granted_share: float = 0.5  # of the pages: at most so many granted to copying engines and not yet sealed
    # of the pages: at most so many for engines that work in the pages, cached ones too
    kept_share: float = 0.99
    # of the pages: in stock, with its longest request, enough for such an engine: no block is evicted for more
    stock_share: float = 1 / STOCK_PART
    # tcp://HOST:PORT for mempools of other hosts, one address, never all; "": this host is alone
    peer_listen: str = ""
    max_peers: int = 64  # that read here, and that are read from
    # peer_listen of the mempools whose instances callers of the nine calls may name here, and that call for theirs; the
    # same list on all hosts
    api_peers: list[str] = []
    peer_silent_ms: int = 1_500  # another host's mempool that answers no heartbeat for so long is lost
    ucx_net_devices: str = (
        ""  # for pages to other hosts, e.g. "eth0" or "mlx5_0:1"; "": the device of peer_listen
    )
    ucx_tls: str = ""  # transports that UCX may use for them; "": all but shared memory
    ucx_port_range: str = ""  # e.g. "20000-20100"; "": any
    # of the memory market, e.g. "http://127.0.0.1:8103": it is told what this mempool lends; "": nobody is
    coordinator_url: str = ""
    coordinator_key: str = ""
    market_name: str = ""  # under which it reports there, unlike any other mempool's; "": mempool.instance
    allowed_uids: list[int] = []  # users that may connect; empty: only the mempool's own

    # one for each GPU, named part of host memory and content of blocks; lent pages are none
    max_spaces: int = 64
    pull_patience_ms: int = (
        150  # so long a reader waits for pages to copy into, when it waits for nothing else
    )
    copy_timeout_ms: int = 5_000  # of a copy between two spaces
    dram_bytes: int = (
        0  # of host memory behind the GPUs, for each content of blocks; 0: what is evicted is gone
    )
    dram_for_host: bool = False  # also behind named parts of host memory (worker.kv_space)
    out_in_flight_bytes: int = (
        256 << 20
    )  # on their way out of one space; beyond that blocks are evicted uncopied
    out_timeout_ms: int = 500  # of a copy out
    # so long engines have to give back what an offer of their space is to lend; then it is worth what came
    offer_patience_ms: int = 2_000
    # page-lock host memory once a GPU copies: at PCIe's rate, but all of it is taken and none is given back. False:
    # through pinned slots, at the CPU's rate, a fifth of that
    pin_host: bool = True
    # make it huge pages first, where the kernel can (Linux 6.1): locked ten times as fast (decision 0049)
    huge_pages: bool = True
    # of the CPU, for copies between spaces in host memory: two saturate a small machine's memory, a server's takes more
    mover_threads: int = 2
    # between two GPUs, measured at the start: a space that a slower pair brings is not copied from or to; 0: any rate
    mover_floor_gb_per_s: float = 0.0
    # which end keeps what: basic (neither), 1 (prefill), 2 (both), 3 (what decode completes goes back to prefill too);
    # worker.pd_caching must say the same
    pd_caching: Literal["basic", "1", "2", "3"] = "3"
    # in what pieces blocks go from prefill to decode (shared/kv/transfer_mode.py); as worker.transfer_mode
    transfer_mode: Literal["by-request-agg", "by-request", "by-layer"] = "by-request-agg"
    # of the sealed blocks, how many have a checksum, which is compared when they are leased or copied;
    # 0: none, 1: all
    checksum_rate: float = 0.001
    max_leases: int = 65_536
    max_handoffs: int = 65_536
    max_waiting: int = 4_096
    max_blocks_per_call: int = 65_536
    max_ttl_ms: int = 120_000
    max_wait_ms: int = 30_000
    idle_punch_ms: int = 30_000  # quiet for so long: memory of free pages goes back; 0: never
    # a space whose engines are gone for so long is dropped: its blocks, and its memory goes to the system; 0: never
    space_idle_ms: int = 600_000


def check_values(found: MempoolSettings) -> None:
    """What is wrong wherever this mempool and its peers are. Raises: SettingsError naming the key and what works."""
    settings.check_share("mempool", "trace_sample_ratio", found.trace_sample_ratio)
    if not found.socket:
        raise SettingsError("setting mempool.socket: name a path, e.g. .quire/run/mempool.sock")
    if not 0.0 < found.granted_share <= 1.0:
        raise SettingsError(f"setting mempool.granted_share: {found.granted_share} is not in (0, 1]; try 0.5")
    if not 0.0 < found.kept_share <= 1.0:
        raise SettingsError(f"setting mempool.kept_share: {found.kept_share} is not in (0, 1]; try 0.99")
    if not 1 / STOCK_PART <= found.stock_share <= 1.0:
        least = 1 / STOCK_PART  # what an engine itself lets go of cached blocks for
        raise SettingsError(
            f"setting mempool.stock_share: {found.stock_share} is not in [{least}, 1]; try {least}"
        )
    if not 0.0 <= found.checksum_rate <= 1.0:
        raise SettingsError(
            f"setting mempool.checksum_rate: {found.checksum_rate} is not in [0, 1]; try 0.001"
        )
    if found.device_capacity_bytes < 0:
        raise SettingsError("setting mempool.device_capacity_bytes: must be 0 (what is free) or more")
    if found.dram_bytes < 0:
        raise SettingsError("setting mempool.dram_bytes: must be 0 (none) or more, e.g. 8589934592")
    for name in (
        "out_in_flight_bytes", "out_timeout_ms", "offer_patience_ms", "peer_silent_ms",
        "capacity_bytes", "max_spaces", "pull_patience_ms", "copy_timeout_ms", "max_leases", "max_handoffs",
        "max_waiting", "max_blocks_per_call", "max_ttl_ms", "max_wait_ms", "max_peers", "mover_threads",
    ):  # fmt: skip
        if getattr(found, name) < 1:
            raise SettingsError(f"setting mempool.{name}: {getattr(found, name)} must be at least 1")
    lending_rules(found)
    for name, example in (("idle_punch_ms", 30_000), ("space_idle_ms", 600_000)):
        if getattr(found, name) < 0:
            raise SettingsError(f"setting mempool.{name}: must be 0 (never) or more, e.g. {example}")
    if found.mover_threads > MAX_MOVER_THREADS:
        raise SettingsError(
            f"setting mempool.mover_threads: {found.mover_threads} is more than {MAX_MOVER_THREADS}; try 4"
        )
    if not 0.0 <= found.mover_floor_gb_per_s <= MAX_FLOOR_GB_PER_S:
        raise SettingsError(
            f"setting mempool.mover_floor_gb_per_s: {found.mover_floor_gb_per_s} is no rate between two GPUs; "
            f"0 (any) to {MAX_FLOOR_GB_PER_S:.0f}, e.g. 200 where NVLink joins them"
        )


def load(argv: Sequence[str]) -> MempoolSettings:
    """Defaults, TOML, QUIRE_MEMPOOL_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(MempoolSettings, "mempool", argv, about=ABOUT)
    check_values(found)
    _check_peers(found)
    return found


def copy_options(found: MempoolSettings) -> CopyOptions:
    """How the mover copies between spaces."""
    return CopyOptions(
        found.pin_host, found.mover_threads, found.mover_floor_gb_per_s, huge_pages=found.huge_pages
    )


def _check_peers(found: MempoolSettings) -> None:
    if found.peer_listen:
        _check_address("peer_listen", found.peer_listen)
    if found.api_peers and not found.peer_listen:
        raise SettingsError(
            "setting mempool.api_peers: they must reach this mempool too; set mempool.peer_listen"
        )
    if len(found.api_peers) > found.max_peers + 1:  # this one may be among them
        raise SettingsError(
            f"setting mempool.max_peers: {found.max_peers}, but api_peers names {len(found.api_peers)}"
        )
    for address in found.api_peers:
        _check_address("api_peers", address)


def _check_address(name: str, listen: str) -> None:
    """Peers are told this address, and UCX listens on its device: it must be one of one host's."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    wrong = not listen.startswith("tcp://") or not port.isdigit() or not host
    with contextlib.suppress(ValueError):  # a name
        wrong = wrong or host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    if wrong:
        raise SettingsError(
            f"setting mempool.{name}: {listen!r}; name one address of a host, e.g. tcp://10.0.0.5:8107"
        )


def limits(found: MempoolSettings) -> PoolLimits:
    """The part that the core bounds itself by."""
    names = msgspec.structs.asdict(found).keys() & PoolLimits.__dataclass_fields__.keys()
    return PoolLimits(**{name: getattr(found, name) for name in names})


def api_path(found: MempoolSettings) -> Path | None:
    """Where callers of the nine calls connect; None: nowhere."""
    return Path(found.api_socket) if found.api_socket else None


def socket_path(found: MempoolSettings) -> Path:
    """Where the mempool listens."""
    return Path(found.socket)
