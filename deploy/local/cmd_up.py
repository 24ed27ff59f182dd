"""`quire up`: check, start the supervisor in the background, show progress until the cluster serves."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.local import config, plan, run_supervisor
from deploy.local.control import ControlClient
from deploy.local.launch import tail
from deploy.local.progress import Progress
from deploy.local.terminal import fail, out, program, shorten, show_log_tail
from shared.errors import PeerGone, SettingsError

SUPERVISOR_START_S = 20.0
STOP_WAIT_S = 15.0
POLL_S = 0.05
# --weave: what prefill and decode do then (decode: at most fuse; colocated workers are decode's)
WEAVES = {"auto": ("auto", "auto"), "off": ("off", "off"), "fuse": ("fuse", "fuse"), "full": ("full", "fuse")}


def up(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id. Default: the demo model.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "",
    topology: Annotated[str, typer.Option(help="auto, disaggregated or colocated.")] = "",
    prefill: Annotated[
        int | None, typer.Option(help="Number of prefill workers.", show_default=False)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Number of decode (or colocated) workers.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "",
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway. Default: 8000.", show_default=False)
    ] = None,
    base_port: Annotated[
        int | None, typer.Option(help="First of the other ports. Default: 8100.", show_default=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm, or mock for experiments without a model.")] = "",
    pd_caching: Annotated[
        str, typer.Option(help="Which end keeps context: basic, 1, 2 or 3 (MemServe 5.1). Default: 3.")
    ] = "",
    weave: Annotated[
        str,
        typer.Option(
            help="How ranks of one engine add up: auto, off, fuse, or full (prefill: full, decode: fuse). Default: off."
        ),
    ] = "",
    settings_file: Annotated[
        Path | None, typer.Option("--config", help="TOML file. Default: QUIRE_CONFIG.")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", help="Any other cluster setting, KEY=VALUE; may be repeated.")
    ] = None,
    foreground: Annotated[bool, typer.Option(help="Stay, and stop everything on Ctrl-C.")] = False,
) -> None:
    """Start the cluster on this machine and wait until it serves.

    Flags win over QUIRE_CLUSTER_* variables, those win over the TOML file's section `cluster`.

    One service's own settings: QUIRE_GATEWAY_*, QUIRE_WORKER_* and so on, or its section of the file.
    """
    flags: dict[str, Any] = {"model": model, "device": device, "topology": topology, "host": host}
    flags |= {"port": port, "base_port": base_port, "num_prefill": prefill, "num_decode": decode}
    flags |= {"engine": engine, "pd_caching": pd_caching, **_weaves(weave)}
    # a 0 was said, too, and may be refused
    said = {key: value for key, value in flags.items() if value not in (None, "")}
    argv = [word for key, value in said.items() for word in (f"--{key}", str(value))]
    for pair in more or []:
        key, sep, value = pair.partition("=")
        if not sep:
            raise SettingsError(f"--set {pair!r}: want KEY=VALUE; keys: {', '.join(config.cluster_keys())}")
        argv += [f"--{config.cluster_key(key)}", value]
    if settings_file is not None:
        config.use_config_file(settings_file)
    found = config.load(argv)
    paths = config.paths_of(found.home)
    config.make_folders(paths)
    _refuse_second(paths, found)
    start = run_supervisor.Start(settings=found, model=plan.find_model(found))
    run_supervisor.prepare(start)
    run_supervisor.write_start(paths, start)
    _keep_old_logs(paths)
    if foreground:
        sys.exit(run_supervisor.main(["--home", found.home]))
    _start_and_wait(paths, found)


def _weaves(wanted: str) -> dict[str, str]:
    """Of both roles; {}: not said. Raises: SettingsError."""
    if not wanted:
        return {}
    if wanted not in WEAVES:
        raise SettingsError(
            f"--weave {wanted!r}: want one of {', '.join(WEAVES)}; each role's own: --set prefill_weave=... "
            "--set decode_weave=..."
        )
    prefill, decode = WEAVES[wanted]
    return {"prefill_weave": prefill, "decode_weave": decode}


def _refuse_second(paths: config.Paths, wanted: config.ClusterSettings) -> None:
    """Exit when a cluster runs already: 0 if it is what was asked for, else 1."""
    try:
        with ControlClient(paths.control) as client:
            status = client.call(op="status")
    except PeerGone:
        return
    if run_supervisor.read_start(paths).settings == wanted:
        out.print(f"already running: {status['url']} serves {status['model']} (`quire status`, `quire down`)")
        sys.exit(0)
    fail(
        f"a cluster with other settings is running ({status['url']} serves {status['model']}); "
        "`quire down` first, or set QUIRE_HOME and other ports for a second one"
    )


def _keep_old_logs(paths: config.Paths) -> None:
    """The last run's logs stay one more run as NAME.log.1."""
    for log in paths.logs.glob("*.log"):
        log.replace(log.with_name(log.name + ".1"))


def _start_and_wait(paths: config.Paths, found: config.ClusterSettings) -> None:
    log = paths.logs / "supervisor.log"
    with log.open("ab") as stderr:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "deploy.local.run_supervisor", "--home", found.home],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            cwd=config.REPO,
            start_new_session=True,
        )
    client = _wait_for_control(paths, supervisor, log)
    with client:
        try:
            _follow(client, found)
        except KeyboardInterrupt:
            out.print("interrupted: stopping what was started")
            _stop(paths)
            sys.exit(130)


def _wait_for_control(paths: config.Paths, supervisor: "subprocess.Popen[bytes]", log: Path) -> ControlClient:
    end = time.monotonic() + SUPERVISOR_START_S
    while time.monotonic() < end and supervisor.poll() is None:
        with contextlib.suppress(PeerGone):
            return ControlClient(paths.control)
        time.sleep(POLL_S)
    show_log_tail({"log_tail": tail(log, lines=12), "log": str(log)})
    return fail("the supervisor did not start, or ended at once")


def _follow(client: ControlClient, found: config.ClusterSettings) -> None:
    """Show notices until everything is ready; exits 1 when that does not happen."""
    status = client.call(op="watch")
    names = [service["name"] for service in status["services"]]
    out.print(f"starting {status['model']} on {status['device']}, {status['topology']}: {', '.join(names)}")
    end = time.monotonic() + found.ready_timeout_s
    last: dict[str, Any] = {}
    if status["gave_up"]:  # faster than this process could connect
        last = {"event": "give_up", "name": status["gave_up"], "text": "could not be started"}
        last["log_tail"] = tail(config.paths_of(found.home).logs / f"{status['gave_up']}.log", lines=12)
    with Progress(status) as progress:
        if not last and not status["was_ready"]:
            for last in _until(client, end):
                progress.show(last)
                if last["event"] in ("all_ready", "give_up"):
                    break
        waiting = ", ".join(progress.waiting) or "nothing"
    if status["was_ready"] or last.get("event") == "all_ready":
        _summary(status)
        return
    if last.get("event") == "give_up":
        show_log_tail(last)
        for _ in _until(client, time.monotonic() + STOP_WAIT_S):
            pass
        fail(f"{last['name']} {last['text']}; `quire doctor` looks for the usual causes")
    if time.monotonic() < end:
        fail(f"the supervisor was stopped or killed; still waiting for: {waiting}")
    _stop(config.paths_of(found.home))
    fail(f"not ready after {found.ready_timeout_s} s; still waiting for: {waiting}")


def _until(client: ControlClient, end: float) -> Iterator[dict[str, Any]]:
    """Notices until the deadline or the supervisor's end."""
    events = client.events(timeout_s=max(0.1, end - time.monotonic()))
    while time.monotonic() < end:
        try:
            yield next(events)
        except (StopIteration, TimeoutError):
            return


def _stop(paths: config.Paths) -> None:
    try:
        with ControlClient(paths.control) as client:
            client.call(op="stop")
            for _ in client.events(timeout_s=STOP_WAIT_S):
                pass
    except (PeerGone, TimeoutError) as error:
        out.print(f"the supervisor did not answer the stop: {error}; try `quire down`", markup=False)


def _summary(status: dict[str, Any]) -> None:
    """How to use what runs now."""
    url, model = status["url"], status["model"]
    body = {"model": model, "messages": [{"role": "user", "content": "What is a list in Python?"}]}
    body |= {"max_tokens": 64, "stream": True}
    key = " -H 'Authorization: Bearer KEY'" if status["authenticated"] else ""
    out.print()
    out.print(f"Quire serves [bold]{model}[/bold] at [bold]{url}/v1[/bold]")
    out.print(f"  try     {program()} chat 'What is a list in Python?'", markup=False)
    out.print(f"  curl    curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    out.print(f"            -d '{msgspec.json.encode(body).decode()}'", markup=False)
    if status["trace_endpoint"]:
        out.print(f"  traces  {status['trace_endpoint']} (OTLP); `{program()} trace REQUEST_ID --jaeger URL`")
    else:
        out.print(f"  traces  {shorten(status['traces'])}; `{program()} trace REQUEST_ID`")
    out.print(
        f"  logs    {shorten(status['logs'])}; `{program()} logs`, `{program()} status`, `{program()} down`"
    )
