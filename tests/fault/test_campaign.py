"""At every protocol step of engines, ranks, fronts and services some process is killed, stopped or cut off."""

import importlib.util
import statistics

import pytest

from shared import settings
from tests.fault.campaign import CampaignSettings, Report, run, steps_on_hosts
from tests.fault.campaign_hosts import STANDS_STILL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NOTICED_S = 2.0


def check(report: Report, num_steps: int) -> None:
    """All was hit, in each way, and was noticed in time."""
    print("\n".join(report.lines()))
    assert len(report.hits) == num_steps
    assert {hit.action for hit in report.hits} == {"kill", "stop", "cut"}
    # all are noticed; a busy machine may stop who should for longer than that now and then
    stopped_s = report.detections_s.pop(STANDS_STILL, [0.0])
    assert min(stopped_s) < NOTICED_S  # of which the heartbeats' patience is 1.5
    assert max(statistics.median(each) for each in report.detections_s.values()) < NOTICED_S


def test_no_fault_at_any_protocol_step_gives_a_wrong_byte_or_loses_a_page(tmp_path):
    """320 hits; QUIRE_CAMPAIGN_STEPS and QUIRE_CAMPAIGN_SEED for others, `python -m tests.fault.campaign` for more."""
    found = settings.load(CampaignSettings, "campaign")
    check(run(found, tmp_path, "pool"), found.steps)


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
def test_no_fault_does_where_pages_move_between_hosts_spaces_and_the_system(tmp_path):
    """80 hits: pulls of another host, swaps to host memory and lent pages, memory released, the nine calls, layers."""
    found = settings.load(CampaignSettings, "campaign")
    check(run(found, tmp_path, "hosts"), steps_on_hosts(found))
