"""Verdicts on a simulated pipeline with known bottlenecks: the right stage is named, the promised gain comes."""

from __future__ import annotations

import ast
import json
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from myxtts.config import DataSettings, Settings, TrainingSettings
from myxtts.observe.breakdown import Evidence
from myxtts.observe.findings import CODES, Verdict, judge
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import Counter, Span, StepTime, step_timing

ROOT = Path(__file__).parent.parent
PROFILING = ROOT / "docs" / "profiling.md"


@dataclass
class Line:
    """A pipeline with the times of its stages in ms, simulated batch by batch with its rings and queues."""

    gather: float = 4.0
    upload: float = 1.0
    encode: float = 2.0
    handoff: float = 0.0
    train: float = 20.0
    launch: float = 1.0
    gather_lag: float = 0.0
    encode_lag: float = 0.0
    """Until the thread of that stage gets the processor."""
    workers: int = 2
    host_ring: int = 8
    model_ring: int = 3
    on_gpu: bool = True
    uneven: tuple[int, float] = (1, 1.0)
    """Every so many batches takes so many times as long to gather."""
    late: dict[int, float] = field(default_factory=dict)
    """Steps before which the host does something else, for so long."""
    compiled: tuple[int, ...] = ()
    """Those of `late` in which the step is compiled again."""
    saved: bool = False
    """Whether `late` is a pause that leaves a span."""
    jitter: float = 0.03
    grows_mb: float = 0.0
    batches: int = 120

    def run(self) -> tuple[list[Span], list[Counter], list[StepTime]]:
        rng = random.Random(0)
        ends: dict[str, list[float]] = {name: [] for name in ("gather", "upload", "encode", "handoff", "train")}
        free, host_free, graphs = [0.0] * self.workers, 0.0, 1
        spans: list[Span] = []
        counters: list[Counter] = []
        steps: list[StepTime] = []
        taken: list[float] = []

        def work(name: str, track: str, after: list[float], length: float, batch: int) -> float:
            start = max(after)
            length *= 1 + rng.uniform(-self.jitter, self.jitter)
            ends[name].append(start + length)
            spans.append(span(name, track, start, length, batch, device=self.on_gpu and name != "gather"))
            return start

        def end(name: str, batch: int) -> float:
            return ends[name][batch] if 0 <= batch < len(ends[name]) else 0.0

        stages = ["gather", "upload", "encode", *(["handoff"] if self.handoff else [])]
        for m in range(self.batches):
            thread = free.index(min(free))
            slow = self.uneven[1] if m % self.uneven[0] == self.uneven[0] - 1 else 1.0
            begin = max(free[thread], end("upload", m - self.host_ring)) + self.gather_lag
            work("gather", f"gather-{thread}", [begin], self.gather * slow, m)
            free[thread] = end("gather", m)
            work(
                "upload",
                "upload stream",
                [end("gather", m), end("upload", m - 1), end("encode", m - 2)],
                self.upload,
                m,
            )
            room = end("handoff", m - 3) if self.handoff else end("train", m - self.model_ring)
            ready = max(end("upload", m), end("encode", m - 1), room) + self.encode_lag
            last = work("encode", "encode stream", [ready], self.encode, m)
            if self.handoff:
                room = end("train", m - self.model_ring)
                last = work(
                    "handoff", "handoff stream", [end("encode", m), end("handoff", m - 1), room], self.handoff, m
                )
            if m in self.late:
                host_free = max(host_free, end("train", m - 1))
                if self.saved:
                    spans.append(span("save", "trainer", host_free, self.late[m], -1))
                host_free += self.late[m]
                graphs += m in self.compiled
            ready = last if self.on_gpu else end(stages[-1], m)
            waited = max(host_free, ready)
            spans.append(span("wait", "trainer", host_free, waited - host_free, m))
            taken.append(waited)
            launched = waited + self.launch
            before = end("train", m - 1)
            start = work("train", "model stream", [launched, before, end(stages[-1], m)], self.train, m)
            spans.append(span("update", "model stream", end("train", m), 0.0, m, device=self.on_gpu))
            host_free = max(launched, end("train", m - 2)) if self.on_gpu else end("train", m)
            gap = max(start - before, 0.0) if m and not self.saved else 0.0
            steps.append(StepTime(m, gap + end("train", m) - start, gap))
            at_us = us(end("train", m))
            counters.append(Counter("recompilations", at_us, graphs))
            counters.append(Counter("model allocated MB", at_us, 4000 + self.grows_mb * m))
        passed = list(zip(ends["gather"], ends["upload"], strict=True))
        for at in taken:
            counters.append(Counter("host ring", us(at), sum(begin <= at < end for begin, end in passed)))
        return spans, counters, steps

    def speed(self) -> float:
        """Batches per second behind the warm-up."""
        steps = self.run()[2][10:]
        return 1000 / step_timing(steps).mean_ms

    def evidence(self, **more: Any) -> Evidence:
        spans, counters, steps = self.run()
        known: dict[str, Any] = {
            "spans": spans,
            "counters": counters,
            "steps": steps,
            "depths": {"host": self.host_ring, "model": self.model_ring},
            "cores": 16,
        }
        if self.on_gpu:
            known |= {"data_gpu": 0, "model_gpu": 1 if self.handoff else 0, "num_gpus": 2 if self.handoff else 1}
        return Evidence(**(known | more))


def us(milliseconds: float) -> int:
    return round(1000 * milliseconds)


def span(name: str, track: str, start: float, length: float, batch: int, device: bool = False) -> Span:
    return Span(name, track, us(start), us(start + length) - us(start), batch, device)


def settings(training: dict[str, Any] | None = None, **data: Any) -> Settings:
    return Settings(data=DataSettings(**data), training=TrainingSettings(**(training or {})))


def alarms(verdict: Verdict) -> list[str]:
    return [found.code for found in verdict.findings if found.level in ("warn", "fail")]


@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
def test_nothing_is_wrong_with_a_feed_that_keeps_up(on_gpu: bool) -> None:
    verdict = judge(Line(on_gpu=on_gpu).evidence())
    assert alarms(verdict) == []
    assert verdict.bound == "train" and verdict.findings[-1].code == "feed-keeps-up"
    assert verdict.sentence.startswith("Training itself is the limit") and "gain nothing" in verdict.sentence
    assert verdict.shares["compute"] > 0.93


BOTTLENECKS: list[tuple[str, str, Line, Settings]] = [
    ("gather-slow", "gather", Line(gather=60), settings()),
    ("workers-few", "gather", Line(gather=14, workers=1, train=8), settings(batch_size=32)),
    ("native-loading-off", "gather", Line(gather=500, workers=16), settings(native_loading=False)),
    ("gather-uneven", "gather", Line(gather=5, workers=1, uneven=(25, 60)), settings()),
    ("host-ring-small", "gather", Line(gather=18, upload=8, workers=2, host_ring=1), settings()),
    ("upload-unpinned", "upload", Line(upload=30), settings(enhanced_gpu_prefetch=False)),
    ("upload-slow", "upload", Line(upload=30), settings()),
    ("encode-slow", "encode", Line(encode=32), settings()),
    ("handoff-slow", "handoff", Line(handoff=40), settings()),
]


@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize(("code", "stage", "line", "chosen"), BOTTLENECKS, ids=[row[0] for row in BOTTLENECKS])
def test_the_stage_that_the_model_waits_for_is_found_first(
    code: str, stage: str, line: Line, chosen: Settings, on_gpu: bool
) -> None:
    verdict = judge(replace(line, on_gpu=on_gpu).evidence(settings=chosen))
    assert verdict.bound == stage
    assert verdict.findings[0].code == code and verdict.findings[0].level == "warn"
    assert f"bound by {stage}" in verdict.sentence
    share = "copy" if stage in ("upload", "handoff") else "wait"
    assert verdict.shares[share] > 0.05
    assert max(verdict.waits, key=lambda name: verdict.waits[name]) == stage


@pytest.mark.parametrize(("line", "chosen"), [row[2:] for row in BOTTLENECKS], ids=[row[0] for row in BOTTLENECKS])
def test_the_shares_add_to_one_and_explain_all_of_the_time(line: Line, chosen: Settings) -> None:
    verdict = judge(line.evidence(settings=chosen))
    assert sum(verdict.shares.values()) == pytest.approx(1, abs=1e-9)
    assert all(share >= 0 for share in verdict.shares.values())
    assert sum(verdict.waits.values()) == pytest.approx(verdict.shares["wait"] + verdict.shares["copy"])
    busy = sum(span.duration_us for span in line.run()[0] if span.name == "train" and span.batch >= 5)
    total = 1000 * sum(step.step_ms for step in line.run()[2][5:])
    assert verdict.shares["compute"] == pytest.approx(busy / total, abs=0.01)


MENDED = {
    "gather-slow": {"gather": 1.0},
    "workers-few": {},
    "native-loading-off": {"gather": 1.0},
    "gather-uneven": {},
    "upload-unpinned": {"upload": 1.0},
    "upload-slow": {"upload": 1.0},
    "encode-slow": {"encode": 1.0},
    "handoff-slow": {"handoff": 1.0},
}


@pytest.mark.parametrize("code", MENDED)
def test_the_promised_gain_comes_when_the_advice_is_followed(code: str) -> None:
    line, chosen = next((line, chosen) for name, _, line, chosen in BOTTLENECKS if name == code)
    found = judge(line.evidence(settings=chosen)).findings[0]
    mended = replace(line, **MENDED[code])
    if found.setting == "data.num_workers":
        mended = replace(line, workers=found.value)
    if found.setting == "data.prefetch_buffer_size":
        mended = replace(line, host_ring=found.value)
    assert found.gain is not None and found.gain > 1.05
    assert found.gain == pytest.approx(mended.speed() / line.speed(), rel=0.15)


def test_the_slowest_of_random_stages_is_the_one_that_bounds() -> None:
    rng = random.Random(1)
    judged = 0
    for _ in range(100):
        times = {"gather": rng.uniform(1, 60), "upload": rng.uniform(0.2, 20), "encode": rng.uniform(0.5, 30)}
        times |= {"train": rng.uniform(5, 40)}
        line = Line(**times, workers=rng.choice([1, 2, 4]), host_ring=16, on_gpu=rng.random() < 0.5, launch=0.2)
        *_, second, slowest = sorted(times, key=lambda name: period(line, name))
        if period(line, slowest) > 1.3 * period(line, second):
            verdict = judge(line.evidence())
            assert verdict.bound == slowest, line
            assert sum(verdict.shares.values()) == pytest.approx(1, abs=1e-9)
            assert slowest != "train" or not alarms(verdict), line
            judged += 1
    assert judged > 50


def period(line: Line, stage: str) -> float:
    """Time between two batches when a stage alone decides."""
    alone: float = getattr(line, stage)
    return alone / line.workers if stage == "gather" else alone


def test_full_buffers_do_not_hide_a_stage_that_is_slower_than_the_model() -> None:
    spans = [part for part in Line(gather=40, workers=1, host_ring=200).run()[0] if part.name == "gather"]
    for number in range(100):  # all of these were made long before
        spans += [span("wait", "trainer", 1000 + 20.0 * number, 0, number + 1000)]
        spans += [span("train", "model stream", 1000 + 20.0 * number, 20, number, True)]
    verdict = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0, cores=4, settings=settings(batch_size=64)))
    assert alarms(verdict) == ["buffers-drain"] and "50 %" in verdict.findings[0].why
    assert verdict.findings[0].setting == "data.num_workers"


def test_a_gain_is_never_more_than_the_next_slow_stage_allows() -> None:
    verdict = judge(Line(gather=120, workers=1, encode=50).evidence(settings=settings()))
    assert verdict.bound == "gather"
    assert verdict.findings[0].gain == pytest.approx(120 / 50, rel=0.1)


def test_headspace_is_what_replaying_one_batch_measured() -> None:
    line = Line(gather=64)
    replayed = [StepTime(number, 20.0, 0.0) for number in range(60)]
    verdict = judge(line.evidence(replayed=replayed))
    assert verdict.headspace_measured and verdict.headspace == pytest.approx(32 / 20, rel=0.03)
    assert "a perfect feed would be 1.6× faster" in verdict.sentence
    reckoned = judge(line.evidence())
    assert not reckoned.headspace_measured and reckoned.headspace == pytest.approx(32 / 20, rel=0.05)


def test_a_gain_never_exceeds_what_replaying_has_shown() -> None:
    replayed = [StepTime(number, 30.0, 0.0) for number in range(60)]
    assert judge(Line(gather=64).evidence(replayed=replayed)).findings[0].gain == pytest.approx(32 / 30, rel=0.03)


def test_headspace_is_not_what_other_causes_cost() -> None:
    late = dict.fromkeys(range(15, 120, 20), 300.0)
    replayed = [StepTime(number, 20.0, 0.0) for number in range(60)]
    verdict = judge(Line(late=late, compiled=tuple(late)).evidence(replayed=replayed))
    assert verdict.headspace == pytest.approx(1, abs=0.03) and "perfect feed" not in verdict.sentence


def test_a_stage_that_is_waited_for_and_idle_is_late_and_not_slow() -> None:
    verdict = judge(Line(encode_lag=30).evidence(cores=4))
    assert verdict.bound == "encode"
    assert verdict.findings[0].code == "pipeline-late"
    assert (verdict.findings[0].setting, verdict.findings[0].value) == ("data.num_workers", 3)
    verdict = judge(Line(gather_lag=30, workers=1).evidence(cores=4))
    assert verdict.bound == "gather" and verdict.findings[0].code == "pipeline-late"


def test_batches_without_spans_starve_the_model_for_reasons_unknown() -> None:
    spans = [part for part in Line(gather=64).run()[0] if part.name in ("train", "update", "wait")]
    verdict = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0))
    assert verdict.findings[0].code == "starving" and verdict.shares["wait"] == pytest.approx(12 / 32, abs=0.05)


def test_batches_uploaded_on_demand_are_one_finding_with_one_setting() -> None:
    spans: list[Span] = []
    for number in range(60):
        at = 40.0 * number
        spans += [span("gather", "gather-0", at - 200, 3, number), span("wait", "trainer", at + 1, 0, number)]
        spans += [span("upload", "upload stream", at + 1, 9, number, True)]
        spans += [span("encode", "encode stream", at + 10, 10, number, True)]
        spans += [span("train", "model stream", at + 20, 20, number, True)]
    verdict = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0, settings=settings(prefetch_to_gpu=False)))
    assert alarms(verdict)[0] == "upload-late" and "encode-slow" not in alarms(verdict)
    assert verdict.findings[0].setting == "data.prefetch_to_gpu" and verdict.findings[0].value is True
    assert verdict.findings[0].gain == pytest.approx(2, rel=0.05)


def test_a_front_end_in_the_stream_of_the_training_step_is_in_its_way() -> None:
    spans: list[Span] = []
    for number in range(60):  # the batches are ready long before, and the encoding of a later one lies between
        at = 30.0 * number
        spans += [
            span("encode", "encode stream", at, 10, number + 3, True),
            span("wait", "trainer", at, 0, number),
        ]
        spans += [span("train", "model stream", at + 10, 20, number, True)]
    chosen = settings(optimize_cpu_gpu_overlap=False)
    verdict = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0, settings=chosen))
    assert verdict.findings[0].code == "encode-serial"
    assert verdict.shares["wait"] == pytest.approx(1 / 3, abs=0.02)


def test_a_front_end_behind_slow_copies_in_its_own_stream_is_not_what_is_slow() -> None:
    spans: list[Span] = []
    for number in range(60):  # a batch is encoded only when the copy of the next one is through
        at = 30.0 * number
        spans += [span("gather", "gather-0", at - 200, 3, number)]
        spans += [span("upload", "upload stream", at, 28, number, True)]
        spans += [span("encode", "encode stream", at + 27 + 30, 3, number, True)]
        spans += [
            span("wait", "trainer", at + 36, 20, number),
            span("train", "model stream", at + 60, 6, number, True),
        ]
    unpinned = settings(enhanced_gpu_prefetch=False)
    verdict = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0, settings=unpinned))
    assert verdict.bound == "upload" and verdict.findings[0].code == "upload-unpinned"
    busy = [part._replace(start_us=part.start_us - us(24), duration_us=us(27)) if part.name == "encode" else part
            for part in spans]  # fmt: skip
    busy = [part._replace(duration_us=us(2)) if part.name == "upload" else part for part in busy]
    assert judge(Evidence(spans=busy, data_gpu=0, model_gpu=0, settings=unpinned)).bound == "encode"


def test_roles_that_share_a_gpu_slow_each_other_down_without_any_gap() -> None:
    replayed = [StepTime(number, 16.0, 0.0) for number in range(60)]
    verdict = judge(Line().evidence(replayed=replayed, num_gpus=2))
    assert verdict.findings[0].code == "roles-compete"
    assert verdict.findings[0].setting == "data.data_gpu" and verdict.findings[0].value == 1
    assert verdict.findings[0].gain == pytest.approx(20 / 16, rel=0.03)
    assert verdict.sentence.startswith("Training is slower beside the pipeline than alone")
    assert "same GPU" in verdict.sentence and "1.3× as fast; set data.data_gpu to 1." in verdict.sentence
    assert "perfect feed" not in verdict.sentence and "itself" not in verdict.sentence
    fed_on_cpu = judge(Line(on_gpu=False).evidence(replayed=replayed))
    assert "same processor" in fed_on_cpu.sentence and "perfect feed" not in fed_on_cpu.sentence
    on_cpu = judge(Line(on_gpu=False, gather=46).evidence(replayed=replayed))
    assert [found.level for found in on_cpu.findings[:2]] == ["warn", "info"]
    assert on_cpu.findings[1].code == "roles-compete" and "processor" in on_cpu.findings[1].why


TINY = Line(gather=1, upload=0.1, encode=1.5, train=5.8, launch=0.2)
"""As measured on a real GPU: a front end that is busy for a quarter of the time, and steps of 5 ms when alone."""


def test_competition_is_found_where_the_pipeline_works_long_enough_to_explain_it() -> None:
    verdict = judge(TINY.evidence(replayed=[StepTime(number, 5.0, 0.0) for number in range(100)], num_gpus=2))
    assert verdict.findings[0].code == "roles-compete" and "16 % longer" in verdict.findings[0].what
    assert verdict.findings[0].gain == pytest.approx(5.8 / 5, rel=0.03)
    large = Line(upload=0.3, encode=0.8, train=112, batches=40)
    for alone in (110.0, 70.0):  # too little to matter; more than a front end of 1 ms can take
        verdict = judge(large.evidence(replayed=[StepTime(number, alone, 0.0) for number in range(40)]))
        assert "roles-compete" not in alarms(verdict)
        assert verdict.sentence.startswith("Training itself is the limit")
        assert verdict.headspace == pytest.approx(112 / alone, rel=0.01)


def test_a_noisy_processor_is_no_competition() -> None:
    """The first steps of a user: 48 % slower, with a front end that is busy for a twentieth of the time."""
    line = Line(gather=0.2, upload=0.1, encode=0.9, launch=0.2, on_gpu=False)
    verdict = judge(line.evidence(replayed=[StepTime(number, 13.5, 0.0) for number in range(60)]))
    assert "roles-compete" not in [found.code for found in verdict.findings]
    assert verdict.headspace is not None and verdict.headspace < 1.05
    assert verdict.sentence.startswith("Training itself is the limit") and "alone" not in verdict.sentence


@pytest.mark.parametrize("beside", [120, 8], ids=["many beside", "few beside"])
@pytest.mark.parametrize("alone", [60, 4], ids=["many alone", "few alone"])
def test_competition_takes_enough_steps_on_either_side(beside: int, alone: int) -> None:
    replayed = [StepTime(number, 16.0, 0.0) for number in range(alone)]
    verdict = judge(Line(batches=beside).evidence(replayed=replayed, warmup_steps=0))
    assert ("roles-compete" in alarms(verdict)) == ("slower beside" in verdict.sentence)
    assert ("roles-compete" in alarms(verdict)) == (beside == 120 and alone == 60)


def test_competition_is_not_found_within_the_spread_of_the_steps() -> None:
    restless = [StepTime(number, 16.0 if number % 5 < 3 else 24.0, 0.0) for number in range(60)]
    verdict = judge(Line().evidence(replayed=restless))
    assert "roles-compete" not in alarms(verdict) and "slower beside" not in verdict.sentence
    found = 0
    for seed in range(100):
        rng = random.Random(seed)
        spans, at = [], 0.0
        for number in range(12):
            length = 20 * rng.lognormvariate(0, 0.3)
            spans += [span("encode", "encode stream", at, 8, number + 3), span("wait", "trainer", at, 0, number)]
            spans += [span("train", "model stream", at, length, number)]
            at += length
        replayed = [StepTime(number, 20 * rng.lognormvariate(0, 0.3), 0.0) for number in range(12)]
        verdict = judge(Evidence(spans=spans, replayed=replayed, warmup_steps=0))
        found += "roles-compete" in [one.code for one in verdict.findings]
    assert found <= 3


@pytest.mark.parametrize(("on_gpu", "helps"), [(True, "A second GPU would"), (False, "A GPU would")])
def test_what_no_setting_changes_is_said_so(on_gpu: bool, helps: str) -> None:
    line = replace(TINY, on_gpu=on_gpu)
    verdict = judge(line.evidence(replayed=[StepTime(number, 5.0, 0.0) for number in range(100)]))
    found = next(one for one in verdict.findings if one.code == "roles-compete")
    assert (found.fix, found.setting, found.gain) == ("", "", None)
    slow = judge(replace(line, encode=12).evidence()).findings[0]
    assert slow.code == "encode-slow" and slow.fix.startswith(helps)


@pytest.mark.parametrize(("gpu", "place"), [(0, "this GPU"), (None, "this machine")], ids=["gpu", "cpu"])
def test_other_processes_are_looked_for_where_training_runs(gpu: int | None, place: str) -> None:
    spans, at = [], 0.0
    for number in range(60):
        length = 20.0 if number % 2 else 35.0
        spans += [span("wait", "trainer", at, 0, number), span("train", "model stream", at, length, number)]
        at += length
    verdict = judge(Evidence(spans=spans, data_gpu=gpu, model_gpu=gpu))
    assert alarms(verdict) == ["uneven-steps"]
    assert verdict.findings[0].why.endswith(f"look for other processes on {place}.")


def test_a_copy_from_pageable_memory_that_keeps_the_program_from_launching_is_to_blame() -> None:
    """As traced on a real GPU: between training and update nothing is launched until a later batch is copied."""
    spans = [span("wait", "trainer", 0, 0, 0), span("train", "model stream", 0, 8, 0, True)]
    for number in range(1, 60):
        at = 34.0 * number
        spans += [span("gather", f"gather-{number % 4}", at - 90, 4, number + 14)]
        spans += [span("upload", "upload stream", at - 32, 31, number + 14, True)]
        spans += [span("encode", "encode stream", at - 1, 3, number + 14, True)]
        spans += [span("update", "model stream", at - 1, 2, number - 1, True)]
        spans += [
            span("wait", "trainer", at + 1, 0, number),
            span("train", "model stream", at + 1, 8, number, True),
        ]
    replayed = [StepTime(number, 10.0, 0.0) for number in range(60)]
    evidence = Evidence(spans=spans, data_gpu=0, model_gpu=0, replayed=replayed)
    verdict = judge(replace(evidence, settings=settings(enhanced_gpu_prefetch=False)))
    assert verdict.bound == "upload" and alarms(verdict)[0] == "upload-unpinned"
    assert "roles-compete" not in alarms(verdict)
    assert judge(evidence).bound == "host"


def test_single_long_steps_are_no_competition_between_the_roles() -> None:
    """A recompilation lies inside the span of its step, and is no work that the pipeline slows down."""
    replayed = [StepTime(number, 20.0, 0.0) for number in range(60)]
    spans, _, _ = Line().run()
    later = 0
    for place, part in enumerate(spans):
        spans[place] = part = part._replace(start_us=part.start_us + later)
        if part.name == "train" and part.batch % 15 == 14:
            spans[place] = part._replace(duration_us=part.duration_us + us(600))
            later += us(600)
    found = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0, replayed=replayed, recompilations=8))
    assert "roles-compete" not in alarms(found)


def test_a_validation_is_one_pause_though_batches_are_copied_meanwhile() -> None:
    late = dict.fromkeys(range(20, 120, 20), 400.0)
    line, chosen = Line(late=late, saved=True), {"save_step": 20, "val_step": 1000}
    evidence = line.evidence(settings=settings(chosen, enhanced_gpu_prefetch=False))
    pauses = [part for part in evidence.spans if part.name == "save"]
    copies = [
        span("upload", "upload stream", part.start_us / 1000 + 20 * number, 5.5, 200 + number, True)
        for part in pauses
        for number in range(1, 20)
    ]
    verdict = judge(replace(evidence, spans=[*evidence.spans, *copies]))
    assert verdict.bound == "save" and verdict.findings[0].code == "save-stall"
    assert "takes 4" in verdict.findings[0].what and "ms, 50 %" in verdict.findings[0].what


def test_a_short_wait_behind_a_pause_does_not_explain_the_pause() -> None:
    late = dict.fromkeys(range(20, 120, 20), 200.0)
    replayed = [StepTime(number, 20.0, 0.0) for number in range(60)]
    evidence = Line(late=late).evidence(settings=settings({"save_step": 20, "val_step": 1000}), replayed=replayed)
    moved = [
        part._replace(duration_us=us(3)) if part.name == "wait" and part.batch in late else part
        for part in evidence.spans
    ]
    verdict = judge(replace(evidence, spans=moved))
    assert {outlier.reason for outlier in verdict.outliers} == {"saving or validation"}
    assert verdict.findings[0].code == "save-stall" and "roles-compete" not in alarms(verdict)


def test_a_gpu_that_is_idle_beside_ready_batches_waits_for_the_host() -> None:
    verdict = judge(Line(late=dict.fromkeys(range(120), 8.0)).evidence())
    assert verdict.bound == "host" and verdict.findings[0].code == "host-late"
    assert verdict.shares["host"] == pytest.approx(8 / 28, abs=0.05)


def test_waiting_for_the_device_inside_a_step_is_named_when_it_was_counted() -> None:
    line = Line(late=dict.fromkeys(range(120), 8.0))
    chosen = settings({"enable_eager_debug": True})
    verdict = judge(line.evidence(syncs_per_step=3.0, settings=chosen))
    assert verdict.findings[0].code == "host-sync" and "3.0 times" in verdict.findings[0].what
    assert verdict.findings[0].setting == "training.enable_eager_debug" and verdict.findings[0].value is False


def test_a_batch_too_small_for_its_launches_is_made_larger_as_far_as_memory_reaches() -> None:
    full, free = (
        [Reading(us(20 * n), 0, utilisation=0.9, memory_used_mb=used, memory_total_mb=24000) for n in range(50)]
        for used in (20000, 5000)
    )
    verdict = judge(Line().evidence(kernel_share=0.4, readings=free))
    assert verdict.bound == "host" and verdict.findings[0].code == "launch-bound"
    assert (verdict.findings[0].setting, verdict.findings[0].value) == ("data.batch_size", 48)
    assert verdict.findings[0].gain == pytest.approx(2.5)
    assert verdict.shares["compute"] == pytest.approx(0.4, abs=0.05)
    assert judge(Line().evidence(kernel_share=0.4, readings=full)).findings[0].value is None
    eager = settings({"enable_graph_mode": False})
    assert (
        judge(Line().evidence(kernel_share=0.4, settings=eager)).findings[0].setting
        == "training.enable_graph_mode"
    )


@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
def test_recompilations_are_counted_and_explain_the_long_steps(on_gpu: bool) -> None:
    late = dict.fromkeys(range(15, 120, 20), 300.0)
    line = Line(late=late, compiled=tuple(late), on_gpu=on_gpu)
    verdict = judge(line.evidence(settings=settings(pad_to_fixed_length=False)))
    assert verdict.recompilations == len(late)
    assert {(outlier.step, outlier.reason) for outlier in verdict.outliers} == {(m, "recompilation") for m in late}
    assert verdict.findings[0].code == "recompiling"
    assert (verdict.findings[0].setting, verdict.findings[0].value) == ("data.pad_to_fixed_length", True)
    assert verdict.findings[0].gain == pytest.approx(Line().speed() / line.speed(), rel=0.15)
    assert verdict.steady_cv < 0.05 < verdict.step_cv


def test_a_count_of_recompilations_is_enough() -> None:
    late = dict.fromkeys(range(15, 120, 20), 300.0)
    verdict = judge(replace(Line(late=late).evidence(), recompilations=6, counters=()))
    assert verdict.recompilations == 6 and verdict.findings[0].code == "recompiling"


@pytest.mark.parametrize("saved", [True, False], ids=["with a span", "by its number"])
@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
def test_a_checkpoint_that_stalls_training_is_saved_less_often(saved: bool, on_gpu: bool) -> None:
    late = dict.fromkeys(range(20, 120, 20), 100.0)
    chosen = settings({"save_step": 20, "val_step": 1000})
    verdict = judge(Line(late=late, saved=saved, on_gpu=on_gpu).evidence(settings=chosen))
    assert verdict.findings[0].code == "save-stall" and verdict.bound == "save"
    assert verdict.shares["other"] == pytest.approx(100 / 500, abs=0.04)
    assert verdict.findings[0].setting == "training.save_step"
    assert 100 / (20 * verdict.findings[0].value) <= 0.0105
    assert verdict.findings[0].gain == pytest.approx(1.25, rel=0.05)


def test_memory_that_grows_with_every_step_is_a_leak_and_one_jump_is_none() -> None:
    verdict = judge(Line(grows_mb=3.0).evidence())
    assert verdict.findings[0].code == "memory-growth" and verdict.findings[0].level == "warn"
    assert verdict.growth_mb["model"] == pytest.approx(3 * 115, rel=0.05)
    jump = [Counter("model allocated MB", us(20 * n), 4000 + 800 * (n > 40)) for n in range(100)]
    assert judge(replace(Line().evidence(), counters=jump)).growth_mb == {}
    read = [Reading(us(20 * n), 0, memory_used_mb=4000 + 3 * n) for n in range(110)]
    assert "gpu" in judge(replace(Line().evidence(), counters=(), readings=read)).growth_mb


def test_a_bursty_feed_makes_the_gpu_oscillate_with_its_period() -> None:
    line = Line(gather=5, workers=1, uneven=(20, 80), batches=300)
    verdict = judge(line.evidence())
    assert verdict.oscillation is not None and verdict.oscillation.source == "spans"
    steps = line.run()[2]
    assert verdict.oscillation.period_s == pytest.approx(20 * step_timing(steps[20:]).mean_ms / 1000, rel=0.1)
    assert verdict.oscillation.depth > 0.5
    assert {"oscillating", "uneven-steps"} <= set(alarms(verdict)) and verdict.findings[0].code == "gather-uneven"
    assert {outlier.reason for outlier in verdict.outliers} == {"waited for gather"}
    others = [step._replace(step=step.step + 700) for step in steps]  # a clock that counts from elsewhere
    assert judge(line.evidence(steps=others)).outliers == verdict.outliers


def test_a_feed_that_is_slow_all_the_time_does_not_oscillate() -> None:
    verdict = judge(Line(gather=32, workers=1, batches=300).evidence())
    assert verdict.oscillation is None and "uneven-steps" not in alarms(verdict)


def test_a_slow_cycle_shows_in_the_utilisation_that_the_driver_tells() -> None:
    readings = [Reading(100_000 * n, 0, utilisation=0.95 if n % 30 < 20 else 0.05) for n in range(300)]
    steps = [StepTime(number, 20.0, 0.0) for number in range(60)]
    verdict = judge(Evidence(steps=steps, readings=readings, data_gpu=0, model_gpu=0))
    assert verdict.oscillation is not None and verdict.oscillation.source == "nvml"
    assert verdict.oscillation.period_s == pytest.approx(3.0, rel=0.05)
    steady = [Reading(100_000 * n, 0, utilisation=random.Random(n).uniform(0.85, 1)) for n in range(300)]
    assert judge(Evidence(steps=steps, readings=steady, data_gpu=0, model_gpu=0)).oscillation is None
    restless = [Reading(100_000 * n, 0, utilisation=random.Random(n).random()) for n in range(300)]
    assert judge(Evidence(steps=steps, readings=restless, data_gpu=0, model_gpu=0)).oscillation is None


def test_utilisation_stands_beside_what_is_really_computed() -> None:
    readings = [Reading(us(20 * n), 0, utilisation=0.93) for n in range(100)]
    verdict = judge(Line().evidence(readings=readings, flops_per_step=1e12, peak_flops=8e14))
    assert verdict.flops_share == pytest.approx(1e12 / 0.02 / 8e14, rel=0.05)
    assert verdict.utilisation == {0: pytest.approx(0.93)}
    told = {found.code: found for found in verdict.findings}
    assert "93 %" in told["utilisation-misleads"].what and "6 %" in told["utilisation-misleads"].what
    assert told["flops-low"].setting == "data.batch_size"


def test_slow_arithmetic_is_mentioned_only_when_it_is_what_bounds() -> None:
    chosen = settings({"enable_xla_compilation": False}, mixed_precision=False)
    verdict = judge(Line().evidence(settings=chosen))
    assert alarms(verdict) == ["precision-off", "graph-off"]
    assert "precision-off" not in alarms(judge(Line(encode=40).evidence(settings=chosen)))


def test_hot_gpus_and_capped_ones_are_told_apart() -> None:
    hot = [Reading(us(20 * n), 0, throttled_by=("thermal slowdown",)) for n in range(50)]
    capped = [Reading(us(20 * n), 0, throttled_by=("power cap",)) for n in range(50)]
    assert "throttled" in alarms(judge(Line().evidence(readings=hot)))
    verdict = judge(Line().evidence(readings=capped))
    assert alarms(verdict) == [] and "power-capped" in [found.code for found in verdict.findings]


def test_rings_tell_how_full_they_were() -> None:
    full, empty = judge(Line().evidence()).rings["host"], judge(Line(gather=64).evidence()).rings["host"]
    assert full.depth == 8 and full.mean_ready > 4 and full.empty_share < 0.05
    assert empty.mean_ready < 1 and empty.empty_share > 0.5


def grade_of(verdict: Verdict) -> tuple[str, str]:
    return verdict.grade, " ".join(verdict.grade_notes)


def test_grades_follow_the_share_in_which_the_model_gpu_is_busy() -> None:
    assert judge(Line().evidence()).grade == "excellent"
    for gather, grade in ((47, "good"), (53, "minimum"), (80, "below minimum")):
        verdict = judge(Line(gather=gather).evidence())
        assert verdict.grade == grade and "model GPU is busy" in verdict.grade_notes[0]
    assert judge(Line().evidence(ran_out_of_memory=True)).grade == "below minimum"
    assert judge(Line(on_gpu=False).evidence()).grade == ""


def test_a_data_gpu_with_little_to_do_is_said_and_not_blamed() -> None:
    grade, notes = grade_of(judge(Line(handoff=0.5).evidence(baseline=2.2)))
    assert grade == "excellent" and "little to do" in notes
    grade, notes = grade_of(judge(Line(handoff=0.5, gather=45).evidence(baseline=2.2)))
    assert grade == "below minimum" and "data GPU is busy" in notes
    assert judge(Line(handoff=0.5, encode=17).evidence(baseline=2.2)).grade == "excellent"
    grade, notes = grade_of(judge(Line(handoff=0.5, encode=17).evidence(baseline=1.4)))
    assert grade == "good" and "1.4×" in notes


def test_a_varying_step_lowers_the_grade() -> None:
    verdict = judge(Line(late=dict.fromkeys(range(10, 120, 10), 30.0)).evidence(recompilations=0))
    assert verdict.step_cv > 0.3 and verdict.grade == "minimum" and "vary" in verdict.grade_notes[0]


def test_step_times_alone_give_a_verdict_and_nothing_at_all_says_so() -> None:
    steps = [StepTime(number, 25.0, 5.0) for number in range(40)]
    verdict = judge(Evidence(steps=steps, replayed=[StepTime(n, 20.0, 0.0) for n in range(40)]))
    assert sum(verdict.shares.values()) == pytest.approx(1) and verdict.shares["compute"] == pytest.approx(0.8)
    assert verdict.headspace == pytest.approx(1.25) and alarms(verdict) == ["starving"]
    nothing = judge(Evidence())
    assert [found.code for found in nothing.findings] == ["no-steps"] and nothing.sentence.startswith("Nothing")


def test_the_first_steps_do_not_count() -> None:
    verdict = judge(Line(late={0: 9000.0, 3: 4000.0}).evidence())
    assert verdict.shares["host"] < 0.02 and verdict.outliers == []


def test_micro_steps_find_their_batches_and_a_cut_trace_is_still_read() -> None:
    spans = Line(gather=64).run()[0]
    accumulated = [
        part._replace(batch=part.batch // 2) if part.name in ("train", "update") else part for part in spans
    ]
    chosen = settings({"gradient_accumulation_steps": 2})
    whole = judge(Evidence(spans=accumulated, settings=chosen, data_gpu=0, model_gpu=0))
    assert whole.bound == "gather" and whole.waits["gather"] > 0.3
    starts = sorted(part.start_us for part in spans)
    for begin in starts[200:230]:
        kept = [part for part in spans if part.start_us > begin]
        cut = judge(Evidence(spans=kept, data_gpu=0, model_gpu=0, warmup_steps=0))
        assert set(cut.waits) == {"gather"} and cut.waits["gather"] > 0.3


def test_a_trace_that_is_still_written_has_waits_ahead_of_the_device() -> None:
    spans, _, steps = Line(gather=32, workers=1, launch=6).run()
    whole = judge(Evidence(spans=spans, data_gpu=0, model_gpu=0))
    last = len(steps) - 2
    under_way = [part for part in spans if part.name not in ("train", "update") or part.batch < last]
    early = judge(Evidence(spans=under_way, data_gpu=0, model_gpu=0))
    assert whole.shares["host"] > 0.1
    assert early.shares == pytest.approx(whole.shares, abs=0.01)


def test_a_verdict_is_json_and_names_why_readings_are_missing() -> None:
    verdict = judge(Line(gather=64, uneven=(20, 20)).evidence(no_readings="no NVIDIA driver answers"))
    record = json.loads(json.dumps(verdict.to_json()))
    assert {"sentence", "grade", "shares", "findings", "bound", "stages", "rings"} <= record.keys()
    assert record["stages"]["gather"]["workers"] == 2
    missing = next(found for found in record["findings"] if found["code"] == "no-readings")
    assert "driver" in missing["why"]


def known_codes() -> list[str]:
    """Those of verdicts, and those that the tools declare; from their source, for importing them takes long."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "myxtts" / "tools").glob("*.py"))
    ]
    declared = [
        ast.literal_eval(node.value)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CODES"
    ]
    return [*CODES, *(code for codes in declared for code in codes)]


def test_every_code_stands_in_the_documentation_exactly_once() -> None:
    lines = PROFILING.read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    assert sorted(re.findall("`([a-z-]+)`", " ".join(cells))) == sorted(known_codes())
    assert len(lines) <= 200


def test_no_finding_has_a_code_that_is_not_registered() -> None:
    for _, _, line, chosen in BOTTLENECKS:
        for found in judge(line.evidence(settings=chosen, no_readings="none")).findings:
            assert found.code in CODES and found.what and (found.fix or found.level in ("pass", "info", "warn"))
