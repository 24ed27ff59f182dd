"""What `quire status` and `quire profile` read is on this machine: no proxy of the environment is asked for it."""

import http.server
import threading
import urllib.request

import pytest

from deploy.local.terminal import get_json
from loadtest.profiler import live


class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ok": 1}')

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("get", [get_json, live._read])
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
