"""Requests the status of a hub."""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPException
from ssl import SSLContext

import msgspec

from baton.clock import call_within
from baton.errors import UserError
from baton.swarm.hub.status import HubStatus

SILENCE_S, DEADLINE_S = 10.0, 60.0
"""Maximum seconds without a byte, and maximum seconds for the whole request."""
MAX_BYTES = 16 * 1024 * 1024


def fetch_status(base: str, token: str, tls: SSLContext | None) -> HubStatus:
    """Return the status of the hub at the URL `base`, which `check_url` has checked. Raises UserError if the hub
    refuses the request or no hub answers, and DeadlineExceeded if the answer takes longer than `DEADLINE_S`."""
    return call_within(DEADLINE_S, f"the hub at {base}", partial(_fetch, base, token, tls))


def _fetch(base: str, token: str, tls: SSLContext | None) -> HubStatus:
    request = urllib.request.Request(f"{base}/status", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_S, context=tls) as response:
            return msgspec.json.decode(response.read(MAX_BYTES), type=HubStatus)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode("utf-8", "replace")
        raise UserError(f"the hub at {base} answers {error.code}: {said} (baton token create --role admin)") from error
    except OSError as error:
        raise UserError(f"no hub answers at {base}: {getattr(error, 'reason', error)}") from error
    except (HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{base} does not answer with the status of a hub ({error}): check that a hub of this version runs there"
        ) from error
