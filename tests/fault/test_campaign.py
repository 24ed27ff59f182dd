"""At every protocol step of engines, ranks, fronts and services some process is killed, stopped or cut off."""

import pytest

from shared import settings
from tests.fault.campaign import CampaignSettings, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_fault_at_any_protocol_step_gives_a_wrong_byte_or_loses_a_page(tmp_path):
    """320 hits; QUIRE_CAMPAIGN_STEPS and QUIRE_CAMPAIGN_SEED for others, `python -m tests.fault.campaign` for more."""
    found = settings.load(CampaignSettings, "campaign")
    report = run(found, tmp_path)
    print("\n".join(report.lines()))
    assert len(report.hits) == found.steps
    assert {hit.action for hit in report.hits} == {"kill", "stop", "cut"}
    slowest_s = max(max(each) for each in report.detections_s.values())
    assert slowest_s < 2.0
