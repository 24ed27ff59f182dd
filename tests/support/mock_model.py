"""The demo model as mock engines need it: all but its weights."""

import shutil
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "models" / "quire-demo"


def without_weights(folder: Path) -> Path:
    """A copy in `folder`, which must not exist."""
    return Path(shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors")))
