"""A pytest plug-in (-p tests.support.taken_rows): which rows of the page state machine a run never took."""

import pytest

from services.mempool.core import page_table
from services.mempool.core.page_state import TABLE, PageEvent
from shared.kv.page import PageState

_taken: set[tuple[int, PageEvent]] = set()
_next_state = page_table.next_state


def _noted(state: int, event: PageEvent) -> PageState:
    after = _next_state(state, event)
    _taken.add((state, event))
    return after


page_table.next_state = _noted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line at the end of the run."""
    left = [f"{row.state.name}:{row.event}" for row in TABLE if (int(row.state), row.event) not in _taken]
    terminalreporter.write_line(f"rows never taken: {', '.join(left) or 'none'}")
