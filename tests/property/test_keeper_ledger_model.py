"""Whatever is kept, kept again and forgotten: the ledger agrees with a plain dict, and loses no descriptor."""

from hypothesis import given
from hypothesis import strategies as st

from services.mempool.keeper.ledger import KeeperFull, Ledger
from tests.unit.test_keeper_ledger import everything

PAGES = 24
MAX_FDS = 16
steps = st.lists(
    st.tuples(
        st.sampled_from(["keep", "forget"]),
        st.integers(0, PAGES - 1),
        st.integers(1, 8),
        st.sampled_from([b"", b"m", b"n"]),
    ),
    max_size=40,
)


@given(steps)
def test_the_ledger_is_a_dict_of_pages_and_every_descriptor_is_held_or_given_back(ops):
    book, model, metas, opened, closed = Ledger(MAX_FDS), {}, {}, 0, []
    for step, first, count, meta in ops:
        pages = range(first, first + count)
        if step == "forget":
            closed += (gone := book.forget("s", "cuda-page", first, count))
            assert sorted(gone) == sorted(model.pop(page) for page in pages if page in model)
            continue
        fds = list(range(opened, opened + count))
        after = {**model, **dict(zip(pages, fds, strict=True))}
        try:
            closed += book.keep("s", "cuda-page", first, count, meta, fds)
        except KeeperFull:
            assert len(after) > MAX_FDS
            continue
        assert len(after) <= MAX_FDS
        model, opened = after, opened + count
        metas |= dict.fromkeys(pages, meta)
        assert everything(book) == model
        assert book.num_fds == len(model)
    assert sorted([*closed, *model.values()]) == list(range(opened))
    for page in model:
        held = book.held("s", "cuda-page", page)
        assert held is not None
        assert (held[0], held[2]) == (page, metas[page])
