"""Malformed messages in the log: the first of a sender at once, then one line in ten seconds that counts them."""

from types import SimpleNamespace

from shared.errors import PeerProtocolError
from shared.observe.malformed import MAX_SENDERS, MalformedLog


def test_each_sender_is_named_at_once_and_then_seldom_with_the_number_of_its_messages():
    said, now = [], [0.0]
    log = SimpleNamespace(warning=lambda event, **ids: said.append((event, *ids.values())))
    malformed = MalformedLog(log, clock=lambda: now[0])
    for _ in range(3):
        malformed.note("a", PeerProtocolError("no map"))
    malformed.note("b", PeerProtocolError("no seq"))
    assert said == [("malformed_message", "a", "no map", 1), ("malformed_message", "b", "no seq", 1)]
    now[0] = 10.0
    malformed.note("a", PeerProtocolError("no body"))
    assert said[2:] == [("malformed_message", "a", "no body", 3)]


def test_no_more_senders_are_remembered_than_are_bounded():
    malformed = MalformedLog(SimpleNamespace(warning=lambda *_, **__: None), clock=lambda: 0.0)
    for number in range(3 * MAX_SENDERS):
        malformed.note(f"10.0.0.1:{number}", PeerProtocolError("no"))
    assert len(malformed._of) == MAX_SENDERS
