"""Tuning: what is tried, kept and said on a machine that only pretends, and what a real trial measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import load_values
from rich.console import Console
from training_fixtures import Clips, clips, small

import myxtts.tools.tune
from myxtts.config import Settings
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Gpu, Machine
from myxtts.errors import PipelineError
from myxtts.observe.trace import Span
from myxtts.run import prepare_corpus
from myxtts.settings import LoadedSettings, apply_presets, value_of
from myxtts.terminal import show_tuning
from myxtts.tools.dry_run import Refused, Trial, num_drained, try_out, try_out_apart
from myxtts.tools.tune import CHECKPOINTING, DATA_GPU, LEVEL, MODEL_GPU, Tuning, tune

__all__ = ["clips", "small"]

CARD = Machine([Gpu(0, "Card", 24000)])
Tune, Measure = Callable[..., Tuning], Callable[[LoadedSettings, int], Trial]
Slower = dict[str, dict[Any, float]]
TWO_CARDS = Machine([Gpu(0, "Card", 24000), Gpu(1, "Card", 24000)])


@dataclass
class Pretended:
    """A machine on which clips/s saturate with the batch, and on which only some things cost speed."""

    speed: float = 100.0
    half_speed_batch: int = 16
    mb_per_clip: float = 100.0
    slower: Slower = field(default_factory=dict)
    """Factors of speed by setting and value."""
    feed_per_worker: float = 1e9
    refuses: Callable[[Settings], str] = lambda _: ""
    shared: float = 0.9
    """Share of its speed that each of several processes keeps."""
    tried: list[Settings] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)

    def __call__(self, loaded: LoadedSettings, num_processes: int = 1) -> Trial:
        data = loaded.settings.data
        self.tried.append(loaded.settings)
        self.processes.append(num_processes)
        if reason := self.refuses(loaded.settings):
            raise Refused(reason)
        fed = self.speed * data.batch_size / (data.batch_size + self.half_speed_batch)
        fed *= num_processes * self.shared if num_processes > 1 else 1
        for key, factors in self.slower.items():
            fed *= factors.get(value_of(loaded.settings, key), 1.0)
        memory = {"gpu": 1000 + self.mb_per_clip * data.batch_size}
        phase_ms = {"gather": 5.0, "encode": 10.0, "train": 40.0}
        return Trial(min(fed, self.feed_per_worker * data.num_workers), fed, memory, phase_ms)


@pytest.fixture
def corpus(small: None, clips: Clips, run_prepare: Callable[..., PreparedCorpus]) -> PreparedCorpus:  # noqa: ARG001
    """Counts as a thousand clips, so that it does not limit the batch."""
    prepared = run_prepare(clips(4), val_fraction=0)
    return replace(prepared, train=prepared.train.select(prepared.train.audio_rows.repeat(250)))


def loaded_with(**flags: str) -> LoadedSettings:
    return apply_presets(load_values(**flags))[0]


@pytest.fixture
def tuned(corpus: PreparedCorpus) -> Tune:
    """Tunes settings given as flags for a card, or for another `machine`."""

    def run(
        measure: Measure, machine: Machine = CARD, minutes: float = 10, max_batch: int = 512, **flags: str
    ) -> Tuning:
        limits = {"minutes": minutes, "max_batch": max_batch}
        return tune(loaded_with(**flags), corpus, machine=machine, measure=measure, **limits)

    return run


def changes(found: Tuning) -> dict[str, tuple[Any, Any]]:
    return {change.setting: (change.old, change.new) for change in found.changes}


# What is found


def test_the_batch_grows_until_that_no_longer_helps(tuned: Tune) -> None:
    found = tuned(Pretended(mb_per_clip=1.0))
    (change,) = found.changes
    assert (change.setting, change.old, change.new) == ("data.batch_size", 16, 512)
    assert change.gain_measured == found.gain == pytest.approx((512 / 528) / 0.5)
    assert found.largest_batch is None and "becomes 512, it was 16" in change.why
    small = Pretended(mb_per_clip=1.0)
    tuned(small, batch_size="4", max_batch=64)
    assert [trial.data.batch_size for trial in small.tried] == [4, 32, 64], "it begins with the preset of the card"


def test_the_largest_batch_that_leaves_room_is_found_by_bisection(tuned: Tune) -> None:
    machine = Pretended(mb_per_clip=300.0)
    found = tuned(machine)
    exact = (0.85 * 24000 - 1000) / 300
    assert found.largest_batch == found.values["data.batch_size"]
    assert exact / 1.2 < found.largest_batch <= exact
    assert any(settings.data.batch_size > exact for settings in machine.tried)
    capped = tuned(Pretended(), enable_memory_isolation="true", model_gpu_memory="6000")
    assert 1000 + 100 * capped.largest_batch <= 0.85 * 6000, "a cap counts instead of the card"


def test_a_larger_batch_with_less_accumulation_keeps_the_effective_one(tuned: Tune) -> None:
    flags = {"batch_size": "16", "gradient_accumulation_steps": "4"}
    found = tuned(Pretended(mb_per_clip=1.0), max_batch=64, **flags)
    assert changes(found) == {"data.batch_size": (16, 64), "training.gradient_accumulation_steps": (4, 1)}
    assert "stays 64" in found.changes[0].why and found.changes[1].gain_measured is None


def test_what_does_not_fit_is_made_to_fit(tuned: Tune) -> None:
    found = tuned(Pretended(mb_per_clip=1000.0), batch_size="64")
    size, accumulate = (found.values[key] for key in ("data.batch_size", "training.gradient_accumulation_steps"))
    assert 1000 + 1000 * size <= 0.85 * 24000
    assert size * accumulate == pytest.approx(64, rel=0.15)
    assert found.before is None and found.gain is None
    assert "do not fit" in found.changes[0].why and "measured" not in found.changes[0].why
    assert found.changes[1].why == "measured with the line above"
    found = tuned(Pretended(mb_per_clip=1000.0), batch_size="64", mixed_precision="false")
    assert list(found.values)[::2] == ["data.batch_size", "data.mixed_precision"], "faults are mended in any batch"


def test_what_cannot_be_tried_at_all_is_an_error(tuned: Tune) -> None:
    with pytest.raises(PipelineError, match=r"Not even one clip fits\. Give --gradient-checkpointing"):
        tuned(Pretended(mb_per_clip=30000.0))
    machine = Pretended(refuses=lambda _: "no kernel for this card")
    with pytest.raises(Refused, match="no kernel for this card"):
        tuned(machine)
    assert len(machine.tried) == 1, "only a lack of memory is a reason to try a smaller batch"


def test_a_batch_is_never_larger_than_the_corpus_or_asked_for(tuned: Tune, corpus: PreparedCorpus) -> None:
    machine = Pretended(mb_per_clip=1.0)
    twenty = replace(corpus, train=corpus.train.select(corpus.train.audio_rows[:20]))
    tune(loaded_with(), twenty, machine=CARD, measure=machine)
    tuned(machine, max_batch=20)
    assert max(settings.data.batch_size for settings in machine.tried) == 20


def test_workers_follow_when_batches_come_too_slowly(tuned: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(myxtts.tools.tune, "usable_cores", lambda: 8)
    found = tuned(Pretended(feed_per_worker=15.0, half_speed_batch=0), num_workers="1")
    assert [(change.old, change.new) for change in found.changes] == [(1, 2), (2, 4)]
    assert (found.changes[0].gain_measured, found.gain) == pytest.approx((2.0, 4.0))
    assert [advice.code for advice in found.advice if advice.level == "warn"] == ["tune-feed-bound"]


def test_small_buffers_are_given_back_to_the_machine_if_that_helps(tuned: Tune) -> None:
    def measure(loaded: LoadedSettings, _: int) -> Trial:
        is_small = loaded.settings.data.prefetch_buffer_size == 2
        return Trial(20.0 if is_small else 50.0, 50.0, {}, {})

    found = tuned(measure, prefetch_buffer_size="2")
    assert changes(found) == {"data.prefetch_buffer_size": (2, None)}
    assert found.gain == pytest.approx(2.5)


BASIC, DUAL = {"optimization_level": "basic"}, {"data_gpu": "0", "model_gpu": "1"}
GRAPH = "training.enable_graph_mode"


@pytest.mark.parametrize(
    ("given", "slower", "machine", "expected"),
    [
        ({"num_workers": "1", "prefetch_buffer_size": "2"}, {}, CARD, {}),
        (BASIC | {"mixed_precision": "false"}, {}, Machine(), {}),
        (BASIC, {GRAPH: {False: 0.5}}, CARD, {LEVEL: ("basic", "enhanced")}),
        ({"gradient_checkpointing": "true"}, {CHECKPOINTING: {True: 0.75}}, CARD, {CHECKPOINTING: (True, False)}),
        (DUAL, {DATA_GPU: {0: 0.8}}, TWO_CARDS, {DATA_GPU: (0, None), MODEL_GPU: (1, None)}),
    ],
    ids=["batches are ready", "no GPU", "a level as a whole", "activations fit", "one GPU is faster than two"],
)
def test_only_what_measurably_helps_is_changed(
    given: dict[str, str], slower: Slower, machine: Machine, expected: dict[str, Any], tuned: Tune
) -> None:
    measure = Pretended(slower=slower, half_speed_batch=0)
    assert changes(tuned(measure, machine=machine, **given)) == expected


FAULTS = {"training.enable_eager_debug": (True, False), "data.native_loading": (False, True)}
FAULTS |= {"data.prefetch_to_gpu": (False, True)}
OFF = {"native_loading": "false", "prefetch_to_gpu": "false", "enable_eager_debug": "true"}


@pytest.mark.parametrize("machine", [CARD, Machine()], ids=["gpu", "cpu"])
@pytest.mark.parametrize("minutes", [10, 1.5], ids=["measured", "no time"])
def test_what_check_knows_is_changed_first_and_nothing_else(
    machine: Machine, minutes: float, tuned: Tune, a_minute_each: Any
) -> None:
    slower = {"training.enable_eager_debug": {True: 0.5}, "data.native_loading": {False: 0.8}}
    measure = Pretended(slower=slower, half_speed_batch=0)
    found = tuned(a_minute_each(measure), machine, minutes, 16, **OFF)
    assert changes(found) == FAULTS and {fault.setting for fault in found.faults} == FAULTS.keys()
    if minutes == 10:
        assert len(measure.tried) == 2 and found.changes[0].gain_measured == found.gain == pytest.approx(2.5)
    else:
        assert len(measure.tried) == 1 and all(change.why.endswith("; not measured") for change in found.changes)


def test_faults_that_measure_slower_together_are_tried_one_by_one(tuned: Tune) -> None:
    slower = {"data.mixed_precision": {False: 0.6}, "data.optimize_cpu_gpu_overlap": {True: 0.5}}
    flags = {"mixed_precision": "false", "optimize_cpu_gpu_overlap": "false"}
    found = tuned(Pretended(slower=slower, half_speed_batch=0), **flags)
    assert changes(found) == {"data.mixed_precision": (False, True)}
    assert found.changes[0].gain_measured == pytest.approx(1 / 0.6)
    assert any(note.startswith("data.optimize_cpu_gpu_overlap true would be 0.50×") for note in found.notes)
    found = tuned(
        Pretended(slower={GRAPH: {False: 0.6}, "data.mixed_precision": {True: 0.5}}),
        mixed_precision="false",
        **BASIC,
    )
    assert GRAPH in found.values and "data.mixed_precision" not in found.values


def test_one_gpu_two_roles_and_torchrun_are_all_measured(tuned: Tune) -> None:
    machine = Pretended(slower={"data.data_gpu": {None: 0.8}}, half_speed_batch=0, shared=0.7)
    found = tuned(machine, machine=TWO_CARDS, gradient_accumulation_steps="4", max_batch=16)
    assert found.values == {"data.data_gpu": 0, "data.model_gpu": 1}
    ways = list(zip([trial.data.data_gpu for trial in machine.tried], machine.processes, strict=True))
    assert ways[-2:] == [(0, 1), (None, 2)] and (None, 1) in ways
    assert machine.tried[-1].training.gradient_accumulation_steps == 2, "the effective batch stays the same"
    (advice,) = found.advice
    assert advice.code == "tune-several-gpus" and advice.gain == pytest.approx(2 * 0.7 * 0.8)
    assert "torchrun --nproc-per-node 2" in advice.fix and "56" not in advice.fix
    assert f"{2 * 0.7 * 0.8 * 100:.1f} clips/s were measured" in advice.why and "batch of 64" in advice.why
    (slow,) = tuned(replace(machine, shared=0.5), machine=TWO_CARDS, data_gpu="0", model_gpu="1").advice
    assert slow.gain == pytest.approx(0.8) and not slow.fix, "torchrun is not advised where it is slower"


def test_of_unequal_cards_the_stronger_trains(tuned: Tune) -> None:
    cards = Machine([Gpu(0, "Large", 24000), Gpu(1, "Small", 8000)])
    found = tuned(Pretended(slower={"data.data_gpu": {None: 0.8}}, half_speed_batch=0), machine=cards)
    assert found.values == {"data.data_gpu": 1, "data.model_gpu": 0}


def test_what_cannot_be_trained_by_all_gpus_is_said(tuned: Tune) -> None:
    def measure(loaded: LoadedSettings, num_processes: int) -> Trial:
        if num_processes > 1:
            raise Refused("NCCL is not there")
        return Pretended()(loaded, num_processes)

    found = tuned(measure, machine=TWO_CARDS, max_batch=16)
    assert found.notes[-1] == "torchrun --nproc-per-node 2 is not possible here: NCCL is not there"
    assert not found.advice


def test_a_run_that_has_begun_keeps_its_batch(tuned: Tune, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "gpt" / "step-00000010").mkdir(parents=True)
    (run / "model.json").write_text("{}")
    found = tuned(Pretended(), checkpoint_dir=str(run))
    assert not found.changes and str(run) in found.notes[0]
    assert tuned(Pretended(), checkpoint_dir=str(run), reset_training="true").changes


# When the time is over


@pytest.fixture
def a_minute_each(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], Measure]:
    """Puts a machine on a clock of its own, on which a trial takes a minute."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def slowly(machine: Measure) -> Measure:
        def measure(loaded: LoadedSettings, num_processes: int) -> Trial:
            now[0] += 60.0
            return machine(loaded, num_processes)

        return measure

    return slowly


@pytest.mark.parametrize(
    ("mb_per_clip", "tried", "kept", "largest"),
    [
        (1.0, [8, 32, 64], 64, None),
        (200.0, [16, 32, 64, 128, 96, 112], 96, 96),
        (200.0, [128, 64, 96, 112], 96, 96),
        (100.0, [16], None, None),
    ],
)
def test_the_best_batch_so_far_is_kept(
    mb_per_clip: float, tried: list[int], kept: int | None, largest: int | None, tuned: Tune, a_minute_each: Any
) -> None:
    machine, minutes = Pretended(mb_per_clip=mb_per_clip), len(tried) + 0.5
    found = tuned(a_minute_each(machine), minutes=minutes, batch_size=str(tried[0]))
    assert [settings.data.batch_size for settings in machine.tried] == tried
    assert (found.values.get("data.batch_size"), found.largest_batch) == (kept, largest)
    assert found.minutes == len(tried) and "time was over" in found.notes[-1]
    assert len(found.notes) == 1 or kept, "nothing is said of batches that were not tried"


def test_one_gpu_alone_is_not_estimated_when_only_two_were_measured(tuned: Tune, a_minute_each: Any) -> None:
    found = tuned(a_minute_each(Pretended()), machine=TWO_CARDS, minutes=1.5, **DUAL)
    assert "tune-several-gpus" not in {advice.code for advice in found.advice}


def test_too_little_time_for_anything_is_an_error(tuned: Tune, a_minute_each: Any) -> None:
    never = Pretended(refuses=lambda _: "no answer within 1 s")
    with pytest.raises(PipelineError, match="give more --minutes"):
        tuned(a_minute_each(never), minutes=0.5)


@pytest.mark.parametrize(
    ("minutes", "max_batch", "says"),
    [(10, 512, "none of the other settings tried is faster"), (1.5, 512, "enough only for the present settings"),
     (10, 16, "no other batch or device to try")],
)  # fmt: skip
def test_nothing_to_change_says_what_was_tried(
    minutes: float, max_batch: int, says: str, tuned: Tune, a_minute_each: Any
) -> None:
    screen = StringIO()
    found = tuned(a_minute_each(Pretended(half_speed_batch=0)), minutes=minutes, max_batch=max_batch)
    show_tuning(found, Console(file=screen, width=150))
    assert screen.getvalue().startswith("Nothing to change: ") and says in screen.getvalue()


def test_a_tuning_is_shown_as_a_table_and_as_a_patch_and_is_valid_json(tuned: Tune) -> None:
    found = tuned(Pretended(slower={"data.mixed_precision": {False: 0.5}}), mixed_precision="false")
    screen = StringIO()
    show_tuning(found, Console(file=screen, width=150))
    assert "data:\n  mixed_precision: true\n" in screen.getvalue() and "2.00×" in screen.getvalue()
    record = json.loads(json.dumps(found.to_json()))
    assert record["values"]["data.mixed_precision"] is True
    assert record["changes"][0]["gain_measured"] == pytest.approx(2.0)


# What a trial measures


def feed_and_training(period_us: int, gathered_first: int) -> list[Span]:
    """Ten batches, trained on every 100 microseconds; `gathered_first` of them were ready long before."""
    trained = [Span("train", "model stream", 100 * number, 90, number) for number in range(10)]
    made = [
        Span(name, name, period_us * place - 5, 10, gathered_first + place)
        for place in range(20)
        for name in ("gather", "upload", "encode")
    ]
    return [*trained, *made]


def test_what_buffers_held_before_does_not_count_as_speed() -> None:
    """Whatever rings say: on a GPU they call a batch ready when its work is ordered, not when it is done."""
    assert num_drained(feed_and_training(period_us=100, gathered_first=3)) == 0
    assert num_drained(feed_and_training(period_us=300, gathered_first=8)) == 6
    quick, slow = feed_and_training(100, 3), feed_and_training(300, 8)
    mixed = [span for span in quick if span.name != "encode"] + [span for span in slow if span.name == "encode"]
    assert num_drained(mixed) == 6
    assert num_drained([]) == 0


def tiny(corpus: Path, **flags: str) -> LoadedSettings:
    given = {
        "train_data": str(corpus), "language": "en", "vocab_size": "256",
        "batch_size": "2", "max_mel_frames": "128", "max_text_length": "40",
        "num_workers": "1", "model_start_delay": "0", "val_fraction": "0",
    }  # fmt: skip
    return loaded_with(**given | flags)


@pytest.mark.usefixtures("small")
def test_a_trial_trains_and_leaves_nothing_in_the_cache(clips: Clips) -> None:
    loaded = tiny(clips(4))
    prepared = prepare_corpus(loaded.settings)
    before = set(prepared.root.iterdir())
    trial = try_out(loaded.settings, prepared, "gpt", 4)
    assert trial.clips_per_s > 0
    assert {"gather", "encode", "train", "update"} <= trial.phase_ms.keys()
    assert set(prepared.root.iterdir()) == before
    greedy = tiny(clips(4), prefetch_buffer_size="100000000")
    with pytest.raises(Refused, match="Lower --buffer-size"):
        try_out(greedy.settings, prepared, "dvae", 1)


@pytest.mark.usefixtures("small")
def test_a_trial_in_a_process_of_its_own_answers_or_is_ended(clips: Clips) -> None:
    """The process trains the real tiny network, so the batch is as small as it gets."""
    settings = tiny(clips(4), batch_size="1", max_mel_frames="112").settings
    assert try_out_apart(settings, "dvae", 1).clips_per_s > 0
    assert try_out_apart(settings, "dvae", 1, num_processes=2).clips_per_s > 0, "as torchrun would start it"
    with pytest.raises(Refused, match="no answer within 0 s"):
        try_out_apart(settings, "dvae", 1, limit_s=0.1)


@pytest.mark.gpu
def test_on_a_gpu_faults_are_mended_and_measured_in_two_minutes(clips: Clips) -> None:
    loaded = tiny(clips(4), **OFF)
    found = tune(loaded, prepare_corpus(loaded.settings), stage="dvae", max_batch=2)
    assert FAULTS.items() <= changes(found).items() and found.minutes < 2.2
    assert found.gain is None or found.gain > 1
