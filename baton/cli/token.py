"""The command `baton token`: who may speak to a hub. Tokens are made, listed and revoked in the hub's token file.

`unquarantine` takes back what a hub has decided about a worker.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from baton.cli.options import Commands, Json
from baton.console import err, out, print_json, wide_out
from baton.errors import UserError
from baton.swarm.audit import Audit
from baton.swarm.auth import DEFAULT_TOKEN_FILE, Role, Token, TokenFile, digest_of, parse_duration, write_private
from baton.swarm.verification.quarantine import Quarantine

token_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Make, list and revoke the tokens that open a hub.")

File = Annotated[Path, typer.Option("--file", help="The hub's token file.")]


class ShownToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """What people and scripts are told of a token."""

    name: str
    role: Role
    trusted: bool
    created: str
    """UTC, ISO 8601."""
    expires: str
    state: str
    """valid, expired or revoked."""
    token: str | None = None
    """Its text: when it is made, and only where it is not written to a file."""
    written_to: str | None = None


@token_app.command()
def create(
    role: Annotated[Role, typer.Option(help="What it opens: a worker's, an admin's or a relay's requests.")],
    expires: Annotated[str, typer.Option(help="How long it opens anything: 90s, 30m, 12h, 7d.")],
    name: Annotated[
        str | None, typer.Option(help="To list and revoke it by; the default counts, such as worker-1.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="A worker of your own: may keep KV caches over new weights.")
    ] = False,
    file: File = DEFAULT_TOKEN_FILE,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the token to this new file for its owner alone; print nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token. It is shown this once; the token file keeps a hash."""
    seconds = parse_duration(expires)
    if write_to is not None and write_to.exists():
        raise UserError(f"{write_to} exists already and may hold a token in use: name a new file")
    kept = TokenFile(file)
    text = kept.create(role, seconds, name, trusted)
    made = next(token for token in kept.tokens() if token.digest == digest_of(text))
    if write_to is not None:
        try:
            write_private(write_to, text.encode() + b"\n")
        except UserError:
            kept.revoke(made.name)  # nobody has it
            raise
    if as_json:
        place = None if write_to is None else str(write_to)
        print_json(msgspec.structs.replace(_shown(made), token=None if place else text, written_to=place))
        return
    if write_to is None:
        out.print(text, soft_wrap=True)
    where = "it is shown this once" if write_to is None else f"written: {write_to}"
    trust = ", trusted" if trusted else ""
    say = f"{made.name}: {role}{trust}, until {_utc(made.expires)} UTC; {where}; {file} keeps a hash"
    err.print(say, soft_wrap=True)


@token_app.command(name="list")
def list_tokens(file: File = DEFAULT_TOKEN_FILE, as_json: Json = False) -> None:
    """List the tokens of a hub: whose, what for, until when."""
    found = [_shown(token) for token in TokenFile(file).tokens()]
    if as_json:
        print_json(found)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for heading in ("name", "role", "trusted", "created (UTC)", "expires (UTC)", "state"):
        table.add_column(heading, no_wrap=True)
    for t in found:
        created, expires = (at.removesuffix("+00:00").replace("T", " ") for at in (t.created, t.expires))
        table.add_row(t.name, t.role, "yes" if t.trusted else "", created, expires, t.state)
    wide_out().print(table)


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The token's name, as baton token list shows it.", show_default=False)],
    file: File = DEFAULT_TOKEN_FILE,
) -> None:
    """Let a token open nothing any more, for good. A hub that runs refuses it from its next request on."""
    TokenFile(file).revoke(name)
    out.print(f"{name} is revoked in {file}", soft_wrap=True)


@token_app.command()
def unquarantine(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/NAME.")],
    name: Annotated[str, typer.Argument(help="A worker's id or label, or a token's name, as in baton status.")],
) -> None:
    """Lift a quarantine that was a mistake: the worker may come again. A hub that runs takes it over within seconds."""
    if not run.is_dir():
        raise UserError(f"there is no directory {run}: give the directory of a run, such as runs/NAME")
    kept = run / "quarantine.jsonl"
    if not kept.exists():
        raise UserError(f"nobody is in quarantine in {run}: there is no {kept}")
    lifted = Quarantine(kept).lift(name, time.time())
    Audit(run / "audit.jsonl").record("unquarantined", 0, ", ".join(lifted), "", "baton token unquarantine", name)
    out.print(f"{name} is in quarantine no more: {', '.join(lifted)}", soft_wrap=True)


def _shown(token: Token) -> ShownToken:
    created, expires = (datetime.fromtimestamp(at, UTC).isoformat() for at in (token.created, token.expires))
    return ShownToken(token.name, token.role, token.is_trusted, created, expires, token.state(time.time()))


def _utc(at: int) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
