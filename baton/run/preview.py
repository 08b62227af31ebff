"""Sample a few responses before any training, and report problems: `baton preview`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.rewards.warnings import first_impression
from baton.run.assemble import EVAL, open_evaluator
from baton.run.dry_run import Footprint, footprint
from baton.run.memory import gib
from baton.run.trajectories import ReadableTrajectory, decode
from baton.tasks.stream import PromptStream
from baton.types import Group

SAMPLES = 4
"""Responses per prompt, so that their rewards can be compared."""


class Preview(msgspec.Struct, frozen=True):
    """Responses of a policy before training, and the findings from these responses and from the dry run."""

    responses: tuple[ReadableTrajectory, ...]
    """`SAMPLES` responses to each prompt, prompt by prompt."""
    findings: tuple[str, ...]
    """Lines for the user. A line that begins with `warning:` names a problem."""

    @property
    def warnings(self) -> list[str]:
        """The findings that name a problem, without the prefix `warning:`."""
        return [line.removeprefix("warning: ") for line in self.findings if line.startswith("warning: ")]


def preview(recipe: Recipe, num_prompts: int) -> Preview:
    """Generate and score responses to the first training prompts. Raises UserError if `num_prompts` is less than
    1, or if a run would not start."""
    if num_prompts < 1:
        raise UserError(f"n: got {num_prompts}, allowed are 1 or more prompts")
    needs = footprint(recipe)
    with open_evaluator(recipe, recipe.model.path, lambda m: PromptStream(m, recipe.run.seed).take(num_prompts)) as it:
        begin = time.perf_counter()
        _, groups = it.evaluate(recipe.rollout.sampling(), version=EVAL.number, samples=SAMPLES)
        seconds = time.perf_counter() - begin
        responses = [decode(it.encoder.tokenizer, 0, group, member) for group in groups for member in group.members]
    return Preview(tuple(responses), tuple(_findings(recipe, needs, groups, seconds)))


def _findings(recipe: Recipe, needs: Footprint, groups: Sequence[Group], seconds: float) -> Iterator[str]:
    results = [member.judgement for group in groups for member in group.members]
    failures = [result.failure for result in results if result.failure is not None]
    if failures:
        yield f"warning: {len(failures)} of {len(results)} responses could not be scored; the first: {failures[0]}"
    yield from first_impression(groups)
    for lengths in needs.prompts:
        if lengths.too_long:
            yield f"warning: task {lengths}"
    lengths_tokens = [member.num_policy_tokens for group in groups for member in group.members]
    generated, longest = sum(lengths_tokens), max(lengths_tokens)
    wanted = needs.trajectories_per_step * generated / len(lengths_tokens)
    # `fastest` assumes that all slots are busy and that a decode step takes the same time for any number of rows;
    # `slowest` assumes the measured tokens per second
    fastest = wanted / min(recipe.engine.slots, needs.trajectories_per_step) * seconds / longest
    slowest = max(fastest, wanted * seconds / generated)
    mean = generated / len(lengths_tokens)
    yield (
        f"generation of a step: {_rounded(fastest)} to {_rounded(slowest)} s for {needs.trajectories_per_step} "
        f"responses of {mean:.3g} tokens on average, estimated from {len(lengths_tokens)} responses in "
        f"{_rounded(seconds)} s; training not included"
    )
    used = ", ".join(f"{process.name} {gib(process.num_bytes)}" for process in needs.processes)
    free = "" if needs.available_bytes is None else f"; {gib(needs.available_bytes)} free on {needs.device}"
    yield f"memory: {used}{free}"


def _rounded(seconds: float) -> str:
    """Return a number with two significant digits, without an exponent below a million."""
    return f"{float(f'{seconds:.2g}'):g}"
