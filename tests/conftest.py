"""Settings shared by every test: hypothesis profiles whose failures can be repeated from the printed seed."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shared.engine.crashes import die_when_crashed
from tests.support.examples import examples
from tests.support.local_cluster import LocalCluster

die_when_crashed()
# where http_proxy is set: every server of these tests is on this machine
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, ("127.0.0.1,localhost,::1", os.environ.get(name))))
gc.disable()  # until all is imported: nothing of that is garbage, and each collection would walk it

PROCESSES, FAULTS = (Path(__file__).parent / name for name in ("integration", "fault"))

settings.register_profile(
    "quire",
    print_blob=True,
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", parent=settings.get_profile("quire"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quire"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what computes and never waits, so that it fails soonest and nothing beside it (.ci/run makes images then)
    disturbs it; then whole processes and clusters; then what needs the images. Modules that take turns (one_at_a_time)
    lie far apart among the others: beside each other one would wait.
    """
    places: dict[Path, tuple[int, float]] = {}
    taking_turns: list[Path] = []
    for item in items:
        late = any(item.path.is_relative_to(folder) for folder in (PROCESSES, FAULTS))
        stage = 2 if item.get_closest_marker("docker") else int(late)
        if item.path not in places and item.get_closest_marker("whole_machine"):
            taking_turns.append(item.path)
        places.setdefault(item.path, (stage, float(len(places))))
    late_ones = [place for stage, place in places.values() if stage == 1] or [0.0]
    apart = (late_ones[-1] - late_ones[0]) / (len(taking_turns) + 1)
    for number, path in enumerate(taking_turns, 1):
        places[path] = places[path][0], late_ones[0] + number * apart + 0.5
    items.sort(key=lambda item: places[item.path])
    gc.collect()
    gc.freeze()  # what was imported stays: the collection behind each module need not walk it
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_is_left_is_ones_own() -> Iterator[None]:
    """What a module leaves open fails it, and not whichever test runs when it happens to be collected."""
    yield
    gc.collect()
    gc.freeze()  # what is left is nobody's garbage, or the next ones would walk it each time


@pytest.fixture(scope="module", autouse=True)
def one_at_a_time(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of two modules that run beside each other (-n 2) only one looks at what the whole machine shares."""
    if request.node.get_closest_marker("whole_machine") is None:
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    with (folder / "whole_machine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module", autouse=True)
def transfer_environment() -> Iterator[None]:
    """What a test told UCX and NCCL in this process's environment ends with its module: later processes inherit it."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_", "NCCL_"))]:
        if name not in before:
            del os.environ[name]


@pytest.fixture(scope="session")
def live_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["LocalCluster"]:
    """`quire up` with the demo model in float32 on one thread, shared by every suite that needs real engines."""
    home = tmp_path_factory.mktemp("live") / "home"
    with LocalCluster(home, "--set", "dtype=float32", env={"QUIRE_WORKER_CALIBRATE": "auto"}) as running:
        running.pool_at_start = running.pool()
        yield running
