"""The commands for a hub: `baton status` shows its workers, `baton relay` caches its weights near workers."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import Authority, HubUrl, Insecure, Json, TokenPath, show
from baton.console import say

if TYPE_CHECKING:
    from baton.swarm.hub.relay import Relay


def status(
    url: HubUrl, token_file: TokenPath, insecure: Insecure = False, ca: Authority = None, as_json: Json = False
) -> None:
    """Show a hub's workers, versions, leases, transfers and quarantine.

    Needs a token with the role `admin`.
    """
    from baton.swarm.auth import read_token_file
    from baton.swarm.listen import check_url, client_ssl
    from baton.swarm.status_client import fetch_status
    from baton.views.terminal.swarm import print_status

    base = check_url(url, insecure)
    found = fetch_status(base, read_token_file(token_file), client_ssl(base, ca))
    show(found, partial(print_status, url=url), as_json=as_json)


RELAY_GRACE_S = 2.0
"""The relay is cancelled this number of seconds after a stop signal, unless it has ended."""


def relay(
    url: HubUrl,
    token_file: TokenPath,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address on which workers connect.")],
    public_url: Annotated[str | None, typer.Option(help="URL for workers, if different from --listen.")] = None,
    cache: Annotated[Path, typer.Option(help="Directory for cached chunks.")] = Path("baton-relay"),
    cache_gb: Annotated[float, typer.Option(min=0.1, help="Maximum size of the cache, GiB.")] = 20.0,
    certificate: Annotated[Path | None, typer.Option(help="PEM file with the TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    insecure: Insecure = False,
    ca: Authority = None,
) -> None:
    """Cache a hub's weights for nearby workers, so that fewer chunks cross the slow link.

    Needs a token with the role `relay`.
    """
    from baton.swarm.auth import read_token_file
    from baton.swarm.hub.relay import Relay, RelayOptions
    from baton.swarm.listen import ListenAddress, check_url, client_ssl

    base = check_url(url, insecure)
    options = RelayOptions(
        base,
        {"Authorization": f"Bearer {read_token_file(token_file)}"},
        ListenAddress.parse(listen, certificate, key, insecure),
        public_url and check_url(public_url, insecure),
        cache,
        int(cache_gb * 2**30),
        client_ssl(base, ca),
        say,
    )
    asyncio.run(_run(Relay(options)))


async def _run(one: Relay) -> None:
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.create_task(one.run(until))

    def end() -> None:
        until.set()
        loop.call_later(RELAY_GRACE_S, running.cancel)  # a request to the hub may block the relay for longer

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await running
