"""Who is started, and how long that may take."""

import pytest

from deploy.local import config, plan
from deploy.local.services_table import ZYGOTE, build
from shared.errors import SettingsError
from tests.unit.test_local_table import a_plan, settings


def test_no_worker_at_all_is_refused():
    for topology in ("auto", "colocated"):
        asked = settings(topology=topology, num_decode=0, address="10.0.0.5")
        with pytest.raises(SettingsError, match=r"cluster\.num_decode"):
            plan.choose_workers(asked, "cuda", ["0"])


def test_what_waits_for_a_model_may_take_as_long_as_up_waits():
    usual = {s.name: s.start_timeout_ms for s in build(a_plan())}
    long = {s.name: s.start_timeout_ms for s in build(a_plan(ready_timeout_ms=1_800_000))}
    late = {name for name in long if long[name] != usual[name]}
    assert late == {"prefill-0", "decode-0", "gateway", ZYGOTE}
    assert {long[name] for name in late} == {1_800_000}
    assert {s.name: s.start_timeout_ms for s in build(a_plan(ready_timeout_ms=1_000))} == usual
    made = plan.make_plan(
        settings(ready_timeout_s=700, redis_url="redis://there:1/0", engine="mock"), config.paths_of("/h"),
        plan.Model(folder="/m", name="m"),
    )  # fmt: skip
    assert made.ready_timeout_ms == 700_000
