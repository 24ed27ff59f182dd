"""FusedDriver for tests: runs fused.cu itself on the CPU, compiled by g++, threads in a seeded order (emulated.h)."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.driver import Params
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused, FusedUnavailable
from shared.kernels.allreduce_rmsnorm.shapes import KernelShape, Launch

SOURCE = Path(__file__).with_name("emulated.cpp")
KERNELS = ("fused_plain", "fused_push", "fused_bulk", "fused_multimem", "gather_rows", "add_norm")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-x", "c++")
COMPILE_S = 240.0
MOST_PASSES = 200_000


class _Copy(ctypes.Structure):
    _fields_ = [("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    """emulated.cpp's Launch, field by field."""

    _fields_ = [
        ("params", ctypes.POINTER(Params)),
        ("dynamic_bytes", ctypes.c_uint64),
        ("before", _Copy),
        ("behind", _Copy),
        ("kernel", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@dataclass
class _Call:
    """A rank's launch. `given` is written to its input before, its output is read to `out` behind it; or nothing is."""

    shape: KernelShape
    name: str
    launch: Launch
    params: Params
    given: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    out: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def packed(self) -> _Launch:
        own = self.params.rank
        return _Launch(
            ctypes.pointer(self.params), self.launch.shared_bytes,
            _Copy(self.params.input[own], self.given.data_ptr(), self.given.numel()),
            _Copy(self.out.data_ptr(), self.params.out[own], self.out.numel()),
            KERNELS.index(self.name), self.launch.ctas, self.launch.threads,
        )  # fmt: skip


class EmulatedGroup(ActedGroup):
    """All ranks' drivers; see ActedGroup. `folder` keeps what is compiled, `multicast` stands for all arenas at once.

    Raises: FusedUnavailable without g++; FusedRefused when a kernel reads or writes outside of what it was given, or
        when no thread can go on.
    """

    def __init__(self, arenas: Sequence[Arena], folder: Path, seed: int) -> None:
        super().__init__(len(arenas))
        self._arenas, self._folder, self.seed = arenas, folder, seed
        self.absent: set[int] = set()  # ranks that never launch: dead
        self._calls: dict[int, list[_Call]] = {rank: [] for rank in range(self.world)}
        self._collects = False

    def library(self, shape: KernelShape) -> ctypes.CDLL:
        """Compiled for one shape, once. Cost: one to three seconds."""
        compiler = shutil.which("g++")
        if compiler is None:
            raise FusedUnavailable("no g++ to run the kernel's source on the CPU with")
        defines = {**shape.defines(), "PARAMS_BYTES": ctypes.sizeof(Params)}
        words = [f"-D{key}={value}" for key, value in defines.items()]
        out = self._folder / ("-".join(str(value) for value in defines.values()) + ".so")
        if not out.exists():
            done = subprocess.run(
                [compiler, *FLAGS, *words, str(SOURCE), "-o", str(out)],
                capture_output=True, text=True, timeout=COMPILE_S, check=False,
            )  # fmt: skip
            if done.returncode:
                raise FusedRefused(f"g++: {done.stderr[-2000:]}")
        found = ctypes.CDLL(str(out))
        found.emulate.restype = ctypes.c_long
        return found

    @contextmanager
    def apart(self) -> Iterator[list[list[torch.Tensor]]]:
        """Launches within run at its end, each rank's one after the other: one may be launches ahead of another.

        A rank's input is written before each of its launches with what it is when that is made, and its output is read
        behind it, into what this gives: uint8 [rows of a lane's buffer], by launch and rank. All of one shape.
        """
        outs: list[list[torch.Tensor]] = []
        self._collects = True
        yield outs
        self._collects = False
        outs += [[call.out for call in calls] for calls in zip(*self._calls.values(), strict=True)]
        self._run_all()

    def come_with(self, rank: int, shape: KernelShape, name: str, launch: Launch, params: Params) -> None:
        """One rank's launch; the last one that is alive starts all. add_norm meets nobody."""
        self.launches.append((name, launch))
        call = _Call(shape, name, launch, params)
        if name == "add_norm":
            self._run(shape, [[call]])
            return
        if self._collects:
            arena, size = self._arenas[rank], params.out[rank] - params.input[rank]  # out lies behind input
            begin = params.input[rank] - arena.bases[rank]
            call.given = arena.own[begin : begin + size].clone()
            call.out = torch.zeros(size, dtype=torch.uint8)
        self._calls[rank].append(call)
        alive = self.world - len(self.absent)
        if not self._collects and sum(map(len, self._calls.values())) == alive:
            self._run_all()

    def _run_all(self) -> None:
        streams, self._calls = list(self._calls.values()), {rank: [] for rank in range(self.world)}
        made = [[(call.shape, call.name) for call in calls] for calls in streams if calls]
        if any(one != made[0] for one in made):
            raise FusedRefused(f"ranks launched different kernels: {made}")
        self._run(made[0][0][0], streams)

    def _run(self, shape: KernelShape, streams: Sequence[Sequence[_Call]]) -> None:
        arena, row_bytes = self._arenas[0], shape.hidden * 2
        most = 1 + max(map(len, streams))
        launches = (_Launch * (most * len(streams)))()
        places = [(base, arena.own.numel()) for base in arena.bases]
        for i, calls in enumerate(streams):
            for j, call in enumerate(calls):
                given = call.params
                launches[i * most + j] = call.packed()
                places += [
                    (given.residual, given.row_stop * row_bytes),
                    (given.weight, row_bytes),
                    (given.report, 4),
                ]
                if call.name == "add_norm":
                    places.append((given.out[0], given.row_stop * row_bytes))
        flat = [end for begin, size in places for end in (begin, begin + size)]
        self.seed += 1
        found = self.library(shape).emulate(
            launches, len(streams), most, (ctypes.c_uint64 * len(flat))(*flat), len(places),
            ctypes.c_uint64(arena.multicast), (ctypes.c_uint64 * self.world)(*arena.bases), self.seed,
            ctypes.c_long(MOST_PASSES),
        )  # fmt: skip
        if found:
            words = {-1: "no thread could go on", -2: "it ended before its rows had arrived"}
            what = words.get(found, f"{found} accesses went astray")
            raise FusedRefused(
                f"{[(call.name, call.launch) for call in streams[-1]]}, seed {self.seed}: {what}"
            )


class EmulatedDriver(ActedDriver):
    """One rank's; see EmulatedGroup."""

    def __init__(self, group: EmulatedGroup) -> None:
        super().__init__(group)
        self._emulated = group

    def launch(self, function: tuple[KernelShape, str], launch: Launch, stream: int, params: Params) -> None:
        """See FusedDriver."""
        shape, name = function
        self._emulated.come_with(params.rank, shape, name, launch, Params.from_buffer_copy(params))
