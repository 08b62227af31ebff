"""Where the hub listens and how it is called: beyond this machine nothing goes in the clear unless it is said."""

from __future__ import annotations

import ipaddress
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UserError
from baton.swarm.listen import ListenAddress, check_url, client_ssl, is_loopback

pytestmark = pytest.mark.timing


def refused(text: str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        ListenAddress.parse(text, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000, "http://127.0.0.1:8000"),
        ("127.8.9.10:0", "127.8.9.10", 0, "http://127.8.9.10:0"),
        ("[::1]:65535", "::1", 65535, "http://[::1]:65535"),
        ("localhost:80", "localhost", 80, "http://localhost:80"),
    ],
)
def test_this_machine_alone_needs_nothing_more(text: str, host: str, port: int, url: str) -> None:
    listen = ListenAddress.parse(text)
    assert (listen.host, listen.port, listen.url()) == (host, port, url)
    assert listen.ssl_context() is None
    assert ListenAddress.parse("127.0.0.1:0").url(port=4711) == "http://127.0.0.1:4711"


@pytest.mark.parametrize(
    "text", ["0.0.0.0:8000", "[::]:8000", "192.168.1.4:1", "[fe80::1]:8000", "hub.example.org:443", "127.evil.org:1"]
)
def test_other_machines_are_let_near_only_with_tls_or_when_it_is_said(text: str) -> None:
    assert "add --insecure" in refused(text)
    listen = ListenAddress.parse(text, is_insecure=True)
    assert listen.url() == f"http://{text}"


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "8000", ":8000", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:+1"),
        *("::1:80", "[::1]", "[127.0.0.1]:80", "[::1%lo]:80", "256.0.0.1:80", "127.1:80", "0:80", "0x7f000001:80"),
        *("h:٣", "a b:80", "-a:80", "a..b:80", "a@b:80", "127.0.0.1:80\n", "x" * 254 + ":80", "127.0.0.1:000080"),
    ],
)
def test_what_is_no_address_is_said_with_what_would_be(text: str) -> None:
    assert "allowed: HOST:PORT" in refused(text, is_insecure=True)


def test_a_port_that_cannot_be_is_refused() -> None:
    assert "ports are 0 (any free port) to 65535" in refused("127.0.0.1:65536")


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_every_ip_address_is_read_as_itself(address: ipaddress.IPv4Address, port: int) -> None:
    text = f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"
    listen = ListenAddress.parse(text, is_insecure=True)
    assert (ipaddress.ip_address(listen.host), listen.port) == (address, port)
    assert listen.url() == f"http://{text}"
    assert is_loopback(listen.host) == address.is_loopback
    if not address.is_loopback:
        assert "add --insecure" in refused(text)


@given(st.text())
def test_any_text_is_an_address_or_one_sentence(text: str) -> None:
    for parse in (lambda: ListenAddress.parse(text), lambda: check_url(text), lambda: check_url(f"http://{text}")):
        sentence = "it is one"
        try:
            parse()
        except UserError as error:
            sentence = str(error)
        assert len(sentence.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("HTTP://localhost:1", "http://localhost:1"),
        ("https://hub.example.org:443", "https://hub.example.org:443"),
        ("https://203.0.113.9:8443/", "https://203.0.113.9:8443"),
    ],
)
def test_a_hubs_url_is_its_scheme_host_and_port(url: str, base: str) -> None:
    assert check_url(url) == base


@pytest.mark.parametrize(
    "url", ["http://hub.example.org:80", "http://0.0.0.0:80", "http://[::2]:80", "http://10.0.0.1:1"]
)
def test_no_token_goes_to_another_machine_in_the_clear_unless_it_is_said(url: str) -> None:
    with pytest.raises(UserError, match=r"unencrypted.*--insecure"):
        check_url(url)
    assert check_url(url, is_insecure=True) == url


@pytest.mark.parametrize(
    "rest",
    ["", "hub", "hub:0", "hub:80/path", "hub:80//", "hub:80?x=1", "hub:80#x", "user:pw@hub:80", "127.0.0.1:80@evil:80"],
)
@pytest.mark.parametrize("scheme", ["http://", "https://", "ftp://", "ws://", "", "https:"])
def test_what_is_no_hubs_url_is_said_with_what_would_be(scheme: str, rest: str) -> None:
    with pytest.raises(UserError, match="allowed: http://HOST:PORT or https://HOST:PORT"):
        check_url(scheme + rest, is_insecure=True)


@pytest.mark.parametrize(
    ("host", "own"),
    [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("192.168.1.4", "192.168.1.4"), ("hub.example", "hub.example")],
)
def test_a_hub_that_listens_everywhere_is_called_over_loopback_by_its_own(host: str, own: str) -> None:
    assert ListenAddress.parse(f"{host}:80", is_insecure=True).own_url(8000) == f"http://{own}:8000"


def test_the_command_to_join_never_names_an_address_that_is_only_for_listening() -> None:
    for host in ("0.0.0.0", "[::]"):
        said = ListenAddress.parse(f"{host}:80", is_insecure=True).join_command(8000)
        assert said.startswith("baton worker http://HOST:8000 --token-file FILE, where HOST is")
    said = ListenAddress.parse("hub.example:80", is_insecure=True).join_command(8000)
    assert said == "baton worker http://hub.example:8000 --token-file FILE"


@dataclass(frozen=True)
class Pem:
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pem]:
    """Two self-signed certificates for localhost and 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make certificates")
    made, folder = {}, tmp_path_factory.mktemp("pem")
    for name in ("ours", "other"):
        pem = made[name] = Pem(folder / f"{name}.pem", folder / f"{name}.key")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=hub"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        where = ["-keyout", str(pem.key), "-out", str(pem.certificate)]
        subprocess.run([*command.split(), *names, *where], check=True, capture_output=True, timeout=60)
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str | None:
    """Let both sides speak in memory until each is done; return the version that they agreed on."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(10):
        for side in tuple(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
            agreed = side.version()
        if not sides:
            return agreed
    raise AssertionError("no handshake in ten rounds")


def test_with_a_certificate_others_are_served_under_tls_and_check_whom_they_reach(pems: dict[str, Pem]) -> None:
    listen = ListenAddress.parse("0.0.0.0:0", pems["ours"].certificate, pems["ours"].key)
    assert listen.url(8443) == "https://0.0.0.0:8443"
    server, client = listen.ssl_context(), client_ssl("https://localhost:8443", pems["ours"].certificate)
    assert server is not None
    assert client is not None
    assert server.minimum_version is client.minimum_version is ssl.TLSVersion.TLSv1_2
    assert shake_hands(server, client, "localhost") == "TLSv1.3"
    assert shake_hands(server, client, "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(server, client, "hub.example.org")
    stranger = client_ssl("https://localhost:8443", pems["other"].certificate)
    assert stranger is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, stranger, "localhost")
    machine = client_ssl("https://localhost:8443")
    assert machine is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, machine, "localhost")


def test_certificates_that_cannot_be_used_are_named(pems: dict[str, Pem], tmp_path: Path) -> None:
    ours, other = pems["ours"], pems["other"]
    both = tmp_path / "both.pem"
    both.write_bytes(ours.certificate.read_bytes() + ours.key.read_bytes())
    assert ListenAddress.parse("0.0.0.0:0", both).scheme == "https"
    swapped = tmp_path / "swapped.pem"
    swapped.write_bytes(ours.key.read_bytes() + ours.certificate.read_bytes() + other.certificate.read_bytes())
    assert (
        ListenAddress.parse("0.0.0.0:0", swapped).fingerprint() == ListenAddress.parse("0.0.0.0:0", both).fingerprint()
    )
    command = ["openssl", "x509", "-in", str(ours.certificate), "-noout", "-fingerprint", "-sha256"]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout
    assert (
        ListenAddress.parse("0.0.0.0:0", both).fingerprint() == shown.partition("=")[2].strip().replace(":", "").lower()
    )
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(ours.key), "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for certificate, key, sentence in (
        (ours.certificate, other.key, "belong together"),
        (ours.certificate, locked, "must have no passphrase"),
        (ours.certificate, None, "cannot be used"),
        (tmp_path / "absent", None, "absent cannot be read: No such file"),
        (None, ours.key, "needs its certificate"),
    ):
        assert sentence in refused("127.0.0.1:0", certificate=certificate, key=key)


def test_a_ca_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(UserError, match="contains no certificate"):
        client_ssl("https://h:1", tmp_path / "empty.pem")
    with pytest.raises(UserError, match="absent cannot be read: No such file"):
        client_ssl("https://h:1", tmp_path / "absent")
    with pytest.raises(UserError, match="use the hub's https URL"):
        client_ssl("http://127.0.0.1:1", tmp_path / "empty.pem")
    assert client_ssl("http://127.0.0.1:1") is None
