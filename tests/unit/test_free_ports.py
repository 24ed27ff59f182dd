"""Ports for servers that are about to be started."""

import errno
import socket
import subprocess
import sys
from pathlib import Path

from shared import free_ports as module
from shared.free_ports import bind_error, free_port, free_ports, is_free

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_processes_get_one_port_though_nobody_has_bound_any_yet():
    command = [sys.executable, "-c", "from shared.free_ports import free_ports; print(*free_ports(200))"]
    children = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    given = [int(word) for child in children for word in child.communicate(timeout=60)[0].split()]
    assert len(given) == 800
    assert len(set(given)) == 800


def test_a_port_on_which_somebody_listens_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    (first,) = free_ports(1)
    with socket.socket() as taken:
        while True:
            try:
                taken.bind(("127.0.0.1", first + 1))
                break
            except OSError:
                first = free_port()
        taken.listen()
        assert first + 1 not in free_ports(50)


def test_at_the_end_of_the_range_they_begin_again_and_a_spoilt_file_is_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    free_port()
    (counter,) = tmp_path.iterdir()
    for text in (str(module.PORTS[-1]), "999999", "some words", "", "-5", "9" * 99):
        counter.write_text(text)
        ports = free_ports(3)
        assert all(port - module.PORTS[0] < 1_000 for port in ports), (text, ports)


def test_a_port_that_another_has_is_told_from_a_host_that_nobody_can_have():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = bind_error("127.0.0.1", port)
        assert error is not None
        assert error.errno == errno.EADDRINUSE
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)
    for host in ("192.0.2.1", "no-such-host.invalid", "a..b", "x" * 64):
        error = bind_error(host, port)
        assert error is not None
        assert error.errno != errno.EADDRINUSE
        assert error.strerror, host
