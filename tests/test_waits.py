"""No call in the package waits without a deadline, but those that `waits_allowed.toml` names, each with its reason."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "baton"
ALLOWED = tomllib.loads((Path(__file__).parent / "waits_allowed.toml").read_text())["wait"]

WITHOUT_ARGUMENTS = {"acquire", "get", "join", "result", "select", "wait"}
"""Methods that take their timeout as the first argument or by name, and wait for ever without one."""
NEEDS_TIMEOUT = {
    *(
        "accept",
        "communicate",
        "connect",
        "create_connection",
        "readline",
        "recv",
        "recv_bytes",
        "recv_into",
        "recvfrom",
    ),
    *("send_bytes", "sendall", "receive_next", "send_all", "in_thread"),
    *("init_process_group", "TCPStore", "urlopen", "asyncio.wait", "ray.get", "ray.wait"),
    *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
}
"""Functions and methods that need `timeout=`, whatever else they are given."""
NEVER = {"to_thread", "run_in_executor", "ThreadPoolExecutor", "ProcessPoolExecutor", "waitpid", "flock"}
"""The interpreter joins the threads of executors when it ends: `baton.clock` has calls that may hang."""
NO_WAIT = {"sqlite3.connect"}


def timeouts(call: ast.Call) -> bool:
    """Whether a call is given a timeout by name, or not to block."""
    return any(
        k.arg is None or "timeout" in k.arg or (k.arg == "block" and ast.unparse(k.value) == "False")
        for k in call.keywords
    )


def waits_for_ever(call: ast.Call) -> bool:
    """Whether a call may wait without a deadline of its own."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    tail = ".".join(name.split(".")[-2:])
    if tail in NO_WAIT:
        return False
    if last in NEVER:
        return not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN", "WNOHANG"))
    if last in NEEDS_TIMEOUT or tail in NEEDS_TIMEOUT or (last == "receive" and tail.endswith("socket.receive")):
        return not timeouts(call)
    if last in WITHOUT_ARGUMENTS and isinstance(call.func, ast.Attribute):
        return not call.args and not timeouts(call)
    return last == "wait" and len(call.args) < 2 and not timeouts(call)  # of concurrent.futures, by its bare name


def found(tree: ast.AST, function: str = "", bounded: bool = False) -> Iterator[tuple[str, str]]:
    """(function, call) of each call that may wait for ever and does not stand in `async with asyncio.timeout(…)`."""
    for node in ast.iter_child_nodes(tree):
        inner, is_bounded = function, bounded
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}".lstrip(".")
            is_bounded = False
        if isinstance(node, ast.AsyncWith):
            is_bounded |= any(".timeout" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call) and not is_bounded and waits_for_ever(node):
            yield inner, ast.unparse(node.func)
        yield from found(node, inner, is_bounded)


def waits() -> set[tuple[str, str, str]]:
    """(file, function, call) of the package's waits without a deadline."""
    return {
        (path.relative_to(PACKAGE).as_posix(), function, call)
        for path in sorted(PACKAGE.rglob("*.py"))
        for function, call in found(ast.parse(path.read_text()))
    }


def test_every_wait_has_a_deadline_or_a_reason_why_it_ends() -> None:
    allowed = {(entry["file"], entry["function"], entry["call"]) for entry in ALLOWED}
    unknown = sorted(waits() - allowed)
    assert not unknown, f"these calls may wait for ever; give each a timeout (see baton/clock.py): {unknown}"


def test_the_list_of_exceptions_only_shrinks() -> None:
    allowed = [(entry["file"], entry["function"], entry["call"]) for entry in ALLOWED]
    assert len(set(allowed)) == len(allowed)
    assert all(entry["why"].strip() for entry in ALLOWED)
    unused = sorted(set(allowed) - waits())
    assert not unused, f"these no longer occur; take them off tests/waits_allowed.toml: {unused}"


@pytest.mark.parametrize(
    ("code", "waits_on"),
    [
        ("future.result()", ["future.result"]),
        ("future.result(5)", []),
        ("thread.join(); ', '.join(names)", ["thread.join"]),
        ("queue.get(); queue.get(timeout=1); queue.get(block=False); row.get('x')", ["queue.get"]),
        ("queue.get(block=is_idle)", ["queue.get"]),
        ("process.wait(); event.wait(3); event.wait(timeout=3)", ["process.wait"]),
        ("self.ray.get(future); ray.get(future, timeout=3); ray.wait(futures)", ["self.ray.get", "ray.wait"]),
        ("wait(futures); wait(futures, 3)", ["wait"]),
        ("subprocess.run(command); subprocess.run(command, timeout=3)", ["subprocess.run"]),
        ("connection.recv_bytes(100); connection.send_bytes(data)", ["connection.recv_bytes", "connection.send_bytes"]),
        ("urllib.request.urlopen(request, timeout=3); urlopen(request)", ["urlopen"]),
        ("async def f():\n async with asyncio.timeout(3):\n  await event.wait()\n await event.wait()", ["event.wait"]),
        ("async def f(): await asyncio.to_thread(call)", ["asyncio.to_thread"]),
        ("async def f(): await in_thread(call, 3); await in_thread(call, 3, timeout_s=5, who='it')", ["in_thread"]),
        ("async def f(): await asyncio.wait({a, b}); await asyncio.wait({a}, timeout=3)", ["asyncio.wait"]),
        ("fcntl.flock(file, fcntl.LOCK_EX); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", ["fcntl.flock"]),
    ],
)
def test_the_rule_finds_waits_without_a_deadline_and_no_others(code: str, waits_on: list[str]) -> None:
    assert [call for _, call in found(ast.parse(code))] == waits_on
