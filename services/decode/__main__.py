"""`python -m services.decode --model-dir FOLDER`: settings -> worker."""

import sys
from collections.abc import Sequence

from services.decode import config
from shared.engine import worker_main
from shared.errors import SettingsError


def main(argv: Sequence[str]) -> int:
    """Run until told to stop; the exit code. Also called in processes forked by the engine zygote."""
    try:
        settings = config.load(argv)
    except SettingsError as error:
        print(f"decode: {error.message}", file=sys.stderr)  # noqa: T201  logs are not set up yet
        return worker_main.EXIT_SETTINGS
    return worker_main.run("decode", settings)


if __name__ == "__main__":
    worker_main.leave(main(sys.argv[1:]))
