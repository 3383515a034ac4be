"""Every setting of `train` does something: those that show in a short run are tried here, the others are named."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_fixtures import Observe, Start, arguments, assert_equal_tensors, losses, newest, steps

from myxtts.config import STAGES
from myxtts.data.batches import Gatherer
from myxtts.run_dir import RunDir
from myxtts.settings import load, specs
from myxtts.training.trainer import State, Trainer

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")

ELSEWHERE = {
    "model.gradient_checkpointing": "test_run.py::test_gradient_checkpointing_changes_memory_and_no_loss",
    "model.lora_rank": "test_run.py::test_adapters_alone_are_kept_and_merge_into_the_weights_they_adapt",
    "data.val_fraction": "test_prepare.py::test_the_split_is_stable_under_other_clips",
    "data.reference_clip": "test_run.py::test_named_speakers_lend_each_other_reference_voices",
    "data.single_speaker": "test_run.py::test_named_speakers_lend_each_other_reference_voices",
    "training.speaker_steps": "test_speaker.py::test_a_stopped_stage_continues_exactly",
    "data.language_temperature": "test_corpora.py::test_the_temperature_evens_out_languages",
    "data.vocab_size": "test_cache.py::test_settings_redo_only_what_they_decide",
    "data.use_phonemes": (
        "test_prepare.py::test_phonemes_change_the_ids_and_cost_clips_in_languages_without_a_voice"
    ),
    "data.cache_dir": "test_cache.py::test_cache_dir",
    "data.shard_cache_gb": "test_locations.py::test_where_and_how_large_the_cache_of_shards_is",
    "data.min_clip_seconds": "test_cli.py::test_settings_change_what_is_set_aside",
    "data.max_text_length": "test_cli.py::test_settings_change_what_is_set_aside",
    "data.max_mel_frames": "test_cli.py::test_settings_change_what_is_set_aside",
    "data.trim_silence_db": "test_cache.py::test_settings_redo_only_what_they_decide",
    "data.data_gpu_memory": "test_devices.py::test_train_applies_the_caps_and_determinism",
    "data.model_gpu_memory": "test_devices.py::test_train_applies_the_caps_and_determinism",
    "data.cache_latents": "test_run.py::test_latents_are_kept_unless_there_is_no_room_or_no_use_for_them",
    "data.mixed_precision": "test_run.py::test_how_a_step_is_run",
    "data.prefetch_to_gpu": (
        "test_feed_settings.py::test_without_prefetch_batches_are_uploaded_when_they_are_asked_for"
    ),
    "data.enhanced_gpu_prefetch": "test_feed_settings.py::test_which_thread_works_in_which_stream",
    "data.optimize_cpu_gpu_overlap": "test_feed_settings.py::test_which_thread_works_in_which_stream",
    "data.model_start_delay": "test_train_flags.py::test_training_starts_with_full_buffers_or_after_the_delay",
    "training.deterministic": "test_resume.py::test_deterministic_runs_on_a_gpu_are_equal_whether_resumed_or_not",
    "training.checkpoint_dir": "test_train_flags.py::test_a_configuration_file_is_read_and_flags_win_over_it",
    "training.init_from": "test_run.py::test_every_stage_starts_from_the_weights_that_were_named",
    "training.init_decoder": "test_resume.py::test_a_decoder_stopped_in_any_phase_equals_one_that_never_was",
    "training.reset_training": "test_resume.py::test_a_reset_puts_the_old_run_aside_and_starts_over",
    "training.warmup_steps": "test_trainer.py::test_the_learning_rate_rises_and_falls_along_a_cosine",
    "training.ema_decay": "test_trainer.py::test_the_validation_loss_is_that_of_the_averaged_weights_per_token",
    "training.codebook": ("test_recipes.py::test_fine_tuning_keeps_a_published_codebook_unless_asked_to_train_it"),
    "training.early_stop": "test_trainer.py::test_training_ends_early_when_validations_no_longer_improve",
    "training.log_step": "test_trainer.py::test_reports_validations_and_checkpoints_come_when_they_are_due",
    "training.val_step": "test_trainer.py::test_reports_validations_and_checkpoints_come_when_they_are_due",
    "training.evaluate_on": ("test_evaluation.py::test_evaluations_on_copies_change_nothing_and_find_the_same"),
    "training.spoken_sentences": (
        "test_evaluation.py::test_evaluations_speak_held_out_sentences_and_leave_them_in_the_run"
    ),
    "training.best_by": (
        "test_evaluation.py::test_judges_score_what_is_spoken_and_choose_the_gpt_that_the_decoder_is_trained_on"
    ),
    "training.save_step": "test_trainer.py::test_reports_validations_and_checkpoints_come_when_they_are_due",
    "training.keep_checkpoints": "test_trainer.py::test_the_newest_and_the_best_checkpoints_are_kept",
    "training.enable_graph_mode": "test_run.py::test_how_a_step_is_run",
    "training.enable_xla_compilation": "test_run.py::test_how_a_step_is_run",
    "training.enable_eager_debug": (
        "test_trainer.py::test_eager_debugging_names_the_operation_and_says_that_it_is_slow"
    ),
}
"""Settings whose effect another test observes."""


def see_data_and_language(run: Observe) -> None:
    others = load(run(num_clips=3).folder / "settings.yaml", {}).settings.data.train_data
    seen = run(f"--val-data {others} --language de", num_clips=5)
    assert "Corpus: 5 training clips" in seen.out and "3 for validation" in seen.out and "German 8" in seen.out
    assert [report["step"] for report in steps(seen.folder, "validation")] == [2]


def see_tokenizer(run: Observe) -> None:
    vocabulary = run(num_clips=7).folder / "vocab.json"
    assert run(f"--tokenizer {vocabulary}").folder.joinpath("vocab.json").read_text() == vocabulary.read_text()
    assert run().folder.joinpath("vocab.json").read_text() != vocabulary.read_text()


def see_model_size(run: Observe) -> None:
    assert RunDir(run("--model-size small").folder).dims().dvae_hidden == 32


def see_batch_size_and_accumulation(run: Observe) -> None:
    shapes = run("--batch-size 3 --grad-accum 3").shapes
    assert {shape[0] for shape in shapes} == {3} and len(shapes) == 3 * 2


def see_epochs_and_max_steps(run: Observe) -> None:
    assert run("--epochs 3 --max-steps 100").last.step == 6  # of two batches each
    assert run("--max-steps 3").last.step == 3


def see_stages_and_their_own_steps(run: Observe) -> None:
    seen = run("--stages dvae,decoder --max-steps 100 --dvae-steps 3 --decoder-steps 1")
    assert [stage for stage in STAGES if (seen.folder / stage).exists()] == ["dvae", "decoder"]
    assert (seen.last.step, newest(seen.folder, "decoder").step) == (3, 1)


def see_workers_and_buffers(run: Observe) -> None:
    plain = run("--num-workers 1").depths[0]
    assert plain.gatherers == 1 and plain.host < 9
    seen = run("--num-workers 3 --prefetch-buffer-size 9")
    assert seen.depths[0].gatherers == 3 and seen.depths[0].host >= 9
    assert steps(seen.folder)[0]["rings"]["host"][1] == seen.depths[0].host
    whole = run("--buffer-size 13")
    assert whole.depths[0].host + whole.depths[0].model == 13 and "Buffer size: 13 batches" in whole.out


def see_gpus(run: Observe) -> None:
    alone = run("--data-gpu 0", code=2)
    assert "--data-gpu is given without --model-gpu. GPUs found: none" in alone.err
    both = run("--data-gpu 0 --model-gpu 1", code=2)
    assert "Multi-GPU requires at least 2 GPUs. GPUs found: none; drop --data-gpu and --model-gpu" in both.err
    assert not both.folder.joinpath("dvae").exists()


def see_memory_isolation(run: Observe) -> None:
    assert "Memory isolation has no effect on the CPU" in run("--enable-memory-isolation").out


def see_static_shapes(run: Observe) -> None:
    for flag in ("--enable-static-shapes", "--pad-to-fixed-length"):
        assert set(run(f"{flag} --batch-size 1 --max-steps 4").shapes) == {(1, 80, 128)}
    assert len(set(run("--disable-static-shapes --batch-size 1 --max-steps 4").shapes)) > 1


def see_native_loading(run: Observe) -> None:
    """Files decoded for every batch give the same weights, and no audio is kept."""
    seen = run("--no-native-loading --cache-dir loose")
    assert_equal_tensors(seen.last.weights, run().last.weights)
    assert not list(Path("loose").rglob("audio-*"))


def see_learning_rate_and_weight_decay(run: Observe) -> None:
    name = "dvae.decoder.0.weight"
    plain, decayed = (run(f"--lr 0.1 --weight-decay {decay}") for decay in (0, 1))
    assert steps(plain.folder)[0]["lr"] == 0.1
    assert decayed.last.weights[name].norm() < 0.97 * plain.last.weights[name].norm()


def see_seed(run: Observe) -> None:
    first, second = run("--seed 5"), run("--seed 5")
    assert_equal_tensors(first.last.weights, second.last.weights)
    other, name = run("--seed 6"), "dvae.codebook.embed"
    assert not torch.equal(other.last.weights[name], first.last.weights[name])


def see_grad_clip(run: Observe) -> None:
    kept = run("--grad-clip 1e-6 --max-steps 1").last.optimizer
    moments = torch.cat([value.flatten() for name, value in kept.items() if name.startswith("exp_avg.")])
    assert float(moments.norm()) == pytest.approx(1e-7, rel=1e-2)


def see_optimization_level(run: Observe) -> None:
    seen = run("--optimization-level basic")
    assert "optimization level basic: training.enable_graph_mode = false (default true)" in seen.out
    assert load(seen.folder / "settings.yaml", {}).settings.training.enable_graph_mode is False


def see_preset(run: Observe) -> None:
    seen = run("--preset 12gb")
    assert "preset 12gb: data.batch_size stays 2 (flag --batch-size)" in seen.out
    assert "preset 12gb: training.gradient_accumulation_steps = 2 (default 1)" in seen.out
    assert len(seen.shapes) == 2 * 2


def see_regularisation(run: Observe) -> None:
    names = ("dropout", "label-smoothing", "code-noise", "text-dropout", "reference-noise")
    given = ["", *(f"--{name} 0.4" for name in names)]
    first_losses = [losses(run(f"--stages gpt --max-steps 1 {flags}").folder)[0] for flags in given]
    assert len(set(first_losses)) == len(given)
    heard = [
        losses(run(f"--stages dvae --max-steps 1 --dvae-noise {share}").folder, "dvae")[0] for share in (0, 1)
    ]
    assert heard[0] != heard[1]


OBSERVED: dict[Callable[[Observe], None], str] = {
    see_data_and_language: "data.train_data data.val_data data.language",
    see_tokenizer: "data.tokenizer",
    see_model_size: "model.size",
    see_batch_size_and_accumulation: "data.batch_size training.gradient_accumulation_steps",
    see_epochs_and_max_steps: "training.epochs training.max_steps",
    see_stages_and_their_own_steps: "training.stages training.dvae_steps training.decoder_steps",
    see_workers_and_buffers: "data.num_workers data.prefetch_buffer_size data.pipeline_buffer_size",
    see_gpus: "data.data_gpu data.model_gpu",
    see_memory_isolation: "data.enable_memory_isolation",
    see_static_shapes: "data.pad_to_fixed_length",
    see_native_loading: "data.native_loading",
    see_learning_rate_and_weight_decay: "training.learning_rate training.weight_decay",
    see_seed: "training.seed",
    see_grad_clip: "training.grad_clip",
    see_optimization_level: "training.optimization_level",
    see_preset: "training.preset",
    see_regularisation: (
        "model.dropout training.label_smoothing training.code_noise training.text_dropout "
        "training.reference_noise training.dvae_noise"
    ),
}


@pytest.mark.parametrize("see", OBSERVED, ids=lambda see: see.__name__.removeprefix("see_"))
def test_a_setting_shows_in_the_run(see: Callable[[Observe], None], run: Observe) -> None:
    see(run)


def test_every_setting_is_observed_somewhere() -> None:
    observed = {key for keys in OBSERVED.values() for key in keys.split()}
    assert observed | ELSEWHERE.keys() == specs().keys()
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), place


def test_training_starts_with_full_buffers_or_after_the_delay(
    run: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, start, ready = Gatherer.fill, Trainer.run, []

    def start_later(trainer: Trainer) -> State:
        ready.append(trainer.feed.num_ahead)
        return start(trainer)

    monkeypatch.setattr(Gatherer, "fill", lambda *given: (time.sleep(0.1), fill(*given))[1])
    monkeypatch.setattr(Trainer, "run", start_later)
    shown = run("--model-start-delay 0").out
    assert "Waiting up to 0s for data pipeline to warm up\nModel training starting now" in shown
    run("--model-start-delay 60")
    assert ready[0] < 4 < 6 <= ready[1]


def test_a_configuration_file_is_read_and_flags_win_over_it(start: Start) -> None:
    path = Path("mine.yaml")
    path.write_text("data: {batch_size: 3}\ntraining: {seed: 8, max_steps: 1, stages: [dvae]}\n")
    command = arguments(Path("run"), start.clips(4))
    for flag in ("--batch-size", "--checkpoint-dir"):
        at = command.index(flag)
        del command[at : at + 2]
    start.command(*command, "--max-steps", "2", "--config", path)
    last = newest(Path("checkpoints"), "dvae")
    identity = last.state["notes"]["identity"]
    assert (last.step, identity["data.batch_size"], identity["training.seed"]) == (2, 3, 8)
