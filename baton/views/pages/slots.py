"""Draw a trace as engine slots over time, coloured by policy version.

Rows are slots, and bars are leases (each assigns one trajectory to one worker). The colour of a bar is its policy
version, from dark (old) to light (new). The trainer's activity is above the slots, and the number of busy slots below
them. The spans are from a live run or from a simulation. The SVG is written directly, with one path for all bars of a
version: matplotlib would write one path per bar, and the page would be too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from baton.records.trace import ASIDE, Span, actors_of
from baton.views.pages.canvas import Chart
from baton.views.pages.history import evenly
from baton.views.pages.windows import Window, choose_windows

WIDTH, LEFT, RIGHT = 1180.0, 132.0, 10.0
LANES_HEIGHT, MAX_ROWS, MAX_WORKERS = 400.0, 320, 40
INK, INK_2, RULE = "var(--ink,#1b1f24)", "var(--ink-2,#57606a)", "var(--rule,#d8dde3)"
"""CSS variables of the page, each with a fallback colour for an SVG that is not part of a page."""
COLOURS = {
    "train": "var(--s2,#d55e00)",
    "publish": "var(--s3,#009e73)",
    "fetch": "var(--s3,#009e73)",
    "eval": "var(--s4,#a3478a)",
    "wait_for_batch": RULE,
    "judge": "var(--s6,#d9a400)",
    "check": "var(--s6,#d9a400)",
    "checkpoint": "var(--s5,#56b4e9)",
    "prefill": "var(--s5,#56b4e9)",
}
"""The colour of each activity except generation."""
_RAMP = ((65, 68, 135), (53, 95, 141), (33, 145, 140), (53, 183, 121), (110, 206, 88), (189, 223, 38))
"""RGB colours from old to new: the middle of matplotlib's viridis, visible on light and on dark backgrounds."""


def slot_pictures(spans: Sequence[Span]) -> list[Chart]:
    """Draw all steps of a short trace, or the first, the slowest and the last steps of a longer trace."""
    return [Chart(w.title, slot_picture(w), _occupancy_note(w)) for w in choose_windows(spans)]


def slot_picture(window: Window) -> str:
    """Return the SVG of one window, with spans clipped to the window."""
    return _Drawing(window).svg()


def ramp(share: float) -> str:
    """Return the colour at a position between the oldest version (`share` 0) and the newest version (1)."""
    shares = np.linspace(0, 1, len(_RAMP))
    return "#" + "".join(f"{round(np.interp(share, shares, channel)):02x}" for channel in zip(*_RAMP, strict=True))


def busy_slots(spans: Iterable[Span], begin_s: float, end_s: float, count: int) -> NDArray[np.float64]:
    """Return the mean number of busy slots in each of `count` equal intervals, shape [count]."""
    edges = np.linspace(begin_s, end_s, count + 1)
    ends = np.array([(s.begin_s, s.end_s) for s in spans if s.name == "generate"], float).reshape(-1, 2)
    ends = np.clip(ends, begin_s, end_s)
    moments = np.concatenate((ends[:, 0], ends[:, 1]))
    order = np.argsort(moments, kind="stable")
    moments, change = moments[order], np.repeat((1.0, -1.0), len(ends))[order]
    if not len(moments):
        return np.zeros(count)
    level = np.cumsum(change)
    # Number of busy slot-seconds before each moment. The number of busy slots is constant between two moments, so
    # linear interpolation is exact.
    seconds = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(moments))))
    means: NDArray[np.float64] = np.diff(np.interp(edges, moments, seconds)) / max(1e-12, (end_s - begin_s) / count)
    return means


def _occupancy_note(window: Window) -> str:
    busy = busy_slots(window.spans, window.begin_s, window.end_s, 2000)
    lanes, rows = _lanes(window.spans), _chosen_rows(window.spans)
    slots, drawn = sum(count for _, count in lanes), sum(len(shown) for _, shown in rows)
    at_work = busy[busy > 0.5]
    if not len(at_work):
        return ""
    left_out = f" The chart shows {drawn:,} slots of {len(rows):,} of the run's {len(lanes):,} workers."
    return (
        f"{slots:,} slots, busy {100 * busy.mean() / slots:.0f} % of the time shown, and "
        f"{100 * at_work.mean() / slots:.0f} % of the time in which at least one slot was busy. During "
        f"{100 * np.mean(at_work < slots / 4):.0f} % of that time, fewer than a quarter of the slots were busy (the "
        f"long tail).{left_out if drawn < slots else ''}"
    )


def _lanes(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """Return the workers, each with its number of slots: the index of the highest slot that was used, plus 1."""
    highest: dict[str, int] = {}
    for span in spans:
        if span.name == "generate":
            highest[span.actor] = max(highest.get(span.actor, 0), span.lane + 1)
    return [(worker, highest[worker]) for worker in actors_of(spans)[1]]


@dataclass(slots=True)
class _Drawing:
    window: Window
    parts: list[str] = field(default_factory=list)
    y: float = 0.0
    """Top of the next row, in SVG units."""

    def svg(self) -> str:
        window = self.window
        shown = [s for s in window.spans if s.end_s > window.begin_s and s.begin_s < window.end_s]
        others, _ = actors_of(window.spans)
        versions = sorted({version for s in shown for version, _ in _versions(s)})
        self._legend(shown, versions)
        self.y += 22
        top = self.y
        for actor in others:
            if mine := [s for s in shown if s.actor == actor]:
                height = 15 if actor == "trainer" else 7
                self._text(LEFT - 8, self.y + height / 2 + 4, actor, "end")
                self._bars(mine, height)
                self.y += height + 5
        rows = _chosen_rows(window.spans)
        lane_height = min(9.0, max(1.25, LANES_HEIGHT / max(1, sum(len(lanes) for _, lanes in rows))))
        low_high = (versions[0], versions[-1]) if versions else (0, 0)
        for worker, lanes in rows:
            self._worker(worker, lanes, [s for s in shown if s.actor == worker], lane_height, low_high)
        self._busy(shown, sum(count for _, count in _lanes(window.spans)))
        self._steps(top)
        self._axis()
        head = f'<svg role="img" viewBox="0 0 {WIDTH:g} {self.y:.0f}" font-size="11.5" class="slots">'
        return f"{head}{''.join(self.parts)}</svg>"

    def x(self, at_s: float) -> float:
        """Return the horizontal position of a moment, clipped to the frame."""
        share = (at_s - self.window.begin_s) / max(1e-9, self.window.end_s - self.window.begin_s)
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(share, 0.0), 1.0)

    def _legend(self, shown: Sequence[Span], versions: Sequence[int]) -> None:
        place = LEFT
        self.y += 14

        def entry(fill: str, words: str, opacity: float = 1.0) -> None:
            nonlocal place
            self._rect(place, self.y - 9, 11, 10, fill, opacity)
            self._text(place + 15, self.y, words)
            place += 15 + 6.4 * len(words) + 14

        if versions:
            self._text(LEFT - 8, self.y, "policy version", "end")
            for version in evenly(versions, 6):
                entry(_colour(version, versions[0], versions[-1]), str(version))
        if any(s.facts.get("ended") in ("lost", "dropped") for s in shown):
            entry(ramp(0.5), "lost", 0.35)
        if any(s.facts.get("ended") == "abort" for s in shown):
            self._rect(place + 4, self.y - 9, 1.6, 10, INK)
            self._text(place + 11, self.y, "aborted")
            place += 74
        place += 16
        done = {s.name for s in shown}
        for name, colour in COLOURS.items():
            if name in done:
                entry(colour, name.replace("_", " "))

    def _bars(self, spans: Sequence[Span], height: float) -> None:
        for span in spans:
            x = self.x(span.begin_s)
            colour = COLOURS.get(span.name, "var(--s7,#8b949e)")
            self._rect(x, self.y, max(0.6, self.x(span.end_s) - x), height, colour)

    def _worker(
        self, worker: str, lanes: Sequence[int], spans: Sequence[Span], height: float, versions: tuple[int, int]
    ) -> None:
        """Draw the slots of one worker, and above the slots the worker's other activities, such as weight transfers."""
        self.y += 4
        total = height * len(lanes)
        self._text(LEFT - 8, self.y + total / 2 + 6, worker if len(worker) <= 20 else f"{worker[:19]}…", "end")
        self._bars([s for s in spans if s.lane == ASIDE and s.name in COLOURS], 3)
        self.y += 4
        self._rect(LEFT, self.y, WIDTH - LEFT - RIGHT, total, RULE, 0.35)
        row = {lane: index for index, lane in enumerate(lanes)}
        bar_height = height - 0.5 if height >= 3 else height
        paths: dict[tuple[str, bool], list[str]] = {}
        aborted = []
        for span in spans:
            if span.name != "generate" or span.lane not in row:
                continue
            y = self.y + row[span.lane] * height
            is_lost = span.facts.get("ended") in ("lost", "dropped")
            for version, begin_s, end_s in _pieces(span):
                x, end = self.x(begin_s), self.x(end_s)
                bar = f"M{x:.1f} {y:.1f}h{max(0.4, end - x - 0.5):.1f}v{bar_height:.2f}H{x:.1f}z"
                paths.setdefault((_colour(version, *versions), is_lost), []).append(bar)
            if span.facts.get("ended") == "abort" and span.end_s < self.window.end_s:
                aborted.append(f"M{self.x(span.end_s) - 1:.1f} {y:.1f}v{bar_height:.2f}")
        for (colour, is_lost), bars in sorted(paths.items()):
            faint = ' fill-opacity="0.35"' if is_lost else ""
            self.parts.append(f'<path fill="{colour}"{faint} d="{"".join(bars)}"/>')
        if aborted:
            self.parts.append(f'<path style="stroke:{INK}" stroke-width="1.4" fill="none" d="{"".join(aborted)}"/>')
        self.y += total

    def _busy(self, shown: Sequence[Span], slots: int) -> None:
        height, count = 56.0, 600
        self.y += 12
        if not slots:
            return
        busy = busy_slots(shown, self.window.begin_s, self.window.end_s, count)
        wide = (WIDTH - LEFT - RIGHT) / count
        tops = [self.y + height * (1 - min(1.0, value / slots)) for value in busy]
        line = "".join(f"V{top:.1f}h{wide:.3f}" for top in tops)
        self._rect(LEFT, self.y, WIDTH - LEFT - RIGHT, height, RULE, 0.35)
        area = f"M{LEFT} {self.y + height:.1f}{line}V{self.y + height:.1f}z"
        self.parts.append(f'<path style="fill:var(--s1,#0072b2)" fill-opacity="0.75" d="{area}"/>')
        self._text(LEFT - 8, self.y + 9, f"{slots:,}", "end")
        self._text(LEFT - 8, self.y + height / 2 + 4, "busy slots", "end")
        self._text(LEFT - 8, self.y + height, "0", "end")
        self.y += height

    def _steps(self, top: float) -> None:
        """Draw lines at the start of training and at the publication of each step."""
        labelled = -1e9
        for step in self.window.steps:
            for at_s, dash in ((step.train_s, "2 3"), (step.end_s, "none")):
                if self.window.begin_s < at_s < self.window.end_s:
                    x = self.x(at_s)
                    self.parts.append(
                        f'<path style="stroke:{INK_2}" stroke-width="0.8" stroke-dasharray="{dash}" '
                        f'd="M{x:.1f} {top - 2:.1f}V{self.y:.1f}"/>'
                    )
            middle = (self.x(step.begin_s) + self.x(step.end_s)) / 2
            if middle - labelled > 48:
                self._text(middle, top - 5, f"step {step.number}", "middle")
                labelled = middle

    def _axis(self) -> None:
        window = self.window
        begin_s, end_s = window.begin_s - window.zero_s, window.end_s - window.zero_s
        self.y += 14
        for tick in MaxNLocator(10, steps=[1, 2, 5, 10]).tick_values(begin_s, end_s):
            x = self.x(window.zero_s + tick)
            if begin_s <= tick and x < WIDTH - 170:  # the label of the axis is at the right end
                self._text(x, self.y, f"{tick:,.10g}", "middle")
        self._text(WIDTH - RIGHT, self.y, "seconds since the start", "end")
        self.y += 6

    def _rect(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} style="fill:{fill}"{faint}/>')

    def _text(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        safe = escape(words, quote=False)
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{INK_2}">{safe}</text>')


def _colour(version: int, low: int, high: int) -> str:
    return ramp((version - low) / (high - low) if high > low else 0.4)


def _versions(span: Span) -> list[tuple[int, float]]:
    """Return the policy versions of a lease, oldest first, each with its share of the tokens."""
    if span.name != "generate":
        return []
    several = span.facts.get("versions")
    if isinstance(several, dict) and (total := sum(several.values())):
        return sorted((int(version), tokens / total) for version, tokens in several.items())
    return [(int(span.facts.get("version", 0)), 1.0)]


def _pieces(span: Span) -> Iterator[tuple[int, float, float]]:
    """Yield (version, begin_s, end_s) for each policy version of a lease. Times are in proportion to tokens."""
    at_s = span.begin_s
    for version, share in _versions(span):
        end_s = at_s + share * (span.end_s - span.begin_s)
        yield version, at_s, end_s
        at_s = end_s


def _chosen_rows(spans: Sequence[Span]) -> list[tuple[str, list[int]]]:
    """Return the workers and slots to draw: all, or an evenly spaced subset if a chart of all would be unreadable."""
    lanes = evenly(_lanes(spans), MAX_WORKERS)
    share = min(1.0, MAX_ROWS / max(1, sum(count for _, count in lanes)))
    return [(worker, evenly(range(count), max(1, int(count * share)))) for worker, count in lanes]
