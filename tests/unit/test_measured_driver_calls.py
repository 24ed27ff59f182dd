"""Every call of CUDA's virtual memory passes the counter, whoever makes it."""

import threading
from types import SimpleNamespace

from shared.engine import measured_driver_calls
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.interface import OP_CUDA_UNMAP, OP_PAUSE, Op
from shared.vmm.mapper import MAPPER_THREAD, NativeMapper, ThreadMapper


class Ok:
    def __int__(self) -> int:
        return 0


def driver() -> CudaVmmDriver:
    """Without a GPU: each call succeeds and does nothing."""
    made = object.__new__(CudaVmmDriver)
    made._cuda = SimpleNamespace(cuMemUnmap=lambda *_: (Ok(),))
    made._context = None
    return made


def test_calls_count_by_the_thread_that_makes_them(monkeypatch):
    monkeypatch.setattr(CudaVmmDriver, "_call", CudaVmmDriver._call)
    monkeypatch.setattr(NativeMapper, "submit", NativeMapper.submit)
    calls = measured_driver_calls.count_driver_calls()
    it = driver()
    it.unmap(0, 4096)
    it.unmap(4096, 4096)
    assert (calls.inline, calls.background) == (2, 0)
    thread = threading.Thread(target=it.unmap, args=(0, 4096), name=MAPPER_THREAD)
    thread.start()
    thread.join()
    assert (calls.inline, calls.background) == (2, 1)


def test_what_a_thread_without_the_interpreter_does_is_counted_when_it_is_handed_over(monkeypatch):
    monkeypatch.setattr(CudaVmmDriver, "_call", CudaVmmDriver._call)
    handed: list[Op] = []
    monkeypatch.setattr(NativeMapper, "submit", lambda _self, ops: handed.extend(ops) or len(handed))
    calls = measured_driver_calls.count_driver_calls()
    ops = [Op(OP_CUDA_UNMAP, 0, 4096), Op(OP_PAUSE, 10, 0), Op(OP_CUDA_UNMAP, 4096, 4096)]
    assert object.__new__(NativeMapper).submit(ops) == 3
    assert (calls.inline, calls.background) == (0, 2)
    assert handed == ops


def test_both_mappers_name_their_thread_so_that_it_is_known():
    made = ThreadMapper(
        SimpleNamespace(prepare_thread=lambda: None, apply=lambda ops: None, entry_points=dict)
    )
    assert made._thread.name == MAPPER_THREAD
    made.close()
