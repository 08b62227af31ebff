"""The address at which the hub listens, and its URLs. Without `--insecure`, no secret is sent over a network
unencrypted.

A process that reads an access token on the network can impersonate the token's sender, and prompts and adapters may be
confidential. Hub and worker therefore require TLS for connections between machines. `--insecure` disables this
requirement, for a private network or a tunnel.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from yarl import URL

from baton.errors import UserError

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?:{_LABEL}\.)*(?!(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?$){_LABEL}\.?")
"""Pattern of host names. The pattern excludes texts such as 127.1, 0x7f000001 and 2130706433. They look like names, but
the system's resolver interprets them as IP addresses."""
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address at which the hub listens, and the certificate for TLS."""

    host: str
    """IP address or host name. An IPv6 address is written without brackets."""
    port: int
    """Port number; 0 selects a free port."""
    certificate: Path | None = None
    """PEM file with the server's certificate and its chain, and with the private key if `key` is None."""
    key: Path | None = None
    is_insecure: bool = False
    """True if other machines may connect without TLS."""

    @classmethod
    def parse(
        cls, text: str, certificate: Path | None = None, key: Path | None = None, is_insecure: bool = False
    ) -> ListenAddress:
        """Parse HOST:PORT. Raises UserError if the text has another form. Also raises UserError if other machines can
        reach the address, but neither TLS nor `is_insecure` is set."""
        place = _host_and_port(text)
        if place is None:
            raise UserError(
                f"the listening address is {text[:_MAX_CHARACTERS]!r}; allowed: HOST:PORT, such as 127.0.0.1:8000 for "
                "this machine only, or 0.0.0.0:8000 or [::]:8000 for others too; ports are 0 (any free port) to 65535"
            )
        host, port = place
        if key is not None and certificate is None:
            raise UserError(f"the key {key} needs its certificate: give both")
        if certificate is None and not is_loopback(host) and not is_insecure:
            raise UserError(
                f"{text} can be reached from other machines, and without TLS tokens and weights would cross the "
                "network unencrypted: give a certificate and its key, or listen on 127.0.0.1 behind a tunnel, or "
                "add --insecure if the network is private"
            )
        listen = cls(host, port, certificate, key, is_insecure)
        listen.ssl_context()  # raises immediately if the certificate cannot be used
        return listen

    @property
    def scheme(self) -> str:
        """Scheme of the URL: https with a certificate, otherwise http."""
        return "http" if self.certificate is None else "https"

    def url(self, port: int | None = None) -> str:
        """Return the hub's URL. `port`: the port that was assigned, if port 0 was requested."""
        return _base(self.scheme, self.host, self.port if port is None else port)

    def own_url(self, port: int) -> str:
        """Return the hub's URL for clients on this machine. This URL differs from `url` if the hub listens on 0.0.0.0
        or ::, because clients cannot connect to these addresses."""
        host = self.host if not self._is_any else "::1" if ":" in self.host else "127.0.0.1"
        return _base(self.scheme, host, port)

    def join_command(self, port: int) -> str:
        """Return the command with which a worker joins. If the hub listens on all addresses, it is unknown under which
        name other machines reach it. The command then contains HOST instead of a name."""
        if self._is_any:
            return f"baton worker {self.scheme}://HOST:{port} --token-file FILE, where HOST is this machine's address"
        return f"baton worker {self.url(port)} --token-file FILE"

    @property
    def _is_any(self) -> bool:
        address = _ip_address(self.host)
        return address is not None and address.is_unspecified

    def fingerprint(self) -> str | None:
        """Return the SHA-256 digest of the server's certificate in hex, or None without TLS. Workers that the run
        starts itself verify the certificate by this digest."""
        if self.certificate is None:
            return None
        # the first certificate of the file is the server's own
        found = _CERTIFICATE.search(self.certificate.read_text())
        assert found is not None, "a certificate that was loaded is in the file"
        return sha256(ssl.PEM_cert_to_DER_cert(found[0])).hexdigest()

    def ssl_context(self) -> ssl.SSLContext | None:
        """Create the server's context (TLS 1.2 or later); None without a certificate. Raises UserError."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = f"the certificate {self.certificate}" + (f" with the key {self.key}" if self.key else "")
        try:
            # an empty password, so that OpenSSL never asks for a password on the terminal
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except ssl.SSLError as error:
            raise UserError(
                f"{files} cannot be used ({error.reason or 'no PEM'}): both must be PEM files that belong together, "
                "and the key must have no passphrase"
            ) from error
        except OSError as error:
            raise UserError(f"{files} cannot be read: {error.strerror}") from error
        return context


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always denotes this machine."""
    address = _ip_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def check_url(url: str, is_insecure: bool = False) -> str:
    """Return the hub's URL as http(s)://HOST:PORT without a trailing slash.

    Raises UserError if the text has another form. Without `is_insecure`, an http URL of another machine is also an
    error, because the token would be sent unencrypted.
    """
    scheme, _, rest = url.partition("://")
    scheme, place = scheme.lower(), _host_and_port(rest.removesuffix("/"))
    if scheme not in ("http", "https") or place is None or place[1] == 0:
        allowed = "allowed: http://HOST:PORT or https://HOST:PORT, as the hub prints it"
        raise UserError(f"the hub's URL is {url[:_MAX_CHARACTERS]!r}; {allowed}")
    host, port = place
    if scheme == "http" and not is_loopback(host) and not is_insecure:
        raise UserError(
            f"{url} would send the token through the network unencrypted: use the hub's https URL, or a tunnel to "
            "127.0.0.1, or add --insecure if the network is private"
        )
    return _base(scheme, host, port)


def client_ssl(url: str, ca: Path | None = None) -> ssl.SSLContext | None:
    """Create the client's TLS context (TLS 1.2 or later), which verifies the hub's certificate and name; return None
    for http.

    `ca`: PEM file with certificates to trust instead of those that this machine trusts, for example if the hub's
    certificate is self-signed. Raises UserError if the file cannot be used.
    """
    if URL(url).scheme != "https":
        if ca is not None:
            raise UserError(f"{ca} applies to https, but {url} is not an https URL: use the hub's https URL")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    except ssl.SSLError as error:
        raise UserError(f"{ca} contains no certificate: give a PEM file") from error
    except OSError as error:
        raise UserError(f"{ca} cannot be read: {error.strerror}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _host_and_port(text: str) -> tuple[str, int] | None:
    """Parse HOST:PORT; return None if the text has another form. The additional checks are needed because yarl accepts
    user names, paths and short forms of addresses."""
    if not _HOST_AND_PORT.fullmatch(text):
        return None
    try:
        url = URL(f"http://{text}")
    except ValueError:
        return None
    host, port = url.host, url.explicit_port
    if host is None or port is None or (_ip_address(host) is None and not _HOST_NAME.fullmatch(host)):
        return None
    return host, port


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _base(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{URL.build(scheme=scheme, host=host).host_subcomponent}:{port}"
