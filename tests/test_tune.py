"""Tuning: what is tried, kept and said with a machine that only pretends, the real trial, and the patched file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training_fixtures import Clips, clips, small

import myxtts.tools.tune
from myxtts.config import Settings
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Gpu, Machine
from myxtts.errors import ConfigError, PipelineError
from myxtts.observe.trace import Span
from myxtts.run import prepare_corpus
from myxtts.settings import (
    LoadedSettings,
    apply_patch,
    apply_presets,
    load,
    patched,
    to_yaml,
    value_of,
    with_values,
)
from myxtts.terminal import show_tuning
from myxtts.tools.dry_run import Refused, Trial, num_drained, try_out, try_out_apart
from myxtts.tools.tune import Tuning, tune

__all__ = ["clips", "small"]

CARD = Machine([Gpu(0, "Card", 24000)])
TWO_CARDS = Machine([Gpu(0, "Card", 24000), Gpu(1, "Card", 24000)])


@dataclass
class Pretended:
    """A machine on which clips/s saturate with the batch, and on which only some things cost speed."""

    speed: float = 100.0
    half_speed_batch: int = 16
    mb_per_clip: float = 100.0
    slower: dict[str, dict[Any, float]] = field(default_factory=dict)
    """Factors of speed by setting and value."""
    feed_per_worker: float = 1e9
    refuses: Callable[[Settings], str] = lambda _: ""
    tried: list[Settings] = field(default_factory=list)

    def __call__(self, loaded: LoadedSettings) -> Trial:
        data = loaded.settings.data
        self.tried.append(loaded.settings)
        if reason := self.refuses(loaded.settings):
            raise Refused(reason)
        fed = self.speed * data.batch_size / (data.batch_size + self.half_speed_batch)
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
    loaded, _ = apply_presets(load(None, {key.replace("__", "."): value for key, value in flags.items()}))
    return loaded


def changes(found: Tuning) -> dict[str, tuple[Any, Any]]:
    return {change.setting: (change.old, change.new) for change in found.changes}


# What is found


def test_the_batch_grows_until_that_no_longer_helps(corpus: PreparedCorpus) -> None:
    machine = Pretended(half_speed_batch=16, mb_per_clip=1.0)
    found = tune(loaded_with(), corpus, machine=CARD, measure=machine)
    before, after = found.changes[0].old, found.changes[0].new
    assert (found.changes[0].setting, before) == ("data.batch_size", 16)
    assert after == 512
    assert found.gain == pytest.approx((512 / 528) / 0.5)
    assert found.changes[0].gain_measured == pytest.approx(found.gain)
    assert found.largest_batch is None
    assert "becomes 512, it was 16" in found.changes[0].why


def test_the_largest_batch_that_leaves_room_is_found_by_bisection(corpus: PreparedCorpus) -> None:
    machine = Pretended(mb_per_clip=300.0)
    found = tune(loaded_with(), corpus, machine=CARD, measure=machine)
    exact = (0.85 * 24000 - 1000) / 300
    assert found.largest_batch == found.values["data.batch_size"]
    assert exact / 1.2 < found.largest_batch <= exact
    assert any(settings.data.batch_size > exact for settings in machine.tried)


def test_a_cap_counts_instead_of_the_card(corpus: PreparedCorpus) -> None:
    flags = {"data__enable_memory_isolation": "true", "data__model_gpu_memory": "6000"}
    found = tune(loaded_with(**flags), corpus, machine=CARD, measure=Pretended(mb_per_clip=100.0))
    assert found.largest_batch is not None
    assert 1000 + 100 * found.largest_batch <= 0.85 * 6000


def test_a_larger_batch_with_less_accumulation_keeps_the_effective_one(corpus: PreparedCorpus) -> None:
    loaded = loaded_with(data__batch_size="16", training__gradient_accumulation_steps="4")
    found = tune(loaded, corpus, machine=CARD, measure=Pretended(mb_per_clip=1.0), max_batch=64)
    assert changes(found) == {
        "data.batch_size": (16, 64),
        "training.gradient_accumulation_steps": (4, 1),
    }
    assert "stays 64" in found.changes[0].why
    assert found.changes[1].gain_measured is None


def test_what_does_not_fit_is_made_to_fit(corpus: PreparedCorpus) -> None:
    machine = Pretended(mb_per_clip=1000.0)
    found = tune(loaded_with(data__batch_size="64"), corpus, machine=CARD, measure=machine)
    size, accumulate = (found.values[key] for key in ("data.batch_size", "training.gradient_accumulation_steps"))
    assert 1000 + 1000 * size <= 0.85 * 24000
    assert size * accumulate == pytest.approx(64, rel=0.15)
    assert found.before is None and found.gain is None
    assert "do not fit" in found.changes[0].why


def test_when_nothing_fits_the_error_says_what_to_do(corpus: PreparedCorpus) -> None:
    with pytest.raises(PipelineError, match=r"Not even one clip fits\. Give --gradient-checkpointing"):
        tune(loaded_with(), corpus, machine=CARD, measure=Pretended(mb_per_clip=30000.0))


def test_what_fails_for_another_reason_than_memory_is_raised_as_it_is(corpus: PreparedCorpus) -> None:
    machine = Pretended(refuses=lambda _: "no kernel for this card")
    with pytest.raises(Refused, match="no kernel for this card"):
        tune(loaded_with(), corpus, machine=CARD, measure=machine)
    assert len(machine.tried) == 1


def test_a_batch_is_never_larger_than_the_corpus_or_asked_for(corpus: PreparedCorpus) -> None:
    machine = Pretended(mb_per_clip=1.0)
    four = replace(corpus, train=corpus.train.select(corpus.train.audio_rows[:20]))
    tune(loaded_with(), four, machine=CARD, measure=machine)
    tune(loaded_with(), corpus, machine=CARD, measure=machine, max_batch=20)
    assert max(settings.data.batch_size for settings in machine.tried) == 20


def test_workers_follow_when_batches_come_too_slowly(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(myxtts.tools.tune, "usable_cores", lambda: 8)
    machine = Pretended(feed_per_worker=15.0, half_speed_batch=0)
    found = tune(loaded_with(data__num_workers="1"), corpus, machine=CARD, measure=machine)
    assert [(change.old, change.new) for change in found.changes] == [(1, 2), (2, 4)]
    assert found.changes[0].gain_measured == pytest.approx(2.0)
    assert found.gain == pytest.approx(4.0)
    assert [advice.code for advice in found.advice if advice.level == "warn"] == ["tune-feed-bound"]


def test_workers_and_buffers_are_left_alone_when_batches_are_ready(corpus: PreparedCorpus) -> None:
    machine = Pretended(half_speed_batch=0)
    loaded = loaded_with(data__num_workers="1", data__prefetch_buffer_size="2")
    found = tune(loaded, corpus, machine=CARD, measure=machine)
    assert not found.changes
    assert {settings.data.num_workers for settings in machine.tried} == {1}


def test_small_buffers_are_given_back_to_the_machine_if_that_helps(corpus: PreparedCorpus) -> None:
    def measure(loaded: LoadedSettings) -> Trial:
        is_small = loaded.settings.data.prefetch_buffer_size == 1
        return Trial(20.0 if is_small else 50.0, 50.0, {}, {})

    loaded = loaded_with(data__prefetch_buffer_size="1")
    found = tune(loaded, corpus, machine=CARD, measure=measure)
    assert changes(found) == {"data.prefetch_buffer_size": (1, None)}
    assert found.gain == pytest.approx(2.5)


def test_switches_that_cost_speed_are_turned_on_and_others_left(corpus: PreparedCorpus) -> None:
    slower = {"data.mixed_precision": {False: 0.4}, "data.optimize_cpu_gpu_overlap": {False: 0.99}}
    loaded = loaded_with(data__mixed_precision="false", data__optimize_cpu_gpu_overlap="false")
    found = tune(loaded, corpus, machine=CARD, measure=Pretended(slower=slower, half_speed_batch=0))
    assert changes(found) == {"data.mixed_precision": (False, True)}
    assert found.changes[0].gain_measured == pytest.approx(2.5)
    assert any(note.startswith("data.optimize_cpu_gpu_overlap true would be 1.01×") for note in found.notes)


def test_precision_is_tried_when_launching_no_longer_hides_what_it_brings(corpus: PreparedCorpus) -> None:
    class LaunchBound(Pretended):
        def __call__(self, loaded: LoadedSettings) -> Trial:
            trial = super().__call__(loaded)
            settings = loaded.settings
            factor = 1.0 if not settings.training.enable_graph_mode else 3 + 3 * settings.data.mixed_precision
            return replace(trial, clips_per_s=factor * trial.clips_per_s)

    given = loaded_with(data__mixed_precision="false", training__enable_graph_mode="false")
    found = tune(given, corpus, machine=CARD, measure=LaunchBound(mb_per_clip=1.0), max_batch=16)
    assert {"data.mixed_precision", "training.enable_graph_mode"} <= changes(found).keys()


def test_switches_are_tried_until_none_helps_beside_what_was_found(corpus: PreparedCorpus) -> None:
    class OneAfterAnother(Pretended):
        def __call__(self, loaded: LoadedSettings) -> Trial:
            trial, settings = super().__call__(loaded), loaded.settings
            speed = 2.0 if settings.data.mixed_precision else 1.0
            speed *= 3.0 if settings.data.mixed_precision and settings.training.enable_graph_mode else 1.0
            speed *= 1.5 if speed > 5 and settings.data.optimize_cpu_gpu_overlap else 1.0
            return replace(trial, clips_per_s=speed * trial.clips_per_s)

    off = ("data__mixed_precision", "training__enable_graph_mode", "data__optimize_cpu_gpu_overlap")
    measure = OneAfterAnother(mb_per_clip=1.0, half_speed_batch=0)
    given = loaded_with(**dict.fromkeys(off, "false"))
    found = tune(given, corpus, machine=CARD, measure=measure, max_batch=16)
    assert found.gain == pytest.approx(9) and len(measure.tried) < 12
    assert not any("would be" in note for note in found.notes)


def test_without_a_gpu_nothing_is_tried_that_only_a_gpu_has(corpus: PreparedCorpus) -> None:
    machine = Pretended(half_speed_batch=0)
    loaded = loaded_with(data__mixed_precision="false", training__optimization_level="basic")
    found = tune(loaded, corpus, machine=Machine(), measure=machine)
    assert not found.changes
    assert {(s.data.mixed_precision, s.training.optimization_level) for s in machine.tried} == {(False, "basic")}


def test_the_level_basic_is_left_as_a_whole(corpus: PreparedCorpus) -> None:
    machine = Pretended(slower={"training.enable_graph_mode": {False: 0.5}}, half_speed_batch=0)
    found = tune(loaded_with(training__optimization_level="basic"), corpus, machine=CARD, measure=machine)
    assert changes(found) == {"training.optimization_level": ("basic", "enhanced")}


def test_recomputing_activations_ends_when_the_batch_fits_without(corpus: PreparedCorpus) -> None:
    machine = Pretended(slower={"model.gradient_checkpointing": {True: 0.75}}, half_speed_batch=0)
    found = tune(loaded_with(model__gradient_checkpointing="true"), corpus, machine=CARD, measure=machine)
    assert changes(found) == {"model.gradient_checkpointing": (True, False)}


def test_two_gpus_are_used_as_measured_and_torchrun_is_reckoned(corpus: PreparedCorpus) -> None:
    machine = Pretended(slower={"data.data_gpu": {None: 0.8}}, half_speed_batch=0)
    found = tune(loaded_with(), corpus, machine=TWO_CARDS, measure=machine)
    assert found.values == {"data.data_gpu": 0, "data.model_gpu": 1}
    (advice,) = found.advice
    assert advice.code == "tune-several-gpus"
    assert advice.gain == pytest.approx(0.95 * 2 * 0.8)
    assert "torchrun --nproc-per-node 2" in advice.fix


def test_a_second_gpu_is_given_back_when_one_is_faster(corpus: PreparedCorpus) -> None:
    machine = Pretended(slower={"data.data_gpu": {0: 0.8}}, half_speed_batch=0)
    loaded = loaded_with(data__data_gpu="0", data__model_gpu="1")
    found = tune(loaded, corpus, machine=TWO_CARDS, measure=machine)
    assert found.values == {"data.data_gpu": None, "data.model_gpu": None}


def test_a_run_that_has_begun_keeps_its_batch(corpus: PreparedCorpus, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "gpt" / "step-00000010").mkdir(parents=True)
    (run / "model.json").write_text("{}")
    machine = Pretended()
    found = tune(loaded_with(training__checkpoint_dir=str(run)), corpus, machine=CARD, measure=machine)
    assert not found.changes
    assert str(run) in found.notes[0]
    again = loaded_with(training__checkpoint_dir=str(run), training__reset_training="true")
    assert tune(again, corpus, machine=CARD, measure=machine).changes


def a_minute_each(machine: Pretended, monkeypatch: pytest.MonkeyPatch) -> Callable[[LoadedSettings], Trial]:
    """The machine on a clock of its own, on which a trial takes a minute."""
    now = [0.0]

    def slowly(loaded: LoadedSettings) -> Trial:
        now[0] += 60.0
        return machine(loaded)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return slowly


def test_when_the_time_is_over_what_was_found_counts(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Pretended(mb_per_clip=1.0)
    slowly = a_minute_each(machine, monkeypatch)
    found = tune(loaded_with(data__mixed_precision="false"), corpus, machine=CARD, measure=slowly, minutes=2.5)
    assert len(machine.tried) == 2
    assert found.minutes == pytest.approx(2.0)
    assert "time was over" in found.notes[-1]


def test_a_faster_batch_is_kept_when_the_time_ends_before_the_fastest(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Pretended(mb_per_clip=1.0)
    slowly = a_minute_each(machine, monkeypatch)
    found = tune(loaded_with(data__batch_size="8"), corpus, machine=CARD, measure=slowly, minutes=3.5)
    assert [settings.data.batch_size for settings in machine.tried] == [8, 16, 32]
    assert found.values == {"data.batch_size": 32}
    assert "time was over" in found.notes[-1]


@pytest.mark.parametrize(("given", "tried"), [("16", [16, 32, 64, 128, 96, 112]), ("128", [128, 64, 96, 112])])
def test_the_largest_batch_so_far_is_kept_when_the_time_ends_between_two(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch, given: str, tried: list[int]
) -> None:
    machine = Pretended(mb_per_clip=200.0)
    slowly = a_minute_each(machine, monkeypatch)
    minutes = len(tried) + 0.5
    found = tune(loaded_with(data__batch_size=given), corpus, machine=CARD, measure=slowly, minutes=minutes)
    assert [settings.data.batch_size for settings in machine.tried] == tried
    assert (found.values["data.batch_size"], found.largest_batch) == (96, 96)
    assert "time was over" in found.notes[-1]


def test_nothing_is_said_of_batches_that_were_not_tried(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = a_minute_each(Pretended(), monkeypatch)
    found = tune(loaded_with(), corpus, machine=CARD, measure=slowly, minutes=1.5)
    assert len(found.notes) == 1 and "time was over" in found.notes[0]


def test_one_gpu_alone_is_not_reckoned_with_when_only_two_were_measured(
    corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_with(data__data_gpu="0", data__model_gpu="1")
    slowly = a_minute_each(Pretended(), monkeypatch)
    found = tune(loaded, corpus, machine=TWO_CARDS, measure=slowly, minutes=1.5)
    assert "tune-several-gpus" not in {advice.code for advice in found.advice}


def test_too_little_time_for_anything_is_an_error(corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def never(_: LoadedSettings) -> Trial:
        now[0] += 100.0
        raise Refused("no answer within 1 s")

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with pytest.raises(PipelineError, match="give more --minutes"):
        tune(loaded_with(), corpus, machine=CARD, measure=never, minutes=1)


def test_a_tuning_is_shown_as_a_table_and_as_a_patch_and_is_valid_json(corpus: PreparedCorpus) -> None:
    loaded = loaded_with(data__mixed_precision="false")
    found = tune(loaded, corpus, machine=CARD, measure=Pretended(slower={"data.mixed_precision": {False: 0.5}}))
    screen = StringIO()
    show_tuning(found, Console(file=screen, width=150))
    assert "data:\n  mixed_precision: true\n" in screen.getvalue()
    assert "2.00×" in screen.getvalue()
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
        "data__train_data": str(corpus), "data__language": "en", "data__vocab_size": "256",
        "data__batch_size": "2", "data__max_mel_frames": "128", "data__max_text_length": "40",
        "data__num_workers": "1", "data__model_start_delay": "0", "data__val_fraction": "0",
    }  # fmt: skip
    return loaded_with(**given, **flags)


@pytest.mark.usefixtures("small")
def test_a_trial_trains_and_leaves_nothing_in_the_cache(clips: Clips) -> None:
    loaded = tiny(clips(4))
    prepared = prepare_corpus(loaded.settings)
    before = set(prepared.root.iterdir())
    trial = try_out(loaded.settings, prepared, "gpt", 4)
    assert trial.clips_per_s > 0
    assert {"gather", "encode", "train", "update"} <= trial.phase_ms.keys()
    assert set(prepared.root.iterdir()) == before


@pytest.mark.usefixtures("small")
def test_a_trial_in_a_process_of_its_own_answers_or_is_ended(clips: Clips) -> None:
    loaded = tiny(clips(4))
    assert try_out_apart(loaded.settings, "dvae", 1).clips_per_s > 0
    with pytest.raises(Refused, match="no answer within 0 s"):
        try_out_apart(loaded.settings, "dvae", 1, limit_s=0.1)


@pytest.mark.usefixtures("small")
def test_a_trial_that_asks_for_too_much_is_refused_with_the_reason(clips: Clips) -> None:
    loaded = tiny(clips(4), data__prefetch_buffer_size="100000000")
    with pytest.raises(Refused, match="Lower --buffer-size"):
        try_out(loaded.settings, prepare_corpus(loaded.settings), "dvae", 1)


# The file


def test_the_shipped_file_keeps_everything_but_the_changed_lines() -> None:
    before = to_yaml(Settings(), comments=True)
    after = patched(before, {"data.batch_size": 32, "training.enable_graph_mode": False, "data.data_gpu": 0})
    changed = [(old, new) for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert changed == [
        ("  batch_size: 16", "  batch_size: 32"),
        ("  data_gpu: null", "  data_gpu: 0"),
        ("  enable_graph_mode: true", "  enable_graph_mode: false"),
    ]


def test_comments_behind_values_odd_spaces_and_line_ends_stay() -> None:
    text = "data:\r\n    batch_size:   16    # for the small card\r\n    language: 'en'\r\n"
    expected = text.replace("   16 ", "   32 ")
    assert patched(text, {"data.batch_size": 32}) == expected


def test_absent_keys_and_sections_are_added_where_they_belong() -> None:
    text = "# mine\ndata:\n    # fits\n    batch_size: 8\n\n# about training\ntraining:\n  seed: 1"
    given = {"data.num_workers": 4, "training.save_step": 50, "model.gradient_checkpointing": False}
    assert patched(text, given) == (
        "# mine\ndata:\n    num_workers: 4\n    # fits\n    batch_size: 8\n\n# about training\ntraining:\n"
        "  save_step: 50\n  seed: 1\n\nmodel:\n  gradient_checkpointing: false\n"
    )
    assert patched("", {"data.batch_size": 4}) == "data:\n  batch_size: 4\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {batch_size: 8, num_workers: 2}", "data: {batch_size: 32, num_workers: 2}\n"),
        ("data:\n  batch_size:  # unset\n", "data:\n  batch_size: 32  # unset\n"),
        ("data:\n  batch_size: '8'\n# end\n", "data:\n  batch_size: 32\n# end\n"),
    ],
)
def test_only_the_characters_of_a_value_change(text: str, expected: str) -> None:
    assert patched(text, {"data.batch_size": 32}) == expected


def test_a_setting_is_changed_under_the_name_the_user_gave_it() -> None:
    text = "data:\n  use_tf_native_loading: false\n  enable_xla: false\n"
    after = patched(text, {"data.native_loading": True, "training.enable_xla_compilation": True})
    assert after == "data:\n  use_tf_native_loading: true\n  enable_xla: true\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("# my settings\ndata:\n  batch_size: 8  # fits\n  num_workers: 2\n")
    return path


def test_applying_writes_the_file_and_keeps_every_backup(config: Path) -> None:
    before = config.read_text()
    path, backup = apply_patch(load(config, {}), {"data.batch_size": 32, "model.size": "small"})
    assert path == config and backup == config.with_name("config.yaml.bak")
    assert backup.read_text() == before
    assert config.read_text().startswith("# my settings\ndata:\n  batch_size: 32  # fits\n")
    written = load(config, {}).settings
    assert (written.data.batch_size, written.data.num_workers, written.model.size) == (32, 2, "small")
    _, second = apply_patch(load(config, {}), {"data.batch_size": 64})
    assert second == config.with_name("config.yaml.bak1")
    assert backup.read_text() == before


def test_without_a_file_one_is_made_where_the_next_command_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, backup = apply_patch(load(None, {}), {"data.batch_size": 32})
    assert backup is None
    assert path == tmp_path / "configs" / "config.yaml"
    assert load(None, {}).settings.data.batch_size == 32


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("data: {batch_size: 8}\n", {"data.num_workers": 3}),
        ("data:\n  batch_size: 8\n", {"data.data_gpu": 0}),
        ("training:\n  preset: 12gb\n", {"data.batch_size": 16}),
    ],
    ids=["a section in one line", "half of a pair", "a preset that wins over a default"],
)
def test_nothing_is_written_that_would_not_load_or_not_act(
    tmp_path: Path, text: str, values: dict[str, Any]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nothing was written"):
        apply_patch(load(path, {}), values)
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_changed_values_count_as_the_users_own_unless_they_are_the_default() -> None:
    loaded = with_values(load(None, {"data.prefetch_buffer_size": "2"}), {"data.prefetch_buffer_size": None})
    assert not loaded.is_set("data.prefetch_buffer_size")
    assert with_values(loaded, {"data.batch_size": 7}).is_set("data.batch_size")
