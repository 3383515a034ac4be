"""The output of a training run: lines on the terminal, metrics, pictures, the report page, a spoken sample."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from myxtts import __version__
from myxtts.config import BUILDS_ON, LANGUAGES, MIN_SPEAKERS, STAGES, Settings, stage_steps, stages_of
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Machine, make_plan
from myxtts.errors import ConfigError, MyXTTSError
from myxtts.host import usable_cores
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.observe.diagnosis import LiveWarnings
from myxtts.observe.metrics import (
    SAMPLES_FOLDER,
    JudgeReport,
    MetricsLog,
    Spoken,
    StepReport,
    ValidationReport,
    duration,
    log_sound,
)
from myxtts.observe.nvml import MACHINE_FILE, UUIDS, Sampler
from myxtts.observe.report import write_report
from myxtts.run import as_started, plan_stages, with_stages
from myxtts.run_dir import RunDir
from myxtts.synthesis.synthesizer import SAMPLE_FILE, Example, example, provenance, speak_sample
from myxtts.terminal import ProgressPrinter, show_corpus
from myxtts.training.trainer import Reporter, StagePlan, State

FEW_STEPS = 1000  # A GPT trained from scratch for fewer steps does not speak words yet
MAX_COLUMNS = 110  # of a command to be copied; a longer one continues on a second line
SLOW_S = 3600.0  # a run on a CPU that takes longer gets advice
_ABOUT_THE_DEMO = (
    "What to expect: this only checks the installation. A few minutes of training the smallest network on four "
    "minutes of speech give babble, or on a GPU the memorised sentences of the corpus. The validation loss of gpt "
    "rises because so few sentences are memorised, not learnt. A voice takes hours of recordings and of GPU time, "
    "or minutes of both if you start from XTTS-v2 (README.md says where to get it)."
)
_ABOUT_THE_TUNED_DEMO = (
    "What to expect: the model it started from, fine-tuned on four minutes of speech. --train-data DIR takes your "
    "recordings; --init-from none trains from scratch."
)
_ABOUT_FEW_STEPS = (
    "What to expect: after {} of gpt from scratch, a model only babbles or hums. A voice takes many thousand "
    "steps and hours of recordings. {}"
)
_FASTER = "With --init-from XTTS-v2 --model-size normal, minutes of each are enough; README.md has a link."
_FASTER_IN_PERSIAN = (
    "XTTS-v2 (README.md says where to get it) does not know Persian, but starting from it with an extended "
    "vocabulary saves hours of both; docs/recordings.md has the commands."
)
_ABOUT_A_CPU = (
    "From scratch on a CPU this is slow. Faster: a GPU; --init-from FOLDER (weights of XTTS-v2 or another run), "
    "which trains only gpt; or --max-steps 100 to try the whole run first."
)
_ABOUT_TUNING_ON_A_CPU = (
    "Fine-tuning on a CPU is slow. Faster: a GPU. Ctrl-C saves: myxtts speak then uses what was learnt so far, "
    "and the same command continues."
)

_log = logging.getLogger(__name__)


class TrainingReports(Reporter):
    """Shows and stores the reports of the training loop, and warns when the pipeline is slow."""

    def __init__(self, folder: Path, printer: ProgressPrinter) -> None:
        self._folder, self._printer = folder, printer
        self._log, self._warnings = MetricsLog(folder), LiveWarnings()
        self.has_trained = False
        self._gpus = Sampler([gpu.index for gpu in Machine.look().gpus])
        self._steps_left: dict[str, int] = {}
        self._step_s: dict[str, float] = {}  # of the stages that were measured

    def corpus(self, prepared: PreparedCorpus) -> None:
        show_corpus(prepared, brief=True)

    def plan(self, stages: Sequence[StagePlan]) -> None:
        self._steps_left = {stage.stage: stage.num_steps for stage in stages if stage.num_steps}

    def begin(self, stage: str, step: int, total_steps: int, own_references: float | None) -> None:
        self.has_trained = True
        self._log.begin(stage, step, own_references)
        self._printer.begin(stage, step, total_steps)
        with contextlib.suppress(OSError):  # the page can do without the machine
            (self._folder / MACHINE_FILE).write_text(json.dumps(machine(), indent=2), encoding="utf-8")

    def tick(self, step: int) -> None:
        self._printer.tick(step)

    def step(self, report: StepReport) -> None:
        self._log.step(report)
        self._printer.report(report)
        if report.eta_s and report.total_steps and report.stage not in self._step_s:
            self._step_s[report.stage] = report.eta_s / (report.total_steps - report.step)
            self._printer.say(self._time_left(report))
        self._printer.warn(self._warnings.add(report))
        lines = [json.dumps(reading._asdict()) + "\n" for reading in self._gpus.read()]
        with contextlib.suppress(OSError), open(self._folder / "readings.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)

    def _time_left(self, report: StepReport) -> list[str]:
        """Return the time that all stages will take; those to come are assumed to be as fast as this one."""
        eta_s = report.eta_s or 0.0
        stages = list(self._steps_left)  # without this one if only a damaged checkpoint made it train on
        to_come = stages[stages.index(report.stage) + 1 :] if report.stage in stages else []
        later_s = {stage: self._steps_left[stage] * self._step_s[report.stage] for stage in to_come}
        total_s, lines = eta_s + sum(later_s.values()), []
        if to_come:
            parts = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in later_s.items())
            measured = f"{report.stage} {duration(eta_s)} as measured, {parts} if a step takes as long"
            measured += "; one of the decoder takes longer" if "decoder" in to_come else ""
            lines.append(f"Time left for all stages: about {duration(total_s)} ({measured})")
        if total_s > SLOW_S and not Machine.look().gpus:
            is_tuned = RunDir(self._folder).started_with().get("training.init_from") is not None
            lines.append(_ABOUT_TUNING_ON_A_CPU if is_tuned else _ABOUT_A_CPU)
        return lines

    def validation(self, report: ValidationReport) -> None:
        self._log.validation(report)
        self._printer.validation(report)
        self._printer.warn(self._warnings.validated(report))

    def picture(self, name: str, picture: Tensor, step: int) -> None:
        if picture.dim() == 1:
            self._log.code_usage(picture.numpy(), step)
        else:
            self._log.image(name, picture.numpy(), step)

    def spoken(self, stage: str, step: int, sentences: Sequence[Spoken]) -> None:
        self._log.spoken(stage, step, sentences, OUTPUT_SAMPLE_RATE)
        bad = sum(bool(sentence.problem) for sentence in sentences)
        found = f"{len(sentences)} sentences{f', {bad} of them badly' * bool(bad)}"
        where = (self._folder / SAMPLES_FOLDER / sentences[0].file).parent
        self._printer.say([f"spoken at step {step}  {found}: {where}"])

    def judged(self, report: JudgeReport) -> None:
        self._log.judged(report)
        names = {"wer": "WER", "similarity": "similarity", "mos": "MOS"}
        scores = [f"{word} {report.scores[name]:.2f}" for name, word in names.items() if name in report.scores]
        self._printer.say([f"judged at step {report.step}  {'  '.join(scores)}"])

    def close(self) -> None:
        self._printer.end()
        self._log.close()
        self._gpus.close()
        try:
            if self.has_trained:
                write_report(self._folder)
        except OSError as error:
            _log.warning("No report.html was written: %s", error)


def machine() -> dict[str, str]:
    """Return the hardware and software of this machine, by name."""
    gpus = Machine.look().gpus
    return {
        "GPUs": ", ".join(map(str, gpus)) or "none",
        **({UUIDS: ", ".join(gpu.uuid for gpu in gpus)} if gpus else {}),
        "CPU": f"{platform.processor() or platform.machine()}, {usable_cores()} usable cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "MyXTTS": __version__,
    }


def closing(settings: Settings, prepared: PreparedCorpus, has_trained: bool) -> Iterator[str]:
    """Speak a sample unless there is one; yield where everything is, what to expect, and what to type next."""
    folder = settings.training.checkpoint_dir
    said, run = example(settings.data, prepared.train, folder), RunDir(folder)
    if has_trained:
        (folder / SAMPLE_FILE).unlink(missing_ok=True)  # it is from an earlier state of the run
    has_spoken = (folder / SAMPLE_FILE).is_file()
    if said is not None and not has_spoken and "gpt" not in run.untrained():
        yield "Speaking a sentence of the corpus …"
        outcome, has_spoken = _sample(settings, said)
        yield from outcome
        with contextlib.suppress(OSError):  # the sample is played on the page
            write_report(folder)
    yield f"Done. Everything is in {folder}: checkpoints, report.html, metrics.jsonl, tensorboard/"
    if has_spoken:
        yield f"  sample       {folder / SAMPLE_FILE}"
    if (folder / "report.html").is_file():
        yield f"  report       {folder / 'report.html'}"
    yield f"  checkpoints  {', '.join(str(folder / stage) for stage in STAGES if (folder / stage).is_dir())}"
    is_new = run.started_with().get("training.init_from") is None
    if random := provenance(run).untrained:
        yield f"  not trained  {', '.join(random)}: random weights"
    if settings.data.train_data is None:
        yield _ABOUT_THE_DEMO if is_new else _ABOUT_THE_TUNED_DEMO
    elif is_new and 0 < (steps := run.status("gpt").step) < FEW_STEPS:
        is_persian = (prepared.train.languages == LANGUAGES.index("fa")).any()
        yield _ABOUT_FEW_STEPS.format(_steps(steps), _FASTER_IN_PERSIAN if is_persian else _FASTER)
    yield "From here:"
    yield from from_here(settings, prepared)
    yield "Next:"
    if settings.data.train_data is None:
        yield f"  {_command('train', '--train-data', 'DIR')}    # your recordings: DIR/metadata.csv, DIR/wavs/"
    if said is not None and has_spoken:
        voice = ("--speaker", nearby(said.recording), "--language", said.language)
        yield f"  {_command('speak', said.text, '--model', str(folder), *voice)}"
    yield f"  {_command('report', str(folder))}"


def from_here(settings: Settings, prepared: PreparedCorpus) -> Iterator[str]:
    """Yield what the same command, a larger number and another stage would do after a run has ended."""
    run, plan = RunDir(settings.training.checkpoint_dir), make_plan(settings.data)
    settings = as_started(settings, run)
    training, stages = settings.training, stages_of(settings, prepared.num_speakers)
    yield f"  {_same_command(settings)}: nothing is left to train"
    step_batches = training.gradient_accumulation_steps * plan.world_size
    size = (prepared.mixture.num_clips, settings.data.batch_size, step_batches)
    ends = {stage: stage_steps(training, stage, *size) for stage in stages}
    flags = {stage: flag for stage, (_, flag) in ends.items()}
    for stage in stages if training.early_stop else ():
        flags[stage] = "--early-stop" if run.status(stage).step < ends[stage][0] else flags[stage]
    for flag in dict.fromkeys(flags.values()):
        longer = next(stage for stage in stages if flags[stage] == flag)
        over = [stage for stage in stages if longer in BUILDS_ON.get(stage, ())]
        then = f", then {' and '.join(over)} start{'s' * (len(over) == 1)} over" if over else ""
        yield f"  a larger {flag}: {longer} continues{then}"
    if training.stages and settings.data.train_data is not None:  # the demonstration chooses its stages itself
        whole = with_stages(replace(settings, training=replace(training, stages=None)), prepared)
        with contextlib.suppress(ConfigError):  # other stages may have been trained with other settings
            does = "; ".join(f"{stage.stage} {stage.does}" for stage in plan_stages(whole, prepared, plan, run))
            yield f"  without --stages: {does}"
    possible = [stage for stage in STAGES if stage != "speaker" or prepared.num_speakers >= MIN_SPEAKERS]
    other = next((stage for stage in possible if stage not in stages and not run.has_checkpoint(stage)), "gpt")
    later = [stage for stage in STAGES if other in BUILDS_ON.get(stage, ()) and run.has_checkpoint(stage)]
    stale = f"; {' and '.join(later)} {'is' if len(later) == 1 else 'are'} then stale" if later else ""
    if not run.has_checkpoint(other):
        yield f"  --stages {other}: trains {other}{stale}"
    elif later and other in flags:
        yield f"  --stages {other} and a larger {flags[other]}: only {other} continues{stale}"


def stopped(settings: Settings, states: Mapping[str, State]) -> str:
    """Return where an interrupted run stopped, and how to continue it."""
    stage, state = next((stage, state) for stage, state in states.items() if not state.done)
    saved = f"everything is saved in {settings.training.checkpoint_dir}"
    return f"Stopped at step {state.step} of stage {stage}: {saved}; {_same_command(settings)} continues from here"


def _same_command(settings: Settings) -> str:
    return "the same command" + (" without --reset-training" if settings.training.reset_training else "")


def _sample(settings: Settings, said: Example) -> tuple[list[str], bool]:
    """Speak a sample and return lines about it and True, or why it failed and False; a failure ends nothing."""
    folder = settings.training.checkpoint_dir
    try:
        speech = speak_sample(folder, said, make_plan(settings.data).model)
    except (MyXTTSError, OSError, torch.OutOfMemoryError) as error:
        return [f"No sample was spoken: {error}"], False
    run, vocoder = RunDir(folder), "Griffin-Lim"
    log_sound(folder, "gpt", speech.wave, OUTPUT_SAMPLE_RATE, run.status("gpt").step)
    if speech.report.vocoder == "hifigan":
        steps = run.status("decoder").step
        vocoder = "the trained decoder" + (f", {_steps(steps)}" if steps else "")
    trained = f" (gpt: {_steps(steps)})" if (steps := run.status("gpt").step) else ""
    spoken = f"{folder / SAMPLE_FILE}: {said.text!r}"
    voice = f"  in the voice of {nearby(said.recording)}, by {vocoder}{trained}"
    return [spoken, voice, *(f"  {note}" for note in speech.report.notes())], True


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _command(*words: str) -> str:
    """Return a myxtts command as it can be typed on this machine."""
    program = Path(sys.executable).with_name("myxtts")
    known = ["myxtts"] if shutil.which("myxtts") else [nearby(program)] if program.is_file() else []
    line = shlex.join([*(known or [sys.executable, "-m", "myxtts.cli"]), *words])
    return line if len(line) < MAX_COLUMNS else line.replace(" --", " \\\n      --", 1)


def nearby(path: Path) -> str:
    """Return a path relative to the working folder if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
