"""Print the status of a hub, and its access tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from baton.console import Console, visible
from baton.swarm.auth import ShownToken
from baton.swarm.hub.status import HubStatus

MAX_FAULT = 200
"""Maximum number of characters of a worker's error that the table shows."""


def print_status(console: Console, status: HubStatus, *, url: str) -> None:
    """Print the status of the hub at `url`. Texts from workers are escaped."""

    def line(text: str, style: str = "") -> None:
        console.print(visible(text, keep=""), style=style)  # also escapes line breaks: a worker cannot fake a line

    version = "none" if status.version is None else str(status.version)
    line(
        f"run {status.run}, step {status.step}; version {version} published; {status.tasks} trajectories requested, "
        f"{status.waiting} of them waiting for a worker"
    )
    numbers = (Column(name, justify="right") for name in ("version", "leases", "tokens/s", "fetched MB", "checked"))
    table = Table("worker", "state", *numbers, box=None, header_style="bold")
    for one in status.workers:
        table.add_row(
            one.name + (" (trusted)" if one.is_trusted else ""),
            one.state + (f": {visible(one.fault[:MAX_FAULT], keep='')}" if one.fault else ""),
            "–" if one.version is None else str(one.version),
            f"{one.leases} / {one.slots}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.fetched_bytes / 1e6:,.1f}",
            str(one.checked),
        )
    if status.workers:
        console.print(table)
    else:
        line(f"no worker has joined yet; to add one: baton worker {url} --token-file FILE")
    for kind, count in Counter(one.worker_class for one in status.workers).items():
        line(f"{count} of the class {kind}")
    line(status.provisioning)
    if status.staleness:
        shares = ", ".join(f"{age} versions {share:.0%}" for age, share in status.staleness.items())
        line(f"staleness of the last batch: {shares}")
    sent = ", ".join(f"{route} {num / 1e6:,.1f} MB" for route, num in status.bytes_out.items())
    line(f"sent: {sent}")
    if status.wasted_tokens:
        causes = ", ".join(f"{cause} {num}" for cause, num in status.wasted_tokens.items())
        line(f"discarded tokens: {causes}")
    for bad in status.quarantine:
        steps = f"trained in steps {', '.join(map(str, bad.trained_steps))}" if bad.trained_steps else "never trained"
        line(f"in quarantine: {bad.name}: {bad.reason} ({steps})", "red")
    for note in status.notes:
        line(note, "yellow")


def print_tokens(console: Console, tokens: Sequence[ShownToken]) -> None:
    """Print a table of access tokens."""
    headings = ("name", "role", "trusted", "created (UTC)", "expires (UTC)", "state")
    columns = (Column(heading, no_wrap=True) for heading in headings)
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for t in tokens:
        created, expires = (at.removesuffix("+00:00").replace("T", " ") for at in (t.created, t.expires))
        table.add_row(t.name, t.role, "yes" if t.trusted else "", created, expires, t.state)
    console.print(table)
