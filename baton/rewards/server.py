"""Runs a generative reward model: a vLLM server that this worker process starts, calls and observes.

      run ══ calls ══▶ worker process ──HTTP on 127.0.0.1, with a random key──▶ vLLM server

The worker process ends when its server ends or fails a health check. The run then starts both processes again
(`pool.py`). All processes of the server end with the worker process (`isolation.py`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton.clock import time_left
from baton.errors import UserError
from baton.rewards.chat import ChatFormat
from baton.rewards.remote import call_remote_scorer
from baton.rewards.scorer_protocol import Call, CallFailure, GenerativeModelSpec, Outcome
from baton.rewards.settings import SERVER_START_S
from baton.specs.model import paged_cache_bytes, read_model
from baton.types import FailureCause

HEALTH_EVERY_S = 5.0
HEALTH_TIMEOUT_S = 30.0
"""Maximum seconds for the server to answer a health check."""
LOG_BYTES = 4000
"""Maximum number of bytes of the server's output that are kept; earlier output is discarded."""
SERVED_NAME = "reward-model"


def command_of(spec: GenerativeModelSpec, port: int, kind: str) -> list[str]:
    """Return the command of the server. `kind`: type of the server's device, `cuda` or `cpu`. Baton's own arguments
    come last, so that they override arguments of the same name in the recipe."""
    own_policy = import_module("baton.policy.tokenizer")  # by name, because this layer does not import baton.policy
    name, revision = own_policy.split_revision(spec.model)
    dtype = spec.dtype if spec.dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"
    model = read_model(own_policy.model_directory(spec.model))
    cache = paged_cache_bytes(model, spec.concurrency, spec.context_tokens, 4 if dtype == "float32" else 2)
    own = {
        "model": str(Path(name).absolute()) if Path(name).exists() else name,
        "served-model-name": SERVED_NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "max-model-len": spec.context_tokens,
        "max-num-seqs": spec.concurrency,
        "kv-cache-memory-bytes": cache,
        "generation-config": "vllm",  # requests set the sampling, not the model's generation_config.json
        "uvicorn-log-level": "warning",
        **({"revision": revision} if revision else {}),
    }
    given = [_flag(key, value) for key, value in spec.arguments.items()]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*program, *given, *(f"--{key}={value}" for key, value in own.items())]


def _flag(key: str, value: Any) -> str:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    shown = msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
    return f"--{name}={shown}"


def environment_of(device: str, key: str, run: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a server. On CUDA, they make only one GPU visible to the server."""
    own = {
        "VLLM_API_KEY": key,  # other users of the machine can read arguments
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    kind, _, index = device.partition(":")
    if kind == "cuda":
        visible = [each for each in run.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        own["CUDA_VISIBLE_DEVICES"] = visible[int(index or 0)] if visible else index or "0"
    return {**run, **own}


class GenerativeModel:
    """A started server, and the calls to it. The calls run in one event loop."""

    def __init__(self, spec: GenerativeModelSpec) -> None:
        """Start the server and wait until it is healthy. Raises UserError if it does not become healthy."""
        self._name, self._key = str(spec), secrets.token_urlsafe(32)
        self._chat = ChatFormat(SERVED_NAME, spec.template, spec.pattern, spec.max_new_tokens)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base, self._tail = f"http://127.0.0.1:{port}", b""
        self._session: aiohttp.ClientSession | None = None
        device = import_module("baton.policy.load").torch_device(spec.device, "[[reward]] devices")
        self._process = subprocess.Popen(
            command_of(spec, port, device.type),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_of(str(device), self._key, os.environ),
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        self._await_health()
        threading.Thread(target=self._end_with_the_server, daemon=True).start()

    async def __call__(self, calls: tuple[Call, ...]) -> tuple[Outcome, ...]:
        """Score conversations, without a timeout: the caller enforces a deadline."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self._base,
                headers={"Authorization": f"Bearer {self._key}"},
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            self._watch = asyncio.create_task(self._check_health_regularly())
        return tuple(await asyncio.gather(*(self._score(self._session, call) for call in calls)))

    async def _score(self, session: aiohttp.ClientSession, call: Call) -> Outcome:
        outcome = await call_remote_scorer(session, "/v1/chat/completions", call, None, self._chat)
        if isinstance(outcome, CallFailure) and outcome.cause is FailureCause.UNREACHABLE:
            await self._check_health(session)
            return CallFailure(FailureCause.CRASHED, outcome.detail)  # the run repeats the call
        return outcome

    async def _check_health_regularly(self) -> None:
        assert self._session is not None
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._check_health(self._session)

    async def _check_health(self, session: aiohttp.ClientSession) -> None:
        """End this process if the server is not healthy."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S), session.get("/health") as reply:
                if reply.status < 300:
                    return
                cause = f"answers a health check with status {reply.status}"
        except TimeoutError:
            cause = f"did not answer a health check within {HEALTH_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            cause = f"cannot be reached: {error or type(error).__name__}"
        self._end(cause)

    def _await_health(self) -> None:
        left_s = time_left(SERVER_START_S)
        while left_s() > 0:
            if (code := self._process.poll()) is not None:
                raise UserError(f"its vLLM server ended with exit code {code}; its last output: {self._shown()}")
            with suppress(OSError), urllib.request.urlopen(f"{self._base}/health", timeout=HEALTH_TIMEOUT_S):
                return
            time.sleep(0.2)
        self._process.kill()
        raise UserError(f"its vLLM server was not healthy within {SERVER_START_S:g} s; its output: {self._shown()}")

    def _end_with_the_server(self) -> None:
        code = self._process.wait()
        self._end(f"ended with exit code {code}")

    def _end(self, cause: str) -> None:
        """End the vLLM server and this process; the run starts both processes again."""
        line = f"{self._name}: its vLLM server {cause}; its last output: {self._shown()}\n"
        os.write(2, line.encode(errors="replace"))
        self._process.kill()
        os._exit(1)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        while piece := os.read(self._process.stdout.fileno(), 65536):
            self._tail = (self._tail + piece)[-LOG_BYTES:]

    def _shown(self) -> str:
        if self._process.poll() is not None:
            self._reader.join(1.0)  # a process of the server may hold the pipe open
        lines = self._tail.decode(errors="replace").splitlines()
        text = " | ".join(line.strip() for line in lines[-8:] if line.strip())
        return "".join(each if each.isprintable() else "?" for each in text)[-1500:] or "none"
