"""What services say of their settings has no password and no key: logs are shown, and sent along with questions."""

import os
import subprocess
import sys
import time

import pytest

from deploy.local.config import DEMO_MODEL
from shared.free_ports import free_port

SECRET = "open-sesame"
REDIS = f"redis://quire:{SECRET}@127.0.0.1:1/0"  # nobody listens there: a link that fails says no more
LIMIT_S = 60


def flags(service, folder):
    listen, admin = f"127.0.0.1:{free_port()}", ("--admin-listen", f"127.0.0.1:{free_port()}")
    model = ("--model-dir", str(DEMO_MODEL))
    return {
        "coordinator": ("--listen", listen),
        "scheduler": ("--listen", f"tcp://{listen}", "--report-listen", "tcp://127.0.0.1:0", *admin),
        "mempool": ("--socket", f"{folder}/pool.sock", "--keeper-socket", f"{folder}/keeper.sock", *admin),
        "decode": ("--listen", "tcp://127.0.0.1:0", "--engine", "mock", *admin, *model),
        "gateway": ("--listen", listen, "--processes", "1", *model),
    }[service]


@pytest.mark.parametrize("service", ["coordinator", "scheduler", "mempool", "decode", "gateway"])
def test_no_service_logs_a_password_or_a_key(service, tmp_path):
    section = {"decode": "WORKER"}.get(service, service.upper())
    secrets = {"coordinator": ("API_KEYS",), "gateway": ("API_KEYS", "COORDINATOR_KEY")}
    names = secrets.get(service, ("COORDINATOR_KEY",))
    env = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    env |= {f"QUIRE_{section}_{name}": SECRET for name in names}
    if service != "scheduler":
        env[f"QUIRE_{section}_REDIS_URL"] = REDIS
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", f"services.{service}", *flags(service, tmp_path)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    event = "gateway_listening" if service == "gateway" else "settings"
    end_s = time.monotonic() + LIMIT_S
    try:
        while event not in log.read_text() and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
    said = log.read_text()
    assert event in said
    assert SECRET not in said
