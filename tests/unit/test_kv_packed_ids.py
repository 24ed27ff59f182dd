"""A prompt that is a list only when somebody wants one."""

import pytest

from shared.kv import packed_ids
from shared.kv.block_hash import pack_tokens
from shared.kv.packed_ids import PackedIds

IDS = [5, 0, 2**32 - 1]


def test_they_are_the_ids_that_were_packed():
    ids = PackedIds(pack_tokens(IDS))
    assert (len(ids), list(ids), ids[-1], ids[1:], 5 in ids) == (3, IDS, IDS[-1], IDS[1:], True)
    assert ids.unpacked() == IDS
    assert repr(ids) == f"PackedIds({IDS})"
    assert list(PackedIds(b"")) == []
    with pytest.raises(IndexError):
        ids[3]


def test_how_many_there_are_takes_no_list_and_the_list_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(packed_ids, "unpack_tokens", lambda raw: made.append(raw) or IDS)
    ids = PackedIds(pack_tokens(IDS))
    assert len(ids) == 3
    assert not made
    assert ids.unpacked() is ids.unpacked()
    assert len(made) == 1
