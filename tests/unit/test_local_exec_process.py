"""Processes that the supervisor makes by exec."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from deploy.local import launch


def test_a_process_that_cannot_be_watched_is_not_left_behind(tmp_path, monkeypatch):
    made = []

    def refuse(pid):
        made.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many"):
        launch.ExecProcess(
            ["sleep", "60"],
            log=tmp_path / "a.log",
            env=dict(os.environ),
            cwd=tmp_path,
            on_exit=lambda _: None,
        )
    (pid,) = made
    try:
        assert not Path(f"/proc/{pid}").exists(), "its successor would meet it, on the same port"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
