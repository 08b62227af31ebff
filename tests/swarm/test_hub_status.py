"""Whatever answers at the address of a hub, `fetch_status` raises a sentence for the user."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.errors import DeadlineExceeded, UserError
from baton.swarm.hub import status
from baton.swarm.hub.status import fetch_status


@pytest.fixture
def answered(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers one request with the bytes of the test's parameter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                connection.recv(65_536)
                connection.sendall(request.param)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(60)


@pytest.mark.parametrize(
    "answered",
    [
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x16", id="a TLS alert"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", id="another service"),
    ],
    indirect=True,
)
def test_what_is_no_hub_is_named(answered: str) -> None:
    with pytest.raises(UserError, match="does not answer with the status of a hub"):
        fetch_status(answered, "token", None)


def test_a_hub_that_sends_its_answer_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DEADLINE_S", 0.5)
    is_over = threading.Event()

    def trickle() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
            while not is_over.wait(0.01):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match=f"the hub at {url} did not answer in"):
            fetch_status(url, "token", None)
        is_over.set()
        thread.join(60)
