"""The commands for a hub: `baton status` shows its workers, `baton relay` caches its weights near workers, and `baton
token` manages its access tokens."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from baton.cli.options import Authority, HubUrl, Insecure, Json, RunPath, TokenPath, command_group, show
from baton.console import err, out, print_json, say, wide_out
from baton.errors import UserError
from baton.swarm.auth import (
    DEFAULT_TOKEN_FILE,
    Role,
    ShownToken,
    TokenFile,
    digest_of,
    parse_duration,
    read_token_file,
    write_private,
)

if TYPE_CHECKING:
    from baton.swarm.hub.relay import Relay


def status(
    url: HubUrl, token_file: TokenPath, insecure: Insecure = False, ca: Authority = None, as_json: Json = False
) -> None:
    """Show a hub's workers, versions, leases, transfers and quarantine.

    Needs a token with the role `admin`.
    """
    from baton.swarm.hub.status import fetch_status
    from baton.swarm.listen import check_url, client_ssl
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


token_app = command_group("Create, list and revoke the access tokens of a hub.")

File = Annotated[Path, typer.Option("--file", help="Token file of the hub.")]


@token_app.command()
def create(
    role: Annotated[Role, typer.Option(help="Role that the token grants.")],
    expires: Annotated[str, typer.Option(help="Lifetime, such as 90s, 30m, 12h or 7d.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the token; default: its role and a number, such as worker-1.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="For a worker that you control: it may keep KV caches across versions.")
    ] = False,
    file: File = DEFAULT_TOKEN_FILE,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the token to this new file, which only you can read.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it once; the token file stores only a hash."""
    seconds = parse_duration(expires)
    if write_to is not None and write_to.exists():
        raise UserError(f"{write_to} already exists and may contain a token in use: give a new file")
    kept = TokenFile(file)
    text = kept.create(role, seconds, name, trusted)
    made = ShownToken.of(next(token for token in kept.tokens() if token.digest == digest_of(text)))
    if write_to is not None:
        try:
            write_private(write_to, text.encode() + b"\n")
        except UserError:
            kept.revoke(made.name)  # the token is not in any file, so no one can use it
            raise
        made = msgspec.structs.replace(made, written_to=str(write_to))
    else:
        made = msgspec.structs.replace(made, token=text)
    if as_json:
        print_json(made)
        return
    if write_to is None:
        out.print(text)
    where = "shown only this once" if write_to is None else f"written: {write_to}"
    until = made.expires.removesuffix("+00:00").replace("T", " ")
    trust = ", trusted" if trusted else ""
    err.print(f"{made.name}: {role}{trust}, until {until} UTC; {where}; {file} stores a hash")


@token_app.command(name="list")
def list_tokens(file: File = DEFAULT_TOKEN_FILE, as_json: Json = False) -> None:
    """List the tokens of a hub with role, expiry and state."""
    from baton.views.terminal.swarm import print_tokens

    found = [ShownToken.of(token) for token in TokenFile(file).tokens()]
    show(found, print_tokens, as_json=as_json, console=wide_out())


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the token in `baton token list`.")],
    file: File = DEFAULT_TOKEN_FILE,
) -> None:
    """Revoke a token permanently. A running hub refuses the next request with this token."""
    TokenFile(file).revoke(name)
    out.print(f"{name} is revoked in {file}")


@token_app.command()
def unquarantine(
    run: RunPath,
    name: Annotated[
        str, typer.Argument(help="Id or label of a worker, or name of an access token, as in `baton status`.")
    ],
) -> None:
    """Lift a quarantine, so that the worker may rejoin. A running hub applies the change within seconds."""
    from baton.swarm.verification.quarantine import unquarantine as lift

    out.print(f"{name} is no longer in quarantine: {', '.join(lift(run, name))}")
