"""Progress of a start: one line per service that got ready, and on a terminal what is still awaited."""

import time
from typing import Any, Self

from rich.status import Status

from deploy.local.terminal import out, show_log_tail

BRIEF_LINES = 2
TROUBLE = ("exited", "crash_loop", "start_timeout", "unresponsive", "journal_damaged", "give_up")


class Progress:
    """`with Progress(status) as p: p.show(event)`."""

    def __init__(self, status: dict[str, Any]) -> None:
        self._began = time.monotonic()
        self.waiting = [s["name"] for s in status["services"] if s["state"] != "ready"]
        self._spinner = Status(self._text(), console=out) if out.is_terminal else None

    def __enter__(self) -> Self:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def show(self, event: dict[str, Any]) -> None:
        """One notice of the supervisor."""
        kind, name = event["event"], event["name"]
        if kind == "ready":
            if name in self.waiting:
                self.waiting.remove(name)
            out.print(f"  {self._clock()}  {name:<14} {event['text']}")
        elif kind in TROUBLE:
            out.print(f"  {self._clock()}  {name:<14} {event['text']}", style="yellow")
            if kind != "give_up":
                cause = event.get("log_errors", [])[:1]  # the last lines are about what followed from it
                brief = {"log_errors": cause} if cause else {"log_tail": event.get("log_tail", [])}
                show_log_tail(brief, lines=BRIEF_LINES)
        if self._spinner is not None:
            self._spinner.update(self._text())

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"

    def _text(self) -> str:
        return f"waiting for {', '.join(self.waiting)}" if self.waiting else "almost there"
