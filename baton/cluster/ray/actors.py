"""The actors on the cluster's machines, which run a worker process or a trainer rank.

Ray constructs them from plain values and bytes. A worker is a child process of its actor. If the engine crashes its
process, as CUDA faults do, the actor survives and reports the end of the worker's log. The process is an ordinary
`baton worker` that joins the hub with a token. It ends when its standard input closes, that is, when the actor dies;
Ray ends the actor when the driver dies.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

import baton
from baton.files import memory_directory
from baton.swarm.auth import write_private

GRACE_S: Final = 20.0
"""Time that a worker has to report what it has before it is killed."""
MAX_WORDS: Final = 2000
"""Characters from the end of a worker's log that are reported when it has ended."""


class WorkerArguments(msgspec.Struct, frozen=True):
    """The command-line arguments of a worker."""

    name: str
    url: str
    token: str
    certificate: str
    is_insecure: bool
    slots: int
    threads: int
    device: str
    options: tuple[str, ...] = ()
    """Passed as `baton worker --engine-option`."""


def own_directory(what: str) -> Path:
    """Make a directory for this process, in memory if possible; remove those that killed processes of this machine
    left."""
    where = memory_directory() or Path(tempfile.gettempdir())
    prefix = f"baton-{what}-{socket.gethostname()}-"
    for old in where.glob(f"{prefix}*"):
        pid = old.name.removeprefix(prefix).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where))


class WorkerActor:
    """An actor that runs one `baton worker` process."""

    def __init__(self, start: WorkerArguments) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix=f"baton-{start.name}-"))
        self._log = self._scratch / "worker.log"
        write_private(self._scratch / "token", start.token.encode())
        command = [sys.executable, "-m", "baton", "worker", start.url, "--token-file", str(self._scratch / "token")]
        command += ["--slots", str(start.slots), "--threads", str(start.threads), "--device", start.device, "--tied"]
        for option in start.options:
            command += ["--engine-option", option]
        if start.certificate:
            (self._scratch / "hub.pem").write_text(start.certificate)
            command += ["--ca", str(self._scratch / "hub.pem")]
        if start.is_insecure:
            command.append("--insecure")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment(start.threads)
            )

    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def watch(self) -> str:
        """Wait until the process has ended; return its exit code and the end of its log, as text."""
        code = self._process.wait()
        words = self._log.read_bytes()[-MAX_WORDS:].decode("utf-8", "replace").strip()
        return f"ended with exit code {code}" + (f"; its last words: {words}" if words else "")

    def leave(self) -> None:
        """Have the process report what it has and end; kill it after `GRACE_S`."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _environment(threads: int) -> dict[str, str]:
    """Return this actor's environment, with the path of its own Baton."""
    root = str(Path(baton.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **own, "OMP_WAIT_POLICY": "passive"}


class RankActor:
    """An actor that is one trainer rank. Messages and answers are msgpack (`trainer/parallel/messages.py`)."""

    def __init__(self, place: bytes, directory: str, address: str) -> None:
        """place: the encoded RankInfo without its host. directory: the controller's working directory, on a shared
        disk."""
        from baton.trainer.parallel.messages import RankInfo, decode_to_rank
        from baton.trainer.parallel.rank_server import RankServer

        if not Path(directory).is_dir():
            raise FileNotFoundError(
                f"{socket.gethostname()} has no directory {directory}: trainer ranks read the model and write "
                "checkpoints below the directory where the command was started, so it must be shared"
            )
        os.chdir(directory)
        told = decode_to_rank(place)
        assert isinstance(told, RankInfo), f"a rank is told its place first, not {type(told).__name__}"
        self._scratch = own_directory("rank")
        where = {"host": address, "interface": interface_of(address), "scratch": str(self._scratch)}
        self._server = RankServer(msgspec.structs.replace(told, **where))

    def handle(self, message: bytes) -> bytes:
        """Handle an encoded message; return the encoded answer."""
        from baton.trainer.parallel.messages import decode_to_rank, encode

        return encode(self._server.handle(decode_to_rank(message)))

    def pid(self) -> int:
        """Id of this actor's process."""
        return os.getpid()

    def take(self, path: str) -> Any:
        """Return a file's bytes for the object store, and delete the file."""
        import numpy as np

        data = np.fromfile(path, np.uint8)
        Path(path).unlink()
        return data

    def close(self) -> None:
        """Leave the process group, and delete the rank's files."""
        self._server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def interface_of(address: str) -> str:
    """Return the network interface of an IPv4 address of this machine; empty if none is found."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
