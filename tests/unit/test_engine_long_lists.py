"""A long prompt's ids are read by NumPy: the tensor is the one that vLLM would have made."""

import pytest
import torch
from vllm.v1.worker.gpu import buffer_utils

from shared.engine.long_lists import FROM_LENGTH, read_long_lists_by_numpy

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
