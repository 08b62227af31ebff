"""Run a supervised warm start, `baton sft`: fine-tune a model as a recipe describes, and write the model to a Hugging
Face directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Protocol

import msgspec
import torch
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.files import atomic_directory, check_output_directory, writing
from baton.policy.load import end_ids, load_model, torch_device, turn_end_id
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.recipe.recipe import WarmStart
from baton.records.evaluation import Evaluation
from baton.records.metrics import MetricsWriter, start_wandb
from baton.records.run_directory import RunDirectory, without_none
from baton.records.run_lock import RunLock
from baton.run.assemble import evaluate_recipe, evaluated_model, set_up_torch
from baton.run.resume import with_revisions
from baton.run.tokenization import PromptEncoder
from baton.tasks.dataset import read_demonstrations
from baton.tasks.demonstrations import demonstrations
from baton.tasks.stream import TaskMixture
from baton.trainer.sft import Demonstration, fine_tune, schedule_of
from baton.types import Message, Prompt, SamplingParams

LOSS_WINDOW = 50
"""Number of latest updates over which the loss is averaged, in progress lines, metrics and the report."""


class SftObserver(Protocol):
    """Receives the progress of a warm start."""

    def stepped(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Receive the mean loss of the latest `LOSS_WINDOW` updates, after each update."""

    def said(self, text: str) -> None:
        """Receive a message for the user."""


class WarmStartReport(msgspec.Struct, frozen=True):
    """The result of a warm start."""

    output: str
    parameters: int
    loss: float
    """Mean loss of the last `LOSS_WINDOW` updates, nats per response token."""
    seconds: float
    evaluations: tuple[Evaluation, ...]
    """Evaluations, sampled and greedy; empty if the recipe has no task."""


def warm_start(recipe: WarmStart, observer: SftObserver, *, overwrite: bool = False) -> WarmStartReport:
    """Fine-tune a model as the recipe describes, and write the model to `recipe.output` atomically. Raises UserError if
    the run or the output exists and `overwrite` is False, or if the warm-up is too long."""
    schedule_of(recipe.sft).check("sft")
    _check_output(Path(recipe.output), recipe.run.path, overwrite=overwrite)
    RunDirectory.check_free(recipe.run.path, overwrite=overwrite)
    with RunLock.take(recipe.run.path, observer.said) as lock:
        RunDirectory.check_free(recipe.run.path, overwrite=overwrite)
        with ExitStack() as ending:
            report = _warm_start(with_revisions(recipe), observer, lock, ending)
            ending.pop_all()
        lock.release("finished")
        return report


def _check_output(output: Path, run: Path, *, overwrite: bool) -> None:
    """Raise UserError if `output` cannot be written, if it would replace the directory `run`, if it is a model and
    `overwrite` is False, or if it exists and is not a model."""
    check_output_directory(output)
    if run.resolve().is_relative_to(output.resolve()):
        raise UserError(f"output: {output} would replace the run's directory {run}: choose another output")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "config.json").is_file():
        raise UserError(f"output: {output} exists and is not a model: choose another output, or remove this one")
    if not overwrite:
        raise UserError(
            f"output: {output} already contains a model: replace it with --overwrite, or choose another output"
        )


def _warm_start(recipe: WarmStart, observer: SftObserver, lock: RunLock, ending: ExitStack) -> WarmStartReport:
    """`ending`: collects functions that the caller calls if an error ends the warm start."""
    is_evaluated = recipe.eval.enabled and bool(recipe.task or recipe.eval.task)
    if is_evaluated:  # errors of the tasks are raised before the training, not in the evaluation after the training
        tasks, tool_format = (*recipe.task, *recipe.eval.task), None
        if recipe.model is not None:
            tool_format = PromptEncoder(load_tokenizer(recipe.model.path), tasks).tool_format
        mixture = TaskMixture(recipe.task, recipe.answer, tests=recipe.eval.task, tool_format=tool_format)
        with closing(mixture):
            mixture.held_out(recipe.eval.num_prompts, or_fewer=True)
    threads = set_up_torch(recipe.run.threads, deterministic=recipe.run.deterministic)
    model, tokenizer, examples = _parts(recipe)
    examples = chain([next(examples)], examples)  # errors of the data are raised before the run's directory is created
    resolved = recipe.model_dump(mode="json")
    wandb = start_wandb(recipe.run.path, recipe.log, without_none(resolved), is_new=True)
    if wandb is not None:
        ending.callback(wandb.close)
    run = RunDirectory.create(recipe.run.path, lock)
    ending.callback(lock.release, "failed")
    run.write_start(resolved, seed=recipe.run.seed, threads=threads)
    losses: list[float] = []
    tokens = 0

    def on_step(step: int, loss: float, num_tokens: int) -> None:
        nonlocal tokens
        losses.append(loss)
        tokens += num_tokens
        recent = fmean(losses[-LOSS_WINDOW:])
        speed = tokens / (time.perf_counter() - begin)
        metrics.write(step, {"sft/loss": recent, "perf/throughput": speed})
        observer.stepped(step, recent, speed)

    writer = MetricsWriter(run.path, resume_step=-1, log=recipe.log, before_write=lock.check, wandb=wandb)
    with closing(writer) as metrics:
        begin = time.perf_counter()
        fine_tune(model, examples, recipe.sft, on_step=on_step)
    output = Path(recipe.output)
    with atomic_directory(output, before_rename=lock.check) as directory, writing(output):
        model.save_pretrained(directory)
        tokenizer.hf.save_pretrained(directory)
    results: list[Evaluation] = []
    if is_evaluated:
        for temperature in (recipe.eval.temperature, *((0.0,) if recipe.eval.greedy else ())):
            evaluated, path = evaluated_model(output, run.path / "recipe.toml")
            sampling = SamplingParams(0, temperature)
            results += evaluate_recipe(evaluated, path, sampling, default_samples=recipe.eval.samples)
    report = WarmStartReport(
        str(output),
        sum(p.numel() for p in model.parameters()),
        fmean(losses[-LOSS_WINDOW:]),
        time.perf_counter() - begin,
        tuple(results),
    )
    run.write_report(msgspec.to_builtins(report))
    return report


def _parts(recipe: WarmStart) -> tuple[PreTrainedModel, Tokenizer, Iterator[Demonstration]]:
    """Return the model, its tokenizer and an endless stream of tokenised demonstrations."""
    if recipe.model is not None:
        own = recipe.model
        tokenizer = load_tokenizer(own.path)
        device = torch_device(own.device)
        model = load_model(
            own.path, dtype=torch.float32, device=device, attention=own.attention, head_dtype=own.head_dtype
        )
        if not end_ids(model, tokenizer):
            raise UserError(
                f"{own.path} has no end-of-sequence id, so no response could end; set eos_token_id in its config.json"
            )
    else:
        assert recipe.scratch is not None
        tokenizer = scratch_tokenizer(_corpus(recipe), recipe.scratch.vocab_size)
        model = scratch_model(recipe.scratch, tokenizer, recipe.run.seed)
    end = turn_end_id(model, tokenizer)
    encoder = PromptEncoder(tokenizer, recipe.task)
    examples = (
        Demonstration(encoder.ids(prompt), _response_ids(texts, encoder, end))
        for prompt, texts in _conversations(recipe)
    )
    return model, tokenizer, examples


def _response_ids(texts: Sequence[str], encoder: PromptEncoder, end: int) -> tuple[int, ...]:
    """Return the ids of turns and observations, arranged as in an episode of RL. The loss includes the observations, so
    that the model learns how the environment responds."""
    ids: tuple[int, ...] = ()
    for place, text in enumerate(texts):
        if place % 2 == 0:
            ids += (*encoder.tokenizer.ids(text), end)
        else:
            assert encoder.bridge is not None
            ids += encoder.bridge.suffix(ids, Message("user", text))
    return ids


def _conversations(recipe: WarmStart) -> Iterator[tuple[Prompt, tuple[str, ...]]]:
    """Yield an endless stream of (prompt, texts). The texts are one response, or turns and observations alternately."""
    if recipe.data is not None:
        for messages, response in read_demonstrations(recipe.data, recipe.run.seed):
            yield Prompt("", "", messages), (response,)
    else:
        assert recipe.demonstrations is not None
        with closing(TaskMixture(recipe.task, recipe.answer, tests=recipe.eval.task)) as mixture:
            yield from demonstrations(mixture, recipe.demonstrations, recipe.run.seed)


def _corpus(recipe: WarmStart) -> list[str]:
    """Return the texts for training a new tokenizer: demonstrations, and questions of the generated single-turn tasks
    with `form = "original"`."""
    shown = [
        "\n".join((*(m.content for m in prompt.messages), *texts))
        for prompt, texts in islice(_conversations(recipe), 2000)
    ]
    originals = (
        s.model_copy(update={"form": "original"}).build() for s in recipe.task if not (s.path or s.environment)
    )
    return [*shown, *(task.draw(recipe.run.seed, i).question for task in originals for i in range(300))]
