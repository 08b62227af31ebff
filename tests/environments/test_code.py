"""The code tool: answers are tested in a process that can reach nothing, and cannot forge their reward."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environment_cases import pool_of, request, results

from baton.environments import sandbox
from baton.environments.calls import EnvironmentSpec, Observation
from baton.environments.code import CodeTask, last_code_block, run_python
from baton.environments.sandbox import isolation, run_code
from baton.errors import UserError

try:
    isolation(allow_unisolated=False)
except PermissionError as error:
    pytestmark = pytest.mark.skip(reason=str(error))
else:
    pytestmark = [pytest.mark.timeout(300), pytest.mark.timing]

ROW: dict[str, Any] = {
    "prompt": "Write `twice(x)`.",
    "entry_point": "twice",
    "tests": [[[1], 2], [["ab"], "abab"], [[0], 0], [[-3], -6]],
}


def answer(code: str) -> str:
    return f"I think so.\n```python\n{code}\n```"


def test_code_runs_with_its_input_and_the_standard_library() -> None:
    found = run_code("import math, json, collections\nprint(math.comb(5, 2), input())", "hello\n")
    assert (found.stdout, found.stderr, found.exit_code, found.is_timeout) == ("10 hello\n", "", 0, False)
    kept = run_code(
        "open('x', 'w').write('kept')\nprint(open('x').read())\nimport threading\n"
        "t = threading.Thread(target=print, args=('thread',))\nt.start()\nt.join()"
    )
    assert kept.stdout == "kept\nthread\n"
    assert run_python("print(1)\n1/0").endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open({here!r}).read()",
        "open('/tmp/forbidden', 'w')",
        "import os; os.listdir('/')",
        "import os; os.chmod('/', 0o777)",
        "import socket; socket.socket()",
        "import os; os.mkdir('a')",
        "import mmap; mmap.mmap(-1, 4096)",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0, 'PermissionError'",
        "import os; os.memfd_create('a')",
        "import os; os.posix_fallocate(os.open('a', os.O_RDWR | os.O_CREAT), 0, 1)",
        "import os; os.fork()",
        "import os; os.execv('/bin/ls', ['ls'])",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
        "import ctypes; raise PermissionError(ctypes.CDLL(None).ptrace(16, 1, 0, 0)) if True else 0",
    ],
)
def test_code_has_no_files_no_network_and_no_processes(code: str) -> None:
    found = run_code(code.replace("{here!r}", repr(str(Path(__file__)))))
    assert found.exit_code == 1
    assert "PermissionError" in found.stderr or "not allowed to raise" in found.stderr
    assert not Path("/tmp/forbidden").exists()


def test_code_is_limited_in_memory_output_and_time() -> None:
    assert "MemoryError" in run_code("x = bytearray(2**30)", memory_bytes=2**28).stderr
    private = "import mmap; mmap.mmap(-1, {}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); print('mapped')"
    assert run_code(private.format(2**20), memory_bytes=2**28).stdout == "mapped\n"
    assert "Cannot allocate memory" in run_code(private.format(2**30), memory_bytes=2**28).stderr
    flood = run_code("while True: print('x' * 1000)")
    assert len(flood.stdout) == sandbox.MAX_OUTPUT_BYTES
    assert "File too large" in flood.stderr
    assert run_code("while True: pass", timeout_s=0.5).is_timeout


@pytest.mark.parametrize("end", ["", "\nimport time; time.sleep(60)"])
@pytest.mark.parametrize(("count", "size"), [(1100, 1), (70, 2**20)])
def test_code_is_limited_in_the_number_and_the_sum_of_its_files(count: int, size: int, end: str) -> None:
    write = "[open(str(i), 'wb').write(bytes({})) for i in range({})]; print('written')"
    assert run_code(write.format(size, count // 2)).stdout == "written\n"
    found = run_code(write.format(size, count) + end)
    assert "at most 1000 files and 64 MiB" in found.stderr
    assert (found.stdout, found.exit_code, found.is_timeout) == ("", -9, False)


def test_code_that_fills_the_disk_passes_no_test() -> None:
    task = CodeTask()
    task.reset(seed=0, **ROW)
    fill = "for i in range(1100):\n    open(str(i), 'w')\n"
    text, reward, *_ = task.step(answer(fill + "def twice(x):\n    return x + x"))
    assert "got OSError: the working directory may contain at most 1000 files and 64 MiB" in text
    assert reward == 0.0


def test_the_environment_of_the_run_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TEST_SECRET", "s3cret")
    assert "s3cret" not in run_code("import os; print(dict(os.environ))").stdout


def test_missing_isolation_is_refused_unless_the_recipe_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isolation(allow_unisolated=False) == "code runs with rlimits, Landlock and seccomp"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    isolation.cache_clear()
    with pytest.raises(UserError, match=r"cannot be isolated on this machine \(seccomp .*allow_unisolated = true"):
        CodeTask.prepare()
    assert CodeTask.prepare(allow_unisolated=True).startswith("code runs with rlimits but without seccomp")
    isolation.cache_clear()


def test_a_wrong_answer_is_told_its_failing_examples_and_may_be_corrected() -> None:
    task = CodeTask(max_turns=3)
    first = task.reset(seed=1, **ROW)
    assert first == "Write `twice(x)`.\n\nExamples:\ntwice(1) == 2\ntwice('ab') == 'abab'\ntwice(0) == 0"
    text, reward, terminated, truncated, info = task.step("no code")
    assert (reward, terminated, truncated) == (0.0, False, False)
    text, reward, terminated, _, info = task.step(answer("def twice(x):\n    print('noise')\n    return x + 1"))
    assert text.startswith("These examples fail:\ntwice('ab'): expected 'abab', got TypeError: can only concatenate")
    assert (reward, terminated, info["passed"]) == (0.0, False, 0.25)
    _, reward, terminated, _, info = task.step(answer("def twice(x):\n    return 2 * x"))
    assert (reward, terminated, info["success"], info["passed"]) == (1.0, True, True, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "```python\n{code}\n```",
        "```py\n{code}\n```",
        "```Python \n{code}\n```",
        "```python\r\n{code}\r\n```\r\n",
        "```\n{code}\n```",
        "```\n{code}```",
        "Use `twice`:\n```text\ntwice(1)\n```\nThe function:\n```python\n{code}\n```",
        "```python\n{code}\n```\nOutput:\n```\n2\n```",
        "```python\nx = 1\n```\nbetter:\n```python\n{code}\n```",
        "```python\nnever ended\n\n```python\n{code}\n```",
        "```python\n{code}\n```</answer>",
        "```python\n{code}\n```.",
        "```python\n{code}\n``` This is it.",
        "The fence ```x``` is short. ```python\n{code}\n```",
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str) -> None:
    task = CodeTask(max_turns=1)
    task.reset(seed=1, **ROW)
    assert task.step(text.format(code="def twice(x):\n    return 2 * x"))[1] == 1.0


@pytest.mark.parametrize(
    "text", ["", "```python\ndef twice(x): return 2 * x", "```sh\nls\n```", "```x``` ```python```"]
)
def test_without_a_complete_block_of_python_there_is_no_answer(text: str) -> None:
    assert last_code_block(text) is None


def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = CodeTask(max_turns=1)
    task.reset(seed=1, **ROW)
    monkeypatch.setattr(sandbox, "isolation", lambda **_: "")  # in this process only: the child finds what is missing
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(OSError, match="the sandbox ended before it executed the code: exit code 1"):
        task.step(answer("def twice(x): return 2 * x"))


def test_a_lower_limit_on_the_memory_of_the_environments_process_is_kept() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (400 * 2**20, 400 * 2**20))

    run = "from baton.environments.sandbox import run_code; print(run_code('print(7)', memory_bytes=2**29))"
    done = subprocess.run([sys.executable, "-c", run], preexec_fn=limited, capture_output=True, text=True, timeout=120)
    assert "stdout='7\\n', stderr='', exit_code=0" in done.stdout, done.stderr


def test_code_that_gets_no_processor_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START_S", 2.0)
    assert run_code("import time; time.sleep(60)", timeout_s=0.5).is_timeout
    monkeypatch.setattr(sandbox, "seconds_queued", lambda pid: 2.5)
    with pytest.raises(OSError, match="waited 2 s for a processor, so the machine is overloaded"):
        run_code("import time; time.sleep(60)", timeout_s=0.5)


@pytest.mark.parametrize(
    "code",
    [
        "def twice(x):\n    return {1: 2, 'ab': 'abab', 0: 0}[x]",  # the hidden test
        "import os, json\nos.write(1, json.dumps([[2, None]] * 4).encode())\nos._exit(0)",
        "class Any:\n    def __eq__(self, other): return True\ndef twice(x): return Any()",
        "import os\nos.write(1, b'[' * 100_000)\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def twice(x):\n    while True: pass",
        "def twice(x) return",
    ],
)
def test_a_forged_or_broken_answer_has_no_reward(code: str) -> None:
    task = CodeTask(max_turns=1, timeout_s=0.5)
    task.reset(seed=1, **ROW)
    _, reward, terminated, truncated, info = task.step(answer(code))
    assert (reward, info["success"]) == (0.0, False)
    assert terminated or truncated


def test_a_problem_of_a_seed_and_its_episode_in_a_process() -> None:
    task = CodeTask()
    assert task.reset(seed=3) == CodeTask().reset(seed=3)
    assert task.canonical() != ""
    pool = pool_of(EnvironmentSpec("code", "baton.environments.code:CodeTask", {"timeout_s": 2.0}), processes=1)
    assert pool.description.endswith("; code runs with rlimits, Landlock and seccomp")
    pool.submit(request(3, answer("def solve(numbers):\n    return None"), environment="code"))
    (found,) = results(pool, 1).values()
    assert isinstance(found, Observation)
    assert "expected" in found.text
    assert found.tool == "code"
    pool.close()
    assert os.getpid()
