"""What a gateway says of its model, of what the coordinator's list names."""

from itertools import permutations

import pytest

from services.gateway.membership import Membership
from shared.errors import SettingsError
from shared.wire.membership import InstanceList, InstanceView
from tests.support.control_plane import description


def view(name, epoch, state="live", **made):
    return InstanceView(
        instance=name, role="decode", endpoint="tcp://127.0.0.1:1", host="h", epoch=epoch, age_ms=0, state=state,
        description=description(**made),
    )  # fmt: skip


def said(membership, *views):
    membership._accept(InstanceList(version=1, instances=list(views)))
    found = membership.description
    return found.fingerprint, found.max_model_len


def test_the_context_is_what_every_live_instance_takes_whoever_comes_first():
    views = view("a", 1, max_model_len=4096), view("b", 2, max_model_len=2048), view("c", 3, max_model_len=0)
    for order in permutations(views):
        assert said(Membership("http://127.0.0.1:1", model="demo"), *order) == ("f1", 2048)
    gone = view("b", 2, "dead", max_model_len=2048)
    assert said(Membership("http://127.0.0.1:1", model="demo"), views[0], gone) == ("f1", 4096)


def test_another_model_under_the_same_name_which_the_scheduler_refuses_describes_nothing():
    first, other = view("b", 5), view("a", 7, fingerprint="f2", max_model_len=512)
    membership = Membership("http://127.0.0.1:1", model="demo")
    assert said(membership, other, first) == ("f1", 4096), "who came first"
    restarted = view("b", 9)
    assert said(membership, other, restarted) == ("f1", 4096), "it is served still"
    assert said(membership, other, view("b", 9, "suspect")) == ("f1", 4096), "it may come back"
    with pytest.raises(SettingsError, match="anew"):  # the others have left
        said(membership, other)
    assert said(membership) == ("f1", 4096), "nobody lives: what was known last"
