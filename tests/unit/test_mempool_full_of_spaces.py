"""A mempool with as many spaces as it may have says so to whoever would need another one."""

from types import SimpleNamespace

import msgspec
import pytest

from services.mempool.shell import MempoolShell
from shared.ids import InstanceId
from shared.wire import mempool as wire
from tests.unit.mempool_harness import DESCRIPTION
from tests.unit.test_mempool_spaces import Spaces

OTHER = msgspec.structs.replace(DESCRIPTION, model="another", fingerprint="another", block_bytes=4096)


def refusal_of(rig, connection, name, description, kind="rank"):
    message = wire.Attach(kind=kind, instance=InstanceId(name), description=description, device="cpu:9")
    rig.run(rig.core.on_attach(connection, connection, message, rig.now_ms))
    found = [each for each in rig.sent[connection] if isinstance(each, wire.AttachRefused)]
    return (found[-1].code, found[-1].reason) if found else None


@pytest.fixture
def rig():
    made = Spaces(max_spaces=2)
    for connection, name in ((1, "a"), (2, "b")):
        made.worker(connection, f"cpu:{connection}", instance=name)
    assert len(made.core.pools) == 2
    return made


@pytest.mark.parametrize("kind", ["rank", "engine"])
def test_whoever_comes_with_another_layout_hears_that_there_is_no_space_and_which_setting_bounds_them(
    rig, kind
):
    code, reason = refusal_of(rig, 50, "c", OTHER, kind)
    assert code == "spaces.full"
    assert "all 2 spaces" in reason
    assert "mempool.max_spaces" in reason
    assert rig.disconnected[50] == "spaces.full"
    assert len(rig.core.pools) == 2


def test_an_instance_with_a_space_that_comes_with_another_layout_hears_of_its_layout(rig):
    for connection in (1, 101):
        rig.closed(connection)
    assert refusal_of(rig, 51, "a", OTHER)[0] == "layout.mismatch"


def test_whoever_has_a_place_in_a_space_gets_it_in_a_full_mempool_too(rig):
    for connection in (2, 102):
        rig.closed(connection)
    rig.worker(7, "cpu:2", instance="b")
    assert 7 not in rig.disconnected
    assert len(rig.core.pools) == 2


def test_a_process_that_is_refused_is_kept_for_no_space(rig):
    shell = SimpleNamespace(
        pool=rig.core, clock=SimpleNamespace(now_ms=lambda: 0), kept=None,
        spaces=SimpleNamespace(ready=SimpleNamespace(make=lambda _: "")),
        _processes=SimpleNamespace(number_of=lambda _: 7, pidfd_of=lambda _: (7, -1)),
    )  # fmt: skip
    link = SimpleNamespace(state=50, peer=SimpleNamespace(pid=7))
    message = wire.Attach(kind="engine", instance=InstanceId("c"), description=OTHER)
    assert len(MempoolShell._attach(shell, link, message)) == 2, "a refusal, and the end"
