"""vLLM's offloading worker with our copies over a driver without a GPU: bytes, order, the ends of tensors."""

import types

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def parts():
    """(torch, module, recording driver, copier, stream)."""
    module = pytest.importorskip("shared.engine.offload_copies")
    import torch

    from shared.kernels.copy_pages.cuda_copier import CudaCopier
    from shared.kernels.copy_pages.recording_driver import RecordingDriver

    driver = RecordingDriver()
    copier = CudaCopier(driver)
    yield torch, module, driver, copier, driver.create_stream()
    copier.close()


def handler(torch, sources, targets):
    return types.SimpleNamespace(src_tensors=sources, dst_tensors=targets, _swap_blocks_batch=None)


def test_blocks_arrive_and_no_copy_runs_over_the_end_of_a_tensor(parts, monkeypatch):
    torch, module, driver, copier, stream = parts
    monkeypatch.setattr(module, "current_stream", lambda: stream)
    memory = torch.randint(
        -100, 100, (4, 64), dtype=torch.int8
    )  # two tensors that happen to lie side by side
    gpu = [memory[:2], memory[2:]]
    far = torch.zeros((4, 64), dtype=torch.int8)
    cpu = [far[:2], far[2:]]
    worker = types.SimpleNamespace(
        _store_handler=handler(torch, gpu, cpu), _load_handler=handler(torch, cpu, gpu)
    )
    assert module.with_copies(worker, copier) is worker
    sources = torch.tensor([t.data_ptr() + row * 64 for t in gpu for row in range(2)], dtype=torch.int64)
    targets = torch.tensor([t.data_ptr() + row * 64 for t in cpu for row in range(2)], dtype=torch.int64)
    sizes = torch.full((4,), 64, dtype=torch.int64)
    worker._store_handler._swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=False)
    assert torch.equal(far, memory)
    batches = [args for name, args in driver.calls if name == "copy_batch"]
    assert len(batches) == 1
    assert sorted(batches[0][2]) == [128, 128]  # merged within a tensor, not over its end

    far.random_(-100, 100)
    worker._load_handler._swap_blocks_batch(targets, sources, sizes, is_src_access_order_any=True)
    assert torch.equal(far, memory)


def test_the_order_is_the_one_that_vllm_asks_for(parts, monkeypatch):
    torch, module, _, copier, stream = parts
    monkeypatch.setattr(module, "current_stream", lambda: stream)
    seen = []
    submit = copier.submit

    def noted(copies, direction, **options):
        seen.append((str(direction), options["order"].name, options["stream"]))
        return submit(copies, direction, **options)

    monkeypatch.setattr(copier, "submit", noted)
    near, far = torch.ones(64, dtype=torch.int8), torch.zeros(64, dtype=torch.int8)
    rows = [torch.tensor([value], dtype=torch.int64) for value in (near.data_ptr(), far.data_ptr(), 64)]
    module.CopyPagesSwap(copier, module.Direction.DEVICE_TO_HOST)(*rows, is_src_access_order_any=False)
    module.CopyPagesSwap(copier, module.Direction.HOST_TO_DEVICE)(*rows, is_src_access_order_any=True)
    assert seen == [("device_to_host", "STREAM", stream), ("host_to_device", "ANY", stream)]
    assert torch.equal(near, far)


def test_a_worker_of_another_make_is_refused(parts):
    from shared.errors import InvariantBroken

    _, module, _, copier, _ = parts
    other = types.SimpleNamespace(
        _store_handler=types.SimpleNamespace(), _load_handler=types.SimpleNamespace()
    )
    with pytest.raises(InvariantBroken, match="no swap function"):
        module.with_copies(other, copier)


def test_transfers_are_written_down_with_their_direction_and_copies(parts, tmp_path):
    torch, *_ = parts
    from shared.engine import measured_offload

    class Handler:
        def __init__(self):
            self._swap_blocks_batch = lambda *columns, **options: None
            self.jobs = []

        def transfer_async(self, job_id, source, target):
            column = torch.zeros(job_id, dtype=torch.int64)
            self._swap_blocks_batch(column, column, column)
            self.jobs.append(job_id)
            return True

        def get_finished(self):
            jobs, self.jobs = self.jobs, []
            return [types.SimpleNamespace(job_id=j, transfer_size=64 * j, transfer_time=0.5) for j in jobs]

    worker = types.SimpleNamespace(_store_handler=Handler(), _load_handler=Handler())
    path = tmp_path / "transfers"
    measured_offload.recorded(worker, path)
    worker._store_handler.transfer_async(3, None, None)
    worker._load_handler.transfer_async(2, None, None)
    assert [len(each.get_finished()) for each in (worker._store_handler, worker._load_handler)] == [1, 1]
    assert worker._store_handler.get_finished() == []
    from loadtest.bench_offload import transfers_of

    found = [
        (row["direction"], row["bytes"], row["s"], row["copies"]) for row in transfers_of(path.read_text())
    ]
    assert found == [("store", 192, 0.5, 3), ("load", 128, 0.5, 2)]


def test_vllm_finds_the_spec_by_its_name(parts):
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    extra = {"spec_name": "CopyPagesOffloadingSpec", "spec_module_path": "shared.engine.offload_copies"}
    assert OffloadingSpecFactory.get_spec_cls(extra) is parts[1].CopyPagesOffloadingSpec
    for engine in ("stock", "quire"):
        from pathlib import Path

        from shared.engine.measured_offload import transfer_config

        config = transfer_config(engine, 1 << 30, Path("r"), Path("c"))
        assert OffloadingSpecFactory.get_spec_cls(config.kv_connector_extra_config).__name__.startswith(
            "Recorded"
        )
