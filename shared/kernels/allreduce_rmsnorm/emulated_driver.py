"""FusedDriver for tests: runs fused.cu itself on the CPU, compiled by g++, threads in a seeded order (emulated.h)."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.driver import Params
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused, FusedUnavailable
from shared.kernels.allreduce_rmsnorm.shapes import KernelShape, Launch

SOURCE = Path(__file__).with_name("emulated.cpp")
KERNELS = ("fused_plain", "fused_bulk", "fused_multimem", "gather_rows", "add_norm")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-x", "c++")
COMPILE_S = 240.0
MOST_PASSES = 200_000


class EmulatedGroup(ActedGroup):
    """All ranks' drivers; see ActedGroup. `folder` keeps what is compiled, `multicast` stands for all arenas at once.

    Raises: FusedUnavailable without g++; FusedRefused when a kernel reads or writes outside of what it was given, or
        when no thread can go on.
    """

    def __init__(self, arenas: Sequence[Arena], folder: Path, seed: int) -> None:
        super().__init__(len(arenas))
        self._arenas, self._folder, self.seed = arenas, folder, seed
        self.absent: set[int] = set()  # ranks that never launch: dead

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

    def come_with(self, rank: int, shape: KernelShape, name: str, launch: Launch, params: Params) -> None:
        """One rank's launch; the last one that is alive starts all. add_norm meets nobody."""
        self.launches.append((name, launch))
        if name == "add_norm":
            self._run(shape, name, launch, {0: params})
            return
        self.waiting[rank] = (shape, name, params)
        if len(self.waiting) + len(self.absent) < self.world:
            return
        calls, self.waiting = self.waiting, {}
        if len({(other, kernel) for other, kernel, _ in calls.values()}) != 1:
            raise FusedRefused(f"ranks launched different kernels: {calls}")
        self._run(shape, name, launch, {one: given for one, (_, _, given) in calls.items()})

    def _run(self, shape: KernelShape, name: str, launch: Launch, calls: dict[int, Params]) -> None:
        arena, row_bytes = self._arenas[0], shape.hidden * 2
        pointers = (ctypes.POINTER(Params) * self.world)()
        places = [(base, arena.own.numel()) for base in arena.bases]
        for rank, given in calls.items():
            pointers[rank] = ctypes.pointer(given)
            places += [
                (given.residual, given.row_stop * row_bytes),
                (given.weight, row_bytes),
                (given.report, 4),
            ]
            if name == "add_norm":
                places.append((given.out[0], given.row_stop * row_bytes))
        flat = [end for begin, size in places for end in (begin, begin + size)]
        self.seed += 1
        found = self.library(shape).emulate(
            KERNELS.index(name), launch.ctas, launch.threads, ctypes.c_uint64(launch.shared_bytes), pointers,
            self.world, (ctypes.c_uint64 * len(flat))(*flat), len(places), ctypes.c_uint64(arena.multicast),
            (ctypes.c_uint64 * self.world)(*arena.bases), self.seed, ctypes.c_long(MOST_PASSES),
        )  # fmt: skip
        if found:
            words = {-1: "no thread could go on", -2: "it ended before its rows had arrived"}
            what = words.get(found, f"{found} accesses went astray")
            raise FusedRefused(f"{name} {launch}, seed {self.seed}: {what}")


class EmulatedDriver(ActedDriver):
    """One rank's; see EmulatedGroup."""

    def __init__(self, group: EmulatedGroup) -> None:
        super().__init__(group)
        self._emulated = group

    def launch(self, function: tuple[KernelShape, str], launch: Launch, stream: int, params: Params) -> None:
        """See FusedDriver."""
        shape, name = function
        self._emulated.come_with(params.rank, shape, name, launch, Params.from_buffer_copy(params))
