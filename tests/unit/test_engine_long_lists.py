"""A long prompt's ids are read by NumPy: the tensor is the one that vLLM would have made."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu import buffer_utils

from shared.engine.long_lists import (
    FROM_LENGTH,
    StagedIds,
    TokenIds,
    read_long_lists_by_numpy,
    stage_ids_packed,
)
from shared.kv.block_hash import pack_tokens

STOCK = buffer_utils.async_tensor_h2d


@pytest.fixture
def read(monkeypatch):
    monkeypatch.setattr(buffer_utils, "async_tensor_h2d", STOCK)
    read_long_lists_by_numpy()
    return buffer_utils.async_tensor_h2d


@pytest.mark.parametrize("count", [1, FROM_LENGTH - 1, FROM_LENGTH, 100_096])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, None])
def test_the_tensor_is_that_of_torch(read, count, dtype):
    ids = [(7 * at) % 128_000 - 2 for at in range(count)]
    found, want = read(ids, device="cpu", dtype=dtype), torch.tensor(ids, dtype=dtype)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)


def test_the_tensor_is_its_own(read):
    ids = list(range(FROM_LENGTH))
    found = read(ids, device="cpu", dtype=torch.int32)
    ids[0] = 5
    assert found[0] == 0


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1])
def test_an_id_that_is_no_int32_is_refused(read, wrong):
    with pytest.raises(OverflowError):
        read([wrong] * FROM_LENGTH, device="cpu", dtype=torch.int32)


def test_only_long_lists_go_that_way(monkeypatch, read):
    seen = []
    monkeypatch.setattr(
        "shared.engine.long_lists.np.array", lambda *args, **_: seen.append(len(args[0])) or args[0]
    )
    read([1] * (FROM_LENGTH - 1), device="cpu", dtype=torch.int32)
    read([1.5] * FROM_LENGTH, device="cpu", dtype=torch.float32)
    read([1] * FROM_LENGTH, device="cpu", dtype=torch.int32)
    assert seen == [FROM_LENGTH]


def test_asking_twice_wraps_once(read):
    read_long_lists_by_numpy()
    assert buffer_utils.async_tensor_h2d is read


IDS = [(7 * at) % 128_000 for at in range(1_000)]


def test_packed_ids_are_a_list_that_may_grow_and_go_to_another_process():
    ids = TokenIds(pack_tokens(IDS))
    assert (ids, ids.is_whole) == (IDS, True)
    grown = ids.copy()
    grown.append(5)
    assert (grown, grown.is_whole, ids) == ([*IDS, 5], False, IDS)
    for one in (ids, grown):
        sent = pickle.loads(pickle.dumps(one))
        assert (type(sent), sent, sent.packed) == (TokenIds, one, ids.packed)


@pytest.mark.parametrize("parts", [[3], [1, 3], [3, 2, 1], [1]])
def test_staged_ids_are_written_as_vllms_list_would_be(read, parts):
    def part(kind: int) -> list[int]:
        ids = TokenIds(pack_tokens(IDS))
        return {1: IDS[:300], 2: [*ids.copy(), 9], 3: ids}[kind]

    staged, listed = StagedIds(), []
    assert not staged
    for kind in parts:
        staged.extend(part(kind))
        listed.extend(part(kind))
        assert len(staged) == len(listed)
    staged.append(4)
    listed.append(4)
    found = read(staged, device="cpu", dtype=torch.int32)
    assert torch.equal(found, torch.tensor(listed, dtype=torch.int32))
    found[0] = -1  # it is nobody else's
    assert staged.array()[0] == listed[0]
    staged.clear()
    assert len(staged) == 0


def test_a_packed_prompt_that_grew_is_staged_with_what_it_grew_by():
    ids = TokenIds(pack_tokens(IDS)).copy()
    ids.extend([1, 2])
    staged = StagedIds()
    staged.extend(ids)
    assert staged.array().tolist() == [*IDS, 1, 2]


def test_only_the_runners_table_of_ids_takes_them_packed():
    tables = [SimpleNamespace(dtype=torch.int32, _staged_write_contents=[]) for _ in range(2)]
    runner = SimpleNamespace(req_states=SimpleNamespace(all_token_ids=tables[0], total_len=tables[1]))
    stage_ids_packed(runner)
    assert [type(table._staged_write_contents) for table in tables] == [StagedIds, list]
    stage_ids_packed(SimpleNamespace())  # the CPU's runner
