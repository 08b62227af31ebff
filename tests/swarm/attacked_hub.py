"""A hub in a process of its own, with few files to open, for tests that attack it. It ends with its standard input.

    python -m tests.swarm.attacked_hub DIRECTORY FILES [CERTIFICATE KEY]

Its first line is JSON: port and tokens. Then each line it is sent is a question, answered by a line:
`files N` opens N files as a run does, `memory` is its own memory in bytes, `frames` counts messages of workers.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.swarm.messages import FromWorker

REQUESTS_PER_S, BURST = 200.0, 400.0
"""Fewer than a hub's, so that a test's flood is more on any machine."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class AttackedHub:
    """The process as a test sees it."""

    process: subprocess.Popen[str]
    port: int
    tokens: dict[str, str]
    """Of the names: worker, other (a worker too), admin, relay."""
    chunks: list[str]
    """Digests of chunks of 8 MiB that it serves."""
    is_tls: bool

    def ask(self, question: str) -> int:
        """Return its answer. Raises AssertionError when it is no more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the hub ended: {self.process.poll()}"
        return int(answer)


@contextmanager
def attacked_hub(directory: Path, files: int, *pem: Path) -> Iterator[AttackedHub]:
    """Start one, and end it."""
    command = [sys.executable, "-m", "tests.swarm.attacked_hub", str(directory), str(files), *map(str, pem)]
    with (
        (directory / "hub.log").open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (directory / "hub.log").read_text()
            yield AttackedHub(process, **json.loads(line))
        finally:
            process.kill()


_frames: Counter[str] = Counter()


def _count_frames() -> None:
    import baton.swarm.hub.worker_connection

    decode = baton.swarm.hub.worker_connection.decode_from_worker

    def counting(frame: bytes) -> FromWorker:
        _frames["in"] += 1
        return decode(frame)

    baton.swarm.hub.worker_connection.decode_from_worker = counting


def _answer(question: str) -> int:
    match question.split():
        case ["files", number]:
            opened = [Path("/dev/null").open() for _ in range(int(number))]  # noqa: SIM115
            for one in opened:
                one.close()
            return len(opened)
        case ["memory"]:
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        case ["frames"]:
            return _frames.total()
    raise AssertionError(question)


def _main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from swarm_bench import SwarmBench

    import baton.swarm.hub.access
    from baton.swarm.auth import Role
    from baton.swarm.listen import ListenAddress

    directory, files, *pem = sys.argv[1:]
    baton.swarm.hub.access.REQUESTS_PER_S, baton.swarm.hub.access.BURST = REQUESTS_PER_S, BURST
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files) // 2, int(files)))  # the hub raises it by itself
    _count_frames()
    listen = ListenAddress.parse("127.0.0.1:0", *map(Path, pem))
    bench = SwarmBench(Path(directory), listen=listen)
    tokens = {
        name: bench.tokens.create(role, 3600, name=name)
        for name, role in {"worker": Role.WORKER, "other": Role.WORKER, "relay": Role.RELAY}.items()
    }
    chunks = [bench.store.put_chunk(bytes([number]) * 2**23).digest for number in range(8)]
    shown = {
        "port": bench.port_number,
        "tokens": {**tokens, "admin": bench.admin_token},
        "chunks": chunks,
        "is_tls": bool(pem),
    }
    print(json.dumps(shown), flush=True)
    for line in sys.stdin:
        bench.hub.check()
        print(_answer(line), flush=True)


if __name__ == "__main__":
    _main()
