"""The command `baton worker`: generate trajectories for a run on another machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import Authority, HubUrl, Insecure, TokenPath
from baton.console import say

if TYPE_CHECKING:
    from baton.rollout.engine import Engine
    from baton.swarm.messages import Welcome
    from baton.swarm.worker.worker import SwarmWorker


TURNS = {"sleep": False, "wake": True, "held": None}
"""Command that a worker with `--tied` reads from standard input → argument of `SwarmWorker.use_device`. The worker
answers each command with one line: the number of bytes of device memory that its engine uses."""


def worker(
    url: HubUrl,
    token_file: TokenPath,
    slots: Annotated[
        int | None, typer.Option(min=8, help="Number of concurrent trajectories; default: as in the recipe.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine: embedded, vllm or sglang; default: as in the recipe.")
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the engine, such as tensor_parallel=2; repeatable."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Number of torch threads on a CPU.")] = 1,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    store: Annotated[
        str | None, typer.Option(help="Directory weights.store of the run, if this machine can read it.")
    ] = None,
    reconnect_timeout: Annotated[
        str | None, typer.Option(help="Exit after this time without a hub: 90s, 30m, 12h; default: never.")
    ] = None,
    insecure: Insecure = False,
    ca: Authority = None,
    fingerprint: Annotated[
        str | None, typer.Option(hidden=True, help="SHA-256 of the hub's certificate, in hex.")
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", hidden=True, help="Exit when standard input ends.")] = False,
    sleeps: Annotated[
        bool, typer.Option("--sleeps", hidden=True, help="Leave the device and return as standard input says.")
    ] = False,
) -> None:
    """Join a run's hub, fetch its weights and generate trajectories for it.

    The worker opens all connections, so it works behind NAT. The worker reconnects after a network failure. Ctrl-C
    aborts the running trajectories, reports their tokens and exits.
    """
    from aiohttp import Fingerprint

    from baton.policy.threads import set_up_threads
    from baton.rollout.engine import EngineSettings
    from baton.rollout.engines.factory import check_source, chosen, engine_from_skeleton
    from baton.swarm.auth import parse_duration, read_token_file
    from baton.swarm.listen import check_url, client_ssl
    from baton.swarm.worker.worker import SwarmWorker, WorkerOptions

    def choose(settings: EngineSettings) -> EngineSettings:
        found = chosen(settings, kind=engine, slots=slots, options=engine_option or ())
        # a worker with `--tied` was started by a run of the same user, so the run may set these keys
        own = ["arguments", "weights_directory", "key_variable"] if tied else []
        check_source(found, [*own, *(option.partition("=")[0] for option in engine_option or ())])
        return found

    choose(EngineSettings())  # checks the options before connecting to the hub
    base = check_url(url, insecure)
    options = WorkerOptions(
        base,
        read_token_file(token_file),
        client_ssl(base, ca) if fingerprint is None else Fingerprint(bytes.fromhex(fingerprint)),
        slots=slots,
        store=store,
        device=_device_name(device),
        engine=engine,
        reconnect_timeout_s=None if reconnect_timeout is None else parse_duration(reconnect_timeout),
        say=say,
    )

    def make_engine(welcome: Welcome, directory: Path, base: Mapping[str, Any] | None) -> Engine:
        set_up_threads(threads)
        settings = choose(welcome.engine_settings())
        return engine_from_skeleton(
            directory, base, settings, device=device, attention=welcome.attention, sleeps=sleeps
        )

    asyncio.run(_run(SwarmWorker(options, make_engine), tied))


async def _run(one: SwarmWorker, is_tied: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, one.leave)

    answers = set[asyncio.Task[None]]()

    async def answer(turn: str) -> None:
        held_bytes = await one.use_device(TURNS[turn])
        os.write(sys.stdin.fileno(), f"{held_bytes}\n".encode())  # a socket, which `WorkerActor` made

    def on_input() -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            loop.remove_reader(sys.stdin.fileno())
            one.leave()
        for turn in data.decode().split():
            task = loop.create_task(answer(turn))
            answers.add(task)
            task.add_done_callback(answers.discard)

    if is_tied:
        loop.add_reader(sys.stdin.fileno(), on_input)
    await one.run()


def _device_name(device: str) -> str:
    """Return the name of the GPU or processor. Devices with equal names are assumed to have equal rounding errors."""
    from baton.records.run_directory import processor_name

    if device == "cpu":
        return processor_name()
    import torch

    from baton.policy.load import torch_device

    found = torch_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else processor_name()
