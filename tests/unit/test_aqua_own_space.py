"""A process's pages in its mempool are as many as it asked for, or it hears that they are not."""

import pytest

from shared.aqua import own_space as module
from shared.aqua.own_space import OwnSpace
from shared.errors import InvalidRequest
from shared.ids import Epoch, InstanceId
from shared.kv.page_table import TableHeader

PAGE = 4_096
open_links = []


class Memory:
    """RankMemory of a mempool that has eight pages under every name; `asked_pages` are answered as asked for."""

    limit = 64

    def __init__(self, *_, capacity_bytes, **__):
        self.header = TableHeader(Epoch(1), 8, PAGE)
        self.asked_pages = min(capacity_bytes // PAGE, self.limit)
        open_links.append(self)

    def close(self):
        open_links.remove(self)


class Quota:
    def __init__(self, *_):
        pass

    def attach(self):
        return TableHeader(Epoch(1), 8, PAGE)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def mempool(monkeypatch):
    monkeypatch.setattr(module, "RankMemory", Memory)
    monkeypatch.setattr(module, "PageQuota", Quota)
    open_links.clear()
    return monkeypatch


def space(num_bytes, **options):
    return OwnSpace("s", InstanceId("notebook"), "cpu:notebook", PAGE, num_bytes, **options)


@pytest.mark.parametrize(("num_pages", "only_lends"), [(16, False), (4, False), (16, True)])
def test_a_name_that_has_another_number_of_pages_is_refused_with_both_numbers(num_pages, only_lends):
    with pytest.raises(InvalidRequest, match=f"^{num_pages} pages .* has 8 .*'notebook'.* another name"):
        space(num_pages * PAGE, only_lends=only_lends)
    assert not open_links, "nothing stays attached"


def test_a_name_that_has_as_many_pages_is_taken_again(mempool):
    assert space(8 * PAGE + PAGE - 1).num_pages == 8, "of whole pages"
    assert space(4 * PAGE, only_lends=True).num_pages == 8, "lend() uses as many as it may"
    mempool.setattr(Memory, "limit", 8)
    assert space(100 * PAGE).num_pages == 8, "the mempool has no more for anybody"
    mempool.setattr(Memory, "limit", 0)
    assert space(100 * PAGE).num_pages == 8, "it does not say what that comes to"
