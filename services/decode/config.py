"""Settings of the decode service: the section "worker" with this role's defaults."""

from collections.abc import Sequence

from shared import settings
from shared.engine.worker_config import WorkerSettings, for_role

DEFAULT_PORT = 8140  # the admin listener's is the next one


def load(argv: Sequence[str]) -> WorkerSettings:
    """Defaults, TOML, QUIRE_WORKER_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(WorkerSettings, "worker", argv)
    return for_role(found, role="decode", instance="decode-0", port=DEFAULT_PORT)
