"""The command `baton status`: show a hub's workers, versions and transfers."""

from __future__ import annotations

from functools import partial

from baton.cli.options import Authority, HubUrl, Insecure, Json, TokenPath, show


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
