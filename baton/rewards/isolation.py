"""Isolates a scorer process as far as the platform allows, which limits the damage of accidents. The isolation is not a
sandbox for hostile code.

      run ══ pipes ══▶ supervisor ──forks──▶ scorer ──starts──▶ processes that a reward function starts

The supervisor process runs no user code. The supervisor kills the scorer and all its descendants when the run sends
SIGTERM, when the run ends (the pipe closes) and when the scorer ends. The method depends on the platform:

* On Linux with user namespaces, the scorer runs in its own PID namespace. When the namespace's first process ends, the
  kernel kills every process in the namespace, also processes in other sessions. The scorer also gets user, mount and
  IPC namespaces, and a network namespace unless the recipe allows the network.
* On Linux without user namespaces, the supervisor is the subreaper of its descendants. Orphans become children of the
  supervisor, which kills children until none is left.
* On other platforms, the supervisor kills the scorer's session.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import baton
from baton.errors import UserError

_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w*|COVERAGE_\w+|"
    r"(OMP|MKL|OPENBLAS|NUMEXPR|CUDA|NVIDIA|TRANSFORMERS|XDG)_\w+|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_\w+)|NLTK_DATA"
)
"""Names of the environment variables that every scorer process gets: paths and settings, not secrets."""
MAX_FILE_BYTES = 2**30
MAX_OPEN_FILES = 4096

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation of a scorer process."""

    scratch: Path
    """Working directory of the scorer; deleted when the scorer ends."""
    description: str
    """Description of the isolation in one line for the user."""

    def enter_scratch(self) -> None:
        """Make `scratch` the working directory. Call this method after all imports, because import paths may be
        relative to the run's directory."""
        os.chdir(self.scratch)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.scratch)


def environment(names: Iterable[str], run: Mapping[str, str], key: str = "judge.env") -> dict[str, str]:
    """Return the environment variables of a scorer process: those of `run` (the run's environment) whose names match
    `_ALLOWED` or are in `names`, the path of this package, and limits of the number of threads. Raises UserError if a
    variable of `names` is not set. `key`: recipe key of `names`."""
    missing = [name for name in names if name not in run]
    if missing:
        raise UserError(f"{key}: got {missing[0]!r}, which is not set; set it, or leave it out")
    chosen, root = set(names), str(Path(baton.__file__).parents[1])
    return {
        **{name: value for name, value in run.items() if name in chosen or _ALLOWED.fullmatch(name)},
        "PYTHONPATH": os.pathsep.join(filter(None, (root, run.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def keep(*, network: bool, who: str = "reward scorers", network_key: str = "judge.network") -> Isolation:
    """Fork, and return only in the child, which becomes the scorer. The parent becomes the supervisor and exits with
    the scorer's exit code. `network`: whether the scorer may use the network. Two arguments are only for
    `Isolation.description`: `who` names the isolated processes, and `network_key` is the recipe key of `network`."""
    wake = _wake_on_signals()
    refusal = _enter_namespaces(network=network)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    scratch = Path(tempfile.mkdtemp(prefix="baton-judge-"))
    child = os.fork()
    if child:
        code = _wait(child, wake)
        if refusal is not None:
            _kill_descendants(child)
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(code)
    _forget_signals()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if refusal is None:
        _mount_proc()
        child = os.fork()
        # this process is the first of the namespace: orphans become its children, and its end kills the whole namespace
        if child:
            os._exit(_reap(child))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        os.setsid()
    _limit()
    reach = "with network" if network else f"without network ({network_key} = true allows it)"
    return Isolation(scratch, _described(refusal, who, reach))


def detach_streams() -> None:
    """Redirect standard input from /dev/null and standard output to standard error, so that output of user code does
    not mix with messages. The caller must duplicate the streams before this call and use the copies for messages."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # by line: a kill would lose the content of a larger buffer


def import_from(sys_path: Iterable[str], memory_bytes: int) -> None:
    """Use the run's `sys_path` for imports. On Linux, limit this process's memory; `memory_bytes` = 0: no limit."""
    sys.path[:] = [str(Path(entry).absolute()) for entry in sys_path]
    if memory_bytes and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _described(refusal: str | None, who: str, reach: str) -> str:
    if refusal is None:
        return (
            f"{who} run in their own namespaces, {reach}, without the secrets of the run's environment; "
            "processes that they start end with them"
        )
    return (
        f"{who} run without namespaces ({refusal}), so they can use the network; they get no secrets of the "
        "run's environment, and processes that they start are killed with them"
    )


# ---- the supervisor process ------------------------------------------------------------------------------------------


def _wake_on_signals() -> int:
    """Return a file descriptor that becomes readable when this process receives SIGTERM or a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return readable


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _wait(child: int, wake: int) -> int:
    """Wait for the child; kill it on SIGTERM or when the run ends. Return the exit code, or 128 + the signal number."""
    poll = select.poll()
    poll.register(0, 0)  # event mask 0: poll reports only that the other end has closed; the scorer reads the data
    poll.register(wake, select.POLLIN)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return _exit_code(status)
        if pid:  # another descendant ended; there may be more
            continue
        ready = dict(poll.poll())
        if 0 in ready or signal.SIGTERM in os.read(wake, 64):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 128 + signal.SIGKILL


def _kill_descendants(session: int) -> None:
    """Kill children until none is left, because children of a killed process become children of this process."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def _reap(child: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == child:
            return _exit_code(status)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# ---- functions of the platform ---------------------------------------------------------------------------------------


def _enter_namespaces(*, network: bool) -> str | None:
    """Enter new namespaces. The next child process becomes the first process of the new PID namespace. Return None, or
    the reason why namespaces are not available."""
    if sys.platform != "linux":
        return f"not on {sys.platform}"
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWUSER | _NEWPID | _NEWNS | _NEWIPC | (0 if network else _NEWNET)):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        return f"user namespace: {error.strerror}"
    if not network:
        _raise_loopback()
    return None


def _raise_loopback() -> None:
    """Enable 127.0.0.1 in the new network namespace, so that processes of the scorer can connect to each other."""
    import fcntl
    import socket
    import struct

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


def _mount_proc() -> None:
    """Mount a /proc that shows only the namespace's processes, unless a container forbids the mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit() -> None:
    import resource

    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
