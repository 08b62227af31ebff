"""Column names, nested columns, JSON texts, and one sentence with file and place for what is not there."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import UserError
from baton.rewards.functions import call_sync
from baton.rewards.scorer import RewardScorer
from baton.rewards.scorer_protocol import Call, Signature
from baton.rewards.settings import RewardSettings
from baton.tasks.dataset import FileTask
from baton.tasks.problem import Problem
from baton.tasks.stream import AnswerSettings, TaskMixture, TaskSettings
from baton.types import Message

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def only(tmp_path: Path, row: object, **keys: Any) -> Problem:
    return FileTask("mine", jsonl(tmp_path / "rows.jsonl", row), **keys).draw(0, 0)


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": "2"}, "2"),
        ({"ground_truth": 2}, "2"),
        ({"solution": "so $2$"}, "so $2$"),
        ({"label": 2.5}, "2.5"),
        ({"reward_model": {"style": "rule", "ground_truth": "2"}}, "2"),
        ({"reward_spec": {"method": "rule", "ground_truth": "2"}}, "2"),
        ({"reward_model": '{"style": "rule", "ground_truth": "2"}'}, "2"),
        ({"answer": None, "solution": "3"}, "3"),
        ({"label": "no", "reward_model": {"ground_truth": "no"}, "answer": "2"}, "2"),
        ({"reward_model": "no object", "label": "2"}, "2"),
    ],
)
def test_a_reference_is_found_under_the_names_of_the_field(
    tmp_path: Path, columns: dict[str, Any], answer: str
) -> None:
    problem = only(tmp_path, {"prompt": "1 + 1?", "other": [1, {"a": None}], **columns})
    assert problem.answer == answer
    assert problem.metadata == {"other": [1, {"a": None}], **columns}


def test_columns_can_be_named_and_a_reference_cut_out(tmp_path: Path) -> None:
    row = {"question": {"text": "1 + 1?"}, "answer": "wrong one", "target": {"final": "1 + 1 = 2 so\n#### 1,002 "}}
    problem = only(tmp_path, row, prompt_column="question.text", answer_column="target.final", answer_after="####")
    assert (problem.question, problem.answer) == ("1 + 1?", "1,002")
    flat = only(tmp_path, {"prompt": "?", "a.b": "2", "a": {"b": "3"}}, answer_column="a.b")
    assert flat.answer == "2", "a column of just this name goes before a nested one"


def test_functions_of_each_convention_receive_the_named_reference_and_unchanged_columns(tmp_path: Path) -> None:
    """The table of docs/tasks.md."""
    solution = "2+3=5\n#### 5"
    row = {"prompt": "2+3", "solution": solution, "level": 1, "data_source": "sums"}
    received: dict[str, Any] = {}

    def names(answer: str, solution: str, level: int) -> float:
        received["names"] = answer, solution, level
        return 1.0

    def trl(completions: list[str], answer: list[Any], solution: list[str], level: list[int]) -> list[float]:
        received["trl"] = answer, solution, level
        return [1.0] * len(completions)

    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        received["verl"] = data_source, ground_truth, extra_info
        return 1.0

    def call(row: dict[str, Any]) -> None:
        task = TaskSettings(name="mine", path=jsonl(tmp_path / "rows.jsonl", row), answer_column="solution")
        mixture = TaskMixture([task], AnswerSettings())
        prompt = mixture.prompt("mine", mixture.tasks["mine"].draw(0, 0))
        conventions: list[tuple[Any, Signature]] = [(names, "names"), (trl, "trl"), (verl, "verl")]
        for function, signature in conventions:
            call_sync(function, signature, [Call(prompt, "5", "5")])

    call(row)
    assert received == {
        "names": ("5", solution, 1),
        "trl": (["5"], [solution], [1]),
        "verl": ("sums", "5", None),
    }
    call({**row, "answer": 6})
    assert received["names"][0] == "5"
    assert received["trl"][0] == [6]


@pytest.mark.parametrize("prompt", [TURNS, json.dumps(TURNS)])
def test_messages_are_the_prompt_as_they_are(tmp_path: Path, prompt: object) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *({"prompt": prompt, "answer": 2, "n": n} for n in range(3)))
    mixture = TaskMixture([TaskSettings(name="mine", path=path)], AnswerSettings(instruct=True))
    found = mixture.prompt("mine", mixture.tasks["mine"].draw(0, 0))
    assert found.messages == (Message("system", "Be brief."), Message("user", "1 + 1?"))
    assert found.is_conversation


def test_a_text_that_only_looks_like_messages_is_a_text(tmp_path: Path) -> None:
    for text in ("[1, 2] + [3]?", "[]", '[{"role": "user"}]', "[not json"):
        problem = only(tmp_path, {"prompt": text, "answer": 2})
        assert (problem.question, problem.messages) == (text, None)


def test_the_same_problem_as_text_and_as_messages_is_on_the_same_side(tmp_path: Path) -> None:
    for number in range(30):
        text = only(tmp_path, {"prompt": f"What is {number}?", "answer": 2})
        turn = {"role": "user", "content": f"what is  {number}?"}
        with_system = only(tmp_path, {"prompt": [TURNS[0], turn], "answer": 2})
        assert text.problem_id == with_system.problem_id == only(tmp_path, {"prompt": [turn], "answer": 2}).problem_id


@pytest.mark.parametrize(
    ("row", "keys", "complaint"),
    [
        (
            {"question": "?", "answer": 1},
            {},
            "has no 'prompt'; it has ['answer', 'question']; name another with prompt_",
        ),
        ({"prompt": None, "answer": 1}, {}, "has no 'prompt'; it has ['answer', 'prompt']"),
        ({"prompt": "?", "answer": 1}, {"prompt_column": "q"}, "has no 'q'; it has ['answer', 'prompt']"),
        ({"prompt": "?", "target": 1}, {}, "has no 'answer'; it has ['prompt', 'target'] (nor ground_truth, solution,"),
        (
            {"prompt": "?", "answer": 1},
            {"answer_column": "a.b"},
            "has no 'a.b'; it has ['answer', 'prompt'] (which answ",
        ),
        ({"prompt": "?", "answer": {"a": 1}}, {}, "'answer' must be a string or a number, got {\"a\":1}"),
        ({"prompt": "?", "answer": True}, {}, "'answer' must be a string or a number, got true"),
        ({"prompt": "?", "answer": "it is 4"}, {"answer_after": "####"}, "the answer has no '####' (answer_after): "),
        ({"prompt": [], "answer": 1}, {}, "'prompt' must be a string, or messages with role and content"),
        ({"prompt": ["hi"], "answer": 1}, {}, "messages with role and content as strings; got 'hi'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1},
            {},
            "content as strings; got {'ro",
        ),
        ({"prompt": [{"role": "assistant", "content": "4"}], "answer": 1}, {}, "ends with an assistant message"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line_with_what_it_has(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], complaint: str
) -> None:
    good = {"prompt": "?", "answer": "#### 1", "q": "?", "a": {"b": 1}}
    path = jsonl(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(UserError) as caught:
        FileTask("mine", path, **keys)
    assert str(caught.value).startswith(f"task 'mine': {path}, line 2")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def test_parquet_gives_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"ground_truth": str(i)}, "k": [i, i + 1]}
        for i in range(7)
    ]
    one, other = FileTask("m", jsonl(tmp_path / "r.jsonl", *rows)), FileTask("m", parquet(tmp_path / "r.parquet", rows))
    assert [one.draw(3, i) for i in range(14)] == [other.draw(3, i) for i in range(14)]


def test_values_that_json_does_not_know_become_texts(tmp_path: Path) -> None:
    row = {"prompt": "?", "answer": "1", "day": datetime.date(2020, 1, 2), "raw": b"ab"}
    problem = FileTask("m", parquet(tmp_path / "r.parquet", [row])).draw(0, 0)
    assert json.loads(json.dumps(problem.metadata)) == {"answer": "1", "day": "2020-01-02", "raw": "YWI="}


def test_times_of_pandas_become_texts_and_images_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    day, wait = (pyarrow.array([90 * 10**9], of("ns")) for of in (pyarrow.timestamp, pyarrow.duration))
    times = {"day": day, "wait": wait}
    write_table(pyarrow.table({"prompt": ["?"], "answer": ["1"], **times}), tmp_path / "r.parquet")
    problem = FileTask("m", str(tmp_path / "r.parquet")).draw(0, 0)
    assert {key: problem.metadata[key] for key in times} == {"day": "1970-01-01T00:01:30", "wait": "PT90S"}

    class Picture:
        """In place of an image, which `datasets` decodes while rows are read."""

    rows = [{"prompt": "?", "answer": "1"}, {"prompt": "?", "answer": "1", "picture": Picture()}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.load_from_disk", lambda path: SimpleNamespace(with_format=lambda kind: rows))
        with pytest.raises(
            UserError, match=r"row 2 has a value that cannot be stored as JSON: .*Picture; remove its column"
        ):
            FileTask("mine", str(tmp_path))


def test_parquet_and_disk_name_the_row_and_what_is_wrong_with_the_path(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"prompt": "?", "answer": "1"}, {"prompt": "?", "answer": None}]
    path = parquet(tmp_path / "r.parquet", rows)
    with pytest.raises(UserError, match=r"r\.parquet, row 2 has no 'answer'; it has \['answer', 'prompt'\]"):
        FileTask("mine", path)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"broken\.parquet is not a parquet file: "):
        FileTask("mine", str(broken))
    whole = Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "whole")
    with pytest.raises(UserError, match=r"whole, row 2 has no 'answer'"):
        FileTask("mine", str(tmp_path / "whole"))
    DatasetDict({"train": whole, "validation": whole.select([0])}).save_to_disk(tmp_path / "splits")
    assert FileTask("mine", str(tmp_path / "splits"), split="validation").draw(0, 0).answer == "1"
    with pytest.raises(UserError, match=r"splits has no split 'test'; it has train, validation"):
        FileTask("mine", str(tmp_path / "splits"), split="test")
    with pytest.raises(
        UserError, match=r"is a directory, but was not written by save_to_disk of Hugging Face datasets"
    ):
        FileTask("mine", str(tmp_path))


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "r.parquet"), ("datasets", "d")])
def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    parquet(tmp_path / "r.parquet", [{"prompt": "?", "answer": "1"}])
    (tmp_path / "d").mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"needs {package}: run `pip install 'baton-rl\[data\]'`"):
        FileTask("mine", str(tmp_path / name))


def test_without_references_only_functions_can_judge(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "?"}, {"prompt": "!", "tests": ["a"]})
    tasks = {"mine": FileTask("mine", path, scorer="none")}
    assert tasks["mine"].draw(0, 0).answer is None
    for kind in ("correct", "score", "exact", "math"):
        with pytest.raises(UserError, match=rf'kind = "{kind}" needs a reference answer, but task \'mine\''):
            RewardScorer(tasks, [RewardSettings(kind=kind)], {})  # type: ignore[arg-type]
    RewardScorer(tasks, [RewardSettings(kind="format")], {})


def test_keys_of_a_file_are_refused_without_one() -> None:
    with pytest.raises(ValueError, match="answer_column applies only to a task with a path"):
        TaskSettings(name="chain_sum", answer_column="x")
    assert TaskSettings(name="chain_sum", scorer="number").scorer == "number"
