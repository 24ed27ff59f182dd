"""The `quire` command. One module per command; this one only wires them and turns errors into exit codes."""

import sys
from typing import Annotated

import typer

from deploy.local import (
    cmd_advise,
    cmd_chat,
    cmd_doctor,
    cmd_down,
    cmd_kill,
    cmd_logs,
    cmd_model,
    cmd_place,
    cmd_profile,
    cmd_stages,
    cmd_status,
    cmd_trace,
    cmd_up,
    cmd_version,
)
from deploy.local.terminal import EXIT_CODES, FAILED, NOT_RUNNING, USAGE, drop, fail, os_error_text
from shared.errors import ClusterError, PeerGone, SettingsError

app = typer.Typer(
    name="quire",
    help="A disaggregated LLM serving cluster on this machine.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _whole(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=cmd_version.on_flag, is_eager=True, help="As `quire version`."
        ),
    ] = False,
) -> None:
    del show_version


for _name, _command in (
    ("up", cmd_up.up),
    ("down", cmd_down.down),
    ("status", cmd_status.status),
    ("logs", cmd_logs.logs),
    ("chat", cmd_chat.chat),
    ("trace", cmd_trace.trace),
    ("stages", cmd_stages.stages),
    ("doctor", cmd_doctor.doctor),
    ("advise", cmd_advise.advise),
    ("place", cmd_place.place),
    ("profile", cmd_profile.profile),
    ("kill", cmd_kill.kill),
    ("version", cmd_version.version),
):
    app.command(name=_name, epilog=EXIT_CODES)(_command)
app.add_typer(cmd_model.app, name="model", epilog=EXIT_CODES)


def main() -> None:
    """Entry point; exits with the codes of EXIT_CODES."""
    try:
        app(prog_name="quire")
    except SettingsError as error:
        fail(error.message, USAGE)
    except PeerGone as error:
        fail(error.message, NOT_RUNNING)
    except ClusterError as error:
        fail(error.message, FAILED)
    except OSError as error:  # not a closed pipe, as of `quire logs | head`: that is no error
        drop(sys.stdout)
        fail(os_error_text(error), FAILED)


if __name__ == "__main__":
    main()
