"""The `myxtts` command: one function per command, which reads its flags and then imports what it needs.

So `--help` and the answer to a mistyped flag come at once: PyTorch takes seconds to import.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myxtts import __version__, config
from myxtts.config import LANGUAGE_NAMES, LANGUAGES, PREPARE_KEYS, STAGES, DataSettings, Settings
from myxtts.errors import INSTALL_EXTRA, NO_PROGRESS, ConfigError, DatasetError, MyXTTSError, printable
from myxtts.settings import LoadedSettings, Parser, add_flags, apply_demo, apply_presets, flags_of, load

if TYPE_CHECKING:
    from myxtts.audio import Wave
    from myxtts.data.clips import PreparedCorpus
    from myxtts.model.xtts import XTTS
    from myxtts.synthesis.books import Book
    from myxtts.synthesis.generation import Sampling
    from myxtts.synthesis.markup import Segment
    from myxtts.synthesis.narration import Judge
    from myxtts.synthesis.synthesizer import Speech, SpeechStream, Synthesizer
    from myxtts.synthesis.voices import Voice
    from myxtts.tools.profile import Profile

MOST_GPUS = 16  # GPUs that the live view looks for
EVALUATION_FOLDER = "evaluation"  # inside a run; the scores in it appear on the page of the run


class _Output(io.FileIO):
    """Standard output or error whose loss, such as a closed pipe or a full disk, does not end a run."""

    result_is_lost = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 1 and not _Output.result_is_lost:
                _Output.result_is_lost = True
                logging.warning("Standard output cannot be written: %s. The command continues.", error.strerror)
            return len(data)


def _secure_streams() -> None:
    """Make output that fails, or that the locale cannot encode, harmless; streams that were replaced stay."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a file opened next would get the number, and what libraries print would go into it
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            kept = ("encoding", "line_buffering", "write_through") if stream is not None else ()
            raw = io.BufferedWriter(_Output(number, "wb", closefd=False))
            options = {option: getattr(stream, option) for option in kept}
            setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", **options))
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a mapped file on a failing disk ends a process without a word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; expected errors are printed without a traceback."""
    _secure_streams()
    options, unknown = make_parser().parse_known_args(arguments)
    options.unknown = unknown
    if unknown and "refuse" in options:
        options.refuse(f"unknown arguments {' '.join(unknown)}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable())
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if options.verbose else logging.INFO)
    logging.getLogger("torch").setLevel(logging.WARNING)  # it logs statistics when a process ends
    try:
        code = int(options.run(options) or 0)
        print(end="", flush=True)
        return code or int(_Output.result_is_lost and options.run is not _train)  # a run's result is its folder
    except MyXTTSError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        missing = f"error: this Python ({sys.executable}) has no package {error.name}"
        print(f"{missing}. Run make train or make test once, then use .venv/bin/python.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; {getattr(options, 'left', 'no incomplete file was left')}", file=sys.stderr)
        return 130


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _say(*lines: object) -> None:
    from myxtts.terminal import show_lines

    show_lines(lines)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. `run` of its result is the function to call, which may return a code."""
    parser = Parser(prog="myxtts", description="The XTTS trainer that never lets a GPU wait.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"myxtts {__version__}")
    parser.add_argument("--verbose", action="store_true", help="show debugging messages")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    groups = (_add_training_commands, _add_collect, _add_tools, _add_speak, _add_serve, _add_evaluate, _add_export)
    for add_to in groups:
        add_to(commands)
    return parser


def _command(
    commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], int | None], strict: bool = False
) -> argparse.ArgumentParser:
    """Add a command. A strict one refuses unknown flags itself; else `load` names them with all other mistakes."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.set_defaults(run=run, **({"refuse": command.error} if strict else {}))
    return command


def _add_training_commands(commands: Any) -> None:
    train = _command(commands, "train", "train a model on a corpus, or continue a run", _train)
    add_flags(train)
    train.add_argument("--dashboard", action="store_true", help="on a terminal: a live view instead of lines")

    prepare = _command(commands, "prepare", "turn recordings into a packed, verified cache or corpus", _prepare)
    add = prepare.add_argument
    out = "write a sharded corpus, or add to one: a folder, s3:// or gs://; --train-data may then name any source"
    add("--out", type=Path, metavar="CORPUS", help=out)
    on = "with --out: where the work is done, in processes of this machine or on a Ray cluster [default: local]"
    add("--on", choices=["local", "ray"], default="local", help=on)
    share = "with --out: only every Nth shard from the Kth on [default: the share of a Slurm or torchrun process]"
    add("--shard", metavar="K/N", help=share)
    size = "with --out: most MB of the source in a shard, as it has them; MP3 grows five times [default: 1000]"
    add("--shard-mb", type=_positive, default=1000.0, metavar="MB", help=size)
    prune = "with --out: delete what the corpus no longer names; runs that began earlier and still read it fail"
    add("--prune", action="store_true", help=prune)
    add_flags(prepare, only=PREPARE_KEYS)

    about = "train a text vocabulary on a corpus, or extend one with a language"
    vocabulary = commands.add_parser("vocabulary", help=about, description=about)
    actions = vocabulary.add_subparsers(required=True, metavar="ACTION")
    new = _command(actions, "train", "train a new vocabulary", _vocabulary)
    about = "add a language to an existing vocabulary; all old ids stay valid"
    extend = _command(actions, "extend", about, _vocabulary)
    add = extend.add_argument
    add("--base", type=Path, required=True, metavar="FILE", help="vocab.json to extend")
    add("--merges", type=_whole_number(0), default=500, metavar="N", help="most merges to add [default: 500]")
    for action in (new, extend):
        action.add_argument("--out", type=Path, required=True, metavar="FILE", help="vocab.json to write")
        add_flags(action, only=PREPARE_KEYS)


def _add_collect(commands: Any) -> None:
    about = "make a corpus from recordings: cut in silence, transcribe, check; or review one by ear"
    collect = _command(commands, "collect", about, _collect, strict=True)
    add = collect.add_argument
    recordings = "audio, video, folders of them, or demo; with none, decide again with other filters"
    add("recordings", type=Path, nargs="*", metavar="RECORDING", help=recordings)
    add("--out", type=Path, metavar="DIR", help="folder of the corpus; one that is there is continued")
    add("--review", type=Path, metavar="DIR", help="open a page to hear and mend the corpus in DIR")
    add("--language", choices=LANGUAGES, help="language of all recordings [default: detected for every clip]")
    speakers = "how many people speak: a number, auto or one; or each file or folder is one [default: auto]"
    add("--speakers", type=_speakers, metavar="N|auto|one|file|folder", help=speakers)
    add("--speaker", default="", metavar="NAME", help="name of the one person who speaks")
    script = "text of all recordings, such as a book; NAME.txt, .srt or .vtt next to a recording is its own"
    add("--script", type=Path, metavar="FILE", help=script)
    whisper = "folder of a CTranslate2 Whisper, or the name of one in the local cache [default: Whisper base]"
    add("--whisper", default="", metavar="DIR|NAME", help=whisper)
    add("--download", action="store_true", help="download the Whisper that is named, if it is not there")
    add("--judge", type=Path, metavar="DIR", help="folder of the models [default: .judge, made by make judge]")
    for name, rule in _thresholds().items():
        add(f"--{name.replace('_', '-')}", type=_number_or_off, metavar="X", help=f"{rule}; off: not used")


def _thresholds() -> dict[str, str]:
    """The filters of a collected corpus by name, each described."""
    from myxtts.collect.catalog import THRESHOLDS, Filters

    defaults = {name: getattr(Filters(), name) for name in THRESHOLDS}
    shown = {name: "off" if value is None else f"{value:g}" for name, value in defaults.items()}
    about = {name: rule.description.rstrip(".") for name, rule in THRESHOLDS.items()}
    return {name: f"{about[name][0].lower()}{about[name][1:]} [default: {shown[name]}]" for name in THRESHOLDS}


def _speakers(text: str) -> str:
    if text in ("auto", "one", "file", "folder") or (text.isdecimal() and int(text) > 0):
        return "one" if text == "1" else text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of speakers nor auto, one, file or folder")


def _number_or_off(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return "off" if text == "off" else float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor off")


def _add_tools(commands: Any) -> None:
    about = "check settings, corpus and machine before training; the exit code is 0 only if nothing fails"
    check = _command(commands, "check", about, _check)
    add = check.add_argument
    add("--gpus", action="store_true", help="also test the GPUs: memory caps, copies, a short run")
    add("--all", action="store_true", help="also show what passed or could not be checked")
    add("--json", action="store_true", help="print the findings as JSON")
    add_flags(check)

    watch = _command(commands, "watch", "show a run live: rings, losses, throughput and GPUs", _watch, strict=True)
    watch.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")

    runs = _command(commands, "runs", "list the runs in a folder: stages, steps, what is left", _runs, strict=True)
    where = "folder to look in [default: the working folder]"
    runs.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help=where)

    report = _command(commands, "report", "write an HTML page about a run", _report, strict=True)
    report.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    report.add_argument("--out", type=Path, metavar="FILE", help="page to write [default: RUN/report.html]")

    about = "measure where the time of a run goes, and say what to change"
    profile = _command(commands, "profile", about, _profile)
    add, steps = profile.add_argument, "steps to measure; with --data-only, batches [default: 50]"
    add("--num-steps", "--num-batches", type=_whole_number(1), default=50, metavar="N", help=steps)
    add("--data-only", action="store_true", help="analyse text, audio and feed; needs no GPU")
    add("--kernels", action="store_true", help="also list the kernels of a step")
    add("--step-ms", type=_positive, metavar="MS", help="with --data-only: time of a step on your GPU")
    add("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")

    tune = _command(commands, "tune", "search for settings that train faster on this machine, by measuring", _tune)
    add, largest = tune.add_argument, "largest batch to try [default: 512, on a CPU 32]"
    add("--minutes", type=_positive, default=2.0, metavar="M", help="time limit [default: 2]")
    add("--max-batch", type=_whole_number(1), metavar="N", help=largest)
    add("--apply", action="store_true", help="write the changes into the YAML file; keeps a backup")
    for tool in (profile, tune):
        add, stage = tool.add_argument, "stage to measure [default: gpt, or the first of --stages]"
        add("--stage", choices=STAGES, help=stage)
        add("--json", action="store_true", help="print the result as JSON")
        add_flags(tool)


def _add_speak(commands: Any) -> None:
    speak = _command(commands, "speak", "speak a text in the voice of a recording", _speak, strict=True)
    add = speak.add_argument
    add("text", nargs="?", help="text to speak, or SSML, which begins with <speak>")
    add("--from-file", type=Path, metavar="FILE", help="text file to speak; - for standard input")
    book = "book to speak, a .txt, .md or .epub: a file for each chapter; the same command continues it"
    add("--book", type=Path, metavar="FILE", help=book)
    _add_model(speak)
    add("--speaker", type=Path, action="append", metavar="FILE", help="recording of the voice; may be repeated")
    _add_adapt(speak, "with --speaker: ")
    voice = "a voice that myxtts voices lists [default: the first]; with --speaker: save the voice under this name"
    add("--voice", metavar="NAME", help=voice)
    add("--language", choices=LANGUAGES, help="language of the text [default: detected]")
    out = "wav or flac file to write [default: speech.wav]; with --book the folder [default: the book's name]"
    add("--out", type=Path, metavar="FILE", help=out)
    add("--format", choices=["flac", "opus", "mp3", "wav"], help="with --book: of the files [default: flac]")
    add("--subtitles", choices=["srt", "vtt"], help="also write subtitles next to the audio; vtt times each word")
    attempts = "attempts at a sentence that fails the quality check [default: 3]"
    add("--attempts", type=_whole_number(1), default=3, metavar="N", help=attempts)
    listen = "let Whisper hear every sentence, and take the attempt with the fewest wrong words (make judge)"
    add("--listen", action="store_true", help=listen)
    add("--stream", action="store_true", help="write the audio while it is generated")
    add("--speed", type=float, default=1.0, help="speaking rate; 2 is twice as fast [default: 1]")
    add("--seed", type=int, help="random seed, for reproducible output")
    add("--repetition-penalty", type=float, help="penalty on repeated codes [default: 5; from scratch: 1]")
    _add_sampling(speak)

    voices = _command(commands, "voices", "list the voices of a model, or add one", _voices, strict=True)
    add = voices.add_argument
    _add_model(voices)
    add("--add", metavar="NAME", help="save the voice of the recordings under this name")
    add("recordings", type=Path, nargs="*", metavar="RECORDING", help="with --add: recordings of one person")
    add("--language", choices=LANGUAGES, action="append", help="with --add: of the speaker; may be repeated")
    add("--description", default="", metavar="TEXT", help="with --add: what the voice is like, for the list")
    _add_adapt(voices, "with --add: ")


def _add_adapt(command: Any, when: str) -> None:
    adapt = f"{when}learn the voice from the recording, which takes about half a minute on two CPU cores "
    adapt += "[default: if the model can, and is not a run that trained its flow]"
    command.add_argument("--adapt", action=argparse.BooleanOptionalAction, help=adapt)


def _add_serve(commands: Any) -> None:
    about = "serve models over HTTP with OpenAI's speech API; the key is in MYXTTS_API_KEY"
    serve = _command(commands, "serve", about, _serve, strict=True)
    about = "open a page to hear, make voices, look at corpora, train and compare runs; serves the same API"
    studio = _command(commands, "studio", about, _serve, strict=True)
    add = studio.add_argument
    runs = "folder with runs; new ones are made in the first; may be repeated [default: the working folder]"
    add("--runs", type=Path, action="append", metavar="DIR", help=runs)
    corpora = "folder with corpora; may be repeated [default: the working folder]"
    add("--corpora", type=Path, action="append", metavar="DIR", help=corpora)
    for command in (serve, studio):
        _add_server(command)


def _add_server(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    model = "a run, a folder of weights, or base; may be repeated [default: as speak]"
    add("--model", type=Path, action="append", metavar="DIR", help=model)
    host = "address to listen on; outside this machine a key is required [default: 127.0.0.1]"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    add("--port", type=_whole_number(0), default=8020, metavar="N", help="port; 0 for a free one [default: 8020]")
    cors = "web origin whose pages may use the server, or *; may be repeated [default: none]"
    add("--cors", action="append", default=[], metavar="ORIGIN", help=cors)
    add("--slots", type=_whole_number(1), metavar="N", help="sentences spoken at once [default: by memory]")
    add("--queue", type=_whole_number(1), default=256, metavar="N", help="most waiting requests [default: 256]")
    add("--max-characters", type=_whole_number(1), default=4096, metavar="N", help="of a text [default: 4096]")
    most = "requests of one client at the same time [default: 16]"
    add("--per-client", type=_whole_number(1), default=16, metavar="N", help=most)
    add("--rate", type=_whole_number(1), default=600, metavar="N", help="requests a minute [default: 600]")
    drain = "on SIGTERM, time for running requests to finish [default: 60]"
    add("--drain", type=_positive, default=60.0, metavar="SECONDS", help=drain)
    add("--device", metavar="D", help="cpu, cuda or cuda:1 [default: the first GPU, or the CPU]")


def _add_model(command: argparse.ArgumentParser) -> None:
    about = "a run, a folder of weights, or base, the model of MyXTTS [default: the run in checkpoints, or base]"
    command.add_argument("--model", type=Path, metavar="DIR", help=about)


def _add_evaluate(commands: Any) -> None:
    about = "synthesise held-out sentences of a run, and rate words, speaker and quality against the recordings"
    evaluate = _command(commands, "evaluate", about, _evaluate, strict=True)
    add = evaluate.add_argument
    add("run_folder", type=Path, metavar="RUN", help="folder of the run")
    sentences = "number of sentences, taken from the speakers in turn [default: 40]"
    add("--sentences", type=_whole_number(1), default=40, metavar="N", help=sentences)
    add("--language", choices=LANGUAGES, help="only sentences in this language")
    add("--judge", type=Path, metavar="DIR", help="folder of the judges [default: .judge, made by make judge]")
    add("--out", type=Path, metavar="DIR", help="folder for audio and scores [default: RUN/evaluation]")
    add("--only", choices=["synthesise", "judge"], help="do one half; the other can follow on another machine")
    add("--seed", type=int, default=1, help="random seed, for reproducible output [default: 1]")
    _add_sampling(evaluate)


def _add_sampling(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--temperature", type=float, help="sampling temperature [default: 0.75]")
    guidance = "classifier-free guidance [default: 2 if trained from scratch with --text-dropout, else 1]"
    add("--guidance", type=float, help=guidance)
    central = "use the code nearest to the mean of the likely ones: clearer, less expressive [default: as trained]"
    add("--central", action=argparse.BooleanOptionalAction, help=central)
    add("--best", action="store_true", help="use the best GPT by --best-by of the run, or by its validation loss")
    add("--vocoder", choices=["hifigan", "griffin-lim"], help="codes to audio [default: the better one]")
    add("--device", metavar="D", help="cpu, cuda or cuda:1 [default: the first GPU, or the CPU]")


def _add_export(commands: Any) -> None:
    about = "write a folder of weights, for coqui-tts and the tools built on it or to give away"
    export = _command(commands, "export", about, _export, strict=True)
    add = export.add_argument
    add("source", type=Path, metavar="FOLDER", help="a run, or a folder of XTTS weights")
    formats = "coqui: as XTTS-v2; compact: int8 and float16, up to 100 MB, with the saved voices [default: coqui]"
    add("--to", choices=["coqui", "compact"], default="coqui", help=formats)
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--tokenizer", type=Path, metavar="FILE", help="a larger vocab.json, for which the network is extended")
    add("--best", action="store_true", help="use the best GPT by --best-by of the run, or by its validation loss")


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.lstrip("-").isdecimal() else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _load(options: argparse.Namespace, demo: bool = True) -> LoadedSettings:
    """Return the settings of a run with presets, and on request the demonstration; prints what they set."""
    loaded = load(options.config, flags_of(options), options.unknown)
    loaded, lines = apply_presets(loaded, _start_of(loaded))
    if demo and loaded.settings.data.train_data is None:
        from myxtts.devices import Machine

        loaded, more = apply_demo(loaded, on_gpu=bool(Machine.look().gpus))
        lines += more if options.run is _train else more[:1]
    if lines and _is_first_process() and not getattr(options, "json", False):
        _say(*lines)
    return loaded


def _start_of(loaded: LoadedSettings) -> tuple[str, dict[str, Any]]:
    """Return what a run starts from if the user does not say it, in a word, and the settings that this gives.

    That is the base model, if the settings fit it, or what the run that is continued was started from.
    """
    from myxtts.run_dir import RunDir
    from myxtts.weights import Provenance, has_weights

    data, training, base = loaded.settings.data, loaded.settings.training, config.BASE_FOLDER
    if loaded.is_set("training.init_from"):
        return "", {}
    is_demo = data.train_data is None and not loaded.is_set("training.checkpoint_dir")
    run = RunDir(config.DEMO_FOLDER if is_demo else training.checkpoint_dir)
    if run.has_begun and not training.reset_training:
        values: dict[str, Any] = {}
        with contextlib.suppress(DatasetError):  # a damaged run is reported by the command
            facts = run.started_with()
            if source := facts.get("training.init_from"):
                values = {"training.init_from": Path(source), "model.size": facts.get("model.size")}
        return "continued run", {key: value for key, value in values.items() if not loaded.is_set(key)}
    if not has_weights(base):
        return "", {}
    known, languages = Provenance.read(base), [data.language, *(source.language for source in data.sources)]
    reasons = {
        "--model-size": loaded.is_set("model.size") and loaded.settings.model.size != "base",
        "--tokenizer": data.tokenizer is not None,
        "--use-phonemes": data.use_phonemes != known.use_phonemes,
        **{f"--language {code}": code not in (None, *known.languages) for code in languages},
    }
    if found := [flag for flag, does_not_fit in reasons.items() if does_not_fit]:
        if _is_first_process():
            logging.info("From scratch: the base model does not fit %s", " and ".join(found))
        return "", {}
    return "base model", {"training.init_from": base, "model.size": "base"}


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _load_data(options: argparse.Namespace) -> DataSettings:
    data = load(options.config, flags_of(options), options.unknown).settings.data
    _require_vocabulary("--tokenizer", data.tokenizer)
    return data


def _require_vocabulary(flag: str, path: Path | None) -> None:
    if path is not None and not path.exists():
        raise DatasetError(f"{flag} {path}: there is no such file; give a vocab.json or its folder")


def _train(options: argparse.Namespace) -> None:
    loaded = _load(options)
    settings = loaded.settings
    _require_vocabulary("--tokenizer", settings.data.tokenizer)
    from myxtts.reports import TrainingReports, closing, stopped
    from myxtts.run import train
    from myxtts.terminal import ProgressLines, ProgressPrinter, dashboard, show_lines

    folder = settings.training.checkpoint_dir
    if not _is_first_process():
        logging.getLogger().setLevel(logging.WARNING)
        train(loaded)
        return
    has_view = options.dashboard and sys.stdout.isatty()
    with (
        ProgressPrinter(is_silent=has_view) as printer,
        dashboard(folder, _gpu_readings(folder)) if has_view else contextlib.nullcontext(),
        contextlib.closing(TrainingReports(folder, printer)) as reports,
    ):
        result = train(loaded, reporter=reports, progress=ProgressLines(), say=lambda line: show_lines([line]))
    if all(state.done for state in result.states.values()):
        show_lines(closing(settings, result.prepared, reports.has_trained), columns=120)
    else:
        _say(stopped(settings, result.states))


def _gpu_readings(folder: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads all GPUs of a run, as it counts them; it finds none without a driver."""
    from myxtts.observe.nvml import Sampler, gpus_of_run

    @cache
    def sampler(uuids: tuple[str, ...]) -> Sampler:
        return Sampler(range(len(uuids) or MOST_GPUS), uuids=uuids or None)

    return lambda: [reading._asdict() for reading in sampler(gpus_of_run(folder)).read()]


def _prepare(options: argparse.Namespace) -> None:
    data = _load_data(options)
    from myxtts.data.prepare import prepare
    from myxtts.data.shards import url_of
    from myxtts.terminal import ProgressLines, show_corpus

    if options.out is not None:
        if (finished := _prepare_sharded(options, data)) is not None:
            show_corpus(prepare(finished, ProgressLines()), made=url_of(options.out))
        return
    if options.shard is not None or options.on != "local" or options.prune:
        raise ConfigError("--on, --prune and --shard make a sharded corpus: say where, with --out CORPUS")
    if data.train_data is None:
        logging.info("No --train-data given: using the embedded corpus")
    show_corpus(prepare(data, ProgressLines(), verify=True))


def _prepare_sharded(options: argparse.Namespace, data: DataSettings) -> DataSettings | None:
    """Make a sharded corpus, or a share of it; return the settings that open it once it is finished."""
    from myxtts.data.jobs import JobOptions, prepare_sharded, share_of
    from myxtts.terminal import ProgressLines

    if data.train_data is None and not options.prune:
        raise ConfigError("prepare --out: say what the corpus is made of, with --train-data SOURCE")
    if data.val_data is not None:
        raise ConfigError("prepare --out: --val-data is a corpus of its own; prepare it with another --out")
    if options.on == "ray" and options.shard is not None:
        raise ConfigError("--shard divides the work without a cluster; leave it out with --on ray")
    share = share_of(options.shard) if options.on == "local" else (0, 1)
    start = _start_of(load(options.config, flags_of(options), options.unknown))[1]
    jobs = JobOptions(options.on, share, options.shard_mb, options.prune)
    done = prepare_sharded(data, options.out, jobs, start.get("training.init_from"), ProgressLines())
    _say(f"{done.made} shards made, {done.kept} were there")
    if done.unnamed and not options.prune:
        _say(f"The corpus does not name {done.unnamed / 1e6:,.1f} MB: --prune deletes them")
        _say("Runs that began earlier may read them, or they are shares that are not joined yet")
    if done.waiting:
        _say(f"{done.waiting} are made by other processes; the last one finishes the corpus")
        return None
    return replace(data, train_data=options.out, tokenizer=None) if data.train_data is not None else None


def _vocabulary(options: argparse.Namespace) -> None:
    data = _load_data(options)
    from myxtts.data.prepare import spoken_corpus
    from myxtts.terminal import ProgressLines
    from myxtts.text import tokenizer

    base: Path | None = getattr(options, "base", None)
    if base is not None and data.language is None:
        raise ConfigError("vocabulary extend: --language is missing; give the language to add, such as fa")
    _require_vocabulary("--base", base)
    old = tokenizer.Tokenizer.load(base) if base is not None else None
    texts, languages = spoken_corpus(data, ProgressLines())
    if old is None:
        vocabulary = tokenizer.train(texts, languages, data.vocab_size)
    else:
        spoken = [text for text, language in zip(texts, languages, strict=True) if language == data.language]
        if not spoken:
            found = " ".join(sorted(set(languages))) or "none"
            raise ConfigError(f"No sentence of the corpus is in {data.language} (its languages: {found})")
        vocabulary = tokenizer.extend(old, spoken, data.language or "", options.merges)
        _say(f"{vocabulary.num_tokens - old.num_tokens} tokens added to the {old.num_tokens} of {base}")
    vocabulary.save(options.out)
    _say(f"{options.out}: {vocabulary.num_tokens} tokens")


def _collect(options: argparse.Namespace) -> None:
    if options.review is not None:
        if options.recordings or options.out:
            raise ConfigError("--review opens a corpus that is there; give it alone: myxtts collect --review DIR")
        from myxtts.web.review import serve_review

        serve_review(options.review)
        return
    if options.out is None:
        raise ConfigError("collect: say where the corpus is made, with --out DIR")
    from myxtts.collect.catalog import THRESHOLDS
    from myxtts.collect.collect import CollectOptions, collect
    from myxtts.terminal import ProgressLines, show_collected

    if options.recordings == [Path("demo")] and not Path("demo").exists():
        from myxtts.collect.recordings import demo_recording
        from myxtts.data.prepare import EMBEDDED_CORPUS

        options.recordings = [demo_recording(options.out, EMBEDDED_CORPUS)]
    given = {name: getattr(options, name) for name in THRESHOLDS if getattr(options, name) is not None}
    filters = {name: None if value == "off" else value for name, value in given.items()}
    names = ("out", "recordings", "language", "speakers", "speaker", "script", "whisper", "judge", "download")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    asked = CollectOptions(filters=filters, **chosen)
    try:
        show_collected(collect(asked, ProgressLines()))
    except KeyboardInterrupt:
        _say("Stopped. The same command continues where it was.")
        raise


def _check(options: argparse.Namespace) -> int:
    loaded = _load(options, demo=False)
    from myxtts.terminal import ProgressLines, show_findings
    from myxtts.tools.check import check, check_gpus, passed, to_json

    findings = check_gpus(loaded, progress=ProgressLines(), say=logging.info) if options.gpus else check(loaded)
    if options.json:
        print(to_json(findings))
    else:
        show_findings(findings, with_passed=options.all or options.verbose)
    return 0 if passed(findings) else 1


def _profile(options: argparse.Namespace) -> None:
    loaded = _load(options)
    if options.trace is not None:
        _check_trace(options.trace, options.data_only)
    from myxtts.terminal import show_profile
    from myxtts.tools.profile import profile

    prepared, stage = _prepare_for_tool(loaded, options)
    given = {name: getattr(options, name) for name in ("num_steps", "data_only", "kernels", "step_ms")}
    found = profile(loaded.settings, prepared, stage=stage, **given)
    if options.trace is not None and found.trace is not None:
        try:
            found.trace.write_chrome(options.trace)
        except OSError as error:
            raise ConfigError(f"--trace {options.trace}: cannot be written ({error.strerror or error})") from error
    if options.json:
        print(json.dumps(found.to_json(), indent=2, default=str))
    else:
        show_profile(found)
        _add_to_page(found, loaded.settings)
    if options.trace is not None:
        logging.info("Trace written to %s; open it at ui.perfetto.dev", options.trace.resolve())


def _check_trace(path: Path, data_only: bool) -> None:
    """Refuse a trace that could not be written, before anything is measured."""
    if data_only:
        raise ConfigError("--trace needs training steps, and --data-only trains none; leave out one of the two")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder; name a file" if path.is_dir() else f"{path.parent}: no such folder"
        raise ConfigError(f"--trace {path}: {problem}")


def _add_to_page(found: Profile, settings: Settings) -> None:
    """Add a profile to the page of the run with this corpus, network and batch size, if there is one."""
    from myxtts.observe.report import write_report
    from myxtts.tools.profile import keep

    subject = attrgetter("data.train_data", "data.batch_size", "model")
    run_folder = settings.training.checkpoint_dir
    try:
        own = load(run_folder / "settings.yaml", {}).settings
        if found.verdict is not None and subject(own) == subject(settings):
            keep(found, run_folder)
            _say(f"On the page of the run: {write_report(run_folder)}")
    except ConfigError:  # no run, or one with settings of another version
        return
    except OSError as error:
        logging.warning("Cannot write the page of the run in %s: %s", run_folder, error)


def _tune(options: argparse.Namespace) -> None:
    loaded = _load(options)
    from myxtts.settings import apply_patch
    from myxtts.terminal import show_tuning
    from myxtts.tools.tune import known_faults, tune

    for fault in known_faults(loaded):
        logging.info("%s: %s", fault.setting, fault.what)
    prepared, stage = _prepare_for_tool(loaded, options)
    limits = {"minutes": options.minutes, "max_batch": options.max_batch}
    found = tune(loaded, prepared, stage=stage, say=logging.info, **limits)
    if options.json:
        print(json.dumps(found.to_json(), indent=2, default=str))
    else:
        show_tuning(found)
    if options.apply and found.values:
        path, backup = apply_patch(loaded, found.values)
        logging.info("%s: written%s", path, f"; the previous version is {backup}" if backup else "")


def _prepare_for_tool(loaded: LoadedSettings, options: argparse.Namespace) -> tuple[PreparedCorpus, str]:
    """Return the prepared corpus and the stage to measure."""
    from myxtts.devices import make_plan
    from myxtts.run import prepare_corpus
    from myxtts.terminal import ProgressLines

    _require_vocabulary("--tokenizer", loaded.settings.data.tokenizer)
    make_plan(loaded.settings.data, spelling=loaded.spelling)  # reports mistakes before a corpus is prepared
    stages = loaded.settings.training.stages or STAGES
    stage = options.stage or ("gpt" if "gpt" in stages else stages[0])
    return prepare_corpus(loaded.settings, ProgressLines()), stage


def _watch(options: argparse.Namespace) -> None:
    from myxtts.terminal import watch

    _require_run(options.run_folder)
    watch(options.run_folder, threading.Event(), _gpu_readings(options.run_folder))


def _require_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the --checkpoint-dir of a run")


def _runs(options: argparse.Namespace) -> None:
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder}: no such folder; give a folder with runs")
    from myxtts.run_dir import find_runs
    from myxtts.terminal import show_runs

    show_runs(options.folder, find_runs(options.folder))


def _report(options: argparse.Namespace) -> None:
    from myxtts.observe.report import write_report

    try:
        _say(write_report(options.run_folder, options.out))
    except OSError as error:
        problem = f"No report of {options.run_folder}: {error.strerror}" if error.strerror else str(error)
        raise ConfigError(problem) from error


_ABOUT_CLONING = (
    "Hint: closer still to the person: fine-tune the model on half a minute of speech, make train DATA=DIR "
    "(docs/base-model.md, Making it yours)"
)
_KEEP = "Hint: --voice NAME keeps the voice, so that it need not be learnt again"
_WITHOUT_ADAPTING = "Hint: without --adapt the base model resembles hardly any real person"


def _speak(options: argparse.Namespace) -> None:
    from myxtts.devices import device_named, work_on
    from myxtts.run_dir import RunDir
    from myxtts.synthesis.books import read_book
    from myxtts.synthesis.markup import Markup, Segment, is_markup
    from myxtts.synthesis.synthesizer import check_output, load_synthesizer, override_sampling
    from myxtts.synthesis.text import require_words
    from myxtts.synthesis.voices import VoiceLibrary, read_references
    from myxtts.terminal import ProgressLines
    from myxtts.text.language import language_of
    from myxtts.text.normalize import normalize
    from myxtts.weights import Provenance

    _check_adapt(options, "speak", "--speaker FILE", bool(options.speaker))
    book = read_book(options.book) if _check_book(options) else None
    text = book.sample if book else _text(options)
    markup = Markup(text) if not book and is_markup(text) else None
    require_words(text, text + normalize(text[:1000], options.language or LANGUAGES[0]))
    if not book:
        options.out = options.out or Path("speech.wav")
        check_output(options.out)
    folder = _model_folder(options.model)
    voices = VoiceLibrary(folder)
    references = read_references(options.speaker) if options.speaker else None
    usual_voice = None if references else voices.load(options.voice or voices.default())  # raises if there is none
    if references and options.voice:
        voices.path(options.voice)  # reports an impossible name before anything is computed
        if options.voice in voices.built_in():
            raise ConfigError(f"speak: {options.voice!r} is a built-in voice; name that of --speaker otherwise")
    source = book or markup
    language = options.language or (source.language if source else "")
    known = RunDir(folder).languages() if RunDir(folder).exists else Provenance.read(folder).languages
    usual = [*(usual_voice.languages if usual_voice and options.voice else ()), *known, *LANGUAGES][0]
    language = language or language_of(markup.text if markup else text, known, usual)
    segments = markup.segments(language) if markup else [Segment(text, language)]
    work_on(device := device_named(options.device))
    synthesizer = load_synthesizer(folder, vocoder=options.vocoder, device=device, best_gpt=options.best)
    if references:
        name, adapt = options.voice or options.speaker[0].stem, _adapts(options, folder, synthesizer)
        voice = synthesizer.voice_of(references, name, adapt=adapt, progress=ProgressLines())
        if options.voice:
            _say(f"Voice saved: {voices.save(voice)}")
    else:
        voice = voices.load(options.voice or voices.default(language))
    _say(f"Speaking {LANGUAGE_NAMES[language]} with {_model_name(folder)}, voice {voice.name}")
    if options.speaker and folder == config.BASE_FOLDER:
        keep = () if options.voice else (_KEEP,)
        _say(*((*keep, _ABOUT_CLONING) if voice.offsets is not None else (_WITHOUT_ADAPTING,)))
    sampling = override_sampling(synthesizer.sampling, options)
    if book or markup or options.listen or options.subtitles:
        _narrate(options, book, segments, synthesizer, voice, language, sampling)
        return
    progress = ProgressLines() if sys.stderr.isatty() else NO_PROGRESS
    how = {"sampling": sampling, "speed": options.speed, "seed": options.seed, "progress": progress}
    speak: Callable[..., Speech | SpeechStream] = synthesizer.stream if options.stream else synthesizer.speak
    speech = speak(text, voice, language, num_attempts=options.attempts, **how)
    speech.save(options.out)
    _say(*speech.report.notes(), options.out)


def _check_book(options: argparse.Namespace) -> bool:
    """True if a book is to be spoken; an error if other flags contradict that."""
    if options.book is None:
        if options.format:
            raise ConfigError("speak: --format is for --book; else the extension of --out decides")
        return False
    if options.text is not None or options.from_file is not None or options.stream:
        raise ConfigError("speak: --book FILE is spoken alone: without a text, --from-file and --stream")
    options.left = "what was spoken is kept, and the same command continues"
    options.out = options.out or Path(options.book.stem)
    if options.out.is_file():
        raise ConfigError(f"speak: --out {options.out} is a file; with --book give a folder")
    return True


def _narrate(
    options: argparse.Namespace,
    book: Book | None,
    segments: Sequence[Segment],
    synthesizer: Synthesizer,
    voice: Voice,
    language: str,
    sampling: Sampling,
) -> None:
    """Speak sentence by sentence: a book, SSML, or a text with subtitles or whose words are heard."""
    import numpy as np

    from myxtts.files import write_text_atomically
    from myxtts.synthesis.audiobook import BookOptions, speak_book, usual_seed
    from myxtts.synthesis.narration import Cue, Narrator, subtitles
    from myxtts.synthesis.synthesizer import Speech
    from myxtts.terminal import ProgressLines

    seed = usual_seed(options.out) if book and options.seed is None else options.seed
    seed = secrets.randbits(31) if seed is None else seed
    with _listening(options) as judge:
        how = (options.speed, sampling, options.attempts, judge, bool(options.subtitles))
        narrator = Narrator(synthesizer, voice, seed, *how)
        if book:
            chosen = BookOptions(language, options.format or "flac", options.subtitles)
            chapters = speak_book(book, narrator, options.out, chosen, ProgressLines(), _say)
            _say(*(f"{chapter.file.name}: {note}" for chapter in chapters for note in chapter.notes), options.out)
            return
        cues: list[Cue] = []
        progress = ProgressLines() if sys.stderr.isatty() else NO_PROGRESS
        stream = narrator.stream(narrator.lines(segments), cues, progress)
        if options.stream:
            stream.save(options.out)
        else:
            waves = [*stream]
            Speech(np.concatenate(waves), stream.report).save(options.out)
    _say(*stream.report.notes(), options.out)
    if options.subtitles:
        subtitle_file = options.out.with_suffix(f".{options.subtitles}")
        write_text_atomically(subtitle_file, subtitles(cues, options.subtitles))
        _say(subtitle_file)


@contextlib.contextmanager
def _listening(options: argparse.Namespace) -> Iterator[Judge | None]:
    """The judge of attempts if `--listen` asks for one."""
    if not options.listen:
        yield None
        return
    import soxr

    from myxtts.collect.listeners import start_recogniser
    from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
    from myxtts.text.normalize import normalize
    from myxtts.tools.judge import RATE, SHORTEST_SECONDS, mistakes

    with start_recogniser() as transcript:

        def share_wrong(wave: Wave, text: str, language: str) -> float:
            is_short = len(wave) < SHORTEST_SECONDS * OUTPUT_SAMPLE_RATE
            heard = "" if is_short else transcript(soxr.resample(wave, OUTPUT_SAMPLE_RATE, RATE), language)
            return float(mistakes(normalize(text, language), normalize(heard, language))["wer"])

        yield share_wrong


def _serve(options: argparse.Namespace) -> None:
    needed = ("starlette", "uvicorn", "websockets", "python_multipart")
    if missing := [name for name in needed if find_spec(name) is None]:
        cure = f"{sys.executable} -m {INSTALL_EXTRA.format('serve')}"
        raise ConfigError(f"the server needs the packages {', '.join(missing)}. Install them:\n  {cure}")
    from myxtts.devices import device_named, work_on
    from myxtts.web.limits import Limits
    from myxtts.web.pages import listen
    from myxtts.web.serve import KEY_VARIABLE, serve
    from myxtts.web.speech import load_model, load_models, names_of

    folders = names_of([_model_folder(folder) for folder in options.model or [None]])
    work_on(device := device_named(options.device))
    asked = (options.max_characters, options.per_client, options.rate)
    limits = Limits(os.environ.get(KEY_VARIABLE, ""), tuple(options.cors), *asked)
    runs, corpora = (getattr(options, name, None) or [Path()] for name in ("runs", "corpora"))
    if missing := [root for root in (*runs, *corpora) if not root.is_dir()]:
        raise ConfigError(f"{missing[0]}: no such folder; --runs and --corpora name folders that are there")
    listener = listen(options.host, options.port)  # reports a port in use before anything is loaded
    models = load_models(folders, device, options.slots, options.queue)
    if "runs" not in options:
        serve(models, limits, listener, options.drain, _say)
        return
    from myxtts.web.pages import show_page
    from myxtts.web.studio import Studio

    load_run = partial(load_model, device=device, slots=options.slots, queue_limit=options.queue)
    studio = Studio(models, load_run, runs, corpora, listener.getsockname()[:2], _gpu_readings)
    with contextlib.closing(studio):
        show_page(studio.address)
        serve(models, limits, listener, options.drain, _say, studio)


def _model_folder(given: Path | None) -> Path:
    from myxtts.run_dir import DIMS_FILE, RunDir
    from myxtts.synthesis.synthesizer import usual_model
    from myxtts.weights import has_weights

    folder = given or usual_model()
    if folder == Path("base") and not folder.exists():
        folder = config.BASE_FOLDER
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run or a folder of weights with --model DIR")
    if not has_weights(folder) and not RunDir(folder).exists and (runs := sorted(folder.glob(f"*/{DIMS_FILE}"))):
        raise ConfigError(f"{folder} is a folder of runs; name one of them: --model {runs[0].parent}")
    return folder


def _model_name(folder: Path) -> str:
    return "the base model" if folder == config.BASE_FOLDER else f"the model in {folder}"


def _check_adapt(options: argparse.Namespace, command: str, flags: str, has_recordings: bool) -> None:
    if options.adapt is not None and not has_recordings:
        flag = "--adapt" if options.adapt else "--no-adapt"
        raise ConfigError(f"{command}: {flag} says how a voice is made of a recording; give one with {flags}")


def _adapts(options: argparse.Namespace, folder: Path, synthesizer: Synthesizer) -> bool:
    """What --adapt or --no-adapt say, or else whether the model can and its flow was not trained in a run."""
    from myxtts.run_dir import RunDir

    usual = synthesizer.adapts and not RunDir(folder).has_checkpoint("decoder")
    return usual if options.adapt is None else bool(options.adapt)


def _voices(options: argparse.Namespace) -> None:
    from myxtts.synthesis.synthesizer import load_synthesizer
    from myxtts.synthesis.voices import VoiceLibrary
    from myxtts.terminal import ProgressLines

    if (options.add is None) != (not options.recordings):
        raise ConfigError("voices: to add one give a name and recordings: myxtts voices --add NAME FILE…")
    _check_adapt(options, "voices", "--add NAME FILE…", options.add is not None)
    folder = _model_folder(options.model)
    library = VoiceLibrary(folder)
    if options.add is not None:
        library.path(options.add)  # reports an impossible name before anything is computed
        synthesizer = load_synthesizer(folder)
        adapt = _adapts(options, folder, synthesizer)
        voice = synthesizer.voice(options.recordings, options.add, adapt=adapt, progress=ProgressLines())
        about = {"languages": tuple(options.language or ()), "description": options.description}
        _say(*voice.notes, library.save(replace(voice, **about)))
        return
    found = library.all()
    add = "myxtts voices --add NAME RECORDING… adds one"
    _say(f"Voices of {_model_name(folder)}" + (", for --voice NAME:" if found else f": none yet; {add}"))
    width = max((len(voice.name) for voice in found), default=0)
    for voice in found:
        _say(f"  {voice.name:{width}}  {' '.join(voice.languages) or '–':8}  {voice.description}".rstrip())


def _text(options: argparse.Namespace) -> str:
    if (options.text is None) == (options.from_file is None):
        raise ConfigError('speak: give either a text, as in myxtts speak "Hello.", or --from-file FILE')
    if options.text is not None:
        return str(options.text)
    from myxtts.synthesis.text import MAX_TEXT_CHARACTERS

    try:
        path = Path("/dev/stdin") if str(options.from_file) == "-" else options.from_file
        with open(path, encoding="utf-8-sig") as file:
            return file.read(MAX_TEXT_CHARACTERS + 1)  # one too many is refused later
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(f"speak: --from-file {options.from_file} cannot be read: {why}") from None


def _evaluate(options: argparse.Namespace) -> None:
    from myxtts.evaluation import find_judges
    from myxtts.observe.report import write_report
    from myxtts.terminal import ProgressLines, show_scores
    from myxtts.tools.evaluate import EvaluationOptions, score, synthesise

    _require_run(options.run_folder)
    out = options.out or options.run_folder / EVALUATION_FOLDER
    judges = find_judges(options.judge) if options.only != "synthesise" else None  # before anything is computed
    if options.only != "judge":
        names = ("language", "vocoder", "seed", "temperature", "guidance", "central", "device")
        given = {name: getattr(options, name) for name in names}
        asked = EvaluationOptions(num_sentences=options.sentences, best_gpt=options.best, **given)
        synthesise(options.run_folder, out, asked, ProgressLines())
    if judges is None:
        there = f" --out {out}" if options.out else ""
        _say(f"{out}: ready to be judged (myxtts evaluate {options.run_folder} --only judge{there})")
        return
    scores = score(out, judges, ProgressLines())
    show_scores(scores)
    _say(scores["reading"], out / "scores.json")
    if out.resolve() == (options.run_folder / EVALUATION_FOLDER).resolve():
        try:
            _say(write_report(options.run_folder))
        except OSError as error:
            _say(f"No page was written: {error}")


def _export(options: argparse.Namespace) -> None:
    from myxtts.run_dir import RunDir
    from myxtts.synthesis.synthesizer import provenance
    from myxtts.text.tokenizer import Tokenizer
    from myxtts.weights import ONLY_HERE, fits_coqui, load_folder, save_compact, save_folder

    replaced = ", in place of the weights that were there" if _check_export(options.source, options.out) else ""
    _require_vocabulary("--tokenizer", options.tokenizer)
    larger = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    run, fresh = RunDir(options.source), ""
    if run.exists and larger is not None:
        raise ConfigError("--tokenizer extends a folder of weights; a run has a vocabulary of its own")
    if run.exists:
        model, vocabulary, known = run.load_model(best_gpt=options.best), run.vocabulary(), provenance(run)
    elif options.best:
        raise ConfigError(f"--best chooses among the checkpoints of a run; {options.source} has only weights")
    else:
        loaded = load_folder(options.source, larger)
        model, vocabulary, known = loaded.model, loaded.vocabulary, loaded.provenance
        fresh = f", new weights for {', '.join(loaded.fresh_parts)}" if loaded.fresh_parts else ""
    size = ""
    if options.to == "compact":
        _build_in_voices(options.source, options.out, model)
        _copy_readers(options.source, options.out)
        written = save_compact(options.out, model, vocabulary, known)
        size = f", {sum(written.values()) / 1e6:.1f} MB"
    else:
        save_folder(options.out, model, vocabulary, known)
        _copy_readers(options.source, options.out)
    _say(f"{options.out}: {model.dims.gpt.text_tokens} text tokens{size}{fresh}{replaced}")
    if known.untrained:
        hum = "; coqui-tts will only hum, myxtts speak uses Griffin-Lim" if "decoder" in known.untrained else ""
        voices = "; coqui-tts will speak with other voices, myxtts speak takes them from the GPT"
        use = voices if known.untrained == ("speaker",) else hum
        _say(f"WARNING: {' and '.join(known.untrained)}: never trained, these weights are random{use}")
    if options.to == "coqui" and not fits_coqui(model.dims):
        _say(f"WARNING: {ONLY_HERE}")


def _build_in_voices(source: Path, out: Path, model: XTTS) -> None:
    """Give an export the voices of its source, without those that other weights made."""
    from myxtts.synthesis.voices import VoiceLibrary, belongs, fingerprint

    found, own = VoiceLibrary(source).all(), fingerprint(model)
    for voice in [voice for voice in found if not belongs(voice, own)]:
        _say(f"WARNING: voice {voice.name} is left out: other weights made it. myxtts voices --add makes it again")
    VoiceLibrary(out).build_in([voice for voice in found if belongs(voice, own)])


def _copy_readers(source: Path, out: Path) -> None:
    from myxtts.run_dir import readers_file
    from myxtts.weights import READERS_FILE

    out.mkdir(parents=True, exist_ok=True)
    (out / READERS_FILE).unlink(missing_ok=True)
    if readers := readers_file(source):
        shutil.copyfile(readers, out / READERS_FILE)


def _check_export(source: Path, out: Path) -> bool:
    """True if an earlier export will be overwritten; anything else in the way is an error."""
    from myxtts.weights import MODEL_FILES

    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder; give a run or a folder of XTTS-v2")
    if out.resolve() == source.resolve():
        raise ConfigError(f"--out {out} is the folder to read; give another one")
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; give a folder for the export")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not set(found) & set(MODEL_FILES):
        some = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
        raise ConfigError(f"--out {out} holds other files ({some}); give a new folder, or an earlier export")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
