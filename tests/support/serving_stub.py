"""A gateway and a worker's status page in one thread: what a profile's runs are answered, and when nothing answers."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK_BYTES = 1_000
ANSWER = (
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[7]}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)


class ServingStub(ThreadingHTTPServer):
    """Args: max_model_len: of /v1/models; 0: left out. bodies: of what was asked. status, delay_s: of all answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, max_model_len: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.max_model_len, self.status, self.num_running = max_model_len, 200, 0
        self.bodies: list[dict] = []
        self.delay_s, self.num_answered = 0.0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ServingStub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        model = {"id": "m"} | (
            {"max_model_len": self.server.max_model_len} if self.server.max_model_len else {}
        )
        page = {
            "role": "decode", "model": "m", "block_tokens": 32, "block_bytes": BLOCK_BYTES, "tensor_parallel": 1,
            "kv_used_share": 0.1, "kv_used_bytes": BLOCK_BYTES, "kv_pool_bytes": 100 * BLOCK_BYTES,
            "num_running": self.server.num_running, "num_waiting": 0,
        }  # fmt: skip
        self._answer(200, json.dumps({"data": [model]} if self.path == "/v1/models" else page).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        status = self.server.status
        time.sleep(self.server.delay_s)
        self._answer(status, ANSWER if status == 200 else b'{"error":{"message":"said so"}}')
        self.server.num_answered += 1

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(max_model_len: int = 0) -> Iterator[ServingStub]:
    """It serves until the end of the block, or until its server_close()."""
    stub = ServingStub(max_model_len)
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
        thread.join()
