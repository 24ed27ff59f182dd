"""The link that `quire advise` names: of a division that keeps up, and none is excluded that was not tried."""

from loadtest.reports.summary import Slo
from loadtest.simulator.advise import Advisor, Question
from loadtest.simulator.hardware import from_data_sheet
from loadtest.simulator.known import Setting
from tests.support.simulated import plain

MACHINE = from_data_sheet("h200", "llama-8b")
TRACE = [plain(n, 250.0 * n, 800, 20) for n in range(10)]  # 4/s


def advised(sustains, *, link_gb_per_s=20.0):
    """Of four engines. Args: sustains: by layout, how much it does over a link."""
    question = Question(TRACE, MACHINE, 4, Slo(4000, 50), Setting(link_gb_per_s))
    advisor = Advisor(question, lambda: 0.0, 100.0)
    advisor._holds = lambda layout, rate_per_s, link: rate_per_s <= sustains(layout.name, link)
    advisor._at_own_rate = lambda layout: None
    return advisor.advise()


def test_a_division_that_a_faster_link_makes_keep_up_is_found_whichever_is_best_today():
    def sustains(name, link):
        if name == "4 colocated":
            return 8.0
        return 10.0 if name == "3P:1D" and link > 70 else 2.0 if name == "1P:3D" else 0.5

    advice = advised(sustains)
    assert (advice.prefill, advice.decode) == (1, 3), "the best over today's link"
    assert not advice.disaggregate
    assert 70 < advice.break_even_gb_per_s < 80
    assert (advice.break_even_layout, advice.break_even_known) == ("3P:1D", True)
    assert "Another (3 prefill to 1 decode) keeps up with them from 7" in advice.sentence
    assert "No link" not in advice.sentence


def test_no_link_is_said_to_help_only_where_every_division_was_tried():
    def slow(name, _link):
        return 8.0 if name == "4 colocated" else 2.0

    asked = []
    advice = advised(lambda name, link: asked.append((name, link)) or slow(name, link))
    assert {name for name, link in asked if link == 1000} == {"1P:3D", "2P:2D", "3P:1D"}
    assert (advice.break_even_gb_per_s, advice.break_even_known) == (None, True)
    assert "No link up to 1000 GB/s would change that." in advice.sentence


def test_a_link_that_there_was_no_time_to_try_is_not_known():
    clock = [0.0]

    def sustains(name, link):
        clock[0] += 60.0 if link == 1000 else 0.0
        return 8.0 if name == "4 colocated" else 2.0

    question = Question(TRACE, MACHINE, 4, Slo(4000, 50), Setting(20.0))
    advisor = Advisor(question, lambda: clock[0], 100.0)
    advisor._holds = lambda layout, rate_per_s, link: rate_per_s <= sustains(layout.name, link)
    advice = advisor.advise()
    assert (advice.break_even_gb_per_s, advice.break_even_known) == (None, False)
    assert advice.sentence.startswith("Keep them colocated")
    assert "No link" not in advice.sentence


def test_where_colocated_instances_sustain_nothing_no_link_is_named():
    advice = advised(lambda name, _link: 3.0 if name == "2P:2D" else 0.0)
    assert advice.disaggregate
    assert advice.sentence.startswith("Disaggregate, 2 prefill to 2 decode")
    assert (advice.break_even_gb_per_s, advice.break_even_known) == (None, False)
    assert "link" not in advice.sentence


def timed(sustains, *, tries, link_gb_per_s=20.0):
    """Advised like that with time for so many tries of the link, after the search."""
    question = Question(TRACE, MACHINE, 4, Slo(4000, 50), Setting(link_gb_per_s))
    tried = []
    advisor = Advisor(question, lambda: 0.0 if len(tried) < tries else 1_000.0, 100.0)

    def holds(layout, rate_per_s, link):
        if advisor._deadline_s == 100.0:  # the search is over
            tried.append(link)
        return rate_per_s <= sustains(layout.name, link)

    advisor._holds, advisor._at_own_rate = holds, lambda layout: None
    return advisor.advise(), tried


def test_a_link_is_known_as_the_slowest_only_where_the_time_was_enough_to_find_it():
    def sustains(name, link):
        return 8.0 if name == "4 colocated" else 10.0 if name == "3P:1D" and link > 70 else 0.5

    for tries in range(3, 11):  # over the fastest all three, then this one over others
        advice, tried = timed(sustains, tries=tries)
        assert len(tried) == tries
        enough = min(link for link in tried if link > 70)
        assert (advice.break_even_gb_per_s, advice.break_even_known) == (round(enough, 3), False)
        assert f"over {enough:.3g} GB/s between instances; whether less would" in advice.sentence
    advice, _ = timed(sustains, tries=100)
    assert (70 < advice.break_even_gb_per_s < 80, advice.break_even_known) == (True, True)
    assert "there was no time" not in advice.sentence


def test_the_link_that_a_division_sustained_the_rate_over_in_the_search_is_enough():
    def sustained(most, from_gb_per_s):
        return lambda name, link: (
            8.0 if name == "4 colocated" else most if name == "3P:1D" and link > from_gb_per_s else 0.5
        )

    for most, verdict in ((8.0, "Keep them colocated"), (10.0, "Disaggregate, 3 prefill to 1 decode")):
        for tries in range(1, 20):
            advice, tried = timed(sustained(most, 7), tries=tries)
            assert all(link < 20 for link in tried), "the search has seen what it does over 20"
            assert 7 < advice.break_even_gb_per_s <= 20
            assert advice.break_even_known == (tries >= 8)
            assert advice.sentence.startswith(verdict)
            assert ("there was no time" in advice.sentence) == (tries < 8)
            assert "Below 20" not in advice.sentence
        assert advice.break_even_gb_per_s < 8
    assert 7 < timed(sustained(10.0, 7), tries=20, link_gb_per_s=0.01)[0].break_even_gb_per_s < 8
    for link_gb_per_s in (0.01, 0.05, 20.0, 1000.0, 3000.0):
        advice, _ = timed(sustained(10.0, 0), tries=20, link_gb_per_s=link_gb_per_s)
        assert (advice.break_even_gb_per_s, advice.break_even_known) == (0.05, True)
