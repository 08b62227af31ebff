"""The command `baton relay`: cache a hub's weights near its workers."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import Authority, HubUrl, Insecure, TokenPath
from baton.console import say

if TYPE_CHECKING:
    from baton.swarm.hub.relay import Relay

RELAY_GRACE_S = 2.0
"""Time in seconds from a stop signal to the cancellation of the relay."""


def relay(
    url: HubUrl,
    token_file: TokenPath,
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Address on which workers connect.")],
    public_url: Annotated[
        str | None, typer.Option("--public-url", help="URL for workers, if different from --listen.")
    ] = None,
    cache: Annotated[Path, typer.Option("--cache", help="Directory for cached chunks.")] = Path("baton-relay"),
    cache_gb: Annotated[float, typer.Option("--cache-gb", min=0.1, help="Maximum size of the cache, GiB.")] = 20.0,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM file with the TLS certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM file with the certificate's private key.")] = None,
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
