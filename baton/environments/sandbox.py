"""Runs Python code that a policy wrote, in a process without access to files, the network or other processes.

The child is `python -I -S sandbox.py`. Before the child executes the code, it permanently restricts itself:

* rlimits limit memory, CPU time, the size of files, and the number of open files;
* Landlock (Linux 5.13) allows the child to read the files of Python and the system's libraries, and to make files in
  its empty working directory, but denies new directories and all other files;
* seccomp denies sockets, new programs and processes, signals to other processes, changes of permissions, debugging
  calls, and memory and disk space that rlimits do not limit: shared memory, files in memory, and fallocate;
* if the child runs as root, it drops its capabilities.

These restrictions need neither root nor namespaces. The code can use only the standard library. Code that exceeds the
limit on CPU time counts as too slow. A limit on wall time, several seconds longer, ends code that sleeps. The parent
kills code whose working directory has too many files or bytes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

MAX_OUTPUT_BYTES = 2**20
MAX_OPEN_FILES = 32
MAX_FILES, MAX_FILES_MIB = 1000, 64
POLL_S = 0.05
"""Seconds between two checks of the working directory. Code may exceed `MAX_FILES` and `MAX_FILES_MIB` until the next
check."""
START_S = 10.0
"""Seconds that are added to the limit of wall time, because Python must start first."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_FORBIDDEN = {
    # socket socketpair connect bind sendto sendmsg; fork vfork execve execveat; kill tkill tgkill rt_sigqueueinfo
    # rt_tgsigqueueinfo pidfd_send_signal; ptrace process_vm_readv process_vm_writev; mount umount2 pivot_root chroot
    # unshare setns; bpf perf_event_open userfaultfd keyctl add_key request_key; io_uring_* pidfd_open pidfd_getfd;
    # chmod and chown in all forms; setxattr lsetxattr fsetxattr setxattrat; prlimit64 open_by_handle_at; shmget shmat
    # semget msgget mq_open; memfd_create memfd_secret fallocate
    "x86_64": (
        "41 53 42 49 44 46 57 58 59 322 62 200 234 129 297 424 101 310 311 165 166 155 161 272 308 321 298 323 250 248 "
        "249 425 426 427 434 438 90 91 92 93 94 260 268 452 188 189 190 463 302 304 "
        "29 30 64 68 240 319 447 285"
    ),
    "aarch64": (
        "198 199 203 200 206 211 221 281 129 130 131 138 240 424 117 270 271 40 39 41 51 97 268 280 241 282 219 217 "
        "218 425 426 427 434 438 52 53 54 55 452 5 6 7 463 261 265 194 196 190 186 180 279 447 47"
    ),
}
"""Machine architecture → numbers of the system calls that fail with EPERM."""
_MMAP, _MAP_SHARED = {"x86_64": 9, "aarch64": 222}, 0x01
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_SCRATCH_ACCESS = sum(1 << bit for bit in (1, 2, 3, 5, 8, 14))
"""Rights in the working directory: write, read, list, remove and make files, truncate. The code may not make
directories, because thousands of nested directories could not be removed."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The outcome of one execution."""

    stdout: str
    """Standard output of the code, cut to `MAX_OUTPUT_BYTES`."""
    stderr: str
    exit_code: int
    """Exit code of the process; negative if a signal ended the process."""
    is_timeout: bool


def run_code(
    source: str, stdin: str = "", *, timeout_s: float = 5.0, memory_bytes: int = 2**30, allow_unisolated: bool = False
) -> SandboxResult:
    """Execute Python source with the given standard input. The result of code that exceeds `MAX_FILES` or
    `MAX_FILES_MIB` contains only an error text. Raises PermissionError if the isolation is incomplete, and OSError if
    the machine fails: the process ended before it executed the code, or waited too long for a processor."""
    isolation(allow_unisolated=allow_unisolated)
    began, begins = os.pipe()
    order = json.dumps([source, timeout_s, memory_bytes, allow_unisolated, begins]).encode() + b"\n"
    with (
        os.fdopen(began, "rb") as has_begun,
        os.fdopen(begins, "wb") as ours,
        tempfile.TemporaryDirectory(prefix="baton-code-") as scratch,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryFile() as inbox,
    ):
        inbox.write(order + stdin.encode(errors="replace"))
        inbox.seek(0)
        command = [sys.executable, "-I", "-S", str(Path(__file__))]
        process = subprocess.Popen(
            command, stdin=inbox, stdout=out, stderr=err, cwd=scratch, env={"LC_ALL": "C.UTF-8"}, pass_fds=(begins,)
        )
        ours.close()
        is_full, queued_s = False, 0.0
        try:
            for _ in range(math.ceil((timeout_s + START_S) / POLL_S)):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                is_full = _is_full(scratch)
                if is_full or process.returncode is not None:
                    break
            is_timeout = process.returncode in (None, -signal.SIGXCPU)
            queued_s = seconds_queued(process.pid) if process.returncode is None else 0.0
        finally:
            process.kill()
            process.wait(START_S)
        if not has_begun.read(1):
            lines = _text(err).strip().splitlines() or [f"exit code {process.returncode}"]
            raise OSError(f"the sandbox ended before it executed the code: {lines[-1][:300]}")
        if queued_s > START_S:
            raise OSError(f"the code waited {queued_s:.0f} s for a processor, so the machine is overloaded")
        if is_full:  # the same result whether the code was killed or ended before the check
            text = f"OSError: the working directory may contain at most {MAX_FILES} files and {MAX_FILES_MIB} MiB\n"
            return SandboxResult("", text, -signal.SIGKILL, False)
        # in a replay, the working directory has another name, so output must not contain the name
        stdout, stderr = (_text(file).replace(scratch, ".") for file in (out, err))
        return SandboxResult(stdout, stderr, process.returncode, is_timeout)


@lru_cache(maxsize=2)
def isolation(*, allow_unisolated: bool) -> str:
    """Describe the isolation in a line for the user. Raises PermissionError if the isolation is incomplete."""
    missing = _missing()
    if missing and not allow_unisolated:
        raise PermissionError(
            f"code cannot be isolated on this machine ({'; '.join(missing)}); allow_unisolated = true runs it anyway"
        )
    return "code runs with rlimits" + (f" but without {'; '.join(missing)}" if missing else ", Landlock and seccomp")


def _is_full(directory: str) -> bool:
    num_files = num_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed since it was listed
                num_bytes += entry.stat(follow_symlinks=False).st_size
            num_files += 1
            if num_files > MAX_FILES or num_bytes > MAX_FILES_MIB * 2**20:
                return True
    return False


def seconds_queued(pid: int) -> float:
    """Return for how many seconds a process was ready to run, but had no processor; 0 if this is unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _text(file: Any) -> str:
    file.seek(0)
    return bytes(file.read(MAX_OUTPUT_BYTES)).decode(errors="replace")


def _missing() -> list[str]:
    found = []
    if _landlock_abi() < 1:
        found.append("Landlock (Linux 5.13 with CONFIG_SECURITY_LANDLOCK, in the lsm= list)")
    if sys.platform != "linux" or platform.machine() not in _AUDIT_ARCH:
        found.append("seccomp (Linux on x86_64 or aarch64)")
    return found


# ---- in the child ----------------------------------------------------------------------------------------------------


def _syscall(*arguments: Any) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(*arguments))


def _landlock_abi() -> int:
    return _syscall(444, None, 0, 1) if sys.platform == "linux" else -1


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _limit(timeout_s: float, memory_bytes: int) -> None:
    import resource

    seconds = int(timeout_s) + 1
    for kind, most in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]  # such as the limit on memory of environment processes
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _restrict_files() -> None:
    """Deny access to all files except those of Python, the system's libraries and the working directory."""
    abi = _landlock_abi()
    handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _check(_syscall(444, attributes, len(attributes), 0), "landlock_create_ruleset")
    places = {sys.base_prefix, sys.base_exec_prefix, str(Path(os.__file__).parent), "/usr/lib", "/lib", "/lib64"}
    allowed = [(place, _READ_FILE | _READ_DIRECTORY) for place in places]
    allowed += [("/dev/null", _READ_FILE | 1 << 1), ("/dev/urandom", _READ_FILE), (str(Path.cwd()), _SCRATCH_ACCESS)]
    for place, access in allowed:
        try:
            descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = struct.pack("=Qi", access & handled, descriptor)
        _check(_syscall(445, rules, 1, rule, 0), f"landlock_add_rule for {place}")
        os.close(descriptor)
    _check(_syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _restrict_calls() -> None:
    """Install a seccomp filter: forbidden system calls and new processes fail with EPERM; threads still work."""
    machine = platform.machine()
    load, jump_equal, jump_greater, jump_set, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    program = [
        (load, 0, 0, 4),
        (jump_equal, 1, 0, _AUDIT_ARCH[machine]),
        (leave, 0, 0, kill),
        (load, 0, 0, 0),
        (jump_greater, 0, 1, 0x40000000),  # numbers of the x32 system calls of x86_64
        (leave, 0, 0, kill),
        (jump_equal, 0, 1, _CLONE3),  # fails, because the filter cannot read its flags in memory; libc then uses clone
        (leave, 0, 0, refuse | errno.ENOSYS),
    ]
    for number in map(int, _FORBIDDEN[machine].split()):
        program += [(jump_equal, 0, 1, number), (leave, 0, 0, refuse | errno.EPERM)]
    program += [
        (jump_equal, 0, 4, _MMAP[machine]),
        (load, 0, 0, 40),  # the flags
        (jump_set, 0, 1, _MAP_SHARED),
        (leave, 0, 0, refuse | errno.EPERM),
        (leave, 0, 0, allow),
        (jump_equal, 0, 3, _CLONE[machine]),
        (load, 0, 0, 16),  # the flags
        (jump_set, 1, 0, _CLONE_THREAD),
        (leave, 0, 0, refuse | errno.EPERM),
        (leave, 0, 0, allow),
    ]
    code = b"".join(struct.pack("=HBBI", *one) for one in program)
    buffer = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(22, 2, header, 0, 0), "prctl(PR_SET_SECCOMP)")


def _main() -> None:
    # Read byte by byte, because the input after the first line is the standard input of the code.
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    source, timeout_s, memory_bytes, allow_unisolated, begins = json.loads(line)
    missing = _missing()
    _limit(timeout_s, memory_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        _check(libc.prctl(38, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(libc.prctl(4, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
        _check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")
    if not any("Landlock" in one for one in missing):
        _restrict_files()
    if not any("seccomp" in one for one in missing):
        _restrict_calls()
    if missing and not allow_unisolated:
        sys.exit(f"not isolated: {missing}")
    os.write(begins, b"1")  # from here on, the code causes all errors
    os.close(begins)
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
