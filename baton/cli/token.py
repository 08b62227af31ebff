"""The command `baton token`: creates, lists and revokes the tokens of a hub, and lifts quarantines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.cli.options import Commands, Json, RunPath, show
from baton.console import err, out, print_json, wide_out
from baton.errors import UserError
from baton.swarm.auth import (
    DEFAULT_TOKEN_FILE,
    Role,
    ShownToken,
    TokenFile,
    digest_of,
    parse_duration,
    write_private,
)

token_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Create, list and revoke the access tokens of a hub.")

File = Annotated[Path, typer.Option("--file", help="The hub's token file.")]


@token_app.command()
def create(
    role: Annotated[Role, typer.Option(help="Requests that it permits: a worker's, an admin's or a relay's.")],
    expires: Annotated[str, typer.Option(help="Lifetime: 90s, 30m, 12h, 7d.")],
    name: Annotated[
        str | None, typer.Option(help="Name in list and revoke; default: numbered, as in worker-1.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="For your own worker: it may keep KV caches across versions.")
    ] = False,
    file: File = DEFAULT_TOKEN_FILE,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the token to this new file, readable only by you.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token and show it once; the token file keeps a hash."""
    seconds = parse_duration(expires)
    if write_to is not None and write_to.exists():
        raise UserError(f"{write_to} exists already and may hold a token in use: name a new file")
    kept = TokenFile(file)
    text = kept.create(role, seconds, name, trusted)
    made = ShownToken.of(next(token for token in kept.tokens() if token.digest == digest_of(text)))
    if write_to is not None:
        try:
            write_private(write_to, text.encode() + b"\n")
        except UserError:
            kept.revoke(made.name)  # it could not be written, so no one can use it
            raise
        made = msgspec.structs.replace(made, written_to=str(write_to))
    else:
        made = msgspec.structs.replace(made, token=text)
    if as_json:
        print_json(made)
        return
    if write_to is None:
        out.print(text, soft_wrap=True)
    where = "it is shown only now" if write_to is None else f"written: {write_to}"
    until = made.expires.removesuffix("+00:00").replace("T", " ")
    trust = ", trusted" if trusted else ""
    err.print(f"{made.name}: {role}{trust}, until {until} UTC; {where}; {file} keeps a hash", soft_wrap=True)


@token_app.command(name="list")
def list_tokens(file: File = DEFAULT_TOKEN_FILE, as_json: Json = False) -> None:
    """List the tokens of a hub with role, expiry and state."""
    from baton.views.terminal.swarm import print_tokens

    found = [ShownToken.of(token) for token in TokenFile(file).tokens()]
    show(found, print_tokens, as_json=as_json, console=wide_out())


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The token's name, as in baton token list.", show_default=False)],
    file: File = DEFAULT_TOKEN_FILE,
) -> None:
    """Revoke a token permanently. A running hub refuses its next request."""
    TokenFile(file).revoke(name)
    out.print(f"{name} is revoked in {file}", soft_wrap=True)


@token_app.command()
def unquarantine(
    run: RunPath,
    name: Annotated[str, typer.Argument(help="Worker's id or label, or a token's name, as in baton status.")],
) -> None:
    """Lift a quarantine so that the worker may rejoin. A running hub applies it within seconds."""
    from baton.swarm.verification.quarantine import unquarantine as lift

    out.print(f"{name} is no longer in quarantine: {', '.join(lift(run, name))}", soft_wrap=True)
