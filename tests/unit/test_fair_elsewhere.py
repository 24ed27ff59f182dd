"""What engines tell each other of whom they served: nothing of it is lost while words are, or engines stay silent."""

from shared.fair.elsewhere import MAX_ABSENT, MAX_TENANTS, Elsewhere, Here


def test_words_of_others_count_by_what_they_grew_and_a_lost_or_repeated_one_changes_nothing():
    elsewhere = Elsewhere()
    assert elsewhere.news({"a": {"t": 100}}) == {}  # from before this engine heard of it
    assert elsewhere.news({"a": {"t": 130, "u": 5}, "b": {"t": 7}}) == {"t": 30}
    assert elsewhere.news({"a": {"t": 130, "u": 5}, "b": {"t": 7}}) == {}
    assert elsewhere.news({"a": {"t": 140, "u": 9}, "b": {"t": 8}}) == {"t": 11, "u": 4}
    assert elsewhere.news({"a": {"t": 2}, "b": {"t": 8}}) == {}  # it began anew
    assert elsewhere.news({"a": {"t": 3}, "b": {"t": 50}}) == {"t": 43}


def test_what_an_engine_served_while_it_was_not_heard_of_counts_when_it_is():
    elsewhere = Elsewhere()
    elsewhere.news({"a": {"t": 100, "u": 10}})
    assert elsewhere.news({}) == {}
    assert elsewhere.news({"a": {"t": 300}}) == {"t": 200}
    assert elsewhere.news({"a": {"t": 300, "u": 15}}) == {"u": 5}, "nor of a tenant that it did not speak of"


def test_of_engines_that_are_gone_only_the_last_ones_are_remembered():
    elsewhere, once = Elsewhere(), {f"t{i}": 1 for i in range(MAX_TENANTS)}
    last = 1 + MAX_ABSENT // MAX_TENANTS
    for number in range(last + 1):
        elsewhere.news({f"e{number}": once, "here": {"t": 1}})
    again = {name: {"t": 5, "t0": 5} for name in ("e0", "e1", f"e{last}", "here")}
    assert elsewhere.news(again) == {"t0": 8, "t": 4}


def test_an_engine_speaks_of_the_tenants_that_it_served_most():
    here = Here()
    served = {f"t{i}": i for i in range(200)}
    for _ in range(8):
        said = here.word(served)
        assert len(said) == MAX_TENANTS
    assert min(said.values()) == 200 - MAX_TENANTS


def test_with_more_tenants_than_fit_into_a_word_others_hear_of_all_that_are_served():
    """A new one too, whose total is far below those of tenants that left long ago."""
    here, elsewhere = Here(), Elsewhere()
    served = {f"old{i}": 1_000_000 + i for i in range(2 * MAX_TENANTS)}
    for _ in range(4):
        elsewhere.news({"a": here.word(served)})
    busy = [f"new{i}" for i in range(3 * MAX_TENANTS)]
    heard = dict.fromkeys(busy, 0)
    for _ in range(40):
        for tenant in busy:
            served[tenant] = served.get(tenant, 0) + 10
        for tenant, tokens in elsewhere.news({"a": here.word(served)}).items():
            heard[tenant] += tokens
    assert min(heard.values()) >= 40 * 10 - 6 * 10, (
        "but for what came before the first word, and since the last"
    )
    assert max(heard.values()) <= 40 * 10
