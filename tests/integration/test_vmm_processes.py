"""Pages between real processes: by descriptor, alive as long as somebody holds one, read-only where asked."""

import json
import os
import signal
import socket
import subprocess
import sys

from shared.vmm.memfd_pages import MemfdPages

PAGE = 64 << 10

OWNER = """
import socket, sys
from shared.vmm.memfd_pages import MemfdPages
link = socket.socket(fileno=int(sys.argv[1]))
pages = MemfdPages(8, 65536)
window = pages.window(8)
window.map(0, 0, 8)
view = window.as_memoryview()
for page in range(8):
    view[page * 65536] = page + 1
socket.send_fds(link, [b"p"], [pages.export_fd(0)])
link.recv(1)
"""

READER = """
import json, sys
from shared.vmm.memfd_pages import MemfdPages
pages = MemfdPages(8, 65536, fd=int(sys.argv[1]))
window = pages.window(4)
window.map_pages(0, [6, 2, 6, 1], writable=False)
view = window.as_memoryview()
print(json.dumps([view[i * 65536] for i in range(4)]), flush=True)
view[0] = 9
"""


def test_pages_of_a_killed_process_live_on_in_a_descriptor():
    ours, theirs = socket.socketpair()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    owner.kill()
    assert owner.wait(10) == -signal.SIGKILL
    ours.close()
    theirs.close()
    adopted = MemfdPages(8, PAGE, fd=fds[0])
    window = adopted.window(1)
    window.map(0, 7)
    assert window.as_memoryview()[0] == 8
    window.close()
    adopted.close()


def test_another_process_reads_aliases_and_dies_when_it_writes_one():
    pages = MemfdPages(8, PAGE)
    window = pages.window(8)
    window.map(0, 0, 8)
    view = window.as_memoryview()
    for page in range(8):
        view[page * PAGE] = 10 + page
    fd = pages.export_fd(0)
    reader = subprocess.run(
        [sys.executable, "-c", READER, str(fd)], pass_fds=[fd], capture_output=True, timeout=60
    )
    assert json.loads(reader.stdout) == [16, 12, 16, 11]
    assert reader.returncode == -signal.SIGSEGV
    assert view[6 * PAGE] == 16
    os.close(fd)
    window.close()
    pages.close()
