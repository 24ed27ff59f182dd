"""Settings of the keeper, and the only place of it that knows where they come from."""

from collections.abc import Sequence

import msgspec

from shared import settings
from shared.errors import SettingsError

ABOUT = "Keeps a mempool's descriptors over its restarts (python -m services.mempool.keeper)."  # for --help


class KeeperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings of one keeper process."""

    socket: str = ".quire/run/keeper.sock"
    max_fds: int = 262_144  # kept at most; the limit of open files bounds it too
    expected_fds: int = (
        16_384  # a warning at start when fewer can be kept: 120 GiB in pages of 8 MiB need 15,360
    )
    log_level: settings.LogLevel = "info"


def check_values(found: KeeperSettings) -> None:
    """Raises: SettingsError naming the key and what works."""
    if not found.socket:
        raise SettingsError("setting keeper.socket: name a path, e.g. .quire/run/keeper.sock")
    for name in ("max_fds", "expected_fds"):
        if getattr(found, name) < 1:
            raise SettingsError(f"setting keeper.{name}: {getattr(found, name)} must be at least 1")


def load(argv: Sequence[str]) -> KeeperSettings:
    """Defaults, TOML, QUIRE_KEEPER_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(KeeperSettings, "keeper", argv, about=ABOUT)
    check_values(found)
    return found
