"""`quire up`: check, start the supervisor in the background, show progress until the cluster serves."""

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import typer
from rich.markup import escape

from deploy.local import config, config_digest, first_machine, plan, run_supervisor
from deploy.local.addresses import served_at
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.control import ControlClient
from deploy.local.interrupts import Interrupts
from deploy.local.launch import errors, tail
from deploy.local.progress import Progress
from deploy.local.terminal import drop, fail, os_error_text, out, program, shorten, show_log_tail
from shared.errors import PeerGone, SettingsError

SUPERVISOR_START_S = plan.NVIDIA_SMI_TIMEOUT_S + 20.0  # it looks at the GPUs before it answers
STOP_WAIT_S = 15.0  # beyond what is under way
POLL_S = 0.05
ANOTHER_BEGAN = "another `quire up` has begun: waiting for it"
STILL_STOPPING = "the last cluster is still stopping: waiting for that"
# --weave: what prefill and decode do then (decode: at most fuse; colocated workers are decode's)
WEAVES = {"auto": ("auto", "auto"), "off": ("off", "off"), "fuse": ("fuse", "fuse"), "full": ("full", "fuse")}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for."""

    settings: ClusterSettings
    paths: config.Paths
    command: str  # `quire`, as later commands find this cluster


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
    said = {key: value for key, value in flags.items() if value not in (None, "")}  # a 0 is said, too
    argv = [word for key, value in said.items() for word in (f"--{key}", str(value))]
    for pair in more or []:
        key, sep, value = pair.partition("=")
        if not sep:
            raise SettingsError(f"--set {pair!r}: want KEY=VALUE; keys: {', '.join(config.cluster_keys())}")
        argv += [f"--{config.cluster_key(key)}", value]
    later = dict(config.environment())  # as other commands will find it, who do not hear of --config
    if named := settings_file or later.get("QUIRE_CONFIG"):
        config.use_config_file(Path(named))  # absolute: the supervisor runs in another folder
    found = config.load(argv)
    config.use_keys_file()
    wanted = Wanted(found, config.paths_of(found.home), _command(found, later))
    config.make_folders(wanted.paths)
    with contextlib.ExitStack() as stack:
        with _take_place(wanted) as lock:
            start = _prepared(found)
            _meet_first(found, start.model)
            run_supervisor.write_start(wanted.paths, start)
            _keep_old_logs(wanted.paths)
            if foreground:
                sys.exit(run_supervisor.main(["--home", found.home], lock=lock))
            interrupts = stack.enter_context(Interrupts())
            supervisor = _start(wanted, lock)
        _wait(wanted, supervisor, interrupts)
        _look_at_first(wanted, start.model)


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


def _command(found: ClusterSettings, later: Mapping[str, str]) -> str:
    """`quire`, before it the variable that leads to a home which only this command was told of."""

    def is_found(**more: str) -> bool:
        with contextlib.suppress(SettingsError):  # of another setting: a flag overruled it
            return str(config.default_home({**later, **more})) == found.home
        return False

    if is_found():
        return program()
    # a settings file's cluster.home goes before QUIRE_HOME
    name = "QUIRE_HOME" if is_found(QUIRE_HOME=found.home) else "QUIRE_CLUSTER_HOME"
    return f"{name}={shlex.quote(found.home)} {program()}"


def _prepared(found: ClusterSettings) -> run_supervisor.Start:
    start = run_supervisor.Start(
        settings=found, model=plan.find_model(found), services=config_digest.digests()
    )
    run_supervisor.prepare(start)
    return start


def _meet_first(found: ClusterSettings, model: plan.Model) -> None:
    """Exit 1 where the machine that this one joins cannot be joined: its workers would wait for it in vain."""
    if problem := first_machine.wait_for(found, model.name, out.print):
        fail(problem)


def _look_at_first(wanted: Wanted, model: plan.Model) -> None:
    """Once more: which model it serves it may have known only meanwhile."""
    if problem := first_machine.look(wanted.settings, model.name).problem:
        fail(f"{problem}; what was started runs: `{wanted.command} status`, `{wanted.command} down`")


def _take_place(wanted: Wanted) -> IO[bytes]:
    """The run's lock, once whoever has it is gone: a cluster that stops, or another `up` that failed.

    From here until the supervisor ends somebody holds it, so two that begin at once do not both start. Exits when a
    cluster runs already: 0 if it is what was asked for, and ready, else 1.
    """
    end = time.monotonic() + wanted.settings.ready_timeout_s
    said, num_unanswered = "", 0
    while (lock := run_supervisor.take_lock(wanted.paths)) is None:
        try:
            why = _look(wanted)
        except PeerGone as error:  # once: it ended between two questions
            num_unanswered += 1
            if num_unanswered > 1:
                fail(f"{error.message}; `{wanted.command} down` ends it")
            why = said
        if why != said:
            out.print(why)
            said = why
        if time.monotonic() > end:
            fail(f"not after {wanted.settings.ready_timeout_s} s; {wanted.paths.lock} is still held")
        time.sleep(POLL_S)
    return lock


def _look(wanted: Wanted) -> str:
    """What to wait for; exits when there is a cluster that stays. Raises: PeerGone: it does not answer."""
    try:
        client = ControlClient(wanted.paths.control, home=wanted.paths.home)
    except PeerGone:
        return ANOTHER_BEGAN
    with client:
        status = client.call(op="status")
        if status["stopping"]:
            return STILL_STOPPING
        _refuse_others(wanted, status)
        command = wanted.command
        if not status["was_ready"]:
            out.print("another `quire up` with these settings has begun: waiting with it")
            _summary(_follow(client, wanted, is_ours=False), wanted.command)
        elif not status["ready"]:
            fail(f"it runs ({served_at(status)}), but is not ready; `{command} status` says what is not")
        else:
            serves = f"{served_at(status)} serves {status['model']}"
            out.print(f"already running: {serves} (`{command} status`, `{command} down`)")
    sys.exit(0)


def _refuse_others(wanted: Wanted, status: Mapping[str, Any]) -> None:
    """Exit 1 when what runs has other settings."""
    found = wanted.settings
    is_id = plan.is_model_id(found.model) and not plan.is_folder(Path(found.model))
    try:
        running = run_supervisor.read_start(wanted.paths)
    except SettingsError:
        names = [f"which is not known, as {wanted.paths.settings} cannot be read"]
    else:
        model = running.model if is_id else plan.find_model(found)
        start = run_supervisor.Start(settings=found, model=model, services=config_digest.digests())
        names = run_supervisor.differences(running, start)
    if names:
        fail(
            f"a cluster with other settings is running ({served_at(status)} serves {status['model']}); not the same: "
            f"{', '.join(names)}; `{wanted.command} down` first, or set QUIRE_HOME and other ports for a second one"
        )


def _keep_old_logs(paths: config.Paths) -> None:
    """The last run's logs stay one more run as NAME.log.1."""
    for log in paths.logs.glob("*.log"):
        log.replace(log.with_name(log.name + ".1"))


def _start(wanted: Wanted, lock: IO[bytes]) -> "subprocess.Popen[bytes]":
    """The supervisor, which has the lock from its first moment."""
    words = ["--home", wanted.settings.home, "--lock-fd", str(lock.fileno())]
    with _log(wanted).open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.local.run_supervisor", *words],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            cwd=config.REPO,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
        )


def _log(wanted: Wanted) -> Path:
    return wanted.paths.logs / "supervisor.log"


def _wait(wanted: Wanted, supervisor: "subprocess.Popen[bytes]", interrupts: Interrupts) -> None:
    """Until it serves. A supervisor that nobody could follow, or whose start was interrupted, is ended."""
    has_control = False
    try:
        interrupts.let()
        with _wait_for_control(wanted, supervisor) as client:
            has_control = True
            status = _follow(client, wanted, is_ours=True)
    except OSError as error:  # nobody can be told how it goes
        drop(sys.stdout)
        _end(wanted, supervisor)
        fail(f"{os_error_text(error)}; what was started is stopped")
    except PeerGone as error:  # stopped by another command, before it was asked
        fail(f"{error.message}: it was stopped or killed; `{wanted.command} down` makes sure")
    except KeyboardInterrupt:
        supervisor.terminate()  # first: the terminal may be what has gone
        out.print("interrupted: stopping what was started")
        _end(wanted, supervisor)
        sys.exit(130)
    except BaseException:
        if not has_control:
            _end(wanted, supervisor)
        raise
    try:
        _summary(status, wanted.command)
    except OSError as error:
        drop(sys.stdout)
        fail(
            f"{os_error_text(error)}; the cluster serves: `{wanted.command} status`, `{wanted.command} down`"
        )


def _end(wanted: Wanted, supervisor: "subprocess.Popen[bytes]") -> None:
    """It stops its services in order; before it answers it has none. Another Ctrl-C: at once."""
    for _ in range(2):
        supervisor.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            supervisor.wait(_stop_wait_s())
            return
    out.print(f"the supervisor (pid {supervisor.pid}) has not ended; try `{wanted.command} down`")


def _stop_wait_s() -> float:
    """What this command has started was told the same settings."""
    return STOP_WAIT_S + sum(config.drains_ms().values()) / 1000


def _wait_for_control(wanted: Wanted, supervisor: "subprocess.Popen[bytes]") -> ControlClient:
    end = time.monotonic() + SUPERVISOR_START_S
    while time.monotonic() < end and supervisor.poll() is None:
        with contextlib.suppress(PeerGone):
            client = ControlClient(wanted.paths.control, home=wanted.paths.home)
            if client.supervisor_pid == supervisor.pid:
                return client
            client.close()  # not the one whose progress is to be shown
        time.sleep(POLL_S)
    log = _log(wanted)
    show_log_tail({"log_tail": tail(log, lines=12), "log": str(log)})
    return fail("the supervisor did not start, or ended at once")


def _follow(client: ControlClient, wanted: Wanted, *, is_ours: bool) -> dict[str, Any]:
    """Show notices until everything is ready; exits 1 when that does not happen. Returns its status of the beginning.

    Args: is_ours: this command started it, so a start that takes too long is stopped.
    """
    found = wanted.settings
    status = client.call(op="watch")
    names = [service["name"] for service in status["services"]]
    out.print(f"starting {status['model']} on {status['device']}, {status['topology']}: {', '.join(names)}")
    if said := status.get("host_memory"):
        out.print(said)
    end = time.monotonic() + found.ready_timeout_s
    last: dict[str, Any] = {}
    if status["gave_up"]:  # faster than this process could connect
        last = {"event": "give_up", "name": status["gave_up"], "text": "could not be started"}
        log = wanted.paths.logs / f"{status['gave_up']}.log"
        last |= {"log_tail": tail(log, lines=12), "log_errors": errors(log), "log": str(log)}
    with Progress(status) as progress:
        if not last and not status["was_ready"]:
            for last in _until(client, end):
                progress.show(last)
                if last["event"] in ("all_ready", "give_up"):
                    break
        waiting = ", ".join(progress.waiting) or "nothing"
    if status["was_ready"] or last.get("event") == "all_ready":
        return status
    if last.get("event") == "give_up":
        show_log_tail(last)
        for _ in _until(client, time.monotonic() + _stop_wait_s()):
            pass
        fail(f"{last['name']} {last['text']}; `quire doctor` looks for the usual causes")
    if time.monotonic() < end:
        fail(f"the supervisor was stopped or killed; still waiting for: {waiting}")
    if is_ours:
        _stop(wanted)
    return fail(f"not ready after {found.ready_timeout_s} s; still waiting for: {waiting}")


def _until(client: ControlClient, end: float) -> Iterator[dict[str, Any]]:
    """Notices until the deadline or the supervisor's end."""
    events = client.events(timeout_s=max(0.1, end - time.monotonic()))
    while time.monotonic() < end:
        try:
            yield next(events)
        except (StopIteration, TimeoutError):
            return


def _stop(wanted: Wanted) -> None:
    try:
        with ControlClient(wanted.paths.control, home=wanted.paths.home) as client:
            client.call(op="stop")
            for event in client.events(timeout_s=_stop_wait_s()):
                if event["event"] == "waiting":
                    out.print(f"{event['name']}: {event['text']}")
    except (PeerGone, TimeoutError) as error:
        out.print(f"the supervisor did not answer the stop: {error}; try `{wanted.command} down`")


def _summary(status: dict[str, Any], command: str) -> None:
    """How to use what runs now. Args: command: `quire`, as it finds this cluster."""
    url, model = status["url"], status["model"]
    where = f"{url}/v1" if url else served_at(status)
    body = {"model": model, "messages": [{"role": "user", "content": "What is a list in Python?"}]}
    body |= {"max_tokens": 64, "stream": True}
    key = " -H 'Authorization: Bearer KEY'" if status["authenticated"] else ""
    out.print()
    out.print(f"Quire serves [bold]{escape(model)}[/bold] at [bold]{escape(where)}[/bold]", markup=True)
    if url:
        out.print(f"  try     {command} chat 'What is a list in Python?'")
        out.print(f"  curl    curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
        out.print(f"            -d '{msgspec.json.encode(body).decode()}'")
    if status["trace_endpoint"]:
        out.print(
            f"  traces  {status['trace_endpoint']} (OTLP); `{command} trace REQUEST_ID --jaeger URL`",
        )
    else:
        out.print(f"  traces  {shorten(status['traces'])}; `{command} trace REQUEST_ID`")
    out.print(
        f"  logs    {shorten(status['logs'])}; `{command} logs`, `{command} status`, `{command} down`",
    )
