"""`quire version`."""

import platform
import tomllib
from importlib import metadata

import typer

from deploy.local.config import REPO
from deploy.local.plan import installed_vllm
from deploy.local.terminal import out


def on_flag(wanted: bool) -> None:
    """Of `quire --version`."""
    if wanted:
        version()
        raise typer.Exit


def version() -> None:
    """Print the versions of Quire, vLLM and Python."""
    vllm = installed_vllm()
    engine = f"{vllm} {metadata.version(vllm)}" if vllm else "vLLM not installed"
    quire = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    out.print(f"quire {quire}, {engine}, Python {platform.python_version()}")
