"""The commands `check`, `profile`, `tune`, `watch` and `report`: their flags, and the one function each calls.

A part of the command line (`cli`), and like it imports nothing heavy before a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myxtts.config import STAGES, Settings
from myxtts.errors import ConfigError
from myxtts.settings import Loaded, add_flags, flags_of, load, presets

if TYPE_CHECKING:
    from myxtts.data.clips import Prepared
    from myxtts.tools.profile import Profile

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
    profile.add_argument("--num-steps", "--num-batches", type=_count, default=50, metavar="N", help=steps)
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
    tune.add_argument("--max-batch", type=_count, metavar="N", help="largest batch to try [default: 512, CPU 32]")
    tune.add_argument("--apply", action="store_true", help="write the changes into the YAML file; keeps a backup")
    _add_shared(tune)
    tune.set_defaults(run=_tune)


def _add_shared(command: argparse.ArgumentParser) -> None:
    about = "stage to measure [default: gpt, or the first of --stages]"
    command.add_argument("--stage", choices=STAGES, help=about)
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    add_flags(command)


def _check(options: argparse.Namespace) -> int:
    from myxtts.findings_screen import show_findings
    from myxtts.screens import ProgressLines, show_lines
    from myxtts.tools.check import check, passed, to_json
    from myxtts.tools.check_gpus import check_gpus

    loaded = _load(options)
    findings = check_gpus(loaded, progress=ProgressLines(), say=logging.info) if options.gpus else check(loaded)
    if options.json:
        show_lines([to_json(findings)])
    else:
        show_findings(findings)
    return 0 if passed(findings) else 1


def _profile(options: argparse.Namespace) -> int:
    from myxtts.screens import show_lines
    from myxtts.tool_screens import show_profile
    from myxtts.tools.profile import profile

    loaded = _load(options)
    found = profile(
        loaded,
        _prepare(loaded),
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
    from myxtts.screens import show_lines
    from myxtts.tool_screens import show_tuning
    from myxtts.tools.config_patch import apply_patch
    from myxtts.tools.tune import tune

    loaded = _load(options)
    limits = {"minutes": options.minutes, "max_batch": options.max_batch}
    found = tune(loaded, _prepare(loaded), stage=_stage(options, loaded), say=logging.info, **limits)
    if options.json:
        show_lines([_as_json(found.to_json())])
    else:
        show_tuning(found)
    if options.apply and found.values:
        path, backup = apply_patch(loaded, found.values)
        logging.info("%s: written%s", path, f"; what it was before is in {backup}" if backup else "")
    return 0


def _load(options: argparse.Namespace) -> Loaded:
    """The settings with which `train` would train."""
    from myxtts.devices import Machine
    from myxtts.screens import show_lines

    loaded, lines = presets.apply(load(options.config, flags_of(options), options.unknown))
    if loaded.settings.data.train_data is None:
        loaded, demo = presets.apply_demo(loaded, on_gpu=bool(Machine.look().gpus))
        lines += demo
    show_lines([] if options.json else lines)
    return loaded


def _stage(options: argparse.Namespace, loaded: Loaded) -> str:
    """The stage to measure: the one named, else of those that would be trained."""
    stages = loaded.settings.training.stages or STAGES
    return str(options.stage or ("gpt" if "gpt" in stages else stages[0]))


def _prepare(loaded: Loaded) -> Prepared:
    from myxtts.devices import make_plan
    from myxtts.screens import ProgressLines
    from myxtts.tools.trial import prepare_corpus

    make_plan(loaded.settings.data)  # what is wrong with the devices is said before a corpus is prepared
    return prepare_corpus(loaded.settings, ProgressLines())


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, default=str)


def _count(text: str) -> int:
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
    from myxtts.observe.dashboard import watch

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
    from myxtts.observe.dashboard import watch

    if not options.run_folder.is_dir():
        raise ConfigError(f"There is no run in {options.run_folder}; name the --checkpoint-dir of a training")
    watch(options.run_folder, threading.Event(), _gpu_readings())
    return 0


def _report(options: argparse.Namespace) -> int:
    from myxtts.observe.report import write_report
    from myxtts.screens import show_lines

    try:
        show_lines([str(write_report(options.run_folder, options.out))])
    except OSError as error:
        no_run = isinstance(error, FileNotFoundError) and error.filename is None
        problem = f"No report of {options.run_folder}: {error.strerror or error}"
        raise ConfigError(str(error) if no_run else problem) from error
    return 0
