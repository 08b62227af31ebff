"""`baton worker` and `baton status`: the two ends of a swarm that are not the trainer's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from baton.cli.options import Json
from baton.console import out, print_json, say, visible
from baton.errors import UserError

if TYPE_CHECKING:
    from baton.rollout.engine import Engine
    from baton.swarm.hub.relay import Relay
    from baton.swarm.hub.status import HubStatus
    from baton.swarm.messages import Welcome

STATUS_DEADLINE_S = 10.0
RELAY_GRACE_S = 2.0
"""What a relay that is to end has to do so by itself."""
MAX_STATUS_BYTES = 16 * 1024 * 1024

Url = Annotated[str, typer.Argument(metavar="URL", help="Where the hub is, such as https://hub.example:7000.")]
TokenPath = Annotated[
    Path, typer.Option("--token-file", help="File with the token that the run's owner gave you (baton token create).")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Send the token over plain HTTP to another machine: it can be read.")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="PEM file with the authority behind the hub's certificate.")
]
Slots = Annotated[
    int | None, typer.Option("--slots", min=8, help="Trajectories generated at once; the recipe's by default.")
]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="The run's weights.store, where this machine can read it.")
]
Kind = Annotated[
    str | None, typer.Option("--engine", help="What generates: embedded, vllm or sglang; the recipe's by default.")
]


def worker(
    url: Url,
    token_file: TokenPath,
    slots: Slots = None,
    engine: Kind = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option("--engine-option", metavar="KEY=VALUE", help="For this engine, such as tensor_parallel=2."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch on a CPU.")] = 1,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    store: StoreUrl = None,
    patience: Annotated[
        str | None, typer.Option("--patience", help="End when there is no hub for so long: 90s, 30m, 12h; else never.")
    ] = None,
    insecure: Insecure = False,
    ca: Authority = None,
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", hidden=True, help="SHA-256 of the hub's certificate, in hex.")
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", hidden=True, help="Leave when standard input ends.")] = False,
) -> None:
    """Generate for a run anywhere: join its hub, fetch its weights, grow its trajectories.

    Opens the one connection itself, so it works behind NAT; comes back by itself when the network or the hub does.
    Ctrl-C puts down what runs, reports it and leaves.
    """
    from aiohttp import Fingerprint

    from baton.policy.threads import set_up_threads
    from baton.rollout.engine import EngineSettings
    from baton.rollout.engines.factory import check_server, chosen, engine_from_skeleton
    from baton.swarm.auth import parse_duration, read_token_file
    from baton.swarm.listen import check_url, client_ssl
    from baton.swarm.worker.worker import SwarmWorker, WorkerOptions

    def choose(settings: EngineSettings) -> EngineSettings:
        found = chosen(settings, kind=engine, slots=slots, options=engine_option or ())
        check_server(found, is_own=any(option.startswith("url=") for option in engine_option or ()))
        return found

    choose(EngineSettings())  # a mistake is said before the hub is asked
    base = check_url(url, insecure)
    options = WorkerOptions(
        base,
        read_token_file(token_file),
        client_ssl(base, ca) if fingerprint is None else Fingerprint(bytes.fromhex(fingerprint)),
        slots=slots,
        store=store,
        device=_device_name(device),
        engine=engine,
        patience_s=None if patience is None else parse_duration(patience),
        say=say,
    )

    def make_engine(welcome: Welcome, directory: Path, base: Mapping[str, Any] | None) -> Engine:
        set_up_threads(threads)
        settings = choose(welcome.engine_settings())
        return engine_from_skeleton(directory, base, settings, device=device, attention=welcome.attention)

    asyncio.run(_run(SwarmWorker(options, make_engine), tied))


async def _run(one: Any, is_tied: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, one.leave)

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            one.leave()

    if is_tied:
        loop.add_reader(sys.stdin.fileno(), on_input)
    await one.run()


def _device_name(device: str) -> str:
    """What decides a device's rounding: the name of the GPU or processor."""
    from baton.records.run_directory import processor_name

    if device == "cpu":
        return processor_name()
    import torch

    from baton.policy.load import torch_device

    found = torch_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else processor_name()


def relay(
    url: Url,
    token_file: TokenPath,
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where workers reach it.")],
    public_url: Annotated[
        str | None, typer.Option("--public-url", help="Where workers find it, if that is another address.")
    ] = None,
    cache: Annotated[Path, typer.Option("--cache", help="Directory for chunks.")] = Path("baton-relay"),
    cache_gb: Annotated[float, typer.Option("--cache-gb", min=0.1, help="Most that lies there.")] = 20.0,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="PEM file, to serve TLS.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM file with its private key.")] = None,
    insecure: Insecure = False,
    ca: Authority = None,
) -> None:
    """Hand a hub's weights on to workers nearby: each chunk goes the long way once. Needs a token of the role relay."""
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
    asyncio.run(_relay(Relay(options)))


async def _relay(one: Relay) -> None:
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.create_task(one.run(until))

    def end() -> None:
        until.set()
        loop.call_later(RELAY_GRACE_S, running.cancel)  # it may be waiting for its hub

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await running


def status(
    url: Url,
    token_file: TokenPath,
    insecure: Insecure = False,
    ca: Authority = None,
    as_json: Json = False,
) -> None:
    """Show a hub's workers, versions, leases, transfers and quarantine; needs a token of the role admin."""
    from baton.swarm.hub.status import HubStatus

    body = _get(url, token_file, insecure, ca)
    try:
        if as_json:
            print_json(msgspec.json.decode(body))
        else:
            _print_status(msgspec.json.decode(body, type=HubStatus), url)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{url} does not answer with a hub's status ({error}): is it a hub of this Baton?") from error


def _get(url: str, token_file: Path, insecure: bool, ca: Path | None) -> bytes:
    from baton.swarm.auth import read_token_file
    from baton.swarm.listen import check_url, client_ssl

    base = check_url(url, insecure)
    headers = {"Authorization": f"Bearer {read_token_file(token_file)}"}
    request = urllib.request.Request(f"{base}/status", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=STATUS_DEADLINE_S, context=client_ssl(base, ca)) as response:
            body: bytes = response.read(MAX_STATUS_BYTES)
            return body
    except urllib.error.HTTPError as error:
        said = error.read(500).decode("utf-8", "replace")
        raise UserError(f"the hub at {base} answers {error.code}: {said} (baton token create --role admin)") from error
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise UserError(f"there is no hub at {base}: {getattr(error, 'reason', error)}") from error


def _print_status(status: HubStatus, url: str) -> None:
    def line(text: str, style: str = "") -> None:
        out.print(visible(text, keep=""), style=style)  # a line break from outside would begin another line

    version = "none" if status.version is None else str(status.version)
    line(
        f"run {status.run}, step {status.step}; version {version} published; {status.tasks} trajectories wanted, "
        f"{status.waiting} of them waiting",
    )
    table = Table(box=None, header_style="bold")
    for name in ("worker", "state", "version", "leases", "tokens/s", "fetched MB", "checked"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right")
    for one in status.workers:
        table.add_row(
            one.name + (" (trusted)" if one.is_trusted else ""),
            one.state + (f": {one.fault}" if one.fault else ""),
            "–" if one.version is None else str(one.version),
            f"{one.leases} / {one.slots}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.fetched_bytes / 1e6:,.1f}",
            str(one.checked),
        )
    if status.workers:
        out.print(table)
    else:
        line(f"no worker has joined yet; one joins by: baton worker {url} --token-file FILE")
    for kind, count in Counter(one.worker_class for one in status.workers).items():
        line(f"{count} of the class {kind}")
    line(status.provisioning)
    if status.staleness:
        shares = ", ".join(f"{age} versions {share:.0%}" for age, share in status.staleness.items())
        line(f"age of the last batch's tokens: {shares}")
    sent = ", ".join(f"{route} {num / 1e6:,.1f} MB" for route, num in status.bytes_out.items())
    line(f"sent: {sent}")
    if status.wasted_tokens:
        causes = ", ".join(f"{cause} {num}" for cause, num in status.wasted_tokens.items())
        line(f"tokens made in vain: {causes}")
    for bad in status.quarantine:
        steps = f"trained in steps {', '.join(map(str, bad.trained_steps))}" if bad.trained_steps else "never trained"
        line(f"in quarantine: {bad.name}: {bad.reason} ({steps})", "red")
    for note in status.notes:
        line(note, "yellow")
