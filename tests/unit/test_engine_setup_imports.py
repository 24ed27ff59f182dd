"""vLLM is imported without garbage collection, which is as it was behind it, whatever comes of the import."""

import gc

import pytest

from shared.engine.vllm_setup import quick_imports


@pytest.fixture(autouse=True)
def collection():
    yield
    gc.enable()


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_rests_and_is_as_it_was(was_on):
    (gc.enable if was_on else gc.disable)()
    seen = []

    def fails():
        with quick_imports():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fails()
    assert seen == [False]
    assert gc.isenabled() == was_on


def test_what_was_imported_is_never_walked_again():
    frozen = gc.get_freeze_count()
    with quick_imports():
        kept = [[] for _ in range(100)]
    assert gc.get_freeze_count() >= frozen + len(kept)
    assert not any(kept[0] is item for item in gc.get_objects())
