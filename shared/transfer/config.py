"""Settings of transfers, and what UCX reads from the environment when it is loaded (once per process, so before it)."""

import os
from typing import Literal

import msgspec

from shared.errors import SettingsError


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the mempool's section; see shared/settings.py."""

    transfer_timeout_ms: int = 5000
    transfer_threads: int = 2  # memcpy threads for host memory
    nixl_mode: Literal["auto", "read", "write"] = "auto"
    ucx_net_devices: str = ""  # e.g. "eth1" or "mlx5_0:1"; "": UCX listens on no device beyond the loopback
    ucx_tls: str = ""  # transports that UCX may use; "": its own choice
    ucx_port_range: str = ""  # e.g. "20000-20100"; "": any
    floor_gb_per_s: float = 0.0  # start-up self-test fails under it; 0: measured, never failing
    floor_pages: int = 64  # that the self-test moves


def ucx_environment(settings: TransferSettings) -> dict[str, str]:
    """Variables for UCX and NIXL.

    Silent links: without the TCP timeouts nothing is noticed within a minute. Listener: UCX opens an unauthenticated
    one on every device that it is not told to leave alone, so without a named device it gets the loopback only.
    Memory events: UCX would patch the C library's mmap, brk and their like while other threads run, and move the end of
    the heap to try them; a thread that allocated just then died (docs/bugs.md). What is sent lies in regions that
    are registered by name, so nobody needs to be told what the process maps. NVLink multicast stays off.
    Raises: SettingsError on a port range that is none.
    """
    env = {
        "UCX_TCP_USER_TIMEOUT": "3s",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_TCP_KEEPCNT": "3",
        "UCX_MEM_EVENTS": "n",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_NET_DEVICES": settings.ucx_net_devices or "lo",
        "NIXL_LOG_LEVEL": "WARN",
        "NCCL_NVLS_ENABLE": "0",
    }
    if settings.ucx_tls:
        env["UCX_TLS"] = settings.ucx_tls
    if settings.ucx_port_range:
        first, dash, last = settings.ucx_port_range.partition("-")
        if not (dash and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536):
            raise SettingsError(
                f"setting mempool.ucx_port_range: {settings.ucx_port_range!r}; write it as 20000-20100"
            )
        env["UCX_TCP_PORT_RANGE"] = settings.ucx_port_range
    return env


def apply_ucx_environment(settings: TransferSettings) -> None:
    """Into this process, before the first import of NIXL; what an operator has set already stays."""
    for name, value in ucx_environment(settings).items():
        os.environ.setdefault(name, value)  # noqa: TID251  a config.py: UCX has no other way of being told
