"""The page at /: who is in the cluster, and who lends what to whom, for people."""

from html import escape

from services.coordinator.page_market import render_market
from shared.wire.lending import MarketView
from shared.wire.membership import InstanceList, InstanceView

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse } th, td { padding: .3rem .9rem; text-align: left }
th { border-bottom: 2px solid #999 } td { border-bottom: 1px solid #ddd } td.number { text-align: right }
.live { color: #0a7d33 } .suspect { color: #b26a00 } .dead { color: #b00020 }
"""
_COLUMNS = (
    "instance",
    "role",
    "state",
    "epoch",
    "endpoint",
    "model",
    "running",
    "waiting",
    "KV used",
    "seen",
)


def render(members: InstanceList, market: MarketView, *, leader_url: str = "") -> str:
    """The whole page; it asks for itself again every 2 s. leader_url: while another coordinator leads."""
    if leader_url:
        link = escape(leader_url, quote=True)
        return _page(f'<h1>Standing by</h1><p>The coordinator at <a href="{link}">{link}</a> leads.</p>')
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = "".join(_row(view) for view in members.instances)
    empty = "" if members.instances else "<p>No instance has registered yet.</p>"
    return _page(
        f"<h1>Instances</h1><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{empty}"
        + render_market(market)
    )


def _page(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire: coordinator</title>'
        f'<meta http-equiv="refresh" content="2"><style>{_STYLE}</style></head><body>{body}'
        '<p><a href="docs">API</a> · <a href="metrics">metrics</a></p></body></html>'
    )


def _row(view: InstanceView) -> str:
    state = escape(view.state)
    words = (view.instance, view.role)
    numbers = (view.num_running, view.num_waiting, f"{view.kv_used_share:.0%}", f"{view.age_ms} ms ago")
    return (
        "<tr>"
        + "".join(f"<td>{escape(word)}</td>" for word in words)
        + f'<td class="{state}">{state}</td><td class="number">{view.epoch}</td>'
        + f"<td>{escape(view.endpoint)}</td><td>{escape(view.description.model)}</td>"
        + "".join(f'<td class="number">{number}</td>' for number in numbers)
        + "</tr>"
    )
