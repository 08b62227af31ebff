"""The actors that run a worker process or a trainer rank on a machine of the cluster.

Ray constructs actors from plain values and bytes. A worker is a child process of its actor. If the engine crashes the
worker process, for example by a CUDA fault, the actor survives and reports the end of the worker's log. The worker
process is an ordinary `baton worker` that joins the hub with a token. The worker process ends when the actor ends,
because the end of the actor closes the worker's standard input. Ray ends the actor when the driver ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

import baton
from baton.clock import time_left
from baton.swarm.auth import write_private

GRACE_S: Final = 20.0
"""Maximum seconds for a worker to report its tokens before it is killed."""
MAX_LOG_BYTES: Final = 2000
"""When a worker has ended, this number of bytes from the end of its log is reported."""


class WorkerArguments(msgspec.Struct, frozen=True):
    """The arguments of a worker."""

    command: tuple[str, ...]
    """Arguments of `baton worker`, without `--tied` and the paths of files, which the actor adds."""
    token: str
    certificate: str
    threads: int
    gpus: tuple[tuple[str, str | int], ...] = ()
    """One pair per GPU, if the worker shares GPUs with ranks or its actor sees GPUs of other processes; otherwise
    empty. The first element is the name of the environment variable that selects the GPUs that a process sees. The
    second element is either a string, the GPU's id that becomes the variable's value, or an integer, the GPU's index
    among the GPUs that the actor sees."""


PIECE_BYTES = 64 * 2**20
"""Maximum number of bytes of a file that one call to `RankActor.take` returns."""


def own_directory(what: str) -> Path:
    """Make a temporary directory for this process, and delete the directories of ended processes. The process locks its
    directory (flock) until it ends. A process id would not identify the owner: several containers may share the
    directory of temporary files, and their process ids are not unique."""
    root, prefix = Path(tempfile.gettempdir()), f"baton-{what}-"
    for old in root.glob(f"{prefix}*"):
        with suppress(OSError):  # the owner still runs, or is another user
            os.close(_locked(old))
            shutil.rmtree(old, ignore_errors=True)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))  # hidden from the loop above in other processes
    with suppress(OSError):  # without locks on this file system, other processes cannot delete the directory either
        _locked(unlocked)  # the descriptor stays open until this process ends
    return unlocked.rename(root / unlocked.name[1:])


def _locked(directory: Path) -> int:
    """Lock a directory, and return the descriptor that holds the lock. Raises OSError if it is locked."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class WorkerActor:
    """An actor that runs one `baton worker` process."""

    def __init__(self, start: WorkerArguments) -> None:
        self._scratch = own_directory("worker")
        self._log = self._scratch / "worker.log"
        write_private(self._scratch / "token", start.token.encode())
        command = [sys.executable, "-m", "baton", "worker", *start.command, "--tied"]
        command += ["--token-file", str(self._scratch / "token")]
        if start.certificate:
            (self._scratch / "hub.pem").write_text(start.certificate)
            command += ["--ca", str(self._scratch / "hub.pem")]
        self._turns, inner = socket.socketpair()  # closes with this process, which ends the worker
        environment = {**_environment(start.threads), **_gpus(start)}
        with self._log.open("ab") as log, inner:  # a session of its own, so that `end_session` finds its children
            self._process = subprocess.Popen(
                command, stdin=inner.fileno(), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def pid(self) -> int:
        return self._process.pid

    def use_device(self, turn: str, timeout_s: float) -> int:
        """Send a command of `cli.worker.TURNS` to the worker process, and return the bytes of device memory that its
        engine then uses. Raises OSError if the process does not answer in time or ends. One call at a time."""
        left_s, answer = time_left(timeout_s), b""
        self._turns.settimeout(timeout_s)
        self._turns.sendall(f"{turn}\n".encode())
        while not answer.endswith(b"\n"):
            self._turns.settimeout(max(0.001, left_s()))
            if not (data := self._turns.recv(64)):
                raise ConnectionError("the worker has ended")
            answer += data
        return int(answer)

    def watch(self) -> str:
        """Wait until the process has ended; return one line with its exit code and the end of its log."""
        code = self._process.wait()
        with self._log.open("rb") as log:  # a log may be larger than the memory
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            output = log.read().decode("utf-8", "replace").split("\n")
        lines = " | ".join(line.strip() for line in output if line.strip())
        return f"ended with exit code {code}" + (f"; its last output: {lines}" if lines else "")

    def leave(self) -> None:
        """Ask the process to report its tokens and to end. Kill it if it has not ended after `GRACE_S` seconds."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            end_session(self._process.pid, GRACE_S)
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _gpus(start: WorkerArguments) -> dict[str, str]:
    """Return the environment variables that restrict a worker to its GPUs; empty if its actor sees no others."""
    found: dict[str, str] = {}
    for name, gpu in start.gpus:
        seen = [each for each in os.environ.get(name, "").split(",") if each]
        own = gpu if isinstance(gpu, str) else seen[gpu] if seen else str(gpu)
        found[name] = f"{found[name]},{own}" if name in found else own
    return found


def end_session(pid: int, deadline_s: float) -> bool:
    """Kill a worker's process and the processes that it started, on this machine. Return True when all these processes
    have ended and their memory is free, and False if a process remains after the deadline."""
    left_s = time_left(deadline_s)
    while own := _of_session(pid):
        if left_s() <= 0:
            return False
        for each in own:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
    return True


def _of_session(session: int) -> list[int]:
    """Return the ids of the running processes of a session, without zombie processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(own) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(baton.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **own, "OMP_WAIT_POLICY": "passive"}


class RankActor:
    """An actor that runs one trainer rank. Messages and answers are msgpack (`trainer/parallel/messages.py`)."""

    def __init__(self, info: bytes, directory: str, address: str) -> None:
        """`info`: encoded RankInfo without its host. `directory`: the controller's working directory, on a shared file
        system."""
        from baton.trainer.parallel.messages import RankInfo, decode_to_rank
        from baton.trainer.parallel.rank_server import RankServer

        if not Path(directory).is_dir():
            raise FileNotFoundError(
                f"{socket.gethostname()} has no directory {directory}: trainer ranks read the model and write "
                "checkpoints below the directory in which the command was started; put it on a shared file system"
            )
        os.chdir(directory)
        own = decode_to_rank(info)
        assert isinstance(own, RankInfo), f"the first message to a rank is {type(own).__name__}"
        self._scratch, self._gpu = own_directory("rank"), own.device_index or 0
        host = {"host": address, "interface": interface_of(address), "scratch": str(self._scratch)}
        self._server = RankServer(msgspec.structs.replace(own, **host))

    def handle(self, message: bytes) -> bytes:
        from baton.trainer.parallel.messages import decode_to_rank, encode

        return encode(self._server.handle(decode_to_rank(message)))

    def pid(self) -> int:
        return os.getpid()

    def visible(self) -> dict[str, str]:
        """Return the environment variable that restricts a process of this machine to the GPU of this rank."""
        from baton.run.devices import visible

        return visible((self._gpu,))

    def take(self, path: str, begin: int) -> Any:
        """Return at most `PIECE_BYTES` of a file as an array, which Ray does not copy. The last piece is shorter than
        `PIECE_BYTES`; when it is read, the file is deleted."""
        import numpy as np

        data = np.fromfile(path, np.uint8, count=PIECE_BYTES, offset=begin)
        if len(data) < PIECE_BYTES:
            Path(path).unlink()
        return data

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


class RewardActor:
    """An actor that holds a reward model. Its methods share one event loop, and scoring a batch blocks this loop."""

    def __init__(self, directory: str, gpu: int) -> None:
        """`directory`: the controller's working directory; relative paths of models refer to it. `gpu`: index of the
        actor's GPU among the GPUs that the actor sees."""
        import torch

        if Path(directory).is_dir():
            os.chdir(directory)
        self._gpu = 0
        if torch.cuda.is_available():
            self._gpu = gpu % torch.cuda.device_count()
            torch.cuda.set_device(self._gpu)
        self._scorers: list[Any] = []
        self._process: Any = None

    async def set_up(self, setup: bytes) -> bytes:
        """Load the model. Takes an encoded `ScorerSetup`; returns an encoded `ScorerReady`."""
        from baton.rewards import scorer_protocol as protocol
        from baton.rewards.worker import load_scorers

        own = msgspec.msgpack.decode(setup, type=protocol.ScorerSetup)
        if any(isinstance(spec, protocol.GenerativeModelSpec) for spec in own.specs):
            return protocol.encode(await self._start_server(own))
        self._scorers, error = load_scorers(own)
        return protocol.encode(protocol.ScorerReady(error))

    async def _start_server(self, setup: Any) -> Any:
        """Start a child process that starts a vLLM server. Child process and server end with this actor."""
        from baton.rewards.pool import LocalProcess
        from baton.rewards.settings import JudgeSettings

        specs = tuple(
            msgspec.structs.replace(spec, device=f"cuda:{self._gpu}") if spec.device == "cuda" else spec
            for spec in setup.specs
        )
        self._process = await LocalProcess.launch(JudgeSettings())
        # the child process gets the actor's `sys.path`, because the run's paths may not exist on this machine
        return await self._process.set_up(msgspec.structs.replace(setup, specs=specs, sys_path=tuple(sys.path)))

    async def ask(self, request: bytes) -> bytes:
        """Score conversations. Takes an encoded `ScoreRequest`; returns an encoded `CallResult`."""
        from baton.rewards import scorer_protocol as protocol
        from baton.rewards.worker import answer

        own = msgspec.msgpack.decode(request, type=protocol.ScoreRequest)
        if self._process is not None:
            outcomes = await self._process.ask(own.spec, own.calls, own.deadline_s, own.deadline_s + GRACE_S)
            return protocol.encode(protocol.CallResult(own.call_id, outcomes))
        return protocol.encode(await answer(self._scorers, own))

    async def pid(self) -> int:
        return os.getpid()


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
