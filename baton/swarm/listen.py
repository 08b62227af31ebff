"""Where the hub listens and how it is called: nothing secret crosses a network in the clear unless that was asked for.

A token proves who calls, and whoever reads it can call in its stead; a prompt or an adapter may be nobody else's
business. So beyond this machine (loopback) both sides insist on TLS, and `--insecure` is the way to say otherwise: in
a network that is private already, or through a tunnel.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from baton.errors import UserError

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}\.?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the hub listens, and with which certificate."""

    host: str
    """An address or a name; an IPv6 address without its brackets."""
    port: int
    """0 takes a free one."""
    certificate: Path | None = None
    """PEM: the server's certificate, with its chain; also the key where `key` is None."""
    key: Path | None = None

    @classmethod
    def parse(
        cls, text: str, certificate: Path | None = None, key: Path | None = None, is_insecure: bool = False
    ) -> Listen:
        """Read HOST:PORT. Raises UserError, also for another machine's callers without TLS and `is_insecure`."""
        host, port = _split(text, f"where to listen is {text!r}")
        if port is None or host is None:
            raise UserError(
                f"where to listen is {text!r}; allowed: HOST:PORT, such as 127.0.0.1:8000 for this machine alone, "
                "0.0.0.0:8000 or [::]:8000 for others too; port 0 takes a free one"
            )
        if key is not None and certificate is None:
            raise UserError(f"a key ({key}) needs its certificate: give both")
        if certificate is None and not is_loopback(host) and not is_insecure:
            raise UserError(
                f"{text} can be reached from other machines, and without TLS tokens and weights would cross the "
                "network in the clear: give a certificate and its key, or listen on 127.0.0.1 behind a tunnel, or "
                "say --insecure where the network is private"
            )
        listen = cls(host, port, certificate, key)
        listen.ssl_context()  # a certificate that cannot be used is said at once
        return listen

    @property
    def scheme(self) -> str:
        """What its URL begins with: https under a certificate."""
        return "http" if self.certificate is None else "https"

    def url(self, port: int | None = None) -> str:
        """Its address for callers; `port` is the one that was taken where 0 was asked for."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port if port is None else port}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the server's side of TLS, 1.2 or later; None without a certificate. Raises UserError for bad files."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = f"the certificate {self.certificate}" + (f" with the key {self.key}" if self.key else "")
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")  # never ask on the terminal
        except ssl.SSLError as error:
            raise UserError(
                f"{files} cannot be used ({error.reason or 'no PEM'}): both are PEM files that belong together, the "
                "key without a passphrase"
            ) from error
        except OSError as error:
            raise UserError(f"{files} cannot be read: {error.strerror}") from error
        return context


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine for certain."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_url(url: str, is_insecure: bool = False) -> str:
    """Return the hub's URL as http(s)://HOST:PORT, ready for a path.

    Raises UserError for anything else, and for http to another machine, which would be told the token in the clear,
    unless `is_insecure`.
    """
    allowed = "allowed: http://HOST:PORT or https://HOST:PORT, as the hub prints it"
    refused = UserError(f"the hub's URL is {url[:_MAX_CHARACTERS]!r}; {allowed}")
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in ("http", "https") or not separator:
        raise refused
    host, port = _split(rest.removesuffix("/"), f"the hub's URL is {url[:_MAX_CHARACTERS]!r}")
    if host is None or not port:
        raise refused
    if scheme == "http" and not is_loopback(host) and not is_insecure:
        raise UserError(
            f"{url} would send the token through the network in the clear: use the hub's https URL, or a tunnel to "
            "127.0.0.1, or say --insecure where the network is private"
        )
    return f"{scheme}://{_bracketed(host)}:{port}"


def client_ssl(url: str, ca: Path | None = None) -> ssl.SSLContext | None:
    """Make the caller's side of TLS, 1.2 or later, which checks the hub's certificate and name; None for http.

    `ca` is a PEM file of the certificates to trust in place of this machine's, such as a self-signed hub's own.
    Raises UserError when it cannot be used.
    """
    if urlsplit(url).scheme != "https":
        if ca is not None:
            raise UserError(f"{ca} is for a hub behind https, and {url} is not: use its https URL")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    except ssl.SSLError as error:
        raise UserError(f"{ca} holds no certificate to trust: it should be a PEM file") from error
    except OSError as error:
        raise UserError(f"{ca} cannot be read: {error.strerror}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _split(text: str, got: str) -> tuple[str | None, int | None]:
    """Cut HOST:PORT; None for a part that is not one. Raises UserError for a port beyond 65535."""
    host, separator, port = text.rpartition(":")
    if len(text) > _MAX_CHARACTERS or not separator or not _PORT.fullmatch(port):
        return None, None
    if int(port) > 65_535:
        raise UserError(f"{got}; a port is at most 65535")
    if host.startswith("[") and host.endswith("]"):
        return (host[1:-1] if _is_address(host[1:-1], 6) else None), int(port)
    return (host if _is_address(host, 4) or _is_name(host) else None), int(port)


def _is_address(host: str, version: int) -> bool:
    try:
        return "%" not in host and ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    """A name that cannot be an address in disguise: 127.1, 0x7f000001 and 2130706433 all are."""
    last = host.removesuffix(".").rpartition(".")[2]
    return len(host) <= 253 and bool(_HOST_NAME.fullmatch(host)) and not _NUMBER.fullmatch(last)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
