"""What commands and measurements read on this machine: no proxy of the environment is asked for it."""

import http.server
import json
import socket
import threading
import urllib.request

import pytest

from deploy.local.terminal import get_json
from loadtest.profiler import live
from shared import http_get
from shared.errors import ClusterError
from shared.observe import timeline
from shared.testing import processes


class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ok": 1}')

    def log_message(self, *_):
        pass


def get_spans(url):
    return json.loads(timeline._get(url, 5.0))


def get_tested(url):
    return processes.get_json(url)[1]


@pytest.mark.parametrize("get", [get_json, live._read, get_spans, get_tested])
def test_no_proxy_is_between_this_command_and_the_services(monkeypatch, get):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(urllib.request, "_opener", None)  # made at the first use, of the environment then
    with http.server.HTTPServer(("127.0.0.1", 0), Status) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert get(f"http://127.0.0.1:{server.server_port}/status") == {"ok": 1}
        finally:
            server.shutdown()
            thread.join()


def test_other_machines_are_asked_as_the_environment_says(monkeypatch):
    asked = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: asked.append(request.full_url))
    http_get.open_url("http://jaeger.example:16686/api", timeout_s=1)
    assert asked == ["http://jaeger.example:16686/api"]
    urls = ("http://127.0.0.1:1", "http://localhost", "http://[::1]:2/x")
    assert [http_get.is_here(url) for url in urls] == [True] * 3
    assert not http_get.is_here("http://10.0.0.1:1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc/", "http://[::1"])
def test_what_is_no_url_is_an_error_with_words(url):
    for get in (get_spans, live._read):
        with pytest.raises(ClusterError):
            get(url)
    assert get_json(url) is None


def test_who_speaks_something_else_is_an_error_with_words():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for _ in range(3):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        for get in (get_spans, live._read):
            with pytest.raises(ClusterError, match="ERR unknown"):
                get(url)
        assert get_json(url) is None
        thread.join()
