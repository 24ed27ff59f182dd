"""`python -m services.gateway --listen 127.0.0.1:8000 --model-dir ...`: settings, processes, run."""

import sys

from services.gateway import config
from services.gateway.processes import bind, run_many, run_one
from shared.errors import SettingsError
from shared.own_folder import OwnFolder
from shared.transport.unix_socket import take_all_descriptors


def main(argv: list[str]) -> int:
    """Exit status: 0 after an orderly end, 2 when a setting is wrong, 70 after a bug of ours."""
    try:
        settings = config.load(argv)
        take_all_descriptors()  # one a connection
        listener = bind(settings)
        if settings.processes == 1:
            return run_one(settings, listener, 0)
        folder = OwnFolder("quire-gateway-metrics-")
        try:
            config.use_shared_metrics(folder.path)
            run_many(settings, listener)
        finally:
            folder.remove()
    except SettingsError as error:
        print(f"gateway: {error.message}", file=sys.stderr)  # noqa: T201 - for whoever started it by hand
        return 2
    return 0


if __name__ == "__main__":
    if sys.flags.optimize:
        sys.exit("gateway: run without -O, assertions guard invariants")
    sys.exit(main(sys.argv[1:]))
