"""The profiler's second mode: batches of a callable, and a device's memory."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.profiler import batches
from loadtest.profiler.core.sweep import BatchPoint, BatchSweep, SweepLimits
from shared.engine.device_memory import GpuMemory, ProcessMemory, open_device
from shared.errors import SettingsError

GB, GIB = 10**9, 1 << 30


def swept(speed, limits=None, no_room_at=1 << 30):
    sweep = BatchSweep(limits or SweepLimits())
    while (batch := sweep.next_batch()) is not None:
        if batch >= no_room_at:
            sweep.out_of_memory(batch)
        else:
            sweep.record(BatchPoint(batch, speed(batch), batch * GB, 80 * GB - batch * GB))
    return sweep


def test_batches_double_until_throughput_saturates_and_the_smallest_good_one_counts():
    sweep = swept(lambda batch: min(batch, 8) * (1 + batch / 1000))
    assert [one.batch for one in sweep.points] == [1, 2, 4, 8, 16]
    assert sweep.peak().batch == 8
    assert "less than 5%" in sweep.reason
    falling = swept(lambda batch: 1 / batch)
    assert ([one.batch for one in falling.points], falling.peak().batch) == ([1, 2], 1)


def test_memory_and_the_largest_batch_end_it_too():
    short = swept(float, no_room_at=5)
    assert (short.peak().batch, short.reason) == (4, "a batch of 8 found no room")
    assert swept(float, SweepLimits(most=6)).peak().batch == 6
    with pytest.raises(SettingsError, match="not even a batch of 1"):
        swept(float, no_room_at=1).peak()
    for wrong in ({"gain": 0.0}, {"most": 0}):
        with pytest.raises(SettingsError):
            SweepLimits(**wrong)


class FakeMemory:
    """A device of 80 GB of which each item takes one; time stands still."""

    name, total_bytes = "fake", 80 * GB

    def __init__(self):
        self.begun = self.waits = self.batch = 0

    def begin(self):
        self.begun += 1

    def wait(self):
        self.waits += 1

    def peak(self):
        return self.batch * GB, (80 - self.batch) * GB

    def found_no_room(self, error):
        return "room" in str(error)


def test_a_callable_is_called_batch_by_batch_until_it_finds_no_room_and_other_errors_are_its_own():
    memory = FakeMemory()

    def work(batch):
        if batch > 4:
            raise RuntimeError("no room")
        memory.batch = batch

    sweep = batches.sweep_batches(work, memory, SweepLimits(gain=1e-6), lambda text: None)
    assert sweep.points[-1].used_bytes == sweep.points[-1].batch * GB
    assert memory.waits == len(sweep.points) * (batches.WARM_UP + batches.ROUNDS)
    with pytest.raises(RuntimeError, match="a bug"):
        batches.sweep_batches(
            lambda batch: (_ for _ in ()).throw(RuntimeError("a bug")), memory, SweepLimits(), print
        )


@pytest.mark.parametrize("name", ["nothing", "json:", ":x", "json:none", "no_such_module:x", "json:__name__"])
def test_a_callable_that_is_not_there_is_named(name):
    with pytest.raises(SettingsError, match="--callable"):
        batches.load(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./mm.py:f", "give the module's dotted name, such as mm:f"),
        ("models/mm.py:f", "give the module's dotted name, such as models.mm:f"),
        ("mm.py:f", "give the module's dotted name, such as mm:f"),
        ("./mm:f", "give the module's dotted name, such as mm:f"),
        (".mm:f", "give the module's dotted name, such as mm:f"),
        ("wrong_names:f", "wrong_names cannot be imported: cannot import name 'nobody'"),
        ("wrong_syntax:f", "wrong_syntax cannot be imported: .*wrong_syntax.py, line 1"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(tmp_path, monkeypatch, name, why):
    (tmp_path / "wrong_names.py").write_text("from json import nobody\n")
    (tmp_path / "wrong_syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SettingsError, match=f"^--callable {re.escape(name)}: {why}"):
        batches.load(name)


def test_resident_memory_sees_a_peak_that_is_gone_again_and_forgets_it():
    memory = open_device("cpu")
    memory.begin()
    before, _ = memory.peak()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
    taken = bytearray(64 << 20)
    taken[:: 1 << 12] = b"x" * len(taken[:: 1 << 12])
    del taken
    used, free = memory.peak()
    assert used >= before
    if before < 1.2 * resident:  # the kernel took the order
        assert used >= before + (32 << 20)
    assert 0 <= free < memory.total_bytes
    with pytest.raises(SettingsError, match="cpu or cuda"):
        open_device("tpu")
    assert memory.found_no_room(MemoryError())
    assert memory.found_no_room(RuntimeError("DefaultCPUAllocator: not enough memory: you tried"))
    assert not memory.found_no_room(RuntimeError("shapes do not match"))


def test_free_on_a_cpu_is_what_others_left_less_what_the_work_took_on_top(tmp_path):
    """The machine has 32 GiB, of which other processes have most."""
    status = tmp_path / "status"
    status.write_text("Name: x\nVmHWM:\t    2097152 kB\nVmRSS:\t 2097152 kB\n")
    memory = ProcessMemory(
        tmp_path, SimpleNamespace(total_bytes=lambda: 32 * GIB, available_bytes=lambda: 9 * GIB)
    )
    memory.begin()
    status.write_text("Name: x\nVmHWM:\t    5242880 kB\nVmRSS:\t 2097152 kB\n")
    assert memory.total_bytes == 32 * GIB
    assert memory.peak() == (5 * GIB, 6 * GIB)
    status.write_text("Name: x\nVmHWM:\t    15728640 kB\nVmRSS:\t 2097152 kB\n")
    assert memory.peak() == (15 * GIB, 0)  # into what the system swapped out


def test_where_the_kernel_forgets_no_peak_or_tells_none(tmp_path):
    (tmp_path / "clear_refs").mkdir()  # no order is taken there
    (tmp_path / "status").write_text("Name: x\nVmHWM:\t    12 kB\nVmRSS:\t 8 kB\n")
    sandboxed = ProcessMemory(tmp_path)
    sandboxed.begin()
    assert sandboxed.peak()[0] == 12 << 10
    (tmp_path / "status").write_text("Name: x\nVmRSS:\t 8 kB\n")
    with pytest.raises(SettingsError, match="VmHWM"):
        sandboxed.peak()


def test_a_gpus_free_memory_is_the_drivers_after_the_work_with_nothing_given_back_between():
    calls = []

    class NoRoom(RuntimeError):
        pass

    cuda = SimpleNamespace(
        get_device_name=lambda: "GPU",
        mem_get_info=lambda: (30 * GB, 80 * GB),
        synchronize=lambda: calls.append("wait"),
        empty_cache=lambda: calls.append("give back"),
        OutOfMemoryError=NoRoom,
    )
    memory = GpuMemory(SimpleNamespace(cuda=cuda))
    memory.begin()
    memory.wait()
    assert calls == ["wait", "give back", "wait"]
    assert (memory.name, memory.peak()) == ("GPU", (50 * GB, 30 * GB))
    assert memory.found_no_room(NoRoom())
    assert not memory.found_no_room(RuntimeError())
