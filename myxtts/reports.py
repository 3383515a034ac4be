"""The output of a training run: lines on the terminal, metrics, pictures, the report page, a spoken sample."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from myxtts import __version__
from myxtts.config import STAGES, Settings
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Machine, make_plan
from myxtts.errors import MyXTTSError
from myxtts.host import usable_cores
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.observe.diagnosis import LiveWarnings
from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport, log_sound
from myxtts.observe.nvml import Sampler
from myxtts.observe.report import write_report
from myxtts.run_dir import RunDir
from myxtts.synthesis.synthesizer import SAMPLE_FILE, Example, example, provenance, speak_sample
from myxtts.terminal import ProgressPrinter, show_corpus_briefly
from myxtts.training.trainer import Reporter, State

FEW_STEPS = 1000  # A GPT trained from scratch for fewer steps does not speak words yet
_ABOUT_THE_DEMO = (
    "What to expect: this only checks the installation. A few minutes of training the smallest network on four "
    "minutes of speech give babble, or on a GPU the memorised sentences of the corpus. A voice takes hours of "
    "recordings and of GPU time, or minutes of both with --init-from XTTS-v2 --model-size normal."
)
_ABOUT_FEW_STEPS = (
    "What to expect: after {} of gpt from scratch, a model only babbles or hums. A voice takes many thousand "
    "steps and hours of recordings; the same command with a larger --max-steps or --epochs continues from here. "
    "With --init-from XTTS-v2 --model-size normal, minutes of both are enough."
)

_log = logging.getLogger(__name__)


class TrainingReports(Reporter):
    """Shows and stores the reports of the training loop, and warns when the pipeline is slow."""

    def __init__(self, folder: Path, printer: ProgressPrinter) -> None:
        self._folder, self._printer = folder, printer
        self._log, self._warnings = MetricsLog(folder), LiveWarnings()
        self.has_trained = False
        self._gpus = Sampler([gpu.index for gpu in Machine.look().gpus])

    def corpus(self, prepared: PreparedCorpus) -> None:
        show_corpus_briefly(prepared)

    def begin(self, stage: str, step: int, total_steps: int) -> None:
        self.has_trained = True
        self._log.begin(stage, step)
        self._printer.begin(stage, step, total_steps)
        with contextlib.suppress(OSError):  # the page can do without the machine
            (self._folder / "machine.json").write_text(json.dumps(machine(), indent=2), encoding="utf-8")

    def tick(self, step: int) -> None:
        self._printer.tick(step)

    def step(self, report: StepReport) -> None:
        self._log.step(report)
        self._printer.report(report)
        self._printer.warn(self._warnings.add(report))
        lines = [json.dumps(reading._asdict()) + "\n" for reading in self._gpus.read()]
        with contextlib.suppress(OSError), open(self._folder / "readings.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)

    def validation(self, report: ValidationReport) -> None:
        self._log.validation(report)
        self._printer.validation(report)
        self._printer.warn(self._warnings.validated(report))

    def picture(self, name: str, picture: Tensor, step: int) -> None:
        if picture.dim() == 1:
            self._log.code_usage(picture.numpy(), step)
        else:
            self._log.image(name, picture.numpy(), step)

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
    return {
        "GPUs": ", ".join(map(str, Machine.look().gpus)) or "none",
        "CPU": f"{platform.processor() or platform.machine()}, {usable_cores()} usable cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "MyXTTS": __version__,
    }


def closing(settings: Settings, prepared: PreparedCorpus, has_trained: bool) -> Iterator[str]:
    """Speak a sample unless there is one; yield where everything is, what to expect, and what to type next."""
    folder = settings.training.checkpoint_dir
    said = example(settings.data, prepared.train)
    if has_trained:
        (folder / SAMPLE_FILE).unlink(missing_ok=True)  # it is from an earlier state of the run
    has_spoken = (folder / SAMPLE_FILE).is_file()
    if said is not None and not has_spoken:
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
    run = RunDir(folder)
    if random := provenance(run).random_parts:
        yield f"  not trained  {', '.join(random)}: random weights"
    if settings.data.train_data is None:
        yield _ABOUT_THE_DEMO
    elif run.from_scratch and 0 < (steps := run.num_steps("gpt")) < FEW_STEPS:
        yield _ABOUT_FEW_STEPS.format(_steps(steps))
    yield "Next:"
    if settings.data.train_data is None:
        yield f"  {_command('train', '--train-data', 'DIR')}    # your recordings: DIR/metadata.csv, DIR/wavs/"
    if said is not None and has_spoken:
        voice = ("--speaker", str(said.recording), "--language", said.language)
        yield f"  {_command('speak', said.text, '--model', str(folder), *voice, '--out', 'speech.wav')}"
    yield f"  {_command('report', str(folder))}"


def stopped(settings: Settings, states: Mapping[str, State]) -> str:
    """Return where an interrupted run stopped, and how to continue it."""
    stage, state = next((stage, state) for stage, state in states.items() if not state.done)
    again = "the same command" + (" without --reset-training" if settings.training.reset_training else "")
    saved = f"everything is saved in {settings.training.checkpoint_dir}"
    return f"Stopped at step {state.step} of stage {stage}: {saved}; {again} continues from here"


def _sample(settings: Settings, said: Example) -> tuple[list[str], bool]:
    """Speak a sample and return lines about it and True, or why it failed and False; a failure ends nothing."""
    folder = settings.training.checkpoint_dir
    try:
        speech = speak_sample(folder, said, make_plan(settings.data).model)
    except (MyXTTSError, OSError, torch.OutOfMemoryError) as error:
        return [f"No sample was spoken: {error}"], False
    run, vocoder = RunDir(folder), "Griffin-Lim"
    log_sound(folder, "gpt", speech.wave, OUTPUT_SAMPLE_RATE, run.num_steps("gpt"))
    if speech.report.vocoder == "hifigan":
        steps = run.num_steps("decoder")
        vocoder = "the trained decoder" + (f", {_steps(steps)}" if steps else "")
    trained = f" (gpt: {_steps(steps)})" if (steps := run.num_steps("gpt")) else ""
    spoken = f"{folder / SAMPLE_FILE}: {said.text!r} in the voice of {said.recording}, by {vocoder}{trained}"
    return [spoken, *(f"  {note}" for note in speech.report.notes())], True


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _command(*words: str) -> str:
    """Return a myxtts command as it can be typed on this machine."""
    program = Path(sys.executable).with_name("myxtts")
    known = ["myxtts"] if shutil.which("myxtts") else [str(program)] if program.is_file() else []
    return shlex.join([*(known or [sys.executable, "-m", "myxtts.cli"]), *words])
