"""The containers' health probe: its exit code says whether the answer was 200."""

import socket
import threading

import pytest

from shared.observe import probe


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server that the machine stops is no unhealthy one here."""
    monkeypatch.setattr(probe.status_of, "__defaults__", (60.0,))


def answering(reply: bytes) -> tuple[str, threading.Thread]:
    """URL of a server that answers one connection with `reply`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(4096)
            connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/ready", thread


@pytest.mark.parametrize(
    ("reply", "exit_code"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", 0),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 1),
        (b"SSH-2.0-x 200\r\n", 1),
        (b"", 1),
    ],
)
def test_only_an_answer_of_200_is_healthy(reply, exit_code):
    url, thread = answering(reply)
    assert probe.main([url]) == exit_code
    thread.join()


def test_nobody_listening_is_unhealthy():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert probe.main([f"http://127.0.0.1:{port}/ready"]) == 1


@pytest.mark.parametrize("url", ["https://127.0.0.1:1/ready", "127.0.0.1:1/ready", "http://127.0.0.1/ready"])
def test_an_address_that_it_cannot_ask_is_an_error(url):
    with pytest.raises(ValueError, match="is not http"):
        probe.main([url])


def test_a_unix_socket_is_healthy_while_somebody_listens(tmp_path):
    path = str(tmp_path / "s")
    assert probe.main([f"unix:{path}"]) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        assert probe.main([f"unix:{path}"]) == 1
        listener.listen(1)
        assert probe.main([f"unix:{path}"]) == 0
    assert probe.main([f"unix:{path}"]) == 1


def test_without_an_address_it_explains_itself():
    assert probe.main([]) == 2
