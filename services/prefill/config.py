"""Settings of the prefill service: the section "worker" with this role's defaults."""

from collections.abc import Sequence

from shared import settings
from shared.engine.worker_config import WorkerSettings, for_role

DEFAULT_PORT = 8120  # the admin listener's is the next one
ABOUT = (
    "Computes prompts and hands their KV pages over (python -m services.prefill --model-dir FOLDER).\n"
    f'Where a default is "": role prefill, instance prefill-0, listen tcp://127.0.0.1:{DEFAULT_PORT}, admin_listen the '
    "next port; model_name the folder's name."
)  # for --help


def load(argv: Sequence[str]) -> WorkerSettings:
    """Defaults, TOML, QUIRE_WORKER_* and flags. Raises: SettingsError naming the key and what works."""
    found = settings.load(WorkerSettings, "worker", argv, about=ABOUT)
    return for_role(found, role="prefill", instance="prefill-0", port=DEFAULT_PORT)
