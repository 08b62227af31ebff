"""The command line: help that teaches, JSON that parses, and one sentence with exit code 2 for each mistake."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.__main__ import main
from baton.api import Run
from baton.cli import main as cli
from baton.errors import TrainingDiverged, UserError
from baton.policy.tokenizer import load_tokenizer
from baton.records.run_directory import RunDirectory

pytestmark = pytest.mark.timing

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "sft", "eval", "show", "tasks", "keys", "plan", "profile")


def invoke(*arguments: object) -> tuple[str, str]:
    """Run a command in this process that works; return what it printed to stdout and stderr."""
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def mistake(*arguments: object) -> str:
    """The sentence of a user's mistake; `main` prints it and exits with 2 (tested once in a process of its own)."""
    with pytest.raises(UserError) as caught:
        invoke(*arguments)
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value).partition(":")[0]
    return str(caught.value)


def baton(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_each_command_and_where_to_begin(command: str) -> None:
    assert f"{command} [OPTIONS]" in invoke(command, "--help")[0]
    root, _ = invoke("--help")
    assert command in root
    assert "baton train quickstart" in " ".join(root.split())


def test_the_version_is_printed() -> None:
    import baton as package

    assert invoke("--version")[0].strip() == package.__version__


@pytest.mark.parametrize(
    ("arguments", "function"),
    [
        (("profile", "quickstart"), "baton.profile.measure.profile"),
        (("cluster", "describe", "--ray", "auto"), "baton.cluster.ray.connection.describe_ray"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, lambda *_, **__: pytest.fail("the work was done first"))
    assert mistake(*arguments, "--out", "/no/such/file.toml").startswith("cannot write /no/such/file.toml")


def test_a_dry_run_resolves_counts_and_starts_nothing(small: Any, tmp_path: Path) -> None:
    """Parameters: embedding 300 · 32 (tied) + 2 layers + the last norm. One of four ranks holds a quarter of the state,
    and whole gradients unless they are sharded."""
    from transformers import AutoModelForCausalLM

    arguments = ("train", small.recipe, f"run.directory={tmp_path}", "algorithm.num_epochs=2", "--dry-run")
    found = json.loads(invoke(*arguments, "--json")[0])
    needs = found["needs"]
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(small.model).parameters())
    assert needs["parameters"] == parameters
    (together,) = needs["processes"]
    parts = {part["name"]: part["num_bytes"] for part in together["parts"]}
    state = [parts[name] for name in ("weights", "gradients", "moments")]
    assert state == [4 * parameters, 4 * parameters, 8 * parameters]
    assert 16 * parameters < needs["trainer_bytes"] < sum(parts.values())
    for cut, whole in (("false", 4), ("true", 1)):
        more = ("trainer.ranks=4", f"trainer.shard_gradients={cut}")
        rank, engine = json.loads(invoke(*arguments, *more, "--json")[0])["needs"]["processes"]
        assert (rank["count"], engine["count"]) == (4, 1)
        found_parts = {part["name"]: part["num_bytes"] for part in rank["parts"]}
        assert [found_parts["weights"], found_parts["gradients"]] == [parameters, whole * parameters]
    kv_bytes = 16 * 64 * 2 * 2 * 2 * 16 * 4  # slots, context, keys and values, layers, heads, head size, float32
    assert needs["cache_bytes"] == kv_bytes
    assert parts["engine: weights"] == 4 * parameters
    assert parts["engine: KV cache"] == kv_bytes
    assert next(part["is_assumed"] for part in together["parts"] if "fragmentation" in part["name"])
    assert needs["trajectories_per_step"] == 16
    assert needs["max_generated_tokens_per_step"] == 160
    assert needs["updates_per_step"] == 2
    assert found["recipe"]["algorithm"]["num_epochs"] == 2
    text, _ = invoke(*arguments)
    assert [line.split()[0] for line in text.splitlines()[:5]] == ["model", "task", "task", "evaluation", "memory"]
    assert "[algorithm]" not in text
    assert f"{parameters:,} parameters" in text
    assert "[algorithm]" in invoke(*arguments, "--keys")[0]
    assert "num_epochs = 2" in invoke(*arguments, "--keys")[0]
    assert needs["example_prompt"] in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_how_many_rows_a_file_has_and_its_longest_prompt(small: Any, tmp_path: Path) -> None:
    prompts = [f"{number} + {number}" for number in range(19)] + ["1 + 2 + 3 + 4 + 5 + 6 + 7 + 8"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in prompts))
    text = small.recipe.read_text()
    generated = 'name = "chain_sum"\nform = "compact"\nparams = { min_terms = 2, max_terms = 3, max_digits = 1 }'
    assert generated in text
    recipe = tmp_path / "small.toml"
    recipe.write_text(text.replace(generated, f'name = "mine"\npath = "{rows}"'))
    hf = load_tokenizer(str(small.model)).hf
    message = [{"role": "user", "content": prompts[-1]}]
    templated = hf.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    longest = len(hf(templated, add_special_tokens=False)["input_ids"])
    printed, _ = invoke("train", recipe, f"run.directory={tmp_path / 'runs'}", "--dry-run")
    (line,) = [line for line in printed.splitlines() if line.startswith("task        mine: ")]
    assert re.search(r"mine: 20 rows; ([1-9]\d*|no) distinct problems are held out or in a test set; ", line)
    assert f"the longest prompt has {longest} tokens, 63 are allowed" in line
    assert "basic_arithmetic: generated; the longest of " in printed


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("engine.slots=4000000",), "engine: KV cache 122 GiB"),
        (("engine.processes=4", "engine.slots=2000000"), "each of 4 engines needs "),
        (
            ("engine.max_context_tokens=8192",),
            "the model in '{model}' supports at most 1024 positions; lower the value",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_the_dry_run_and_by_the_start_with_the_key_to_lower(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], sentence: str
) -> None:
    """By hand: 4 million slots of 64 tokens and 512 bytes are 122 GiB."""
    monkeypatch.setattr("baton.run.dry_run.available_bytes", lambda device: 100 * 2**30)
    for dry in (("--dry-run",), ()):
        said = mistake("train", small.recipe, f"run.directory={tmp_path / 'runs'}", *overrides, *dry)
        assert sentence.format(model=small.model) in said
        assert "it fits" in said or "lower" in said
    assert not (tmp_path / "runs" / "small").exists()


def test_a_dry_run_refuses_a_warm_up_that_leaves_no_step_to_decay_over(small: Any) -> None:
    schedule = ("run.steps=3", "trainer.warmup_steps=3", "trainer.decay=linear")
    sentence = mistake("train", small.recipe, *schedule, "--dry-run")
    assert "trainer.warmup_steps: got 3, allowed are fewer than the 3 steps of the run" in sentence


def test_a_dry_run_reads_the_headers_of_the_weights(small: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small.model, model)
    file = model / "model.safetensors"
    whole = file.read_bytes()
    arguments = ("train", small.recipe, f"model.path={model}", "--dry-run")
    for content in (whole[:-7], b"\xff" * 5000, b""):
        file.write_bytes(content)
        assert f"model.path: {file} is damaged" in mistake(*arguments)
    file.unlink()
    assert "holds no weights" in mistake(*arguments)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    assert "lacks model-00002-of-00002.safetensors, which its index lists" in mistake(*arguments)


def test_a_dry_run_checks_the_files_of_the_reference_model(small: Any, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    arguments = ("train", small.recipe, f"algorithm.reference={reference}", "algorithm.kl_coef=0.1", "--dry-run")
    assert mistake(*arguments).startswith(f"algorithm.reference: there is no directory '{reference}'")
    shutil.copytree(small.model, reference)
    invoke(*arguments)
    file = reference / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert mistake(*arguments).startswith(f"algorithm.reference: {file} is damaged")


def test_keys_say_how_a_list_is_overridden() -> None:
    assert "overrides number the entries from 0, such as task.0.name=…" in " ".join(invoke("keys", "task")[0].split())
    assert "from 0" not in invoke("keys", "engine")[0]


def test_the_quickstart_is_ready_to_run() -> None:
    found = json.loads(invoke("train", ROOT / "recipes" / "quickstart.toml", "--dry-run", "--json")[0])
    assert found["needs"]["parameters"] < 2_500_000
    assert (ROOT / "models" / "quickstart" / "model.safetensors").stat().st_size < 10_000_000


def test_train_ends_with_a_report_in_text_or_json(small: Any, tmp_path: Path) -> None:
    arguments = ("train", small.recipe, f"run.directory={tmp_path}", "run.steps=1", "eval.num_prompts=2")
    report = json.loads(invoke(*arguments, "--json")[0])
    assert (report["steps"], report["seed"]) == (1, 5)
    assert json.loads((tmp_path / "small" / "report.json").read_text()) == report
    text, _ = invoke(*arguments, "--overwrite")
    assert "1 train steps, seed 5" in text
    assert f"baton show {tmp_path / 'small'} --step 1" in text.replace("\n", "")


def test_show_reads_what_was_kept(small: Any) -> None:
    everything = json.loads(invoke("show", small.run, "--step", 2, "-n", 99, "--json")[0])
    assert len(everything) == 16
    assert {t["step"] for t in everything} == {2}
    best = json.loads(invoke("show", small.run, "--step", 2, "--sort", "best", "-n", 16, "--json")[0])
    assert [t["reward"] for t in best] == sorted((t["reward"] for t in everything), reverse=True)
    place = [(-t["reward"], t["sample_index"]) for t in best]
    assert place == sorted(place), "equal rewards: first one response to each prompt"
    longest = json.loads(invoke("show", small.run, "--step", 2, "--sort", "longest", "-n", 1, "--json")[0])
    assert longest[0]["num_tokens"] == max(t["num_tokens"] for t in everything)
    group = everything[4]["group_id"]
    chosen = json.loads(invoke("show", small.run, "--step", 2, "--group", group, "--json")[0])
    assert [t["sample_index"] for t in chosen] == [0, 1, 2, 3]
    assert json.loads(invoke("show", small.run, "-n", 1, "--json")[0])[0]["step"] == 3, "the last step by default"
    text, _ = invoke("show", small.run, "-n", 2)
    assert "step 3" in text
    assert "reward" in text


def test_show_reads_the_responses_of_an_evaluation(small: Any) -> None:
    results = {(e.step or 0, e.way, e.task): e for e in Run(small.run).evaluations()}
    steps = sorted({step for step, _, _ in results})
    for source, way in (("evaluation", "temperature 1"), ("greedy", "greedy")):
        command = ("show", small.run, "--from", source, "--json", "-n", 99)
        for step in steps:
            shown = json.loads(invoke(*command, "--step", step)[0])
            measured = results[step, way, "all"]
            assert measured.accuracy is not None
            assert len(shown) == measured.num_prompts * measured.samples
            assert sum(t["is_correct"] for t in shown) / len(shown) == pytest.approx(measured.accuracy.value)
        assert {t["step"] for t in json.loads(invoke(*command)[0])} == {steps[-1]}, "the last evaluation by default"
    assert len(list(Run(small.run).samples(steps[0], "greedy"))) == results[steps[0], "greedy", "all"].num_prompts
    missing = mistake("show", small.run, "--from", "greedy", "--step", 99)
    assert f"has no greedy trajectories of step 99; recorded: {steps}" in missing


def test_eval_writes_every_response(small: Any, tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    (*_, overall) = json.loads(invoke("eval", small.run, "-n", 4, "-k", 2, "--out", file, "--json")[0])
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(written) == 8
    assert sum(sample["reward"] for sample in written) / 8 == pytest.approx(overall["reward"])
    assert all({"prompt", "response", "reference", "is_correct"} <= sample.keys() for sample in written)
    refused = mistake("eval", small.run, "--out", tmp_path / "none" / "responses.jsonl")
    assert "cannot write" in refused


def test_eval_measures_a_run_a_checkpoint_and_any_model(small: Any) -> None:
    checkpoint = small.run / "checkpoints" / "step_000003"
    of_run, of_checkpoint = (
        json.loads(invoke("eval", path, "-n", 4, "-k", 2, "--json")[0]) for path in (small.run, checkpoint)
    )
    assert of_run == of_checkpoint
    assert [r["task"] for r in of_run] == ["chain_sum", "basic_arithmetic", "all"]
    assert (of_run[-1]["num_prompts"], of_run[-1]["samples"]) == (4, 2)
    greedy = json.loads(invoke("eval", small.model, "--recipe", small.recipe, "-n", 4, "--temperature", 0, "--json")[0])
    assert greedy[-1]["temperature"] == 0
    assert "pass@2" in invoke("eval", small.run, "-n", 4, "-k", 2)[0]
    assert "all greedy responses to a prompt are equal" in mistake("eval", small.run, "-k", 2, "--temperature", 0)


def test_tasks_and_keys_are_listed() -> None:
    listed = json.loads(invoke("tasks", "--json")[0])
    assert len(listed) >= 104
    assert all(task["question"] for task in listed)
    one, _ = invoke("tasks", "countdown")
    assert "min_numbers" in one
    assert 'with form = "compact"' in one
    keys = json.loads(invoke("keys", "trainer", "--json")[0])
    assert "lr" in {key["key"] for key in keys}
    assert "trainer" in invoke("keys")[0]


@pytest.mark.parametrize("name", ["letter_counting", "arc_1d", "rearc", "string_manipulation", "codeio"])
def test_an_example_is_shown_as_it_is_whatever_brackets_it_holds(name: str) -> None:
    [task] = json.loads(invoke("tasks", name, "--json")[0])
    shown = "".join(invoke("tasks", name)[0].split())
    assert "".join(task["question"].split()) in shown


def test_mistakes_in_what_is_named(small: Any, tmp_path: Path) -> None:
    assert "there is no recipe" in mistake("train", tmp_path / "none.toml")
    assert "there is no recipe" in mistake("sft", tmp_path / "none.toml")
    assert "there is no directory" in mistake("train", small.recipe, f"model.path={tmp_path / 'none'}", "--dry-run")
    (tmp_path / "empty").mkdir()
    sentence = mistake("train", small.recipe, f"model.path={tmp_path / 'empty'}", "--dry-run")
    assert "not a Hugging Face model" in sentence
    assert "is not a run: it has no run.json" in mistake("show", tmp_path)
    assert "give a recipe with --recipe" in mistake("eval", small.model)
    assert "did you mean 'countdown'" in mistake("tasks", "count_down")
    assert "did you mean 'trainer'" in mistake("keys", "trianer")


def test_mistakes_in_keys_tasks_and_steps(small: Any) -> None:
    assert "did you mean 'num_epochs'?" in mistake("train", small.recipe, "algorithm.num_epoch=2")
    assert "did you mean 'chain_sum'?" in mistake("train", small.recipe, "task.0.name=chain_sums", "--dry-run")
    assert "write section.key=value" in mistake("train", small.recipe, "trainer.lr")
    assert "has no trajectories of step 9; recorded: steps 1 to 3" in mistake("show", small.run, "--step", 9)
    assert "has no group 99; its groups are 8 to 11" in mistake("show", small.run, "--group", 99)
    assert "distinct held-out problems" in mistake("eval", small.run, "-n", 100_000)


def test_overwriting_spares_a_directory_that_is_no_run(small: Any, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.tex").write_text("years of work")
    sentence = mistake("train", small.recipe, f"run.directory={tmp_path}", "--overwrite")
    assert "is not empty and not a run (thesis.tex): choose another run.name" in sentence
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "small" / "thesis.tex").read_text() == "years of work"


def test_a_recorded_batch_that_is_not_finite_is_shown_and_can_be_skipped(small: Any, tmp_path: Path) -> None:
    """The last batch of a run, which its last checkpoint lacks, has rewards as an earlier Baton recorded them."""
    shutil.copytree(small.run, tmp_path / "small")
    run = RunDirectory.open(tmp_path / "small")
    shutil.rmtree(run.checkpoints / "step_000003")

    def spoilt(member: Any) -> Any:
        judged = msgspec.structs.replace(member.judgement, reward=float("inf"))
        return msgspec.structs.replace(member, judgement=judged)

    groups = [msgspec.structs.replace(g, members=tuple(map(spoilt, g.members))) for g in run.groups(3)]
    run.write_groups(3, groups)
    shown = json.loads(invoke("show", run.path, "--step", 3, "-n", 99, "--json")[0])
    assert len(shown) == 16
    assert "step 3" in invoke("show", run.path, "--step", 3)[0]
    resume = ("train", small.recipe, f"run.directory={tmp_path}", "--resume")
    with pytest.raises(TrainingDiverged, match=r"--resume --skip-batch 3"):
        invoke(*resume)
    assert json.loads(invoke(*resume, "--skip-batch", 3, "--json")[0])["steps"] == 3
    assert {g.group_id for g in run.groups(3)}.isdisjoint(g.group_id for g in groups)
    assert len(json.loads(invoke("show", run.path, "--step", 3, "--from", "skipped", "-n", 99, "--json")[0])) == 16


def test_mistakes_about_runs_that_exist(small: Any) -> None:
    assert "already holds a run" in mistake("train", small.recipe)
    assert "is complete: 3 of run.steps = 3" in mistake("train", small.recipe, "--resume")
    fewer = mistake("train", small.recipe, "--resume", "run.steps=2")
    assert "run.steps = 2:" in fewer
    assert "step_000003 already has 3 train steps; resume with run.steps above 3" in fewer
    assert "exclude each other" in mistake("train", small.recipe, "--resume", "--overwrite")
    assert (small.run / "report.json").is_file()


@pytest.mark.parametrize("option", [("-n", 0), ("-k", 0), ("--temperature", -1), ("--top-p", 1.5), ("--top-k", -1)])
def test_an_evaluation_that_cannot_be_is_refused_with_the_option_named(small: Any, option: tuple[str, float]) -> None:
    result = CliRunner().invoke(cli.app, ["eval", str(small.run), *map(str, option)], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert option[0] in result.output


def test_a_model_without_chat_template_is_refused(small: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(small.model, model)
    (model / "chat_template.jinja").unlink()
    assert "has no chat template" in mistake("train", small.recipe, f"model.path={model}", "--dry-run")


@pytest.mark.parametrize(
    ("instruct", "role", "advice"),
    [("true", "system", "set answer.instruct = false"), ("false", "user", "change the messages in the data")],
)
def test_messages_that_the_chat_template_refuses_are_one_sentence(
    small: Any, tmp_path: Path, instruct: str, role: str, advice: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small.model, model)
    check = f"{{% if messages[0].role == '{role}' %}}{{{{ raise_exception('no such role') }}}}{{% endif %}}"
    (model / "chat_template.jinja").write_text(check + (model / "chat_template.jinja").read_text())
    sentence = mistake("train", small.recipe, f"model.path={model}", f"answer.instruct={instruct}", "--dry-run")
    assert re.search(rf"the model's chat template refuses messages with the roles {role}.*: no such role; ", sentence)
    assert advice in sentence


def test_the_program_prints_a_mistake_as_one_line_without_traceback_and_exits_with_2(tmp_path: Path) -> None:
    done = baton("train", tmp_path / "[bold]none.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no recipe ")
    assert "[bold]none.toml" in done.stderr, "what the user wrote is not taken for markup"
    assert done.stderr.count("\n") == 1


def test_an_error_of_the_operating_system_that_names_a_file_is_one_line() -> None:
    done = baton("train", "x" * 300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.replace("\n", "") == f"error: {'x' * 300}: File name too long"


def test_ctrl_c_while_modules_are_imported_ends_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "baton.cli.main", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


@pytest.mark.slow
def test_the_program_evaluates(small: Any) -> None:
    done = baton("eval", small.run, "-n", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[-1]["num_prompts"] == 2
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_terminated_run_finishes_its_step_says_so_with_its_exit_code_and_goes_on(small: Any, tmp_path: Path) -> None:
    arguments = ["train", small.recipe, f"run.directory={tmp_path}", "run.steps=100000", "eval.num_prompts=2"]
    run = tmp_path / "small"
    with subprocess.Popen([sys.executable, "-m", "baton", *map(str, arguments)], cwd=ROOT) as process:
        try:
            deadline = time.monotonic() + 120
            while not list(run.glob("trajectories/step_*")):
                assert process.poll() is None
                assert time.monotonic() < deadline, "no step within 120 s"
                time.sleep(0.02)
            process.terminate()
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows)
    assert (run / "checkpoints" / f"step_{last:06d}").is_dir(), "the last step has a checkpoint"
    arguments[3] = f"run.steps={last + 1}"
    assert json.loads(invoke(*arguments, "--resume", "--json")[0])["steps"] == last + 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_run_outlives_the_readers_of_its_output(small: Any, tmp_path: Path, closed: str) -> None:
    """As under `| head -1`: one line is read, then the pipe is closed, and the run trains to its end."""
    arguments = ["train", small.recipe, f"run.directory={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-m", "baton", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if closed == "both" else subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        if closed == "stderr":
            assert process.stderr is not None
            process.stderr.close()
            said = process.stdout.read()
            assert b"step    3/3" in said
        else:
            process.stdout.readline()
            process.stdout.close()
        if closed == "stdout":
            assert process.stderr is not None
            said = process.stderr.read()
            assert said.count(b"standard output is closed: the command continues without printing to it") == 1
            assert b"Traceback" not in said
        assert process.wait(300) == 0
    run = RunDirectory.open(tmp_path / "small")
    assert run.recorded_steps() == [1, 2, 3]
    assert (run.path / "checkpoints" / "step_000003").is_dir()
    assert (run.path / "report.json").is_file()


def test_a_command_that_only_prints_ends_when_its_output_is_closed() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "baton", "keys"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(300)) == (b"", 1)


def test_an_option_of_an_earlier_version_is_refused_with_its_new_name() -> None:
    for options in (["--patience", "30m"], ["--patience=30m"]):
        result = CliRunner().invoke(cli.app, ["worker", "http://localhost:1", "--token-file", "t", *options])
        assert result.exit_code == 2
        assert "--patience is now called --reconnect-timeout" in result.output
    result = CliRunner().invoke(cli.app, ["show", "runs/none", "--best"])
    assert result.exit_code == 2
    assert "--best is now called --sort best" in result.output


def test_a_misspelled_command_is_refused_without_naming_a_hidden_one() -> None:
    result = CliRunner().invoke(cli.app, ["tran"])
    assert result.exit_code == 2
    assert "'train'" in result.output
    assert "'rank'" not in result.output


@pytest.mark.parametrize(
    ("option", "override", "sentence"),
    [
        (("--workers", 1), "swarm.workers=3", "swarm.workers=3 contradicts --workers, which sets 1; remove one"),
        (("--serve", "h:1"), "swarm.serve=h:2", 'swarm.serve=h:2 contradicts --serve, which sets "h:1"; remove'),
        (("--insecure",), "swarm.insecure=false", "swarm.insecure=False contradicts --insecure, which sets true"),
    ],
)
def test_an_option_and_an_override_that_contradict_each_other_are_refused(
    option: tuple[object, ...], override: str, sentence: str
) -> None:
    assert sentence in mistake("train", "quickstart", *option, override)
