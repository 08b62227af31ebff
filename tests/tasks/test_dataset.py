"""A user's own problems from a JSONL file."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from baton.errors import TaskExhausted, UserError
from baton.tasks.dataset import FileTask, read_demonstrations
from baton.tasks.stream import AnswerSettings, PromptStream, TaskMixture, TaskSettings


def write(path: Path, *rows: object) -> str:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return str(path)


def questions(path: Path, count: int) -> str:
    return write(path, *({"prompt": f"Question {i}?", "answer": i} for i in range(count)))


def test_every_epoch_visits_every_training_row_once_and_no_held_out_one(tmp_path: Path) -> None:
    path = questions(tmp_path / "q.jsonl", 200)
    task = FileTask("mine", path)
    held_out = {p.question for p in (task.draw(0, i) for i in range(200)) if p.is_held_out}
    training = {f"Question {i}?" for i in range(200)} - held_out
    assert 5 < len(held_out) < 45  # a tenth: 20 expected
    stream = PromptStream(TaskMixture([TaskSettings(name="mine", path=path)], AnswerSettings()), seed=4)
    orders = []
    for _ in range(3):
        epoch = [p.messages[-1].content for p in stream.take(len(training))]
        assert Counter(epoch) == dict.fromkeys(training, 1)
        orders.append(tuple(epoch))
    assert len(set(orders)) == 3, "every epoch has an order of its own"


def test_a_question_that_stands_in_the_file_twice_is_held_out_twice_or_never(tmp_path: Path) -> None:
    rows = [{"prompt": f"{blank}Question  {i}?", "answer": i} for i in range(50) for blank in ("", " ")]
    task = FileTask("mine", write(tmp_path / "q.jsonl", *rows))
    sides: dict[str, set[bool]] = {}
    for index in range(len(rows)):
        problem = task.draw(0, index)
        sides.setdefault(problem.question.strip(), set()).add(problem.is_held_out)
    assert len(sides) == 50
    assert all(len(side) == 1 for side in sides.values())


def test_a_file_with_too_few_held_out_rows_says_how_many_there_are(tmp_path: Path) -> None:
    mixture = TaskMixture([TaskSettings(name="mine", path=questions(tmp_path / "q.jsonl", 40))], AnswerSettings())
    with pytest.raises(TaskExhausted, match=r"task 'mine' has only \d+ distinct held-out problems .* but 64 were"):
        mixture.held_out(64)


def test_a_file_without_held_out_rows_says_how_a_run_starts_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "1+1", "answer": 2}\n')
    mixture = TaskMixture([TaskSettings(name="mine", path=str(path))], AnswerSettings())
    ways = r"has only 0 .* add rows, give a test set \(\[\[eval.task\]\].*\(eval.enabled = false\)$"
    with pytest.raises(TaskExhausted, match=ways):
        mixture.held_out(64, or_fewer=True)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("12", 12, 1.0),
        (" 12 ", "12", 1.0),
        ("12.0", "12", 1.0),
        ("1,200", "1200", 1.0),
        ("0.10", ".1", 1.0),
        ("−12", "-12", 1.0),
        ("$12", "12", 1.0),
        ("Paris", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("12", "1,2", 0.0),  # a pair is no number
        ("12345678901234567891", "12345678901234567890", 0.0),  # equal only as floats
        ("1e999999999", "3", 0.0),
        ("nan", "3", 0.0),
        ("", "3", 0.0),
        (None, "3", 0.0),
    ],
)
def test_an_answer_is_right_as_the_same_text_or_the_same_number(
    tmp_path: Path, answer: str | None, reference: object, score: float
) -> None:
    task = FileTask("mine", write(tmp_path / "q.jsonl", {"prompt": "?", "answer": reference, "source": "a book"}))
    problem = task.draw(0, 0)
    assert problem.metadata == {"answer": reference, "source": "a book"}  # all that reward functions may want
    assert task.score(answer, problem.answer, problem.metadata) == score


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{not json}", "line 3 is not a JSON object"),
        (b"[1, 2]", "line 3 is not a JSON object"),
        pytest.param(b'{"prompt": ' + b"[" * 100_000, "line 3 is not a JSON object", id="nested"),
        (b'{"prompt": "\xff", "answer": 1}', "line 3 is not a JSON object"),
        (b'{"prompt": "?"}', "line 3 has no 'answer'; it has ['prompt']"),
        (b'{"answer": 1, "question": "?"}', "line 3 has no 'prompt'; it has ['answer', 'question']"),
        (b'{"prompt": 1, "answer": 1}', "line 3: 'prompt' must be a string"),
        (
            b'{"prompt": "?", "answer": 1, "more": [1267650600228229401496703205376]}',
            "line 3 has an integer of more than",
        ),
        (b'{"prompt": "?", "answer": " "}', "line 3: the reference answer is empty: {'prompt': '?', 'answer': ' '}"),
        (b'{"prompt": "?", "answer": [1]}', "line 3: 'answer' must be a string or a number"),
        (b'{"prompt": "?", "answer": null}', "line 3 has no 'answer'; it has ['answer', 'prompt'] (nor ground_truth,"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"prompt": "?", "answer": 1}\n\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        FileTask("mine", str(path))
    assert str(caught.value).startswith(f"task 'mine': {path}, ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_text_and_an_array_is_no_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "?", "answer": 1}\n')
    assert len(FileTask("mine", str(path)).rows) == 1
    path.write_text('[{"prompt": "?", "answer": 1}]')
    with pytest.raises(UserError, match=r"q.jsonl has a JSON array; allowed is JSONL, with one object per line"):
        FileTask("mine", str(path))


def test_a_file_of_another_format_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("prompt,answer\n1+1,2\n")
    with pytest.raises(UserError, match=r"q.csv, line 1 is not a JSON object: .*; allowed is JSONL .*, or parquet"):
        FileTask("mine", str(tmp_path / "q.csv"))


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        FileTask("mine", str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="has no rows"):
        FileTask("mine", str(tmp_path / "empty.jsonl"))


def test_a_prompt_of_many_brackets_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt": "[" * 100_000, "answer": 1})
    assert FileTask("mine", path).draw(0, 0).question == "[" * 100_000


@pytest.mark.timeout(60)
def test_many_spaces_in_a_reference_take_linear_time(tmp_path: Path) -> None:
    reference = f"####{' ' * 20_000}5\nno"
    path = write(
        tmp_path / "q.jsonl", {"prompt": "?", "answer": reference}, {"prompt": "?", "answer": "so\n####  5 \n"}
    )
    assert [row.answer for row in FileTask("mine", path).rows] == [reference, "5"]


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    """JSON texts may hold U+2028 and U+0085 as they are; Python's splitlines would cut there."""
    prompt = "one\u2028two\x85three"
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "' + prompt + '", "answer": "4"}\n', encoding="utf-8")
    assert FileTask("mine", str(path)).draw(0, 0).question == prompt


def test_demonstrations_of_a_file_come_once_per_epoch_and_in_the_same_order_again(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *({"prompt": f"p{i}", "completion": f"c{i}"} for i in range(20)))
    shown = list(islice(read_demonstrations(path, 3), 40))
    assert shown == list(islice(read_demonstrations(path, 3), 40))
    for epoch in (shown[:20], shown[20:]):
        assert Counter((m[0].content, r) for m, r in epoch) == {(f"p{i}", f"c{i}"): 1 for i in range(20)}
    assert shown[:20] != shown[20:]


def test_a_completion_that_is_no_text_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": 5})
    with pytest.raises(UserError, match="line 2: 'completion' must be a string"):
        next(read_demonstrations(path, 0))
