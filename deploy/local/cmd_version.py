"""`quire version`."""

import platform
import tomllib
from importlib import metadata

from deploy.local.config import REPO
from deploy.local.plan import installed_vllm
from deploy.local.terminal import out


def version() -> None:
    """Print the versions of Quire, vLLM and Python."""
    vllm = installed_vllm()
    engine = f"{vllm} {metadata.version(vllm)}" if vllm else "vLLM not installed"
    quire = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    out.print(f"quire {quire}, {engine}, Python {platform.python_version()}")
