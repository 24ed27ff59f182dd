"""Calls in a loop stay on mapped memory at every depth (shared/frame_room.py)."""

import os
import resource
import threading
from collections.abc import Callable

import pytest

from shared.frame_room import with_frame_room

DEPTHS = 300
CALLS = 300


def _add(one: int, other: int) -> int:
    return one + other


def _faults_of_a_loop() -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        _add(1, 2)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _at(depth: int) -> int:
    return _at(depth - 1) if depth else _faults_of_a_loop()


def _worst_depth() -> int:
    return max(_at(depth) for depth in range(DEPTHS))


def _in_a_thread(call: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_without_room_a_loop_at_some_depth_faults_at_every_call() -> None:
    """What the module is for. Should this fail with another Python, the module can go."""
    assert _in_a_thread(_worst_depth) >= CALLS


def test_with_room_no_loop_faults_at_any_depth() -> None:
    assert _in_a_thread(lambda: with_frame_room(_worst_depth)) < CALLS / 10


def test_a_forked_process_keeps_the_room() -> None:
    def forked() -> int:
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            return os.waitstatus_to_exitcode(status)
        code = 99
        try:
            code = int(_worst_depth() >= CALLS / 10)
        finally:
            os._exit(code)

    assert _in_a_thread(lambda: with_frame_room(forked)) == 0


def test_arguments_results_and_errors_pass_through() -> None:
    assert with_frame_room(divmod, 7, 2) == (3, 1)
    assert with_frame_room(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        with_frame_room(divmod, 1, 0)
