"""A training run from start to end: prepare the corpus, plan the devices, train stage after stage, resume, save.

`train` is the way in. A run lives in its folder (`run_dir`): started again, it continues where it was stopped, and
refuses settings that cannot change on the way. Several processes (torchrun) train one run together.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from myxtts import config
from myxtts.checkpoints import Checkpoints, LoadedCheckpoint, Notes, UnreadableWeights, require_same
from myxtts.config import (
    BUILDS_ON,
    DECODER_EMA_DECAY,
    FINE_TUNING,
    FLOW_SIZES,
    FLOW_TUNING,
    LANGUAGES,
    MIN_SPEAKERS,
    SAMPLE_RATE,
    SMALL_CORPUS,
    SMALL_CORPUS_HOURS,
    STAGES,
    Settings,
    num_frames_of,
    stage_steps,
    stages_of,
    warmup_steps,
)
from myxtts.data.clips import ClipSet, PreparedCorpus
from myxtts.data.order import Cursor
from myxtts.data.prepare import prepare, with_tokenizer_of_run
from myxtts.devices import (
    Machine,
    Plan,
    announcements,
    apply_caps,
    deterministic,
    explained_out_of_memory,
    make_plan,
    peak_flops,
    random_state,
    release_memory,
    set_random_state,
    work_on,
)
from myxtts.distributed import barrier, of_first_rank, process_group
from myxtts.errors import NO_PROGRESS, ConfigError, DatasetError, MyXTTSError, Progress
from myxtts.evaluation import SPEAKING_STAGES, Evaluator, Judging, Speaker, find_judges, validate, with_speech
from myxtts.files import lock, write_text_atomically
from myxtts.host import usable_cores
from myxtts.model.gpt import adapter_state, store_frozen_in_bf16
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import Generator, HifiGanInput
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.findings import Situation, hints
from myxtts.pipeline.feed import Streams, build_feed, dvae_key, keep_latents, latents_key
from myxtts.run_dir import VOCABULARY_FILE, RunDir, StageStatus, inherited, initial_model, readers_file
from myxtts.settings import LoadedSettings, as_loaded, how_to_set, specs, to_yaml, value_of, with_settings
from myxtts.synthesis.synthesizer import provenance
from myxtts.text.tokenizer import Tokenizer
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import RECIPES, DecoderRecipe, DvaeRecipe, Recipe, StageFacts, useful_flops
from myxtts.training.trainer import (
    Evaluation,
    Reporter,
    StagePlan,
    State,
    Step,
    Trainer,
    choose_mode,
    clips_per_step,
)
from myxtts.weights import MODEL_FILES, Provenance, has_weights, is_trained_in, start_from_hifigan

MEL_STATISTICS_CLIPS = 256
BATCH_SPLIT_KEYS = ("data.batch_size", "training.gradient_accumulation_steps", "processes")
"""How the clips of a step are divided: a run may change these as long as their product stays the same."""
MIXTURE, TEMPERATURE = "corpora and weights", "data.language_temperature"
ONE_CORPUS: dict[str, Any] = {MIXTURE: "one corpus, each clip once", TEMPERATURE: 1.0}
"""What is written, and assumed of a run that does not say it, where every epoch holds every clip of one corpus."""
JUDGED = ("wer", "similarity", "mos")
"""The values of `best_by` that the judges find."""
CLIPS_PER_STEP = "clips of a step (--batch-size × --grad-accum × processes)"

Say = Callable[[str], None]

_log = logging.getLogger(__name__)


class TrainingResult(NamedTuple):
    """The outcome of `train`."""

    states: dict[str, State]  # where each stage stands; the last is not `done` if a stop was requested
    prepared: PreparedCorpus


def train(
    settings: Settings | LoadedSettings,
    *,
    reporter: Reporter | None = None,
    progress: Progress = NO_PROGRESS,
    say: Say | None = None,
) -> TrainingResult:
    """Train every stage that the settings ask for, or continue the run in their `checkpoint_dir`.

    Under torchrun every process calls this; only rank 0 reports, writes, and calls `say`, by default the log's.
    """
    given = settings if isinstance(settings, LoadedSettings) else as_loaded(settings)
    settings = given.settings
    plan = make_plan(settings.data, spelling=given.spelling)
    reporter, say = (reporter or Reporter(), say or _log.info) if plan.rank == 0 else (Reporter(), _silent)
    training = settings.training
    run_dir = RunDir(training.checkpoint_dir, training.keep_checkpoints, training.best_by)
    continues = run_dir.has_begun and not settings.training.reset_training
    require_source(settings, run_dir if continues else None)
    with contextlib.ExitStack() as held:
        if plan.rank == 0:
            held.enter_context(lock(run_dir.folder))
        held.enter_context(deterministic(plan, settings.training.deterministic))
        work_on(plan.model)
        held.enter_context(process_group(plan))
        apply_caps(plan)
        if continues:
            settings = as_started(settings, run_dir)
        if plan.rank > 0:
            barrier(plan)  # rank 0 prepares the corpus, the others read it
        prepared = prepare_corpus(settings, progress, run_dir if continues else None)
        if plan.rank == 0:
            barrier(plan)
        reporter.corpus(prepared)
        settings = with_stages(settings, prepared, say)
        tuned = {} if continues else fine_tuning_values(settings, prepared, given.origin, say)
        settings = with_settings(settings, tuned)
        auto = auto_values(settings, prepared, run_dir if continues else None)
        stages = plan_stages(settings, prepared, plan, run_dir if continues else None)
        planned = [f"Plan of the run in {run_dir.folder}:", *map(str, stages)]
        for line in [*announcements(plan, settings.data), *_hints(settings, prepared, plan, auto), *planned]:
            say(line)
        reporter.plan(stages)
        fresh = cache(partial(initial_model, settings, prepared.tokenizer))
        _start(settings, run_dir, prepared, plan, None if continues else fresh, say, tuned, given.origin)
        settings = replace(settings, data=prepared.fitted(settings.data))
        stop, states = held.enter_context(_StopRequest(plan)), dict[str, State]()  # earlier, nothing is to save
        for stage in stages_of(settings):
            say(f"Stage {stage}")
            trained_on = run_dir.fingerprints(stage)
            loaded = _to_continue(run_dir, stage, trained_on)
            is_saved = run_dir.is_whole(without=() if loaded is not None else (stage,))
            model = run_dir.load_model(None if is_saved else fresh(), without=(stage,), warn=False)
            own = with_auto(settings, auto, stage)
            context = StageContext(stage, own, prepared, plan, model, run_dir, reporter, say, stop, trained_on)
            states[stage] = train_stage(context, loaded)
            barrier(plan)  # the next stage reads what rank 0 has saved of this one
            if not states[stage].done:
                break
    return TrainingResult(states, prepared)


def _to_continue(run_dir: RunDir, stage: str, trained_on: Mapping[str, str]) -> LoadedCheckpoint | None:
    """The checkpoint that a stage continues from; None if it starts, or starts over as an earlier one changed.

    Raises an error if it would start over only because an earlier one cannot be read. The last checkpoint stays
    until the stage has ended again.
    """
    loaded = run_dir.checkpoints(stage).newest()
    if loaded is None or loaded.notes.was_trained_on(trained_on):
        return loaded
    for earlier in BUILDS_ON.get(stage, ()):
        if run_dir.checkpoints(earlier).newest_is_damaged:
            damaged = (
                f"The newest checkpoint of {earlier} in {run_dir.folder} is damaged: {stage} was trained on it."
            )
            raise UnreadableWeights(f"{damaged}\nRestore it from a backup, or start over with --reset-training.")
    return None


def _silent(_: str) -> None: ...


# Corpus and weights to start from


def require_source(settings: Settings, continued: RunDir | None) -> None:
    """Raise a ConfigError unless there is what the settings need: judges, and weights if the run has none yet."""
    _require_hifigan(settings, continued)
    _require_evaluation(settings.training)
    source = settings.training.init_from
    known = continued.started_with().get("training.init_from") if continued is not None else None
    if source is None or str(source) == known or RunDir(source).exists:
        return
    if has_weights(source) and (settings.data.tokenizer is not None or (source / VOCABULARY_FILE).is_file()):
        return
    if has_weights(source):
        why = f"the folder has weights, but no {VOCABULARY_FILE}; copy it there, or name one with --tokenizer"
    elif source.is_dir():
        why = f"the folder holds neither XTTS weights ({' or '.join(MODEL_FILES)}) nor a run"
    else:
        why = "that is a file, not a folder" if source.exists() else "there is no such folder"
    raise ConfigError(
        f"--init-from {source}: {why}.\n"
        "Name a folder with the files of XTTS-v2 (model.pth, dvae.pth, mel_stats.pth, vocab.json), or a run's."
    )


def _require_evaluation(training: config.TrainingSettings) -> None:
    """Raise a ConfigError if the settings need evaluations that they switch off, or judges that are not there."""
    needs = [f"--best-by {training.best_by}"] if training.best_by else []
    needs += [f"--early-stop {training.early_stop}"] if training.early_stop else []
    if needs and training.evaluate_on == "off":
        raise ConfigError(f"{needs[0]} needs evaluations, and --evaluate-on is off; leave out one of them")
    if training.best_by in JUDGED:
        if training.spoken_sentences == 0:
            raise ConfigError(f"{needs[0]} needs spoken sentences, and --spoken-sentences is 0; give 8 or so")
        try:
            find_judges()
        except ConfigError as error:
            raise ConfigError(f"{needs[0]} needs the judges. {error}") from None


def _require_hifigan(settings: Settings, continued: RunDir | None) -> None:
    """Raise an error unless a decoder stage that is yet to begin can start from `init_decoder`."""
    path, is_begun = settings.training.init_decoder, continued is not None and continued.has_checkpoint("decoder")
    if path is not None and "decoder" in stages_of(settings) and not is_begun:
        dims = SIZES[settings.model.size]
        generator = Generator(1, dims.vocoder_channels, 1, reads_mels=dims.reads_mels)
        start_from_hifigan(path, generator, HifiGanInput(dims.vocoder_channels))


def prepare_corpus(
    settings: Settings, progress: Progress = NO_PROGRESS, continued: RunDir | None = None
) -> PreparedCorpus:
    """The corpus with the vocabulary of the run: that of the run it continues, of --init-from, or a new one."""
    if continued is None:
        require_source(settings, None)
    own = continued.vocabulary_file if continued is not None else None
    data = with_tokenizer_of_run(settings.data, own, settings.training.init_from)
    try:
        return prepare(data, progress)
    except DatasetError as error:
        if continued is None and settings.training.init_from == config.BASE_FOLDER:
            cure = "--init-from none starts from scratch, with one of the corpus; docs/recordings.md extends it"
            raise DatasetError(f"{error}\nThe vocabulary is that of the base model. {cure}") from error
        if continued is None:
            raise
        raise DatasetError(
            f"{error}\nTexts were read with the vocabulary of the run in {continued.folder}, which this would "
            "continue. For another corpus give another --checkpoint-dir, or --reset-training."
        ) from error


def with_stages(settings: Settings, prepared: PreparedCorpus, say: Say = _silent) -> Settings:
    """The settings with the stages that the corpus allows; raises if they name one that it does not."""
    training, num_speakers = settings.training, prepared.num_speakers
    stages = stages_of(settings, num_speakers)
    found = f"the corpus names {num_speakers or 'no'} speaker{'s' * (num_speakers != 1)} with two clips or more"
    why = f"{found}, and the stage learns from {MIN_SPEAKERS} or more"
    if "speaker" in stages and num_speakers < MIN_SPEAKERS:
        raise ConfigError(f"--stages speaker: {why}. Leave it out: the decoder can do without it")
    if training.stages is None and "decoder" in stages and "speaker" not in stages:
        say(f"Stage speaker is left out: {why}. The decoder takes voices from the GPT instead")
    return replace(settings, training=replace(training, stages=stages)) if "speaker" in stages else settings


def _start(
    settings: Settings,
    run_dir: RunDir,
    prepared: PreparedCorpus,
    plan: Plan,
    fresh: Callable[[], XTTS] | None,
    say: Say,
    tuned: Mapping[str, Any],
    origin: Mapping[str, str],
) -> None:
    """Write the folder of a new run, which starts with the model `fresh`; tidy that of a continued one (None).

    An old run in the same folder is put aside only once the new model exists.
    """
    training, stages, source = settings.training, stages_of(settings), settings.training.init_from
    barrier(plan)  # all ranks have read what was there
    model = fresh() if fresh is not None else None
    if plan.rank == 0:
        if training.reset_training and (aside := run_dir.reset()) is not None:
            say(f"Starting over; what the folder held is now in {aside}")
        for stage in STAGES:
            run_dir.checkpoints(stage).prune()
        if model is not None:
            known, is_coded = inherited(source), model.dvae.codebook.is_trained  # a folder may lack the DVAE
            random = {*known["untrained"], *(() if is_coded else ("dvae",))}
            facts = {
                "training.init_from": None if source is None else str(source),
                "model.size": settings.model.size,
                "data.max_mel_frames": prepared.max_mel_frames,
                **known,
                "untrained": [stage for stage in STAGES if stage in random],
                "auto": auto_values(settings, prepared),
                "fine_tuning": {**steps_after_a_trial(settings, prepared, origin, tuned), **tuned},
                "has_grown_vocabulary": source is not None and _num_tokens(source) < prepared.tokenizer.num_tokens,
            }
            trained_in_full = [stage for stage in stages if stage != "gpt" or not settings.model.lora_rank]
            readers = None if source is None else readers_file(source)
            run_dir.start(model, prepared.tokenizer, trained_in_full, facts, readers)
        is_random = "dvae" in run_dir.untrained() and "dvae" not in stages
        if "gpt" in stages and is_random and model is not None:
            say("Hint: stage gpt without a trained DVAE learns the codes of a random one; train dvae before it")
        again = replace(settings, training=replace(training, reset_training=False))
        write_text_atomically(run_dir.folder / "settings.yaml", to_yaml(again))
    barrier(plan)


def fine_tuning_values(
    settings: Settings, prepared: PreparedCorpus, origin: Mapping[str, str], say: Say = _silent
) -> dict[str, Any]:
    """The settings that suit fine-tuning the GPT, or a flow, on so much speech, by key.

    What the user gave stays; for the GPT, whose steps and learning rate go together, the user then decides on all.
    """
    tables: dict[tuple[str, ...], Mapping[float, Mapping[str, Any]]] = {("gpt",): FINE_TUNING}
    if settings.model.size in FLOW_SIZES:
        tables["decoder",] = FLOW_TUNING
    table = tables.get(stages_of(settings), {})
    minutes = float(prepared.train.num_samples.sum()) / SAMPLE_RATE / 60
    row = next((values for most, values in table.items() if minutes < most), {})
    keys = {"training.epochs", *(key for values in table.values() for key in values)}
    given = {key for key in keys if origin.get(key) in ("file", "flag")}
    if settings.training.init_from is None or (given and table is FINE_TUNING):
        return {}
    given |= {"training.max_steps"} if "training.epochs" in given else set()
    own = as_loaded(settings)  # a preset may have set some; adapters have a learning rate of their own
    has_own = {key: own.is_set(key) for key in row} | {"training.learning_rate": settings.model.lora_rank > 0}
    found = {key: value for key, value in row.items() if not has_own[key] and key not in given}
    if listed := ", ".join(f"{specs()[key].flags[0]} {value:g}" for key, value in found.items()):
        all_or_none = " (give one of these, and you decide on all)" if table is FINE_TUNING else ""
        say(f"Fine-tuning on {minutes:.1f} minutes of speech: {listed}{all_or_none}")
    return found


def steps_after_a_trial(
    settings: Settings, prepared: PreparedCorpus, origin: Mapping[str, str], tuned: Mapping[str, Any]
) -> dict[str, Any]:
    """The steps of the table, for a run that was tried with others and is continued without them."""
    key = "training.max_steps"
    if not tuned or key in tuned:
        return {}
    others = {name: where for name, where in origin.items() if name != key}
    found = fine_tuning_values(with_settings(settings, {key: None}), prepared, others)
    return {key: found[key]} if key in found else {}


def auto_values(
    settings: Settings, prepared: PreparedCorpus, continued: RunDir | None = None
) -> Mapping[str, float]:
    """The settings that are `auto` and on for this corpus, by key; those that a continued run began with."""
    if continued is not None:
        return dict(continued.started_with().get("auto", {}))
    training, samples = settings.training, int(prepared.train.num_samples.sum())
    is_small = samples / SAMPLE_RATE < 3600 * SMALL_CORPUS_HOURS and settings.data.train_data is not None
    values: Mapping[str, float] = SMALL_CORPUS if is_small else {}
    if (source := training.init_from) is not None:  # speaking depends on these, see `synthesizer.sampling_for`
        known = provenance(RunDir(source)) if RunDir(source).exists else Provenance.read(source)
        values = {"training.code_noise": known.code_noise, "training.text_dropout": known.text_dropout}
    return {key: value for key, value in values.items() if value and value_of(settings, key) is None}


def with_auto(settings: Settings, auto: Mapping[str, float], stage: str) -> Settings:
    """The settings of a stage with a number for each that is `auto`; for gpt, what the run began with."""
    own = {"gpt": auto, "decoder": {"training.ema_decay": DECODER_EMA_DECAY}}.get(stage, {})
    unset = [key for key in SMALL_CORPUS if value_of(settings, key) is None]
    return with_settings(settings, {key: own.get(key, 0.0) for key in unset})


def _num_tokens(source: Path) -> int:
    try:
        return int(Tokenizer.load(source).num_tokens)
    except MyXTTSError:  # weights without a vocabulary: the one named by --tokenizer is theirs
        return sys.maxsize


def _hints(settings: Settings, prepared: PreparedCorpus, plan: Plan, auto: Mapping[str, float]) -> Iterator[str]:
    if auto and "gpt" in stages_of(settings):
        applied = ", ".join(f"{key} {value:g}" for key, value in auto.items())
        why = f"From scratch on less than {SMALL_CORPUS_HOURS:g} hours of speech"
        why = why if settings.training.init_from is None else "Like the weights it starts from"
        yield f"{why}, the gpt stage has {applied}"
    machine = Machine.look()
    gpus = machine.gpus
    situation = Situation(
        settings=settings,
        num_gpus=len(gpus) if plan.world_size == 1 else min(len(gpus), 1),
        roles=machine.roles,
        cores=usable_cores(),
        gpu_memory_mb=next((gpu.memory_mb for gpu in gpus if gpu.index == plan.model.index), 0),
        num_clips=prepared.mixture.num_clips,
        num_val_clips=len(prepared.val),
        speech_hours=float(prepared.train.num_samples.sum()) / SAMPLE_RATE / 3600,
        processes=plan.world_size,
    )
    for found in hints(situation):
        what = ": ".join(filter(None, [found.what, found.why]))
        how = how_to_set(found.setting, found.value) if found.value is not None else ""
        yield f"Hint: {what}; {': '.join(filter(None, [found.fix, how]))}"


# One stage


@dataclass
class StageContext:
    """One stage of a run: what is trained, on which data and devices, where it is saved, and who is informed.

    Feeds and the training loop read from it what they need. A dry run makes one as well, and saves nothing.
    """

    stage: str
    settings: Settings
    prepared: PreparedCorpus
    plan: Plan
    model: XTTS
    run_dir: RunDir
    reporter: Reporter = field(default_factory=Reporter)
    say: Say = _silent
    stop: Callable[[], bool] = lambda: False
    trained_on: Mapping[str, str] = field(default_factory=dict)
    """The fingerprints of the earlier stages."""
    vocoder: dict[str, float] = field(default_factory=dict)
    """Mean distances of decoder and Griffin-Lim from held-out recordings, by the last validation."""
    _evaluator: Evaluator | None = None

    @property
    def fine_tuning(self) -> bool:
        """True if the stage starts from trained weights of `init_from`."""
        random = self.run_dir.initially_untrained() if self.run_dir.exists else ()
        return self.settings.training.init_from is not None and self.stage not in random

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return self.run_dir.checkpoints(self.stage)

    @cached_property
    def streams(self) -> Streams:
        """Shared by all feeds of the stage: PyTorch keeps working memory for every stream."""
        return Streams.of(self.plan, self.settings.data)

    @cached_property
    def codes_key(self) -> str:
        """Names the codes in the cache; not known before the DVAE has its final weights."""
        return dvae_key(self.model, self.settings.data.mixed_precision and self.plan.data.type == "cuda")

    @cached_property
    def latents_key(self) -> str:
        """Names the latents in the cache; the networks before the decoder have their final weights."""
        return latents_key(self.model, self.codes_key)

    def notes(self) -> dict[str, Any]:
        known = identity(self.settings, self.prepared, self.plan)
        trained_with = {key: value_of(self.settings, key) for key in SMALL_CORPUS}
        languages = [LANGUAGES[number] for number in sorted(set(self.prepared.train.languages.tolist()))]
        notes = {"identity": known, "lora_rank": self.settings.model.lora_rank, "languages": languages}
        notes |= {"trained_with": trained_with}
        return notes | ({"vocoder": self.vocoder} if self.vocoder else {})

    @property
    def evaluates_on(self) -> str:
        """`data`, `model` or `cpu`."""
        asked, plan = self.settings.training.evaluate_on, self.plan
        if asked != "auto":
            return "model" if asked == "off" else asked
        keeps_its_memory = plan.mode == "dual" or choose_mode(self.settings, self.stage, plan).captured
        return "data" if plan.data.type == "cuda" and keeps_its_memory else "model"

    def of_first_rank(self, *values: int) -> tuple[int, ...]:
        """What rank 0 has; all ranks must ask."""
        return of_first_rank(self.plan, *values)

    @cached_property
    def speaker(self) -> Speaker | None:
        """Speaks the held-out sentences; None if the stage, the settings or the corpus have none."""
        training, is_on_cpu = self.settings.training, self.plan.model.type == "cpu" or self.evaluates_on == "cpu"
        is_free, wanted = self.evaluates_on == "data" and not is_on_cpu, training.spoken_sentences
        wanted = (8 if is_free or training.best_by in JUDGED else 0) if wanted is None else wanted
        if not wanted or self.stage not in SPEAKING_STAGES or self.plan.rank > 0:
            return None
        try:
            if training.deterministic and not is_on_cpu:  # PyTorch has no sums of that kind for sampling
                raise ConfigError("a GPU samples no codes with --deterministic; --evaluate-on cpu does")
            return Speaker(self, wanted)
        except (MyXTTSError, OSError) as error:
            self.say(f"Evaluations speak no sentences: {error}")
            return None

    @cached_property
    def judging(self) -> Judging | None:
        """Has sentences judged in the background; None if the judges are not installed."""
        try:
            return Judging(find_judges(), self.run_dir.folder)
        except ConfigError:
            return None

    def evaluate(self, recipe: Recipe, step: int, speaks: bool) -> Evaluation:
        """Evaluate the networks as they are, in the stream of the model role."""
        losses, pictures = validate(self, recipe)
        speaker = self.speaker if speaks else None
        return with_speech(Evaluation(step, losses, pictures), speaker, self.model, self.plan.model)

    def evaluator(self, step: Step) -> Evaluator | None:
        """The evaluator that works while training goes on; None if the model role evaluates, or another rank."""
        where = self.evaluates_on
        if where == "model" or self.plan.rank > 0:
            return None
        device = torch.device("cpu") if where == "cpu" else self.plan.data
        keeps_all = self.stage == "gpt" and self.settings.training.best_by in JUDGED
        try:
            self._evaluator = Evaluator(self, step, device, self.speaker, keeps_all)
        except torch.OutOfMemoryError:
            self.drop_evaluator()
            self.say(f"No room on {device} for copies of the weights: training waits for evaluations")
            return None
        size = f"{self._evaluator.num_bytes / 2**20:.0f} MB of copied weights"
        self.say(f"Evaluations run on {device} while training goes on ({size})")
        return self._evaluator

    def evaluated(self, found: Evaluation) -> None:
        """Remember what an evaluation found of the vocoders, and have its sentences judged."""
        distances = {name: found.losses[name] for name in ("decoder", "griffin_lim") if name in found.losses}
        self.vocoder = distances or self.vocoder
        if found.spoken and self.judging is not None:
            replaced = self.judging.submit(found.step, found.spoken)
            if replaced is not None:
                self.say(f"The sentences of step {replaced} are not judged: judging takes longer than evaluating")

    def judged(self, wait: bool = False) -> list[Evaluation]:
        """What the judges found since the last call; with `wait`, everything that was spoken."""
        if "judging" not in vars(self) or self.judging is None:
            return []
        if wait and not self.judging.is_idle:
            self.say("Waiting for the judges")
        return self.judging.results(wait)

    def drop_evaluator(self) -> None:
        """End the evaluator and free its memory; what is evaluated from here on speaks no sentences."""
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None
            release_memory()
        vars(self)["speaker"] = None

    def close(self) -> None:
        """End the evaluator, the judges and the writer of checkpoints."""
        self.drop_evaluator()
        if "judging" in vars(self) and self.judging is not None:
            self.judging.close()
        self.checkpoints.close()

    def stop_requested(self, step: int) -> bool:
        """True if training should stop after this step; several processes ask rarely, as it costs messages."""
        interval = min(self.settings.training.log_step, 10) if self.plan.world_size > 1 else 1
        return step % interval == 0 and self.stop()

    def weights(self, recipe: Recipe) -> dict[str, Tensor]:
        """What a checkpoint holds: the stage's part of the model, or only its adapters; live tensors."""
        if self.stage == "gpt" and self.settings.model.lora_rank:
            return {f"gpt.{name}": value for name, value in adapter_state(self.model.gpt).items()}
        state = {name: value for name, value in self.model.state_dict().items() if is_trained_in(self.stage, name)}
        for prefix, module in recipe.extra_modules().items():
            state |= {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
        return state

    def load_weights(self, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
        """Put what `weights` returned back in its place."""
        own = dict(weights)
        for prefix, module in recipe.extra_modules().items():
            names = [name for name in weights if name.startswith(f"{prefix}.")]
            module.load_state_dict({name.removeprefix(f"{prefix}."): own.pop(name) for name in names})
        unknown = self.model.load_state_dict(own, strict=False).unexpected_keys
        if unknown:
            raise UnreadableWeights(
                f"The checkpoint of {self.stage} does not fit this model: it holds {unknown[:3]}"
            )


def plan_stages(
    settings: Settings, prepared: PreparedCorpus, plan: Plan, run_dir: RunDir | None
) -> list[StagePlan]:
    """What a command does with every stage; raises if it cannot continue the run in `run_dir`."""
    planned, changed, auto = list[StagePlan](), list[str](), auto_values(settings, prepared, run_dir)
    newest = run_dir.newest_notes() if run_dir is not None else {}
    for stage in STAGES:
        now = identity(with_auto(settings, auto, stage), prepared, plan)
        target, notes = total_steps(settings, prepared, stage, now), newest.get(stage)
        status = run_dir.status(stage, changed) if run_dir is not None else StageStatus(stage)
        if stage not in stages_of(settings):
            if status.state == "stale":
                cure = "leave out --stages" if settings.training.stages else f"add --stages {stage}"
                planned.append(
                    StagePlan(stage, 0, "stale, and left as it is", f"{status.why}; {cure} to train it")
                )
            continue
        if notes is not None and run_dir is not None:
            require_continuable(run_dir.folder, notes.state["notes"]["identity"], now)
        if notes is None:
            step, does = 0, f"{target} steps"
        elif status.state == "stale":
            step, does = 0, f"starts over, {target} steps"
        elif is_complete(settings, prepared, notes):
            step, does = target, f"complete at step {notes.step}"
        else:
            step, does = notes.step, f"continues at step {notes.step} of {max(target, notes.step)}"
        why = status.why
        batch_clips = settings.data.batch_size * plan.world_size
        risen = warmup_steps(settings.training, prepared.mixture.num_clips, batch_clips) + 1
        if status.state == "complete" and risen < step < target:
            why = f"its first {step} steps used the learning rates of a shorter run"
        planned.append(StagePlan(stage, max(target - step, 0), does, why))
        if step < target:
            changed.append(stage)
    return planned


def is_complete(settings: Settings, prepared: PreparedCorpus, notes: Notes) -> bool:
    """True if a stage has ended, early or with the steps that are asked for, as its batches were divided."""
    stage, training = notes.state["stage"], settings.training
    is_early = 0 < training.early_stop <= notes.state["stale_validations"]
    target = total_steps(settings, prepared, stage, notes.state["notes"]["identity"])
    is_evaluated = notes.state.get("pending") is None  # a kill may have come before the last evaluation
    return bool(notes.state["done"]) and is_evaluated and (is_early or notes.step >= target)


def train_stage(ctx: StageContext, loaded: LoadedCheckpoint | None) -> State:
    """Train one stage to its end or until a stop is requested, from the checkpoint `loaded` or from the start."""
    try:
        now = identity(ctx.settings, ctx.prepared, ctx.plan)
        state, total = State(), total_steps(ctx.settings, ctx.prepared, ctx.stage, now)
        if loaded is not None:
            saved = loaded.state["notes"]["identity"]
            require_continuable(ctx.run_dir.folder, saved, now)
            state = State.from_json(loaded.step, loaded.state)
            ctx.vocoder = loaded.state["notes"].get("vocoder", {})
            if is_complete(ctx.settings, ctx.prepared, loaded.notes):
                ctx.say(f"Stage {ctx.stage}: finished at step {state.step}")
                return state
            ctx.say(f"Stage {ctx.stage}: continuing at step {state.step} of {max(total, state.step)}")
            if "cursor_counts" not in loaded.state and state.cursor.batch and saved["processes"] > 1:
                state.cursor = Cursor(state.cursor.epoch, state.cursor.batch * saved["processes"])
                ctx.say(
                    "The order of several processes has changed since the run was saved: "
                    f"the rest of epoch {state.cursor.epoch} repeats some clips and leaves out others"
                )
            if saved["data.batch_size"] != now["data.batch_size"] and state.cursor.batch:
                ctx.say(f"Batches have another size now: epoch {state.cursor.epoch} starts over")
                state.cursor = Cursor(state.cursor.epoch)
        return _train(ctx, loaded, state, total)
    finally:
        ctx.close()


def total_steps(settings: Settings, prepared: PreparedCorpus, stage: str, split: Mapping[str, Any]) -> int:
    """Optimiser steps of the stage if the clips of a step are divided like this; see BATCH_SPLIT_KEYS."""
    batch_size, accumulate, processes = (int(split[name]) for name in BATCH_SPLIT_KEYS)
    num_clips = prepared.mixture.num_clips
    return stage_steps(settings.training, stage, num_clips, batch_size, accumulate * processes)[0]


def _train(ctx: StageContext, loaded: LoadedCheckpoint | None, state: State, total: int) -> State:
    data, training, plan, model = ctx.settings.data, ctx.settings.training, ctx.plan, ctx.model
    if ctx.stage == "dvae" and loaded is None and (model.mel_stats == 1).all():  # there are none yet
        model.mel_stats.copy_(mel_statistics(ctx.prepared.train, plan.data))
    # Not for LoRA: adapters belong to the weights that the run wrote down when it started.
    is_random = loaded is None and ctx.stage in ctx.run_dir.initially_untrained()
    if ctx.stage == "gpt" and is_random and not ctx.settings.model.lora_rank:
        torch.manual_seed(training.seed)
        model.gpt.init_from_codebook(model.dvae.codebook.embed.t())
    step = set_up(ctx, total, loaded)
    if isinstance(step.recipe, DvaeRecipe) and step.recipe.frozen:
        ctx.say("Codebook: frozen, so that its codes keep their meaning; --codebook trained changes it")
    peak = peak_clips_per_s(ctx, step)
    if ctx.stage == "decoder" and data.cache_latents:
        is_worth_it = total * clips_per_step(ctx) >= len(ctx.prepared.train)
        if not (is_worth_it and keep_latents(ctx, ctx.say)):
            ctx.settings = with_settings(ctx.settings, {"data.cache_latents": False})
        barrier(plan)  # each rank has computed its share
    if training.evaluate_on != "off" and len(ctx.prepared.val):
        _ = ctx.speaker  # reads the texts of the corpus, for which training would wait
    doing = f"training on batches of {data.batch_size} clips"
    with explained_out_of_memory(plan, "model", doing), build_feed(ctx, state.cursor) as feed:
        ctx.say(f"Buffer size: {feed.buffers()}")
        if feed.own_references is not None:
            ctx.say(f"Reference voices: {_about_references(feed.own_references, data, ctx.prepared)}")
        ctx.say(f"Training step: {step.mode}")
        ctx.say(f"Waiting up to {data.model_start_delay:g}s for data pipeline to warm up")
        waited = feed.wait_until_warm(data.model_start_delay)
        ctx.say(f"Model training starting now ({feed.num_ahead} batches ready after {waited:.1f} s)")
        trained = Trainer(ctx, step, feed, state, total, peak).run()
        step.close()
        return trained


def _about_references(own: float, data: config.DataSettings, prepared: PreparedCorpus) -> str:
    if data.reference_clip == "same":
        return "each clip is conditioned on itself, as --reference-clip same asks"
    if own == 0:
        return "each clip is conditioned on another clip of its speaker"
    advice = "if one person speaks in all clips without a name, give --single-speaker"
    if len(prepared.corpora) > 1:
        where = " or of ".join(prepared.unnamed_corpora) or "the clips without a name of a corpus"
        advice = f"if one person speaks in all of {where}, give it as DIR:single-speaker"
    return f"{100 * own:.0f} % of the clips have no other clip of their speaker and use themselves; {advice}"


def set_up(ctx: StageContext, total: int, loaded: LoadedCheckpoint | None = None) -> Step:
    """The step that trains the stage: its networks unfrozen, restored from a checkpoint, and on their device."""
    settings, training, plan = ctx.settings, ctx.settings.training, ctx.plan
    mode = choose_mode(settings, ctx.stage, plan)
    ctx.model.eval().requires_grad_(False)
    torch.manual_seed(training.seed)  # a stage starts the same, whatever this process did before
    with explained_out_of_memory(plan, "model", "loading weights and optimiser"):
        has_new_tokens = ctx.run_dir.exists and bool(ctx.run_dir.started_with().get("has_grown_vocabulary"))
        warm = ctx.stage == "decoder" and training.init_decoder is not None
        if loaded is not None:
            warm = any(name.startswith("teacher.") for name in loaded.weights)
        facts = StageFacts(plan.world_size, ctx.fine_tuning, total, warm, has_new_tokens)
        recipe = RECIPES[ctx.stage].build(ctx.model, settings, facts)
        if loaded is not None:
            ctx.load_weights(recipe, loaded.weights)
        elif isinstance(recipe, DecoderRecipe) and recipe.teacher is not None and training.init_decoder:
            keeps_flow = ctx.fine_tuning and recipe.generator.flow is not None
            ctx.say(start_from_hifigan(training.init_decoder, recipe.generator, recipe.teacher, keeps_flow))
        if ctx.stage == "gpt" and settings.model.lora_rank and mode.autocast:
            store_frozen_in_bf16(ctx.model.gpt)
        recipe.to(plan.model).train()
        parts = recipe.parts()
        num_clips = ctx.prepared.mixture.num_clips
        warmup = warmup_steps(training, num_clips, settings.data.batch_size * plan.world_size)
        optimizer = Optimizer(
            parts if len(parts) > 1 else recipe,
            training.learning_rate or recipe.learning_rate(ctx.fine_tuning),
            Schedule(warmup, total, lead_steps=recipe.lead_steps),
            weight_decay=training.weight_decay,
            grad_clip=training.grad_clip,
            betas=recipe.betas,
            ema_decay=(training.ema_decay or 0.0) if recipe.is_averaged else 0.0,
        )
    torch.manual_seed(training.seed + plan.rank)  # dropout differs between ranks
    if loaded is not None:
        own = optimizer.state_dict()
        optimizer.load_state_dict({name: loaded.optimizer[name] for name in loaded.optimizer if name in own})
        saved = loaded.optimizer.get(f"random.{plan.rank}")
        if saved is not None and saved.shape == random_state(plan.model).shape:
            set_random_state(plan.model, saved)
        else:
            torch.manual_seed(training.seed + plan.rank + loaded.step)
            ctx.say("The run was saved on other devices: it continues with other random numbers")
    accumulate, stream = training.gradient_accumulation_steps, ctx.streams.model
    return Step(recipe, optimizer, mode, stream, accumulate=accumulate, reduction=training.gradient_reduction)


def peak_clips_per_s(ctx: StageContext, step: Step) -> float | None:
    """The speed at which every GPU would compute nothing but useful matrix products; None if unknown."""
    peak = peak_flops(step.stream, torch.bfloat16 if step.mode.autocast else torch.float32)
    flops = useful_flops(step.recipe, ctx.prepared.train) if peak else None
    return ctx.plan.world_size * peak / flops if flops and peak else None


@torch.no_grad()
def mel_statistics(clips: ClipSet, device: torch.device) -> Tensor:
    """The divisors of mels, [80]: the root mean square of each band over some training clips.

    In the DVAE's loss an error in the loudest band, at 300 Hz, then weighs 4.6 times one in the faintest, at 8 kHz
    (embedded corpus). XTTS-v2 has a divisor per band too, and errors in faint bands are heard less.
    """
    log_mel, num_frames = LogMel(DVAE_MEL).to(device), 0
    total = torch.zeros(DVAE_MEL.num_mels, dtype=torch.float64, device=device)
    for clip in range(0, len(clips), max(len(clips) // MEL_STATISTICS_CLIPS, 1)):
        pcm = torch.from_numpy(clips.audio[int(clips.audio_rows[clip])].copy()).to(device)
        mel = log_mel(pcm.float() / 32768)[:, : num_frames_of(len(pcm))]
        total += mel.double().square().sum(1)
        num_frames += mel.shape[1]
    return (total / max(num_frames, 1)).sqrt().float().cpu()


# Resuming


def as_started(settings: Settings, run_dir: RunDir) -> Settings:
    """The settings of a continued run: `init_from` is the one it was started with, and cannot change."""
    facts, training = run_dir.started_with(), settings.training
    source = facts.get("training.init_from")
    given = source if training.init_from is None else str(training.init_from)
    now = {"training.init_from": given, "model.size": settings.model.size}
    require_same(run_dir.folder, {name: facts.get(name) for name in now}, now)
    own = as_loaded(settings)
    tuned = {key: value for key, value in facts.get("fine_tuning", {}).items() if not own.is_set(key)}
    settings = with_settings(settings, tuned)
    if settings.data.tokenizer is not None:
        named, pinned = Tokenizer.load(settings.data.tokenizer), run_dir.vocabulary()
        require_same(run_dir.folder, {"vocabulary": pinned.fingerprint}, {"vocabulary": named.fingerprint})
    return with_settings(settings, {"training.init_from": Path(source) if source else None})


def identity(settings: Settings, prepared: PreparedCorpus | None, plan: Plan | None = None) -> dict[str, Any]:
    """What a run cannot change on its way, as far as it is known: the network, and the order of its clips."""
    data, model, training = settings.data, settings.model, settings.training
    known: dict[str, Any] = {
        "model.size": model.size,
        "model.lora_rank": model.lora_rank,
        "data.batch_size": data.batch_size,
        "data.max_text_length": data.max_text_length,
        "data.use_phonemes": data.use_phonemes,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
        "training.seed": training.seed,
        "training.ema_decay": training.ema_decay or 0.0,
    }
    if prepared is not None:
        known |= {
            "training clips": len(prepared.train),
            "seconds of training clips": round(float(prepared.train.num_samples.sum()) / SAMPLE_RATE, 1),
            "vocabulary": prepared.tokenizer.fingerprint,
        }
        if prepared.train.shards is not None:
            known["shards"] = len(np.unique(prepared.train.shards))
        known |= ONE_CORPUS
        if len(prepared.corpora) > 1 or not prepared.mixture.is_plain:
            pairs = zip(prepared.corpora, map(config.format_weight, prepared.weights), strict=True)
            known |= {MIXTURE: ", ".join(map(":".join, pairs)), TEMPERATURE: data.language_temperature}
    given = os.environ.get("WORLD_SIZE", "")  # as torchrun would start it from here
    return known | {"processes": plan.world_size if plan else int(given) if given.isdigit() else 1}


def check_resumable(settings: Settings, run_dir: RunDir, prepared: PreparedCorpus | None) -> None:
    """Raise the error with which `train` would refuse to continue a run, as far as it can be known beforehand."""
    settings = as_started(settings, run_dir)
    auto = run_dir.started_with().get("auto", {})
    for stage, notes in run_dir.newest_notes().items():
        if stage in stages_of(settings):
            saved, now = notes.state["notes"]["identity"], identity(with_auto(settings, auto, stage), prepared)
            require_continuable(run_dir.folder, {name: saved[name] for name in now if name in saved}, now)


def require_continuable(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ConfigError if what cannot change has changed."""
    saved = {name: value for name, value in ONE_CORPUS.items() if name in now} | dict(saved)
    before, after = (
        {name: value for name, value in known.items() if name not in (*BATCH_SPLIT_KEYS, "data.max_mel_frames")}
        | {CLIPS_PER_STEP: math.prod(known.get(name, 1) for name in BATCH_SPLIT_KEYS)}
        for known in (saved, now)
    )
    advice = []
    if before[CLIPS_PER_STEP] != after[CLIPS_PER_STEP] and before[CLIPS_PER_STEP] % now["processes"] == 0:
        per_process = before[CLIPS_PER_STEP] // now["processes"]
        batch = max(size for size in range(1, now["data.batch_size"] + 1) if per_process % size == 0)
        keep = f"--batch-size {batch} --grad-accum {per_process // batch}"
        advice.append(f"A step of the run has {before[CLIPS_PER_STEP]} clips: {keep} keeps them.")
    if before.get("training clips") != after.get("training clips"):
        other = f"--init-from {folder} --checkpoint-dir {_free_folder(folder)}"
        advice.append(f"For recordings added or removed, train on in a new run: {other}")
        if before.get("shards", 0) == after.get("shards"):
            why = "by --val-fraction, or as the run began with a version that held clips of every shard out"
            advice.append(f"If none were, other clips are held out now: {why}.")
    require_same(folder, before, after, advice)


def _free_folder(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in names if not path.exists())


# Signals and processes


class _StopRequest:
    """SIGINT, SIGTERM and a closed terminal (SIGHUP) let the step finish; a second one ends the process at once.

    Called, it returns True if training should stop. All ranks get the same answer, so all must call it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._received = plan, False
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        if self._plan.world_size == 1:
            return self._received
        flag = torch.tensor([float(self._received)], device=self._plan.model)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def __enter__(self) -> _StopRequest:
        with contextlib.suppress(ValueError):  # threads other than the main one receive no signals
            is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            for number in (signal.SIGINT, signal.SIGTERM, *(() if is_nohup else (signal.SIGHUP,))):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = True
        _log.info("Finishing this step and saving; the same signal again ends at once")
