"""The `myxtts` command: reads the command line, sets up logging and screens, calls one function per command.

Everything heavy is imported by the command that needs it, so that `--help` is immediate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myxtts import __version__
from myxtts.config import LANGUAGES, PREPARE_KEYS, STAGES, DataSettings, Settings
from myxtts.errors import ConfigError, DatasetError, MyXTTSError
from myxtts.settings import LoadedSettings, Parser, add_flags, apply_demo, apply_presets, flags_of, load

if TYPE_CHECKING:
    from myxtts.data.clips import PreparedCorpus
    from myxtts.text.tokenizer import Tokenizer
    from myxtts.tools.profile import Profile

ABOUT_SPEAK = "speak a text in the voice of a recording"


def add_speak(commands: Any) -> None:
    """Add the command to the command line."""
    speak = commands.add_parser("speak", help=ABOUT_SPEAK, description=ABOUT_SPEAK, allow_abbrev=False)
    speak.add_argument("text", nargs="?", help="what to say")
    speak.add_argument(
        "--from-file", type=Path, metavar="FILE", help="a text file to read instead; - for the input"
    )
    speak.add_argument(
        "--model", type=Path, default=Path("checkpoints"), metavar="DIR", help="a run or an XTTS-v2 folder"
    )
    speak.add_argument(
        "--speaker", type=Path, action="append", metavar="FILE", help="a recording of the voice; may be repeated"
    )
    speak.add_argument("--voice", metavar="NAME", help="a voice kept under this name; with --speaker: keep it so")
    speak.add_argument("--language", choices=LANGUAGES, required=True, help="language of the text")
    speak.add_argument("--out", type=Path, default=Path("speech.wav"), metavar="FILE", help="wav or flac to write")
    speak.add_argument("--stream", action="store_true", help="write the sound while it is made")
    speak.add_argument("--speed", type=float, default=1.0, help="2 is twice as fast [default: 1]")
    speak.add_argument("--seed", type=int, help="the same seed says it the same way")
    speak.add_argument("--temperature", type=float, help="how adventurous [default: 0.75]")
    speak.add_argument(
        "--repetition-penalty", type=float, help="against repeated codes [default: 5; 1 for a run from scratch]"
    )
    speak.add_argument(
        "--guidance", type=float, help="above 1 the text counts more, for a run with --text-dropout [default: 1]"
    )
    speak.add_argument(
        "--central", action="store_true", default=None, help="the middle of the likely codes: clearer, but flatter"
    )
    speak.add_argument("--best", action="store_true", help="the GPT that validated best, not the newest")
    speak.add_argument("--vocoder", choices=["hifigan", "griffin-lim"], help="what makes the sound")
    speak.set_defaults(run=_speak_command, refuse=speak.error)


def _speak_command(options: argparse.Namespace) -> int:
    """Load the model, find the voice, speak and write."""
    from myxtts.errors import NoProgress
    from myxtts.synthesis.synthesizer import as_asked, check_output, load_synthesizer
    from myxtts.synthesis.vocoding import FAINT_NOTE, is_faint
    from myxtts.synthesis.voices import VoiceFolder
    from myxtts.terminal import ProgressLines, show_lines

    text = _text(options)
    if not options.speaker and not options.voice:
        raise ConfigError(
            "speak: name a recording of the voice with --speaker FILE, or a kept one with --voice NAME"
        )
    check_output(options.out)
    synthesizer = load_synthesizer(options.model, vocoder=options.vocoder, best_gpt=options.best)
    voices = VoiceFolder(options.model / "voices")
    if options.speaker:
        voice = synthesizer.voice(options.speaker, options.voice)
        if options.voice:
            voices.save(voice)
    else:
        voice = voices.load(options.voice, synthesizer.fingerprint)
    sampling = as_asked(synthesizer.sampling, options)
    manner = {"sampling": sampling, "speed": options.speed, "seed": options.seed}
    manner["progress"] = ProgressLines() if sys.stderr.isatty() else NoProgress()
    if options.stream:
        stream = synthesizer.stream(text, voice, options.language, **manner)
        faint = _write_stream(options.out, stream)
        report = stream.report
    else:
        speech = synthesizer.speak(text, voice, options.language, **manner)
        speech.save(options.out)
        faint, report = is_faint(speech.wave), speech.report
    show_lines([*report.notes(), *([FAINT_NOTE] if faint else []), str(options.out)])
    return 0


def _text(options: argparse.Namespace) -> str:
    if (options.text is None) == (options.from_file is None):
        raise ConfigError('speak: give either a text, as in myxtts speak "Hello.", or --from-file FILE')
    if options.text is not None:
        return str(options.text)
    try:
        path = Path("/dev/stdin") if str(options.from_file) == "-" else options.from_file
        return str(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise ConfigError(f"speak: --from-file {options.from_file} cannot be read: {why}") from None


def _write_stream(path: Path, stream: Any) -> bool:
    """Write every piece as soon as it is there; whether hardly anything can be heard in all of them."""
    from contextlib import closing

    import soundfile

    from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
    from myxtts.synthesis.vocoding import Loudness

    loudness = Loudness()
    with closing(stream), soundfile.SoundFile(path, "w", OUTPUT_SAMPLE_RATE, 1, "PCM_16") as file:
        for piece in stream:
            file.write(piece)
            file.flush()
            loudness.add(piece)
    return loudness.is_faint


ABOUT_EVALUATE = (
    "synthesise held-out sentences of a run, and judge words, speaker and quality against the recordings"
)
FOLDER = "evaluation"
"""Of a run; its page shows the scores that lie there."""


def add_evaluate(commands: Any) -> None:
    """Add the command to the command line."""
    evaluate = commands.add_parser("evaluate", help=ABOUT_EVALUATE, description=ABOUT_EVALUATE, allow_abbrev=False)
    evaluate.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    sentences = "how many to say, speakers in turn [default: 40]"
    evaluate.add_argument("--sentences", type=_count_from_one, default=40, metavar="N", help=sentences)
    evaluate.add_argument("--language", choices=LANGUAGES, help="only sentences in this language")
    judges = "where the judges are installed [default: .judge, made by make judge]"
    evaluate.add_argument("--judge", type=Path, metavar="DIR", help=judges)
    out = "the folder for sounds and scores [default: RUN/evaluation]"
    evaluate.add_argument("--out", type=Path, metavar="DIR", help=out)
    parts = ["synthesise", "judge"]
    evaluate.add_argument("--only", choices=parts, help="one half; the other can follow on another machine")
    evaluate.add_argument("--best", action="store_true", help="the GPT that validated best, not the newest")
    evaluate.add_argument("--vocoder", choices=["hifigan", "griffin-lim"], help="what makes the sound")
    evaluate.add_argument("--seed", type=int, default=1, help="the same seed says it the same way [default: 1]")
    evaluate.add_argument("--temperature", type=float, help="how adventurous [default: 0.75]")
    evaluate.add_argument(
        "--guidance", type=float, help="above 1 the text counts more, for a run with --text-dropout [default: 1]"
    )
    evaluate.add_argument(
        "--central", action="store_true", default=None, help="the middle of the likely codes: clearer, but flatter"
    )
    evaluate.set_defaults(run=_evaluate_command, refuse=evaluate.error)


def _evaluate_command(options: argparse.Namespace) -> int:
    """Look for the judges first: without them nothing need be computed."""
    from myxtts.terminal import ProgressLines, show_lines
    from myxtts.tools.evaluate import find_judges, judge

    if not options.run_folder.is_dir():
        raise ConfigError(f"There is no run in {options.run_folder}; name the --checkpoint-dir of a training")
    out = options.out or options.run_folder / FOLDER
    judges = find_judges(options.judge) if options.only != "synthesise" else None
    if options.only != "judge":
        _synthesise(options, out)
    if judges is None:
        there = f" --out {out}" if options.out else ""
        show_lines([f"{out}: ready to be judged (myxtts evaluate {options.run_folder} --only judge{there})"])
        return 0
    scores = judge(out, judges, ProgressLines())
    show_scores(scores)
    show_lines([str(scores["reading"]), *_pages(options.run_folder, out)])
    return 0


def show_scores(scores: Mapping[str, Any]) -> None:
    """Print the sums of every set; a dash where no judge heard it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("clips", "WER", "CER", "similarity", f"above {scores['same_speaker_from']}", "MOS")
    table.add_column("set")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in scores["summary"].items():
        shown = [_number(row["wer"], 3), _number(row["cer"], 3), _number(row["similarity"], 2)]
        share = row["same_speaker_share"]
        shown += [f"{100 * share:.0f} %" if share is not None else "–", _number(row["mos"], 2)]
        table.add_row(name, str(row["clips"]), *shown)
    Console(highlight=False).print(table)


def _synthesise(options: argparse.Namespace, out: Path) -> None:
    from myxtts.terminal import ProgressLines
    from myxtts.tools.evaluate import Asked, synthesise

    asked = Asked(
        num_sentences=options.sentences,
        language=options.language,
        vocoder=options.vocoder,
        seed=options.seed,
        temperature=options.temperature,
        guidance=options.guidance,
        central=options.central,
        best_gpt=options.best,
    )
    synthesise(options.run_folder, out, asked, ProgressLines())


def _pages(run_folder: Path, out: Path) -> list[str]:
    """Where to look: the scores, and the run's page if they are part of it."""
    from myxtts.observe.report import write_report

    scores = str(out / "scores.json")
    if out.resolve() != (run_folder / FOLDER).resolve():
        return [scores]
    try:
        return [scores, str(write_report(run_folder))]
    except OSError as error:
        return [scores, f"No page was written: {error}"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _count_from_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few, at least 1")
    return number


MOST_GPUS = 16
"""GPUs that a live view looks for; those that are not there are not shown."""


def add_tool_commands(commands: Any) -> None:
    """Add the tools to the subparsers of a command line."""
    about = "check settings, corpus and machine before training; exit code 0 only when nothing fails"
    check = commands.add_parser("check", help=about, description=about, allow_abbrev=False)
    check.add_argument("--gpus", action="store_true", help="also try the GPUs: caps, copies, a short training")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_flags(check)
    check.set_defaults(run=_check)

    about = "watch a run: rings, losses, throughput and GPUs, live"
    watch = commands.add_parser("watch", help=about, description=about, allow_abbrev=False)
    watch.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    watch.set_defaults(run=_watch, refuse=watch.error)

    about = "write one HTML page about a run"
    report = commands.add_parser("report", help=about, description=about, allow_abbrev=False)
    report.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    report.add_argument("--out", type=Path, metavar="FILE", help="the page to write [default: RUN/report.html]")
    report.set_defaults(run=_report, refuse=report.error)

    about = "say where the time of a training goes, and what to change"
    profile = commands.add_parser("profile", help=about, description=about, allow_abbrev=False)
    steps = "steps to measure, or with --data-only batches to take [default: 50]"
    profile.add_argument("--num-steps", "--num-batches", type=_at_least_one, default=50, metavar="N", help=steps)
    profile.add_argument("--data-only", action="store_true", help="analyse text, audio and feed; needs no GPU")
    profile.add_argument("--kernels", action="store_true", help="list the kernels of a step as well")
    given = "with --data-only: time of a step on your GPU, instead of one measured here"
    profile.add_argument("--step-ms", type=_positive, metavar="MS", help=given)
    profile.add_argument("--trace", type=Path, metavar="FILE", help="write a trace that ui.perfetto.dev opens")
    _add_shared(profile)
    profile.set_defaults(run=_profile)

    about = "find settings that train faster on this machine, by measuring them"
    tune = commands.add_parser("tune", help=about, description=about, allow_abbrev=False)
    tune.add_argument("--minutes", type=_positive, default=10.0, metavar="M", help="time to search [default: 10]")
    tune.add_argument(
        "--max-batch", type=_at_least_one, metavar="N", help="largest batch to try [default: 512, CPU 32]"
    )
    tune.add_argument("--apply", action="store_true", help="write the changes into the YAML file; keeps a backup")
    _add_shared(tune)
    tune.set_defaults(run=_tune)


def _add_shared(command: argparse.ArgumentParser) -> None:
    about = "stage to measure [default: gpt, or the first of --stages]"
    command.add_argument("--stage", choices=STAGES, help=about)
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    add_flags(command)


def _check(options: argparse.Namespace) -> int:
    from myxtts.terminal import ProgressLines, show_findings, show_lines
    from myxtts.tools.check import check, check_gpus, passed, to_json

    loaded = _load_for_tool(options)
    findings = check_gpus(loaded, progress=ProgressLines(), say=logging.info) if options.gpus else check(loaded)
    if options.json:
        show_lines([to_json(findings)])
    else:
        show_findings(findings)
    return 0 if passed(findings) else 1


def _profile(options: argparse.Namespace) -> int:
    from myxtts.terminal import show_lines, show_profile
    from myxtts.tools.profile import profile

    loaded = _load_for_tool(options)
    found = profile(
        loaded.settings,
        _prepare_for_tool(loaded),
        num_steps=options.num_steps,
        stage=_stage(options, loaded),
        data_only=options.data_only,
        kernels=options.kernels,
        step_ms=options.step_ms,
    )
    if options.trace is not None and found.trace is not None:
        try:
            found.trace.write_chrome(options.trace)
        except OSError as error:
            raise ConfigError(f"--trace {options.trace}: cannot be written ({error.strerror or error})") from error
    if options.json:
        show_lines([_as_json(found.to_json())])
    else:
        show_profile(found)
        show_lines(_onto_page(found, loaded.settings))
    return 0


def _onto_page(found: Profile, settings: Settings) -> list[str]:
    """Put what was found on the page of the run of this corpus, network and batch, if there is one."""
    from myxtts.observe.report import write_report
    from myxtts.tools.profile import keep

    run_folder = settings.training.checkpoint_dir
    try:
        own = load(run_folder / "settings.yaml", {}).settings
    except ConfigError:
        return []
    is_the_same = (own.data.train_data, own.data.batch_size, own.model) == (
        settings.data.train_data,
        settings.data.batch_size,
        settings.model,
    )
    if found.verdict is None or not is_the_same:
        return []
    try:
        keep(found, run_folder)
        return [f"On the page of the run: {write_report(run_folder)}"]
    except OSError as error:
        logging.warning("The page of the run in %s was not written: %s", run_folder, error)
        return []


def _tune(options: argparse.Namespace) -> int:
    from myxtts.settings import apply_patch
    from myxtts.terminal import show_lines, show_tuning
    from myxtts.tools.tune import tune

    loaded = _load_for_tool(options)
    limits = {"minutes": options.minutes, "max_batch": options.max_batch}
    found = tune(loaded, _prepare_for_tool(loaded), stage=_stage(options, loaded), say=logging.info, **limits)
    if options.json:
        show_lines([_as_json(found.to_json())])
    else:
        show_tuning(found)
    if options.apply and found.values:
        path, backup = apply_patch(loaded, found.values)
        logging.info("%s: written%s", path, f"; what it was before is in {backup}" if backup else "")
    return 0


def _load_for_tool(options: argparse.Namespace) -> LoadedSettings:
    """The settings with which `train` would train."""
    from myxtts.devices import Machine
    from myxtts.terminal import show_lines

    loaded, lines = apply_presets(load(options.config, flags_of(options), options.unknown))
    if loaded.settings.data.train_data is None:
        loaded, demo = apply_demo(loaded, on_gpu=bool(Machine.look().gpus))
        lines += demo
    show_lines([] if options.json else lines)
    return loaded


def _stage(options: argparse.Namespace, loaded: LoadedSettings) -> str:
    """The stage to measure: the one named, else of those that would be trained."""
    stages = loaded.settings.training.stages or STAGES
    return str(options.stage or ("gpt" if "gpt" in stages else stages[0]))


def _prepare_for_tool(loaded: LoadedSettings) -> PreparedCorpus:
    from myxtts.devices import make_plan
    from myxtts.run import prepare_corpus
    from myxtts.terminal import ProgressLines

    make_plan(loaded.settings.data)  # what is wrong with the devices is said before a corpus is prepared
    return prepare_corpus(loaded.settings, ProgressLines())


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, default=str)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


@contextlib.contextmanager
def dashboard(folder: Path, is_wanted: bool) -> Iterator[None]:
    """The live view of a run on a thread of its own."""
    if not is_wanted:
        yield
        return
    from myxtts.terminal import watch

    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(folder, stop, _gpu_readings()), name="dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _gpu_readings() -> Callable[[], list[dict[str, Any]]]:
    """What the GPUs say of themselves at the time of the call; nothing without a driver."""
    from myxtts.observe.nvml import Sampler

    sampler = Sampler(range(MOST_GPUS))
    return lambda: [reading.to_json() for reading in sampler.read()]


def _watch(options: argparse.Namespace) -> int:
    from myxtts.terminal import watch

    if not options.run_folder.is_dir():
        raise ConfigError(f"There is no run in {options.run_folder}; name the --checkpoint-dir of a training")
    watch(options.run_folder, threading.Event(), _gpu_readings())
    return 0


def _report(options: argparse.Namespace) -> int:
    from myxtts.observe.report import write_report
    from myxtts.terminal import show_lines

    try:
        show_lines([str(write_report(options.run_folder, options.out))])
    except OSError as error:
        no_run = isinstance(error, FileNotFoundError) and error.filename is None
        problem = f"No report of {options.run_folder}: {error.strerror or error}"
        raise ConfigError(str(error) if no_run else problem) from error
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected error is shown as its text, not as a traceback."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    options.unknown = unknown
    if unknown and "refuse" in options:
        options.refuse(f"unknown arguments {' '.join(unknown)}")
    logging.basicConfig(format="%(message)s", level=logging.DEBUG if options.verbose else logging.INFO)
    logging.getLogger("torch").setLevel(logging.WARNING)  # it has statistics to tell when a process ends
    try:
        return int(options.run(options))
    except MyXTTSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing half-made was left behind", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="myxtts", description="The XTTS trainer that never lets a GPU wait.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"myxtts {__version__}")
    parser.add_argument("--verbose", action="store_true", help="show debugging messages")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    about = "train a model on a corpus, or continue a training"
    train = commands.add_parser("train", help=about, description=about, allow_abbrev=False)
    add_flags(train)
    train.add_argument("--dashboard", action="store_true", help="a live view instead of progress lines")
    train.set_defaults(run=_train)

    about = "turn a folder of recordings into a packed, verified cache"
    prepare = commands.add_parser("prepare", help=about, description=about, allow_abbrev=False)
    add_flags(prepare, only=PREPARE_KEYS)
    prepare.set_defaults(run=_prepare)

    about = "train a text vocabulary on a corpus, or extend one with a language"
    actions = commands.add_parser("vocabulary", help=about, description=about).add_subparsers(
        required=True, metavar="ACTION"
    )
    _add_vocabulary_action(actions.add_parser("train", help="a new vocabulary", allow_abbrev=False))
    about = "add a language to an existing vocabulary; every old id stays valid"
    extend = actions.add_parser("extend", help=about, description=about, allow_abbrev=False)
    extend.add_argument("--base", type=Path, required=True, metavar="FILE", help="the vocab.json to extend")
    extend.add_argument(
        "--merges", type=_count, default=500, metavar="N", help="merges to add at most [default: 500]"
    )
    _add_vocabulary_action(extend)

    add_tool_commands(commands)
    add_speak(commands)
    add_evaluate(commands)

    about = "write a folder that coqui-tts and the tools built on it load"
    export = commands.add_parser("export", help=about, description=about, allow_abbrev=False)
    export.add_argument("source", type=Path, metavar="FOLDER", help="a run, or a folder of XTTS weights")
    export.add_argument("--to", choices=["coqui"], default="coqui", help="the form to write [default: coqui]")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    export.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a larger vocab.json to grow the network for"
    )
    export.add_argument("--best", action="store_true", help="of a run the GPT that validated best, not the newest")
    export.set_defaults(run=_export, refuse=export.error)
    return parser


def _add_vocabulary_action(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the vocab.json to write")
    add_flags(command, only=PREPARE_KEYS)
    command.set_defaults(run=_vocabulary)


def _load(options: argparse.Namespace) -> LoadedSettings:
    loaded = load(options.config, flags_of(options), options.unknown)
    _require_file("--tokenizer", loaded.settings.data.tokenizer)
    return loaded


def _require_file(flag: str, path: Path | None) -> None:
    """A vocabulary is a file, or the folder that holds it."""
    if path is not None and not path.exists():
        raise DatasetError(f"{flag} {path}: there is no such file; name a vocab.json, or the folder that holds it")


def _train(options: argparse.Namespace) -> int:
    from myxtts.devices import Machine
    from myxtts.reports import TrainingReports, closing, stopped
    from myxtts.run import train
    from myxtts.settings import apply_demo, apply_presets
    from myxtts.terminal import ProgressLines, ProgressPrinter, show_lines

    loaded, applied = apply_presets(_load(options))
    if loaded.settings.data.train_data is None:
        loaded, demo = apply_demo(loaded, on_gpu=bool(Machine.look().gpus))
        applied += demo
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        show_lines(applied)
    if not is_first:
        logging.getLogger().setLevel(logging.WARNING)
    folder = loaded.settings.training.checkpoint_dir
    is_shown = is_first and not options.dashboard
    with ProgressPrinter(0 if is_shown else 1) as printer, dashboard(folder, is_first and options.dashboard):
        reports = TrainingReports(folder, printer) if is_first else None
        try:
            result = train(loaded, reporter=reports, progress=ProgressLines(), say=lambda line: show_lines([line]))
        finally:
            if reports is not None:
                reports.close()
    if reports is None:
        return 0
    settings = loaded.settings
    if all(state.done for state in result.states.values()):
        show_lines(closing(settings, result.prepared, reports.has_trained))
    else:
        show_lines([stopped(settings, result.states)])
    return 0


def _prepare(options: argparse.Namespace) -> int:
    _prepare_and_show(_load(options).settings.data, verify=True)
    return 0


def _prepare_and_show(data: DataSettings, verify: bool) -> None:
    from myxtts.data.prepare import prepare
    from myxtts.terminal import ProgressLines, show_corpus

    progress = ProgressLines()
    if data.train_data is None:
        logging.info("No --train-data given: using the embedded corpus")
    show_corpus(prepare(data, progress, verify=verify))


def _vocabulary(options: argparse.Namespace) -> int:
    from myxtts.data.prepare import spoken_corpus
    from myxtts.terminal import ProgressLines
    from myxtts.text import tokenizer

    data = _load(options).settings.data
    base: Path | None = getattr(options, "base", None)
    if base is not None and data.language is None:
        raise ConfigError("vocabulary extend: --language is missing; give the language to add, such as fa")
    _require_file("--base", base)
    old = tokenizer.Tokenizer.load(base) if base is not None else None
    texts, languages = spoken_corpus(data, ProgressLines())
    vocabulary: Tokenizer
    if old is None:
        vocabulary = tokenizer.train(texts, languages, data.vocab_size)
    else:
        spoken = [text for text, language in zip(texts, languages, strict=True) if language == data.language]
        if not spoken:
            found = " ".join(sorted(set(languages))) or "nothing"
            raise ConfigError(f"No sentence of the corpus is in {data.language} (its metadata says: {found})")
        vocabulary = tokenizer.extend(old, spoken, data.language or "", options.merges)
        print(f"{vocabulary.num_tokens - old.num_tokens} tokens added to the {old.num_tokens} of {base}")
    vocabulary.save(options.out)
    print(f"{options.out}: {vocabulary.num_tokens} tokens")
    return 0


def _export(options: argparse.Namespace) -> int:
    from myxtts.run_dir import RunDir
    from myxtts.synthesis.synthesizer import provenance
    from myxtts.text.tokenizer import Tokenizer
    from myxtts.weights import load_folder, save_folder

    if options.out.resolve() == options.source.resolve():
        raise ConfigError(f"--out {options.out} is the folder that is read; name another one")
    replaced = _export_replaced(options.out)
    _require_file("--tokenizer", options.tokenizer)
    larger = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    run = RunDir(options.source)
    if run.exists:
        if larger is not None:
            raise ConfigError("--tokenizer grows a folder of weights; the vocabulary of a run is its own")
        known = provenance(run)
        save_folder(options.out, run.load_model(best_gpt=options.best), run.vocabulary(), known)
        print(f"{options.out}: {run.dims().gpt.text_tokens} text tokens{replaced}")
        _warn_untrained(known.untrained)
        return 0
    if options.best:
        raise ConfigError(f"--best chooses among the checkpoints of a run; {options.source} has only weights")
    loaded = load_folder(options.source, larger)
    save_folder(options.out, loaded.model, loaded.vocabulary, loaded.provenance)
    fresh = f", fresh weights for {', '.join(loaded.fresh_parts)}" if loaded.fresh_parts else ""
    print(f"{options.out}: {loaded.model.dims.gpt.text_tokens} text tokens{fresh}{replaced}")
    _warn_untrained(loaded.provenance.untrained)
    return 0


def _export_replaced(out: Path) -> str:
    """Words for an export that is written over; anything else that is in the way is an error."""
    from myxtts.weights import MODEL_FILES

    if out.is_file():
        raise ConfigError(f"--out {out} is a file; name a folder for the export")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not any(name in found for name in MODEL_FILES):
        raise ConfigError(
            f"--out {out} holds other files ({', '.join(found[:4])}{', …' if len(found) > 4 else ''}); an export "
            "would write among them. Name a new or empty folder, or one of an earlier export."
        )
    return ", in place of the weights that were there" if found else ""


def _warn_untrained(stages: Sequence[str]) -> None:
    if stages:
        hum = "; coqui-tts makes a hum of it, myxtts speak uses Griffin-Lim instead" if "decoder" in stages else ""
        print(f"WARNING: {' and '.join(stages)}: never trained, these weights are random{hum}")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
