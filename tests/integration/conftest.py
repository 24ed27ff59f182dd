"""What several modules need: stock vLLM's answers, two hosts of our own, a Redis."""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.two_hosts import TwoHosts, why_not
from shared.prompttree.embedded import EmbeddedRedis
from tests.integration.gateway_rig import make_model_dir
from tests.integration.test_exactness import CASES, MODEL, ROOT
from tests.support.exactness_cases import long_answer


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stock vLLM's answer to every case, by its name. Of two that run tests beside each other (-n 2) one asks it."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "stock"
    folder.mkdir(exist_ok=True)
    cases, out = folder / "cases.json", folder / "out.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            cases.write_text(json.dumps([*CASES.values(), long_answer(MODEL)]))
            part = folder / "part.json"
            command = [
                sys.executable,
                "-m",
                "tests.support.stock_reference",
                str(MODEL),
                str(cases),
                str(part),
            ]
            subprocess.run(command, cwd=ROOT, check=True, timeout=900)
            part.replace(out)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    """Two network namespaces joined by a veth pair. Root only."""
    if importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("nixl-cu13 is not installed")
    if reason := why_not():
        pytest.skip(reason)
    with TwoHosts() as both:
        yield both


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and its chat template, for gateways; tests of workers have a folder of their own."""
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that runs."""
    server = EmbeddedRedis(0, tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def opened() -> AsyncIterator[list[Any]]:
    """Closes what a test appends to it."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        await thing.close()
