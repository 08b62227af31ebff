"""The picture of the slots: everybody is in it, colours are in the order of versions, and windows tell no lies."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np
import pytest

from baton.records.run_directory import RunDirectory
from baton.records.trace import ASIDE, BEGIN, Span
from baton.views.pages.report import render
from baton.views.pages.slots import MAX_ROWS, MAX_WORKERS, busy_slots, ramp, slot_picture, slot_pictures
from baton.views.pages.windows import Window, choose_windows, steps_of
from tests.views.report_cases import changeable_run as changeable_run


def stage(name: str, begin_s: float, end_s: float, step: int) -> Span:
    return Span(name, "trainer", 0, begin_s, end_s, {"step": step})


def lease(actor: str, lane: int, begin_s: float, end_s: float, version: int = 0, **facts: object) -> Span:
    return Span("generate", actor, lane, begin_s, end_s, {"version": version, "tokens": 4, "ended": "finish", **facts})


def a_run(
    num_steps: int, *, workers: Sequence[str] = ("node#0", "node#1"), slow: int = 0, at_s: float = 0.0
) -> list[Span]:
    """Steps of 10 s (one of them of 30): 6 s of generation in two slots of each worker, training, a publication."""
    spans = [Span(BEGIN, "trainer", 0, at_s, at_s)]
    for step in range(1, num_steps + 1):
        long_s = 26.0 if step == slow else 6.0
        for worker in workers:
            spans += [lease(worker, 0, at_s, at_s + long_s, step - 1), lease(worker, 1, at_s, at_s + 2, step - 1)]
        spans.append(stage("wait_for_batch", at_s, at_s + long_s, step))
        spans.append(stage("train", at_s + long_s, at_s + long_s + 3, step))
        spans.append(stage("publish", at_s + long_s + 3, at_s + long_s + 4, step))
        at_s += long_s + 4
    return spans


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def words(svg: str) -> list[str]:
    return [text.text or "" for text in drawn(svg).iter("text")]


def bars(svg: str) -> dict[str, int]:
    """Number of bars by colour."""
    found: dict[str, int] = {}
    for path in drawn(svg).iter("path"):
        if "fill" in path.attrib and path.attrib["fill"].startswith("#"):
            found[path.attrib["fill"]] = found.get(path.attrib["fill"], 0) + path.attrib["d"].count("M")
    return found


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_all_workers_and_all_leases_are_in_the_picture_each_in_the_colour_of_its_version():
    names = [f"engine process {i}" for i in range(12)]
    spans = [*a_run(3, workers=names), Span("fetch", names[0], ASIDE, 10.0, 10.5, {"version": 1})]
    (picture,) = slot_pictures(spans)
    shown = words(picture.svg)
    assert [word for word in shown if word.startswith("engine")] == names, "in the order of their numbers"
    assert {"trainer", "step 1", "step 2", "step 3", "busy slots", "24", "fetch", "train"} <= set(shown)
    assert bars(picture.svg) == {ramp(0.0): 24, ramp(0.5): 24, ramp(1.0): 24}


def test_a_lease_over_two_versions_has_both_colours_in_the_share_of_their_tokens():
    spans = [lease("node", 0, 0.0, 8.0, 4, versions={"3": 30, "4": 10}), stage("train", 0.0, 8.0, 1)]
    (picture,) = slot_pictures(spans)
    old, new = (
        next(p.attrib["d"] for p in drawn(picture.svg).iter("path") if p.attrib.get("fill") == ramp(share))
        for share in (0.0, 1.0)
    )
    left = [float(re.match(r"M([\d.]+)", d)[1]) for d in (old, new)]  # type: ignore[index]
    wide = [float(re.search(r"h([\d.]+)", d)[1]) for d in (old, new)]  # type: ignore[index]
    assert left[0] + 0.75 * (1180 - 132 - 10) == pytest.approx(left[1], abs=0.2)
    assert wide[0] / wide[1] == pytest.approx(3, rel=0.02)


def test_what_was_lost_is_faint_and_what_was_put_down_is_marked():
    ends = [
        lease("node", 0, 0.0, 4.0, ended="lost"),
        lease("node", 1, 0.0, 4.0, ended="abort"),
        lease("node", 2, 0.0, 8.0),
    ]
    (picture,) = slot_pictures([*ends, stage("train", 0.0, 8.0, 1)])
    faint = [p for p in drawn(picture.svg).iter("path") if p.attrib.get("fill-opacity") == "0.35"]
    marks = [p for p in drawn(picture.svg).iter("path") if "--ink," in p.attrib.get("style", "")]
    assert [p.attrib["d"].count("M") for p in (*faint, *marks)] == [1, 1]
    assert {"lost", "aborted"} <= set(words(picture.svg))


def test_newer_versions_are_lighter_all_the_way():
    def light(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    shades = [light(ramp(share)) for share in np.linspace(0, 1, 40)]
    assert shades == sorted(shades)
    assert shades[0] > 0.03, "to be seen on dark ground"
    assert shades[-1] < 0.75, "and on light ground"


def test_slots_at_work_are_counted_by_hand():
    spans = [lease("a", 0, 0.0, 4.0), lease("a", 1, 1.0, 2.0), lease("b", 0, 1.5, 9.0), stage("train", 0.0, 4.0, 1)]
    assert busy_slots(spans, 0.0, 4.0, 4).tolist() == pytest.approx([1.0, 2.5, 2.0, 2.0])
    assert busy_slots(spans, 3.0, 5.0, 2).tolist() == pytest.approx([2.0, 1.0])
    assert busy_slots([], 0.0, 4.0, 2).tolist() == [0.0, 0.0]


def test_the_note_says_how_long_the_tail_is():
    # 4 slots in 10 s: 2 are at work for 6 s, 2 for 2 s: 16 of 40 slot seconds; any for 6 s: 16 of 24; never under 1
    (picture,) = slot_pictures(a_run(1))
    words_of_it = "4 slots, busy 40 % of the time shown, and 67 % of the time in which at least one slot was busy. "
    words_of_it += "During 0 % of that time"
    assert picture.note.startswith(words_of_it)
    (lonely,) = slot_pictures([*a_run(1, workers=[f"node#{i}" for i in range(4)]), lease("node#0", 2, 6.0, 10.0)])
    assert "During 40 % of that time, fewer than a quarter" in lonely.note


def test_a_name_that_is_markup_stays_text():
    (picture,) = slot_pictures(a_run(1, workers=["</svg><script>"]))
    assert "<script>" not in picture.svg
    assert "</svg><script>" in words(picture.svg)


def test_ten_thousand_workers_make_a_picture_of_bounded_size():
    spans = [lease(f"node#{i}", lane, 0.0, 1.0 + lane, i % 3) for i in range(5000) for lane in (0, 1)]
    (picture,) = slot_pictures([*spans, stage("train", 0.0, 4.0, 1)])
    shown = [word for word in words(picture.svg) if word.startswith("node#")]
    assert len(shown) == MAX_WORKERS
    assert (shown[0], shown[-1]) == ("node#0", "node#4999")
    assert sum(bars(picture.svg).values()) <= MAX_ROWS
    assert len(picture.svg) < 200_000
    assert picture.note.startswith("10,000 slots, "), "and all are counted"
    assert picture.note.endswith("The chart shows 80 slots of 40 of the run's 5,000 workers.")


# ---- which part is drawn ---------------------------------------------------------------------------------------------


def test_steps_last_from_the_wish_for_a_batch_to_the_publication():
    spans = [*a_run(2), stage("eval", 20.0, 25.0, 2)]
    assert [(s.number, s.begin_s, s.train_s, s.end_s) for s in steps_of(spans)] == [(1, 0, 6, 10), (2, 10, 16, 20)]


def test_of_a_long_run_the_first_the_slowest_and_the_last_steps_are_shown():
    windows = choose_windows(a_run(40, slow=17))
    assert [[step.number for step in w.steps] for w in windows] == [[1, 2, 3], [16, 17, 18], [38, 39, 40]]
    assert [(w.begin_s, w.end_s) for w in windows] == [(0, 30), (150, 200), (390, 420)]
    assert "17" in windows[1].title


def test_no_window_reaches_over_the_time_between_two_processes():
    spans = [*a_run(2), *a_run(4, at_s=86_400.0)]
    windows = choose_windows(spans)
    assert [[step.begin_s for step in w.steps] for w in windows] == [
        [0, 10],
        [86_400, 86_410],
        [86_410, 86_420, 86_430],
    ]
    assert all(w.end_s - w.begin_s <= 30 for w in windows)
    assert all(s.begin_s >= w.zero_s for w in windows for s in w.spans), "time is that of the process"


def test_steps_at_the_end_in_which_nothing_is_generated_are_left_out_by_name():
    spans = a_run(12)
    spans = [s for s in spans if s.name != "generate" or s.begin_s < 70]
    windows = choose_windows(spans)
    assert [step.number for step in windows[-1].steps] == [5, 6, 7]
    assert "The last steps with generation" in windows[-1].title


def test_a_trace_without_train_steps_is_shown_whole_and_an_empty_one_not_at_all():
    (window,) = choose_windows([lease("a", 0, 5.0, 6.0), lease("a", 0, 6.0, 9.0)])
    assert (window.begin_s, window.end_s) == (5.0, 9.0)
    assert slot_pictures([]) == []
    assert drawn(slot_picture(Window("", [], (), 0.0, 1.0, 0.0))).tag == "svg"


def test_the_page_of_a_run_has_the_picture_and_that_of_a_run_without_a_trace_has_not(run: RunDirectory):
    page = render(run)
    assert "Slots over time" in page
    assert 'class="slots"' in page
    (run.path / "trace.jsonl").unlink()
    assert "Slots over time" not in render(run)


def test_a_simulation_that_traces_no_waiting_has_steps_too():
    spans = [lease("engine 0", 0, 0.0, 6.0), lease("engine 0", 0, 10.0, 18.0, 1)]
    for version, at_s in ((1, 6.0), (2, 18.0)):
        spans.append(Span("train", "trainer", 0, at_s, at_s + 3, {"version": version}))
        spans.append(Span("publish", "trainer", 0, at_s + 3, at_s + 4, {"version": version}))
    spans.append(Span("prefill", "engine 0", ASIDE, 0.0, 0.5, {"tokens": 90}))
    assert [(s.number, s.begin_s, s.train_s, s.end_s) for s in steps_of(spans)] == [(1, 0, 6, 10), (2, 10, 18, 22)]
    (picture,) = slot_pictures(spans)
    assert {"step 1", "step 2", "prefill"} <= set(words(picture.svg))
