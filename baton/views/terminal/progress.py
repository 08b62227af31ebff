"""Print the progress of a run: a live bar on a terminal, otherwise plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from baton.console import Console
from baton.records.evaluation import Evaluation, shown_share

LINES = 20
"""Approximate number of progress lines of a warm start, if the console is not a terminal."""


class _StepsProgress(Progress):
    """A progress bar over a known number of steps, with lines printed above it."""

    def __init__(self, console: Console, num_steps: int, *columns: ProgressColumn) -> None:
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._num_steps, self._steps = num_steps, self.add_task("", total=num_steps)

    def said(self, text: str) -> None:
        self.console.print(text)


class SftProgress(_StepsProgress):
    """Shows the progress and the loss of a warm start: a bar on a terminal, otherwise about `LINES` lines."""

    def __init__(self, console: Console, num_steps: int) -> None:
        loss = TextColumn("{task.description}", markup=False)
        bar = BarColumn(bar_width=24)
        super().__init__(
            console, num_steps, TextColumn("warm start"), bar, MofNCompleteColumn(), loss, TimeRemainingColumn()
        )

    def stepped(self, step: int, loss: float, tokens_per_s: float) -> None:
        self.update(self._steps, completed=step, description=f"loss {loss:.3f}")
        last = self._num_steps
        if not self.console.is_terminal and (step % max(1, last // LINES) == 0 or step in (1, last)):
            self.said(f"step {step}/{last}  loss {loss:.4f}  {tokens_per_s:.0f} tok/s")


class TerminalObserver(_StepsProgress):
    """Prints a line per train step; on a terminal, a bar also shows the current phase."""

    def __init__(self, console: Console, num_steps: int) -> None:
        phase = TextColumn("{task.description}", markup=False)
        bar = BarColumn(bar_width=24)
        super().__init__(console, num_steps, SpinnerColumn(), phase, bar, MofNCompleteColumn(), TimeElapsedColumn())
        self.update(self._steps, description="train")

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        task = self.add_task(f"  {name}", total=total or None)
        try:
            yield lambda count: self.advance(task, count)
        finally:
            self.remove_task(task)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.update(self._steps, completed=step)
        # metrics lack the entropy if all advantages are 0
        entropy = f"{metrics['policy/entropy']:5.3f}" if "policy/entropy" in metrics else "    –"
        self.console.print(
            f"step {step:>4}/{self._num_steps}  reward {metrics['reward/mean']:6.3f}  "
            f"length {metrics['response_length/mean']:6.1f}  entropy {entropy}  "
            f"{metrics['perf/throughput']:6.0f} tok/s  {metrics['perf/step_time']:.2f} s{_replicas(metrics)}"
        )

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        self.update(self._steps, completed=step)
        for result in results:
            if result.task != results[-1].task:
                continue  # the last result is for all tasks; metrics.jsonl has the result of each task
            line = Text.assemble((f"accuracy after step {step}", "bold"))
            line.append(f", {result.way}: {shown_share(result.accuracy)} on {result.num_prompts} prompts")
            if result.reward is not None:
                line.append(f", reward {result.reward:.3f}")
            own = [r for r in results if r.way == result.way and r is not result and r.accuracy is not None]
            if own:
                line.append(f" ({', '.join(f'{r.task} {100 * r.accuracy.value:.1f} %' for r in own if r.accuracy)})")
            self.console.print(line)


def _replicas(metrics: Mapping[str, float]) -> str:
    """Name the slowest replica, and the replicas that serve an older version; empty without replicas."""

    def values(name: str) -> dict[str, float]:
        found = ((key.split("/"), value) for key, value in metrics.items() if key.startswith("replicas/"))
        return {key[1]: value for key, value in found if key[2] == name}

    speeds, versions, text = values("tokens_per_s"), values("version"), ""
    if speeds:
        slowest = min(speeds, key=lambda index: speeds[index])
        text = f"  slowest of {len(versions)} replicas: {slowest}, {speeds[slowest]:.0f} tok/s"
    late = [index for index, number in versions.items() if number < max(versions.values())]
    return text + (f"  late: {', '.join(late)}" if late else "")
