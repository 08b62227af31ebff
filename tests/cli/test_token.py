"""`baton token`: a token is shown once, kept as a hash, listed without it and revoked by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.errors import UserError
from baton.swarm.auth import DEFAULT_TOKEN_FILE, Authenticator, Denied, Role, read_token_file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def token(*arguments: object) -> tuple[str, str]:
    """Run `baton token …` and return what it printed to stdout and stderr."""
    result = CliRunner().invoke(
        cli.app, ["token", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def mistake(*arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        token(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opens(text: str, role: Role) -> bool:
    try:
        Authenticator(DEFAULT_TOKEN_FILE).check(f"Bearer {text}", {role})
    except Denied:
        return False
    return True


def test_what_create_prints_opens_the_hub_until_it_is_revoked() -> None:
    stdout, stderr = token("create", "--role", "worker", "--expires", "7d")
    text = stdout.removesuffix("\n")
    assert opens(text, Role.WORKER), "stdout is the token and nothing else"
    assert not opens(text, Role.ADMIN)
    assert "worker-1: worker, until 20" in stderr
    assert text not in stderr
    assert "worker-1 is revoked" in token("revoke", "worker-1")[0]
    assert not opens(text, Role.WORKER)


def test_a_list_tells_of_each_token_and_shows_none() -> None:
    texts = [
        token("create", "--role", role, "--expires", "12h", "--name", name, *more)[0].strip()
        for role, name, more in (("worker", "anna", ["--trusted"]), ("admin", "boss", []), ("relay", "cache", []))
    ]
    token("revoke", "cache")
    found = json.loads(token("list", "--json")[0])
    assert [(t["name"], t["role"], t["trusted"], t["state"]) for t in found] == [
        ("anna", "worker", True, "valid"),
        ("boss", "admin", False, "valid"),
        ("cache", "relay", False, "revoked"),
    ]
    table = token("list")[0]
    for words in (("anna", "worker", "yes", "valid"), ("boss", "admin", "valid"), ("cache", "relay", "revoked")):
        assert re.search(".*".join(words), table), table
    shown = table + json.dumps(found)
    assert not any(text[-20:] in shown for text in texts)
    assert "digest" not in shown


def test_json_tells_scripts_the_token_or_the_file_it_went_to(tmp_path: Path) -> None:
    made = json.loads(token("create", "--role", "relay", "--expires", "90s", "--json")[0])
    assert opens(made["token"], Role.RELAY)
    assert made["name"] == "relay-1"
    assert made["created"] < made["expires"]
    out = tmp_path / "relay.token"
    made = json.loads(token("create", "--role", "relay", "--expires", "90s", "--out", out, "--json")[0])
    assert "token" not in made
    assert made["written_to"] == str(out)


def test_out_writes_the_token_for_its_owner_alone_and_prints_none(tmp_path: Path) -> None:
    out = tmp_path / "worker.token"
    stdout, stderr = token("create", "--role", "worker", "--expires", "1d", "--out", out)
    assert stdout == ""
    assert out.stat().st_mode & 0o777 == 0o600
    text = read_token_file(out)
    assert opens(text, Role.WORKER)
    assert text not in stderr
    assert "already exists" in mistake("create", "--role", "worker", "--expires", "1d", "--out", out)
    assert read_token_file(out) == text
    assert "cannot be written" in mistake("create", "--role", "worker", "--expires", "1d", "--out", "absent/t")
    states = [t["state"] for t in json.loads(token("list", "--json")[0])]
    assert states == ["valid", "revoked"], "a token that reached nobody opens nothing"


def test_another_file_is_another_hub(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    text = token("create", "--role", "worker", "--expires", "1d", "--file", other)[0].strip()
    assert not DEFAULT_TOKEN_FILE.exists()
    Authenticator(other).check(f"Bearer {text}", {Role.WORKER})
    assert len(json.loads(token("list", "--file", other, "--json")[0])) == 1


def test_mistakes_are_one_sentence_and_make_no_token() -> None:
    assert "7d" in mistake("create", "--role", "worker", "--expires", "soon")
    assert "only tokens of role worker" in mistake("create", "--role", "admin", "--expires", "7d", "--trusted")
    assert "the token's name" in mistake("create", "--role", "admin", "--expires", "7d", "--name", "a/b")
    assert not DEFAULT_TOKEN_FILE.exists()
    assert "the file baton-tokens.json does not exist" in mistake("list")
    assert "the file baton-tokens.json does not exist" in mistake("revoke", "anna")
    assert "the directory runs/none does not exist: give the directory of a run" in mistake(
        "unquarantine", "runs/none", "w"
    )
    assert not Path("runs").exists()
    token("create", "--role", "worker", "--expires", "7d")
    assert "no token named 'anna'" in mistake("revoke", "anna")
    result = CliRunner().invoke(cli.app, ["token", "create", "--role", "root", "--expires", "7d"])
    assert result.exit_code == 2
    assert "worker" in result.output
