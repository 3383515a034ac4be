"""Diagnoses of a simulated pipeline with known bottlenecks: the right phase is named, the promised gain comes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from myxtts.config import DataSettings, Settings, TrainingSettings
from myxtts.observe.breakdown import DATA_PHASES, ProfileData
from myxtts.observe.diagnosis import Diagnosis
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import Counter, Span, StepTime, step_timing

WARM_UP = 5


@dataclass
class Line:
    """A pipeline with the times of its phases in ms, simulated batch by batch with its rings and queues."""

    gather: float = 4.0
    upload: float = 1.0
    encode: float = 2.0
    handoff: float = 0.0
    train: float = 20.0
    launch: float = 1.0
    gather_lag: float = 0.0  # until the thread gets the processor
    encode_lag: float = 0.0
    workers: int = 2
    host_ring: int = 8
    model_ring: int = 3
    on_gpu: bool = True
    uneven: tuple[int, float] = (1, 1.0)
    """Every so many batches takes so many times as long to gather."""
    late: dict[int, float] = field(default_factory=dict)
    """Steps before which the host does something else, for so long."""
    jitter: float = 0.03
    grows_mb: float = 0.0
    batches: int = 120

    def run(self) -> tuple[list[Span], list[Counter], list[StepTime]]:
        rng = random.Random(0)
        ends: dict[str, list[float]] = {name: [] for name in (*DATA_PHASES, "train")}
        free, host_free = [0.0] * self.workers, 0.0
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

        phases = DATA_PHASES if self.handoff else DATA_PHASES[:3]
        for m in range(self.batches):
            thread = free.index(min(free))
            slow = self.uneven[1] if m % self.uneven[0] == self.uneven[0] - 1 else 1.0
            begin = max(free[thread], end("upload", m - self.host_ring)) + self.gather_lag
            work("gather", f"gather-{thread}", [begin], self.gather * slow, m)
            free[thread] = end("gather", m)
            ready_at = [end("gather", m), end("upload", m - 1), end("encode", m - 2)]
            work("upload", "upload stream", ready_at, self.upload, m)
            room = end("handoff", m - 3) if self.handoff else end("train", m - self.model_ring)
            ready = max(end("upload", m), end("encode", m - 1), room) + self.encode_lag
            last = work("encode", "encode stream", [ready], self.encode, m)
            if self.handoff:
                ready_at = [end("encode", m), end("handoff", m - 1), end("train", m - self.model_ring)]
                last = work("handoff", "handoff stream", ready_at, self.handoff, m)
            if m in self.late:
                host_free = max(host_free, end("train", m - 1)) + self.late[m]
            ready = last if self.on_gpu else end(phases[-1], m)
            waited = max(host_free, ready)
            spans.append(span("wait", "trainer", host_free, waited - host_free, m))
            taken.append(waited)
            launched = waited + self.launch
            before = end("train", m - 1)
            start = work("train", "model stream", [launched, before, end(phases[-1], m)], self.train, m)
            spans.append(span("update", "model stream", end("train", m), 0.0, m, device=self.on_gpu))
            host_free = max(launched, end("train", m - 2)) if self.on_gpu else end("train", m)
            gap = max(start - before, 0.0) if m else 0.0
            steps.append(StepTime(m, gap + end("train", m) - start, gap))
            at_us = us(end("train", m))
            counters.append(Counter("model allocated MB", at_us, 4000 + self.grows_mb * m))
        passed = list(zip(ends["gather"], ends["upload"], strict=True))
        for at in taken:
            counters.append(Counter("host ring", us(at), sum(begin <= at < end for begin, end in passed)))
        return spans, counters, steps

    def speed(self) -> float:
        """Batches per second after the warm-up."""
        return 1000 / step_timing(self.run()[2][10:]).mean_ms

    def data(self, **more: Any) -> ProfileData:
        spans, counters, _ = self.run()
        start = max(part.start_us + part.duration_us for part in spans if is_model(part) and part.batch < WARM_UP)
        kept = [
            part
            for part in spans
            if (part.name in DATA_PHASES and part.start_us + part.duration_us > start)
            or (part.start_us >= start and not (is_model(part) and part.batch < WARM_UP))
        ]
        known: dict[str, Any] = {"spans": kept, "counters": counters, "cores": 16}
        known |= {"depths": {"host": self.host_ring, "model": self.model_ring}}
        if self.on_gpu:
            known |= {"data_gpu": 0, "model_gpu": 1 if self.handoff else 0, "num_gpus": 2 if self.handoff else 1}
        return ProfileData(**(known | more))


def is_model(part: Span) -> bool:
    return part.name in ("train", "update")


def us(milliseconds: float) -> int:
    return round(1000 * milliseconds)


def span(name: str, track: str, start: float, length: float, batch: int, device: bool = False) -> Span:
    return Span(name, track, us(start), us(start + length) - us(start), batch, device)


def settings(training: dict[str, Any] | None = None, **data: Any) -> Settings:
    return Settings(data=DataSettings(**data), training=TrainingSettings(**(training or {})))


def alone(step_ms: float, count: int = 60) -> list[StepTime]:
    """Steps that repeat one batch."""
    return [StepTime(number, step_ms, 0.0) for number in range(count)]


def diagnose_gpu(spans: list[Span], **more: Any) -> Diagnosis:
    return Diagnosis(ProfileData(**({"spans": spans, "data_gpu": 0, "model_gpu": 0} | more)))


def diagnose_line(line: Line, **more: Any) -> Diagnosis:
    return Diagnosis(line.data(**more))


def repeated(count: int, period: float, *parts: tuple[str, float, float, int]) -> list[Span]:
    """Spans (name, offset, length, batch ahead) that come again every period."""
    tracks = {"gather": "gather-0", "wait": "trainer", "train": "model stream", "update": "model stream"}
    found = [(number, *part) for number in range(count) for part in parts]
    return [
        span(name, tracks.get(name, name), period * n + offset, length, n + ahead, name not in ("gather", "wait"))
        for n, name, offset, length, ahead in found
    ]


def alarms(diagnosis: Diagnosis) -> list[str]:
    return [found.code for found in diagnosis.findings if found.level in ("warn", "fail")]


def change(diagnosis: Diagnosis) -> tuple[str, Any]:
    """What the first finding proposes."""
    return diagnosis.findings[0].setting, diagnosis.findings[0].value


on_both = pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])

# The phase that bounds


@on_both
def test_nothing_is_wrong_with_a_feed_that_keeps_up(on_gpu: bool) -> None:
    found = diagnose_line(Line(on_gpu=on_gpu))
    assert alarms(found) == []
    assert found.bound == "train" and found.findings[-1].code == "feed-keeps-up"
    assert found.sentence.startswith("Training itself is the limit") and "gain nothing" in found.sentence
    assert found.shares["compute"] > 0.93


BOTTLENECKS: dict[str, tuple[str, Line, Settings]] = {
    "gather-slow": ("gather", Line(gather=60), settings()),
    "workers-few": ("gather", Line(gather=14, workers=1, train=8), settings(batch_size=32)),
    "native-loading-off": ("gather", Line(gather=500, workers=16), settings(native_loading=False)),
    "gather-uneven": ("gather", Line(gather=5, workers=1, uneven=(25, 60)), settings()),
    "host-ring-small": ("gather", Line(gather=18, upload=8, workers=2, host_ring=1), settings()),
    "upload-unpinned": ("upload", Line(upload=30), settings(enhanced_gpu_prefetch=False)),
    "upload-slow": ("upload", Line(upload=30), settings()),
    "encode-slow": ("encode", Line(encode=32), settings()),
    "handoff-slow": ("handoff", Line(handoff=40), settings()),
}


@on_both
@pytest.mark.parametrize("code", BOTTLENECKS)
def test_the_phase_that_bounds_is_found_with_all_of_the_time_and_the_gain_that_comes(
    code: str, on_gpu: bool
) -> None:
    phase, line, chosen = BOTTLENECKS[code]
    line = replace(line, on_gpu=on_gpu)
    diagnosis = diagnose_line(line, settings=chosen)
    assert diagnosis.bound == phase and f"bound by {phase}" in diagnosis.sentence
    found = diagnosis.findings[0]
    pinned = on_gpu or code != "upload-unpinned"  # pinned memory is for GPUs
    assert (found.code, found.level) == (code if pinned else "upload-slow", "warn")
    assert diagnosis.shares["copy" if phase in ("upload", "handoff") else "wait"] > 0.05
    assert max(diagnosis.waits, key=lambda name: diagnosis.waits[name]) == phase
    assert sum(diagnosis.shares.values()) == pytest.approx(1, abs=1e-9) and min(diagnosis.shares.values()) >= 0
    assert sum(diagnosis.waits.values()) == pytest.approx(diagnosis.shares["wait"] + diagnosis.shares["copy"])
    spans, _, steps = line.run()
    busy = sum(span.duration_us for span in spans if span.name == "train" and span.batch >= WARM_UP)
    total = 1000 * sum(step.step_ms for step in steps[WARM_UP:])
    assert diagnosis.shares["compute"] == pytest.approx(busy / total, abs=0.015)
    if code != "host-ring-small" and on_gpu:
        changed = {"data.num_workers": "workers", "data.prefetch_buffer_size": "host_ring"}.get(found.setting)
        mended = replace(line, **({changed: found.value} if changed else {phase: 1.0}))
        assert found.gain is not None and found.gain > 1.05
        assert found.gain == pytest.approx(mended.speed() / line.speed(), rel=0.15)


def test_the_slowest_of_random_phases_is_the_one_that_bounds() -> None:
    rng = random.Random(1)
    judged = 0
    for _ in range(100):
        times = {"gather": rng.uniform(1, 60), "upload": rng.uniform(0.2, 20), "encode": rng.uniform(0.5, 30)}
        times |= {"train": rng.uniform(5, 40)}
        line = Line(**times, workers=rng.choice([1, 2, 4]), host_ring=16, on_gpu=rng.random() < 0.5, launch=0.2)
        periods = times | {"gather": times["gather"] / line.workers}
        *_, second, slowest = sorted(periods, key=lambda name: periods[name])
        if periods[slowest] > 1.3 * periods[second]:
            found = diagnose_line(line)
            assert found.bound == slowest, line
            assert sum(found.shares.values()) == pytest.approx(1, abs=1e-9)
            assert slowest != "train" or not alarms(found), line
            judged += 1
    assert judged > 50


def test_full_buffers_do_not_hide_a_phase_that_is_slower_than_the_model() -> None:
    """All batches that are trained on were made long before."""
    spans = [part for part in Line(gather=40, workers=1, host_ring=200).run()[0] if part.name == "gather"]
    spans += repeated(100, 20, ("wait", 1000, 0, 1000), ("train", 1000, 20, 0))
    found = diagnose_gpu(spans, cores=4, settings=settings(batch_size=64))
    assert alarms(found) == ["buffers-drain"] and "50 %" in found.findings[0].why
    assert found.findings[0].setting == "data.num_workers"


@pytest.mark.parametrize(
    ("line", "step_ms", "gain"),
    [(Line(gather=120, workers=1, encode=50), None, 120 / 50), (Line(gather=64), 30.0, 32 / 30)],
    ids=["the next slow phase", "what replaying has shown"],
)
def test_a_gain_is_limited(line: Line, step_ms: float | None, gain: float) -> None:
    found = diagnose_line(line, replayed=alone(step_ms) if step_ms else ())
    assert found.bound == "gather" and found.findings[0].gain == pytest.approx(gain, rel=0.1)


def test_headroom_is_what_replaying_one_batch_measured() -> None:
    found = diagnose_line(Line(gather=64), replayed=alone(20.0))
    assert found.headroom_measured and found.headroom == pytest.approx(32 / 20, rel=0.03)
    assert "a perfect feed would be 1.6× faster" in found.sentence
    estimated = diagnose_line(Line(gather=64))
    assert not estimated.headroom_measured and estimated.headroom == pytest.approx(32 / 20, rel=0.05)
    late = dict.fromkeys(range(15, 120, 20), 300.0)
    other = diagnose_line(Line(late=late), recompilations=len(late), replayed=alone(20.0))
    assert other.headroom == pytest.approx(1, abs=0.03) and "perfect feed" not in other.sentence


@pytest.mark.parametrize("phase", ["encode", "gather"])
def test_a_phase_that_is_waited_for_and_idle_is_late_and_not_slow(phase: str) -> None:
    found = diagnose_line(Line(**{f"{phase}_lag": 30.0, "workers": 1}), cores=4)
    assert found.bound == phase and found.findings[0].code == "pipeline-late"
    assert change(found) == ("data.num_workers", 3)


def test_batches_without_spans_starve_the_model_for_reasons_unknown() -> None:
    spans = [part for part in Line(gather=64).run()[0] if part.name in ("train", "update", "wait")]
    found = diagnose_gpu(spans)
    assert found.findings[0].code == "starving" and found.shares["wait"] == pytest.approx(12 / 32, abs=0.05)


def test_batches_uploaded_on_demand_are_one_finding_with_one_setting() -> None:
    made = [("gather", -200, 3, 0), ("wait", 1, 0, 0), ("upload", 1, 9, 0), ("encode", 10, 10, 0)]
    spans = repeated(60, 40, *made, ("train", 20, 20, 0))
    found = diagnose_gpu(spans, settings=settings(prefetch_to_gpu=False))
    assert alarms(found)[0] == "upload-late" and "encode-slow" not in alarms(found)
    assert change(found) == ("data.prefetch_to_gpu", True)
    assert found.findings[0].gain == pytest.approx(2, rel=0.05)


def test_a_front_end_in_the_stream_of_the_training_step_is_in_its_way() -> None:
    """The batches are ready long before, and the encoding of a later one lies between the steps."""
    spans = repeated(60, 30, ("encode", 0, 10, 3), ("wait", 0, 0, 0), ("train", 10, 20, 0))
    found = diagnose_gpu(spans, settings=settings(optimize_cpu_gpu_overlap=False))
    assert found.findings[0].code == "encode-serial"
    assert found.shares["wait"] == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(
    ("upload_ms", "encode", "bound", "code"),
    [(28, (57, 3), "upload", "upload-unpinned"), (2, (33, 27), "encode", "encode-slow")],
)
def test_a_batch_is_encoded_only_when_the_copy_of_the_next_one_is_through(
    upload_ms: float, encode: tuple[float, float], bound: str, code: str
) -> None:
    made = [("gather", -200, 3, 0), ("upload", 0, upload_ms, 0), ("encode", *encode, 0), ("wait", 36, 20, 0)]
    found = diagnose_gpu(
        repeated(60, 30, *made, ("train", 60, 6, 0)), settings=settings(enhanced_gpu_prefetch=False)
    )
    assert (found.bound, found.findings[0].code) == (bound, code)


def test_a_copy_from_pageable_memory_that_keeps_the_program_from_launching_is_to_blame() -> None:
    """As traced on a real GPU: between training and update nothing is launched until a later batch is copied."""
    made = [("gather", -90, 4, 14), ("upload", -32, 31, 14), ("encode", -1, 3, 14), ("update", -1, 2, -1)]
    spans = repeated(60, 34, *made, ("wait", 1, 0, 0), ("train", 1, 8, 0))
    found = diagnose_gpu(spans, replayed=alone(10.0), settings=settings(enhanced_gpu_prefetch=False))
    assert found.bound == "upload" and alarms(found)[0] == "upload-unpinned"
    assert "roles-compete" not in alarms(found)
    assert diagnose_gpu(spans, replayed=alone(10.0)).bound == "host"


# Roles that share a device


def test_roles_that_share_a_gpu_slow_each_other_down_without_any_gap() -> None:
    found = diagnose_line(Line(), replayed=alone(16.0), num_gpus=2)
    assert found.findings[0].code == "roles-compete" and change(found) == ("data.data_gpu", 1)
    assert found.findings[0].gain == pytest.approx(20 / 16, rel=0.03)
    assert found.sentence.startswith("Training shares its GPU with the feed")
    assert "1.3× as fast; set data.data_gpu to 1." in found.sentence
    assert "perfect feed" not in found.sentence and "itself" not in found.sentence
    fed_on_cpu = diagnose_line(Line(on_gpu=False), replayed=alone(16.0))
    assert "shares its processor" in fed_on_cpu.sentence and "perfect feed" not in fed_on_cpu.sentence
    on_cpu = diagnose_line(Line(on_gpu=False, gather=46), replayed=alone(16.0))
    assert [found.level for found in on_cpu.findings[:2]] == ["warn", "info"]
    assert on_cpu.findings[1].code == "roles-compete" and "processor" in on_cpu.findings[1].why


TINY = Line(gather=1, upload=0.1, encode=1.5, train=5.8, launch=0.2)
"""As measured on a real GPU: a front end that is busy for a quarter of the time, and steps of 5 ms when alone."""


def test_contention_is_found_where_the_feed_works_long_enough_to_explain_it() -> None:
    assert "16 % longer" in diagnose_line(TINY, replayed=alone(5.0)).findings[0].what
    large = Line(upload=0.3, encode=0.8, train=112, batches=40)
    for step_ms in (110.0, 70.0):  # too little to matter; more than a front end of 1 ms can take
        found = diagnose_line(large, replayed=alone(step_ms))
        assert "roles-compete" not in alarms(found)
        assert found.sentence.startswith("Training itself is the limit")
        assert found.headroom == pytest.approx(112 / step_ms, rel=0.01)


@pytest.mark.parametrize(("fed", "replayed"), [(120, 60), (120, 4), (12, 60), (12, 4)])
def test_contention_takes_enough_steps_with_and_without_the_feed(fed: int, replayed: int) -> None:
    found = diagnose_line(Line(batches=fed), replayed=alone(16.0, replayed))
    assert ("roles-compete" in alarms(found)) == ("shares its GPU" in found.sentence)
    assert ("roles-compete" in alarms(found)) == (fed == 120 and replayed == 60)
    restless = [StepTime(number, 16.0 if number % 5 < 3 else 24.0, 0.0) for number in range(60)]
    assert "roles-compete" not in alarms(diagnose_line(Line(), replayed=restless))


@pytest.mark.parametrize(("on_gpu", "helps"), [(True, "A second GPU would"), (False, "A GPU would")])
def test_what_no_setting_changes_is_said_so(on_gpu: bool, helps: str) -> None:
    line = replace(TINY, on_gpu=on_gpu)
    diagnosis = diagnose_line(line, replayed=alone(5.0))
    found = next(one for one in diagnosis.findings if one.code == "roles-compete")
    assert (found.fix, found.setting, found.gain) == ("", "", None)
    slow = diagnose_line(replace(line, encode=12)).findings[0]
    assert slow.code == "encode-slow" and slow.fix.startswith(helps)


# The host and pauses


FREE, FULL = (
    [Reading(us(20 * n), 0, utilisation=0.9, memory_used_mb=used, memory_total_mb=24000) for n in range(50)]
    for used in (5000, 20000)
)


EAGER, NO_GRAPH = settings({"enable_eager_debug": True}), settings({"enable_graph_mode": False})
VARYING = settings(pad_to_fixed_length=False)


@pytest.mark.parametrize(
    ("known", "code", "says", "expected"),
    [
        ({}, "host-late", "although a batch is ready", ("", None)),
        ({"syncs_per_step": 3.0}, "host-sync", "3.0 times", ("", None)),
        ({"syncs_per_step": 3.0, "settings": EAGER}, "host-sync", "3.0", ("training.enable_eager_debug", False)),
        ({"readings": FREE}, "launch-bound", "40 %", ("data.batch_size", 48)),
        ({"readings": FULL}, "launch-bound", "40 %", ("", None)),
        ({"settings": NO_GRAPH}, "launch-bound", "40 %", ("training.enable_graph_mode", True)),
        ({"settings": VARYING}, "launch-bound", "40 %", ("data.pad_to_fixed_length", True)),
    ],
)
def test_a_gpu_that_waits_for_the_host_is_told_from_one_that_waits_for_data(
    known: dict[str, Any], code: str, says: str, expected: tuple[str, Any]
) -> None:
    bound_by_launches = code == "launch-bound"
    line = Line() if bound_by_launches else Line(late=dict.fromkeys(range(120), 8.0))
    found = diagnose_line(line, **known, **({"kernel_share": 0.4} if bound_by_launches else {}))
    assert found.bound == "host" and found.findings[0].code == code
    assert says in found.findings[0].what and change(found) == expected
    assert found.shares["host"] == pytest.approx(0.6 if bound_by_launches else 8 / 28, abs=0.05)


@on_both
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed shapes", "varying shapes"])
def test_recompilations_explain_the_long_steps(on_gpu: bool, fixed: bool) -> None:
    late = dict.fromkeys(range(15, 120, 20), 300.0)
    line = Line(late=late, on_gpu=on_gpu)
    found = diagnose_line(line, recompilations=len(late), settings=settings(pad_to_fixed_length=fixed))
    assert found.to_json()["recompilations"] == len(late)
    assert {(outlier.step, outlier.reason) for outlier in found.outliers} == {(m, "recompilation") for m in late}
    assert found.findings[0].code == "recompiling"
    assert change(found) == (("", None) if fixed else ("data.pad_to_fixed_length", True))
    assert found.findings[0].gain == pytest.approx(Line().speed() / line.speed(), rel=0.15)
    assert found.steady_cv < 0.05 < found.step_cv


def test_a_late_step_is_the_hosts_whatever_its_number() -> None:
    """A profile neither saves nor validates."""
    late, saving = dict.fromkeys(range(20, 120, 20), 100.0), settings({"save_step": 20, "val_step": 20})
    found = diagnose_line(Line(late=late), settings=saving)
    assert found.bound == "host" and found.findings[0].code == "host-late"
    assert {outlier.reason for outlier in found.outliers} == {"the host was late"}
    assert sum(found.shares.values()) == pytest.approx(1)


# Memory, oscillation, arithmetic


def test_memory_that_grows_with_every_step_is_a_leak_and_one_jump_is_none() -> None:
    found = diagnose_line(Line(grows_mb=3.0))
    assert (found.findings[0].code, found.findings[0].level) == ("memory-growth", "warn")
    assert found.growth_mb["model"] == pytest.approx(3 * 115, rel=0.05)
    jump = [Counter("model allocated MB", us(20 * n), 4000 + 800 * (n > 40)) for n in range(100)]
    assert diagnose_line(Line(), counters=jump).growth_mb == {}


def test_a_bursty_feed_makes_the_gpu_oscillate_with_its_period() -> None:
    line = Line(gather=5, workers=1, uneven=(20, 80), batches=300)
    found = diagnose_line(line)
    assert found.oscillation is not None and found.oscillation.source == "spans"
    period_s = 20 * step_timing(line.run()[2][20:]).mean_ms / 1000
    assert found.oscillation.period_s == pytest.approx(period_s, rel=0.1) and found.oscillation.depth > 0.5
    assert {"oscillating", "uneven-steps"} <= set(alarms(found)) and found.findings[0].code == "gather-uneven"
    assert {outlier.reason for outlier in found.outliers} == {"waited for gather"}
    always_slow = diagnose_line(Line(gather=32, workers=1, batches=300))
    assert always_slow.oscillation is None and "uneven-steps" not in alarms(always_slow)


@pytest.mark.parametrize(("kind", "oscillates"), [("cycle", True), ("steady", False), ("restless", False)])
def test_a_slow_cycle_shows_in_the_utilisation_that_the_driver_reports(kind: str, oscillates: bool) -> None:
    def share(n: int) -> float:
        noise = random.Random(n)
        steady, restless = noise.uniform(0.85, 1), noise.random()
        return {"cycle": 0.95 if n % 30 < 20 else 0.05, "steady": steady, "restless": restless}[kind]

    spans = [span("train", "model stream", 20.0 * number, 20, number, True) for number in range(1500)]
    found = diagnose_gpu(spans, readings=[Reading(100_000 * n, 0, utilisation=share(n)) for n in range(300)])
    assert (found.oscillation is not None) == oscillates
    if found.oscillation is not None:
        assert found.oscillation.source == "nvml" and found.oscillation.period_s == pytest.approx(3.0, rel=0.05)


def test_utilisation_is_set_against_what_is_really_computed() -> None:
    readings = [Reading(us(20 * n), 0, utilisation=0.93) for n in range(100)]
    found = diagnose_line(Line(), readings=readings, flops_per_step=1e12, peak_flops=8e14)
    assert found.mfu == pytest.approx(1e12 / 0.02 / 8e14, rel=0.05)
    assert found.utilisation == {0: pytest.approx(0.93)}
    by_code = {finding.code: finding for finding in found.findings}
    assert "93 %" in by_code["utilisation-misleads"].what and "6 %" in by_code["utilisation-misleads"].what
    assert by_code["flops-low"].setting == "data.batch_size"


def test_slow_arithmetic_is_mentioned_only_when_it_is_what_bounds() -> None:
    chosen = settings({"enable_xla_compilation": False}, mixed_precision=False)
    found = diagnose_line(Line(), settings=chosen)
    assert alarms(found) == ["precision-off", "graph-off"] and found.findings[0].gain is None
    assert "precision-off" not in alarms(diagnose_line(Line(encode=40), settings=chosen))


@pytest.mark.parametrize(
    ("reason", "code", "level"), [("thermal slowdown", "throttled", "warn"), ("power cap", "power-capped", "info")]
)
def test_hot_gpus_and_capped_ones_are_told_apart(reason: str, code: str, level: str) -> None:
    found = diagnose_line(Line(), readings=[Reading(us(20 * n), 0, throttled_by=(reason,)) for n in range(50)])
    assert [finding.level for finding in found.findings if finding.code == code] == [level]


def test_rings_show_how_full_they_were() -> None:
    full, empty = (diagnose_line(line).rings["host"] for line in (Line(), Line(gather=64)))
    assert full.depth == 8 and full.mean_ready > 4 and full.empty_share < 0.05
    assert empty.mean_ready < 1 and empty.empty_share > 0.5


# Grades and the whole


@pytest.mark.parametrize(
    ("line", "known", "grade", "note"),
    [
        (Line(), {}, "excellent", ""),
        (Line(gather=47), {}, "good", "model GPU is busy"),
        (Line(gather=53), {}, "minimum", "model GPU is busy"),
        (Line(gather=80), {}, "below minimum", "model GPU is busy"),
        (Line(), {"ran_out_of_memory": True}, "below minimum", "out of memory"),
        (Line(on_gpu=False), {}, "", "for GPUs"),
        (Line(handoff=0.5), {}, "excellent", "little to do"),
        (Line(handoff=0.5, gather=45), {}, "below minimum", "data GPU is busy"),
        (Line(handoff=0.5, encode=17), {}, "excellent", "one GPU is no part of the grade; myxtts tune"),
        (Line(late=dict.fromkeys(range(10, 120, 10), 30.0)), {}, "minimum", "vary"),
    ],
)
def test_grades_follow_the_documented_limits(line: Line, known: dict[str, Any], grade: str, note: str) -> None:
    found = diagnose_line(line, **known)
    assert found.grade == grade and note in " ".join(found.grade_notes)


def test_an_idle_data_gpu_is_advised_to_what_tune_really_measures() -> None:
    (found,) = [one for one in diagnose_line(Line(handoff=0.5)).findings if one.code == "data-gpu-idle"]
    assert "myxtts tune measures one GPU against two" in found.fix and "both" not in found.fix


def test_micro_steps_find_their_batches_and_a_cut_trace_is_still_read() -> None:
    spans = Line(gather=64).run()[0]
    accumulated = [part._replace(batch=part.batch // 2) if is_model(part) else part for part in spans]
    whole = diagnose_gpu(accumulated, settings=settings({"gradient_accumulation_steps": 2}))
    assert whole.bound == "gather" and whole.waits["gather"] > 0.3
    starts = sorted(part.start_us for part in spans)
    for begin in starts[200:230]:
        cut = diagnose_gpu([part for part in spans if part.start_us > begin])
        assert set(cut.waits) == {"gather"} and cut.waits["gather"] > 0.3


def test_a_trace_that_is_still_written_has_waits_ahead_of_the_device() -> None:
    spans, _, steps = Line(gather=32, workers=1, launch=6).run()
    under_way = [part for part in spans if not is_model(part) or part.batch < len(steps) - 2]
    whole, early = diagnose_gpu(spans), diagnose_gpu(under_way)
    assert whole.shares["host"] > 0.1
    assert early.shares == pytest.approx(whole.shares, abs=0.01)


def test_a_diagnosis_is_json_and_names_what_is_missing() -> None:
    found = diagnose_line(Line(gather=64, uneven=(20, 20)), no_readings="no NVIDIA driver answers")
    record = json.loads(json.dumps(found.to_json()))
    assert {"sentence", "grade", "shares", "findings", "bound", "phases", "rings", "mfu"} <= record.keys()
    assert record["phases"]["gather"]["workers"] == 2 and record["phases"]["gather"]["longest_ms"] > 0
    missing = next(found for found in record["findings"] if found["code"] == "no-readings")
    assert "driver" in missing["why"]
    nothing = json.loads(json.dumps(Diagnosis(ProfileData()).to_json()))
    assert [found["code"] for found in nothing["findings"]] == ["no-steps"] and nothing["bound"] == ""
    assert nothing["sentence"].startswith("Nothing") and nothing["grade"] == ""
