"""The page of `myxtts studio`: hear, make voices, see what training uses, train, compare runs.

Corpora and runs are chosen among those below the folders of the command line, by name; sounds by identifiers that
this server gave out. Nothing that comes from the network becomes a path, but the checked name of a new run.
Training is a process of its own, which outlives the page and the server: all that is known of it is read from its
folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import soundfile as sf

from myxtts import config
from myxtts.audio import UnusableAudio, decode
from myxtts.collect.catalog import DATABASE, Catalog
from myxtts.collect.recordings import cut_clip
from myxtts.config import LANGUAGE_NAMES, LANGUAGES, PRESETS, SAMPLE_RATE, Settings
from myxtts.data.clips import LIMITS, ClipSet, PreparedCorpus
from myxtts.data.corpus import METADATA_FILES
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare, prepared_before, read_training
from myxtts.errors import ConfigError, MyXTTSError, printable
from myxtts.files import held_by
from myxtts.observe.diagnosis import warnings_of
from myxtts.observe.metrics import (
    SAMPLES_FOLDER,
    MetricsTail,
    StageHistory,
    json_lines,
    json_object,
    read_metrics,
    stages_of,
    without_nan,
)
from myxtts.observe.report import write_report
from myxtts.run_dir import DIMS_FILE, RESET_PREFIX, RunDir
from myxtts.settings import format_setting, load, specs, value_of
from myxtts.web.limits import Gate, is_loopback
from myxtts.web.pages import LOOPBACK, Guard, file_routes, json_get, json_post, page_app
from myxtts.web.review import Review, review_app
from myxtts.web.speech import HostedModel, Models
from myxtts.weights import has_weights

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

NAMES = ("studio.js", "studio.css", "studio.json", "page.js", "style.css")
FILES = {"/": "studio.html"} | {f"/{name}": name for name in NAMES}
API = ("/v1/", "/health", "/metrics")
EMBEDDED = "embedded"  # the name of the corpus in the package
LOG, LISTENING = "studio.log", "listening.jsonl"
RECORDINGS = {
    ".wav": "audio/wav", ".flac": "audio/flac", ".opus": "audio/ogg", ".ogg": "audio/ogg", ".mp3": "audio/mpeg"
}  # fmt: skip
BUSY = ("starting", "training", "stopping")
MOST_DEPTH, MOST_POINTS, MOST_SET_ASIDE, MOST_STEPS = 2, 120, 400, 10**7
MOST_REFERENCE_S = 20  # of the voice that a run gets from its corpus
_LENGTH_STEP_S, _MOST_SHARES, _HEARD_EVALUATIONS, _LOG_BYTES, _LOG_LINES = 2, 40, 4, 8192, 16
_KNOWN_S = 3.0  # for which the names of folders are believed
_RUN_NAME = re.compile(r"[^\W_][\w -]{0,59}")
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; media-src data:; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts"
)
"""Of a run's report, which has its own policy too: both hold. In a sandbox it cannot use the studio."""

Readings = Callable[[Path], Callable[[], list[dict[str, Any]]]]  # from a run to a reading of each of its GPUs


class UnknownFolder(ConfigError):
    """There is no corpus or run of that name."""


class Folders:
    """The folders of one kind at and below some roots, by name. Any thread may call."""

    def __init__(self, roots: Sequence[Path], is_one: Callable[[Path], bool], kind: str) -> None:
        self.roots, self._is_one, self._kind = [root.resolve() for root in roots], is_one, kind
        self._known: dict[str, Path] = {}
        self._read_at = -math.inf

    def all(self) -> dict[str, Path]:
        """Every folder by name: its path below a root, written without slashes."""
        if time.monotonic() - self._read_at < _KNOWN_S:
            return self._known
        found: dict[str, Path] = {}
        for root in self.roots:
            for path in (path for path in _below(root, MOST_DEPTH) if self._is_readable_one(path)):
                name = " › ".join(path.relative_to(root).parts) or root.name
                if path not in found.values():
                    found[name if name not in found else f"{root.name} › {name}"] = path
        self._known, self._read_at = found, time.monotonic()
        return found

    def _is_readable_one(self, path: Path) -> bool:
        try:
            return self._is_one(path)
        except OSError:  # a folder that must not be read
            return False

    def refresh(self) -> None:
        """Look for folders when one is next asked for."""
        self._read_at = -math.inf

    def named(self, name: object) -> Path:
        """The folder of that name."""
        if str(name) not in self.all():
            self.refresh()
        if str(name) not in self.all():
            raise UnknownFolder(f"There is no {self._kind} {str(name)[:60]!r}.")
        return self._known[str(name)]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    with contextlib.suppress(OSError):  # a folder that must not be read
        inner = sorted(folder.iterdir()) if depth else []
        for path in inner:
            if not path.name.startswith((".", RESET_PREFIX)) and path.is_dir():
                yield from _below(path, depth - 1)


def is_corpus(folder: Path) -> bool:
    """True for a folder with metadata or a catalog, or with recordings beside texts of the same names."""
    if any((folder / name).is_file() for name in (*METADATA_FILES, DATABASE)):
        return True
    texts = [path.stem for path in folder.glob("*.txt")][:100]
    return any((folder / f"{stem}{suffix}").is_file() for stem in texts for suffix in RECORDINGS)


def is_training(folder: Path) -> bool:
    """True for the folder of a run, and of one that the studio has begun."""
    return (folder / DIMS_FILE).is_file() or (folder / LOG).is_file()


class Sounds:
    """Audio files that the page may play, by identifiers that say nothing of them."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._ids: dict[Path, str] = {}

    def add(self, folder: Path, name: object, fresh: bool = False) -> str:
        """The address of a file in a folder, a `fresh` one of its own; "" if there is none."""
        path = (folder / str(name)).resolve()
        if not path.is_relative_to(folder.resolve()) or path.suffix not in RECORDINGS or not path.is_file():
            return ""
        known = secrets.token_urlsafe(9) if fresh else self._ids.setdefault(path, secrets.token_urlsafe(9))
        self._paths[known] = path
        return f"/studio/sound/{known}"

    def path(self, known: str) -> Path:
        if (path := self._paths.get(known)) is None or not path.is_file():
            raise UnknownFolder("There is no such sound any more.")
        return path


class Processes:
    """Commands of myxtts that were started here. They run on when the server ends."""

    def __init__(self) -> None:
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._stopping: dict[Path, int] = {}  # the processes that were asked to end
        self._lock = threading.Lock()

    def start(self, folder: Path, arguments: Sequence[str], log: Path) -> None:
        """Start a command that works on a folder; what it says goes to `log`."""
        command = [sys.executable, "-m", "myxtts", *arguments]
        with self._lock, open(log, "wb") as file:
            self._started[folder] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _running(self, folder: Path) -> int | None:
        """The process that works on a folder, whoever started it."""
        process = self._started.get(folder)
        return held_by(folder) or (process.pid if process is not None and process.poll() is None else None)

    def state(self, folder: Path) -> str:
        """One of `BUSY`, or else `failed`, or `ended` if nothing is known to be wrong."""
        if (running := self._running(folder)) is not None:
            asked = self._stopping.get(folder) == running
            return "stopping" if asked else "training" if held_by(folder) is not None else "starting"
        code = self._started[folder].poll() if folder in self._started else 0
        return "failed" if code not in (0, 130, -signal.SIGINT) else "ended"

    def has_done(self, folder: Path) -> bool:
        """True, once, after a command on this folder that was started here has ended well."""
        return folder in self._started and self._started[folder].poll() == 0 and bool(self._started.pop(folder))

    def stop(self, folder: Path) -> None:
        """Ask a run to finish its step and save, once: asked again, it would end at once."""
        with self._lock:
            running = self._running(folder)
            if running is not None and self._stopping.get(folder) != running:
                self._stopping[folder] = running
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running, signal.SIGINT)


def last_lines(log: Path) -> list[str]:
    """The end of what a command said."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [printable(line) for line in text.splitlines()[-_LOG_LINES:]]


class Corpora:
    """What training would use of the corpora, and pages to review those that were collected."""

    def __init__(self, roots: Sequence[Path], processes: Processes) -> None:
        self.folders = Folders(roots, is_corpus, "corpus")
        self._processes, self._lock = processes, threading.Lock()
        self._logs = Path(tempfile.mkdtemp(prefix="myxtts-studio-"))
        self._open: dict[Path, tuple[Catalog, Review, Starlette]] = {}

    def named(self, name: object) -> Path | None:
        """The folder of a corpus; None for the embedded one."""
        return None if name == EMBEDDED else self.folders.named(name)

    def listed(self) -> list[dict[str, Any]]:
        """Every corpus by name, and whether it has a review page."""
        found = [
            {"name": name, "review": (path / DATABASE).is_file()} for name, path in self.folders.all().items()
        ]
        return [*found, {"name": EMBEDDED, "review": False}]

    def about(self, name: object) -> dict[str, Any]:
        """What training would use of a corpus, if it was prepared; else how far that is."""
        folder = self.named(name)
        key = folder or EMBEDDED_CORPUS
        state, flags = self._processes.state(key), corpus_flags(folder)
        data = load(None, flags).settings.data
        prepared = None if state in BUSY else prepared_before(data)
        if prepared is None and state == "ended" and self._processes.has_done(key):
            prepared = prepare(data)  # making the cache has changed the folder that was read
        table = table_of(prepared) if prepared is not None else None
        log = [] if table or state == "ended" else last_lines(self._log(key))
        return {"name": name, "state": state, "log": log, "table": table}

    def prepare(self, name: object) -> dict[str, Any]:
        """Begin to prepare a corpus, as training would."""
        folder = self.named(name)
        key = folder or EMBEDDED_CORPUS
        if self._processes.state(key) not in BUSY:
            self._processes.start(key, ["prepare", *as_arguments(corpus_flags(folder))], self._log(key))
        return self.about(name)

    def _log(self, folder: Path) -> Path:
        return self._logs / f"{abs(hash(folder))}.log"

    def review(self, name: str) -> Starlette:
        """The review page of a collected corpus."""
        folder = self.folders.named(name)
        with self._lock:
            if folder not in self._open:
                catalog = Catalog(folder, lock=False)
                review = Review(catalog, partial(cut_clip, folder))
                self._open[folder] = (catalog, review, review_app(review))
                review.write_soon()  # the last page may have been killed
            return self._open[folder][2]

    def close(self) -> None:
        """Write what reviews have not written yet."""
        for catalog, review, _ in self._open.values():
            review.close()
            catalog.close()
        for path in self._logs.iterdir():
            path.unlink()
        self._logs.rmdir()


def corpus_flags(folder: Path | None) -> dict[str, Any]:
    """The settings with which a corpus is prepared for training, by key."""
    flags: dict[str, Any] = {} if folder is None else {"data.train_data": f"{folder}/"}
    return flags | ({"data.tokenizer": str(config.BASE_FOLDER)} if has_weights(config.BASE_FOLDER) else {})


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    return [part for key, value in flags.items() for part in (specs()[key].flags[0], str(value))]


def table_of(prepared: PreparedCorpus) -> dict[str, Any]:
    """The table of `myxtts prepare`."""
    both, counted = (prepared.train, prepared.val), Counter(item.reason for item in prepared.set_aside)
    seconds = np.concatenate([part.num_samples for part in both]) / SAMPLE_RATE
    shares = [share._asdict() for share in prepared.shares() if share.kind != "corpus"]
    return {
        **{name: _amount(part) for name, part in zip(("train", "val"), both, strict=True)},
        "speakers": [share for share in shares if share["kind"] == "speaker"][:_MOST_SHARES],
        "num_speakers": sum(share["kind"] == "speaker" for share in shares),
        "languages": [share for share in shares if share["kind"] == "language"],
        "lengths": np.bincount((seconds // _LENGTH_STEP_S).astype(int)).tolist(),
        "reasons": [{"reason": why, "clips": n, "flag": LIMITS.get(why, "")} for why, n in counted.most_common()],
        "set_aside": [item._asdict() for item in prepared.set_aside[:MOST_SET_ASIDE]],
        "num_set_aside": len(prepared.set_aside),
        "is_unnamed": bool(prepared.unnamed_corpora),
    }


def _amount(clips: ClipSet) -> dict[str, float]:
    return {"clips": len(clips), "seconds": float(clips.num_samples.sum()) / SAMPLE_RATE}


class Trial(NamedTuple):
    """Two sounds of one text, to be compared without knowing whose they are."""

    runs: tuple[str, str]  # in the order in which they are heard
    text: str


class Runs:
    """Training: runs as they are, and the processes that train them."""

    def __init__(self, roots: Sequence[Path], corpora: Corpora, processes: Processes, readings: Readings) -> None:
        self.folders, self.sounds = Folders(roots, is_training, "run"), Sounds()
        self._corpora, self._processes, self._readings = corpora, processes, readings
        self._tails: dict[Path, MetricsTail] = {}
        self._gpus: dict[Path, Callable[[], list[dict[str, Any]]]] = {}
        self._summaries: dict[Path, tuple[object, dict[str, Any]]] = {}
        self._trials: dict[str, Trial] = {}
        self._lock = threading.Lock()

    def listed(self) -> list[dict[str, Any]]:
        """The runs, the last saved first."""
        found = [{"name": name, **self._summary(path)} for name, path in self.folders.all().items()]
        return sorted(found, key=lambda run: (run["state"] not in BUSY, -run["saved_at"]))

    def _summary(self, folder: Path) -> dict[str, Any]:
        changed = []
        with contextlib.suppress(OSError):  # a file that was just replaced
            changed += sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
        if folder not in self._summaries or self._summaries[folder][0] != changed:
            self._summaries[folder] = (changed, _summary_of(folder))
        return {**self._summaries[folder][1], "state": self._processes.state(folder)}

    def start(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a run as the form of the page asks for it."""
        name, flags = asked.get("name"), corpus_flags(self._corpora.named(asked.get("corpus")))
        if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
            raise ConfigError("Name the run: up to 60 letters, digits, spaces, - and _, a letter or digit first.")
        folder = self.folders.roots[0] / name
        if folder.exists():
            raise ConfigError(f"There is a folder {name!r} already; choose another name.")
        flags.pop("data.tokenizer", None)  # that of the weights to start from, which training knows
        flags |= {"training.checkpoint_dir": folder, **self._choices(asked)}
        more = ["--single-speaker"] if asked.get("single_speaker") is True else []
        return self._begin(name, folder, [*as_arguments(flags), *more])

    def _choices(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a form by key; raises unless each is among its choices."""
        start, preset, language = (str(asked.get(key) or "") for key in ("start", "preset", "language"))
        if preset not in ("", *PRESETS) or language not in ("", *LANGUAGES):
            raise ConfigError(
                f"Choose a preset ({', '.join(PRESETS)}) and a language of the list, or leave them out."
            )
        init_from: Any = start if start in ("", "none") else self.folders.named(start)
        spoken = 4 if asked.get("spoken") is True else None
        chosen = {"training.init_from": init_from, "training.preset": preset, "data.language": language,
                  "training.max_steps": _steps(asked), "training.spoken_sentences": spoken}  # fmt: skip
        return {key: value for key, value in chosen.items() if value}

    def resume(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Continue a run with the settings that it keeps, up to a step if one is given."""
        folder = self.folders.named(asked.get("name"))
        if not (folder / "settings.yaml").is_file():
            raise ConfigError("This run has ended before it began; start another one.")
        steps, flags = _steps(asked), ["--config", str(folder / "settings.yaml"), "--checkpoint-dir", str(folder)]
        return self._begin(asked.get("name"), folder, [*flags, *(["--max-steps", str(steps)] if steps else [])])

    def stop(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Let a run finish its step, save and end."""
        self._processes.stop(self.folders.named(asked.get("name")))
        return {"name": asked.get("name")}

    def _begin(self, name: object, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
        """Start to train, unless a run is being trained."""
        with self._lock:
            for other, path in self.folders.all().items():
                if self._processes.state(path) in BUSY:
                    raise ConfigError(f"The run {other!r} is training. Stop it first; two slow each other down.")
            folder.mkdir(parents=True, exist_ok=True)
            self._processes.start(folder, ["train", *arguments], folder / LOG)
            self.folders.refresh()
        return {"name": name}

    def live(self, name: object) -> Any:
        """The numbers of `myxtts watch`, what evaluations spoke, and the last lines of the log."""
        folder = self.folders.named(name)
        with self._lock:
            tail = self._tails.setdefault(folder, MetricsTail(folder / "metrics.jsonl"))
            stages = stages_of(tail.read())
        running = next((stage for stage in reversed(stages) if stage.steps), None)
        names = ("stage", "step", "total_steps", "epoch", "losses", "clips_per_s", "step_ms", "idle_share", "mfu",
                 "eta_s", "elapsed_s", "skipped", "memory_mb")  # fmt: skip
        last = {key: getattr(running.steps[-1], key) for key in names} if running else None
        shown = {
            "name": name, "state": self._processes.state(folder), "last": last, "log": last_lines(folder / LOG),
            "stages": [_progress(stage) for stage in stages if stage.steps],
            "warnings": [warning.text for warning in warnings_of(running.steps)] if running else [],
            "gpus": self._gpus.setdefault(folder, self._readings(folder))(),
            "samples": list(self._samples(folder, stages)),
        }  # fmt: skip
        return without_nan(shown)

    def _samples(self, folder: Path, stages: Sequence[StageHistory]) -> Iterator[dict[str, Any]]:
        """The sentences of the last evaluations, the oldest first."""
        for stage in stages:
            for step, rows in stage.spoken[-_HEARD_EVALUATIONS:]:
                for row in (row for row in rows if isinstance(row, Mapping)):
                    sounds = {
                        key: self.sounds.add(folder / SAMPLES_FOLDER, row.get(key))
                        for key in ("file", "recording")
                    }
                    about = {key: str(row.get(key) or "") for key in ("text", "language", "problem")}
                    if sounds["file"]:
                        yield {"stage": stage.name, "step": step, **about, **sounds}

    def _heard(self, folder: Path, fresh: bool = False) -> dict[str, str]:
        """The newest sound of every text that evaluations of a run have spoken."""
        found: dict[str, tuple[str, Any]] = {}
        for stage in stages_of(read_metrics(folder / "metrics.jsonl")):
            rows = [row for _, rows in stage.spoken for row in rows if isinstance(row, Mapping)]
            found |= {str(row.get("text")): (SAMPLES_FOLDER, row.get("file")) for row in rows}
        clips = json_object(folder / "evaluation" / "scores.json").get("clips")
        for clip in clips if isinstance(clips, list) else []:
            if isinstance(clip, Mapping) and clip.get("set") == "synthesised":
                found[str(clip.get("text"))] = ("evaluation", clip.get("file"))
        sounds = {text: self.sounds.add(folder / place, name, fresh) for text, (place, name) in found.items()}
        return {text: sound for text, sound in sounds.items() if sound}

    def compare(self, names: tuple[str, str]) -> Any:
        """Two runs side by side: what differs, how they scored, the same sentences, and what listeners said."""
        folders = [self.folders.named(name) for name in names]
        known = [_settings_of(folder) for folder in folders]
        shown = [[format_setting(key, value_of(each, key)) for each in known] for key in specs()]
        differ = [(key, *both) for key, both in zip(specs(), shown, strict=True) if both[0] != both[1]]
        heard = [self._heard(folder) for folder in folders]
        stages = [stages_of(read_metrics(folder / "metrics.jsonl")) for folder in folders]
        both = {
            "names": names,
            "runs": [self._summary(folder) for folder in folders],
            "scores": [_scores_of(folder) for folder in folders],
            "stages": [[_progress(stage) for stage in each if stage.steps] for each in stages],
            "settings": [row for row in differ if row[0] != "training.checkpoint_dir"],
            "samples": [
                {"text": text, "sounds": [each[text] for each in heard]} for text in heard[0] if text in heard[1]
            ],
            "listening": self._tally(names),
        }
        return without_nan(both)

    def trials(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The common sentences of two runs in random order, each pair too, with sounds that tell nothing."""
        names = (str(asked.get("a")), str(asked.get("b")))
        heard = {name: self._heard(self.folders.named(name), fresh=True) for name in names}
        texts = [text for text in heard[names[0]] if text in heard[names[1]]]
        found = []
        for text in random.sample(texts, len(texts)):
            order = (names[0], names[1]) if random.random() < 0.5 else (names[1], names[0])
            known = secrets.token_urlsafe(9)
            self._trials[known] = Trial(order, text)
            found.append({"id": known, "text": text, "sounds": [heard[name][text] for name in order]})
        return found

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what a listener preferred: the first sound (0), the second (1) or neither (null)."""
        chosen, known = asked.get("chosen"), str(asked.get("id"))
        if chosen not in (0, 1, None) or (trial := self._trials.pop(known, None)) is None:
            raise ConfigError("This comparison has been answered, or was begun before the server was.")
        preferred = "" if chosen is None else trial.runs[int(chosen)]
        line = {"runs": sorted(trial.runs), "preferred": preferred, "text": trial.text, "at": round(time.time())}
        with self._lock, open(self.folders.roots[0] / LISTENING, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return {}

    def _tally(self, names: tuple[str, str]) -> dict[str, Any]:
        """How often each of two runs was preferred, and how likely chance alone would differ as much."""
        lines = json_lines(self.folders.roots[0] / LISTENING)
        chosen = Counter(line.get("preferred") for line in lines if line.get("runs") == sorted(names))
        counts = [chosen[name] for name in names]
        trials, fewest = sum(counts), min(counts)
        p = min(1.0, 2 * sum(math.comb(trials, k) for k in range(fewest + 1)) / 2**trials)
        return {"preferred": counts, "neither": chosen[""], "p": p}

    def report(self, name: object) -> str:
        """The page about a run."""
        folder = self.folders.named(name)
        with tempfile.TemporaryDirectory(prefix="myxtts-") as place:
            try:
                return write_report(folder, Path(place) / "report.html").read_text(encoding="utf-8")
            except FileNotFoundError:
                raise ConfigError("This run has reported nothing yet.") from None


def _steps(asked: Mapping[str, Any]) -> int | None:
    steps = asked.get("steps")
    if steps is None or (type(steps) is int and 0 < steps <= MOST_STEPS):
        return steps
    raise ConfigError(f"The number of steps must be 1 to {MOST_STEPS:,}, or empty.")


def _summary_of(folder: Path) -> dict[str, Any]:
    empty = {"stages": [], "size": "", "languages": [], "corpus": "", "saved_at": 0.0, "can_speak": False}
    run = RunDir(folder)
    try:
        if not run.has_begun:
            return {**empty, "saved_at": folder.stat().st_mtime, "problem": ""}
        found = run.summary()
    except (MyXTTSError, OSError) as error:
        return {**empty, "problem": str(error)}
    about = {key: getattr(found, key) for key in ("size", "languages", "saved_at")}
    corpus = ", ".join(Path(part).name for part in found.corpus.split(", ")) or EMBEDDED
    stages = [{**stage._asdict(), "again": found.again.get(stage.stage, "")} for stage in found.stages]
    can_speak = bool(found.saved_at) and "gpt" not in run.untrained()
    about |= {"corpus": corpus, "stages": stages, "can_speak": can_speak, "problem": ""}
    return dict(without_nan(about))


def speaker_of_run(folder: Path) -> tuple[str, bytes] | None:
    """The name and a recording of the speaker with the most clips in the corpus of a run, if it is still there."""
    found, pcm = [], np.zeros(0, np.int16)
    with contextlib.suppress(MyXTTSError):
        found = [(corpus, clip) for corpus in read_training(_settings_of(folder).data) for clip in corpus.clips]
    most, _ = max(Counter(clip.speaker for _, clip in found).items(), key=lambda pair: pair[1], default=("", 0))
    for corpus, clip in found:
        if clip.speaker == most and len(pcm) < MOST_REFERENCE_S * SAMPLE_RATE:
            with contextlib.suppress(UnusableAudio):
                pcm = np.concatenate([pcm, decode(corpus.folder / clip.path, SAMPLE_RATE, MOST_REFERENCE_S)])
    file = io.BytesIO()
    sf.write(file, pcm, SAMPLE_RATE, format="WAV")
    name = re.sub(r"[^\w .'-]", " ", most).strip(" _.'-") or "speaker"
    return (name, file.getvalue()) if len(pcm) else None


def _settings_of(folder: Path) -> Settings:
    try:
        return load(folder / "settings.yaml", {}).settings
    except ConfigError:  # written by another version, or not yet
        return Settings()


def _scores_of(folder: Path) -> Any:
    summary = json_object(folder / "evaluation" / "scores.json").get("summary")
    return summary.get("synthesised") if isinstance(summary, Mapping) else None


def _progress(stage: StageHistory) -> dict[str, Any]:
    """The curves of a stage: pairs of step and value."""
    steps = stage.column("step")
    parts = np.array_split(np.arange(len(steps)), min(MOST_POINTS, len(steps)))
    curves = {name: stage.column(name) for name in ("losses.total", "clips_per_s")}
    thinned = {
        name.partition(".")[0]: [[float(steps[part[-1]]), float(np.mean(values[part]))] for part in parts]
        for name, values in curves.items()
    }
    last = stage.steps[-1]
    return {
        "name": stage.name,
        "step": last.step,
        "total": last.total_steps,
        "validations": stage.validations,
        **thinned,
    }


class Studio:
    """The page, at the same address as the API of `serve`."""

    def __init__(
        self,
        models: Models,
        load_model: Callable[[str, Path], HostedModel],
        runs: Sequence[Path],
        corpora: Sequence[Path],
        place: tuple[str, int],
        readings: Readings = lambda _: list,
    ) -> None:
        """`place` is the address that the server listens on."""
        self._models, self._load_model, processes = models, load_model, Processes()
        self.corpora = Corpora(corpora, processes)
        self.runs = Runs(runs, self.corpora, processes, readings)
        self._loading = threading.Lock()
        host, port = place
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = LOOPBACK if is_loopback(host) else f"[{host}]" if ":" in host else host
        self._guard = Guard(self._app(), secrets.token_urlsafe(24), port, shown)
        self.address = self._guard.address

    def with_api(self, gate: Gate, api_key: str) -> ASGIApp:
        """The application of page and API; the owner of the page needs no key."""
        own = (b"authorization", f"Bearer {api_key}".encode())

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or not scope["path"].startswith(API):
                return await self._guard(scope, receive, send)
            if api_key and self._guard.admits(scope):
                others = [pair for pair in scope["headers"] if pair[0] != own[0]]
                scope = {**scope, "headers": [*others, own]}
            return await gate(scope, receive, send)

        return app

    def close(self) -> None:
        """Write what is not written yet. Training goes on."""
        self.corpora.close()

    def about(self) -> dict[str, Any]:
        """What the forms of the page offer."""
        return {
            "languages": LANGUAGE_NAMES,
            "presets": list(PRESETS),
            "has_base": has_weights(config.BASE_FOLDER),
            "corpora": self.corpora.listed(),
        }

    def hear(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Load a run as a model of the API; again, if it has been trained since."""
        name = str(asked.get("name"))
        folder = self.runs.folders.named(name)
        with self._loading:
            model = self._load_model(name, folder)
            try:
                if not model.voices() and (speaker := speaker_of_run(folder)) is not None:
                    model.add_voice(*speaker)
            except BaseException:
                model.engine.close()
                raise
            self._models.add(model)
        return {"name": name}

    def _app(self) -> Starlette:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import FileResponse, HTMLResponse
        from starlette.routing import Mount, Route

        runs, corpora = self.runs, self.corpora

        def given(request: Request, name: str = "name") -> str:
            return request.query_params.get(name, "")

        def sound(request: Request) -> Response:
            path = runs.sounds.path(request.path_params["known"])
            return FileResponse(path, media_type=RECORDINGS[path.suffix], headers={"cache-control": "private"})

        def report(request: Request) -> Response:
            policy = {"content-security-policy": _REPORT_POLICY}
            return HTMLResponse(runs.report(given(request)), headers=policy)

        async def review(scope: Scope, receive: Receive, send: Send) -> None:
            app = await run_in_threadpool(corpora.review, scope["path_params"]["name"])
            await app(scope, receive, send)

        gets: dict[str, Callable[[Request], Any]] = {
            "about": lambda _: self.about(),
            "corpora": lambda _: corpora.listed(),
            "corpus": lambda request: corpora.about(given(request)),
            "runs": lambda _: runs.listed(),
            "live": lambda request: runs.live(given(request)),
            "compare": lambda request: runs.compare((given(request, "a"), given(request, "b"))),
        }
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "prepare": lambda asked: corpora.prepare(asked.get("name")),
            "train": runs.start, "resume": runs.resume, "stop": runs.stop, "hear": self.hear,
            "trials": runs.trials, "answer": runs.answer,
        }  # fmt: skip
        routes = [
            *file_routes(Path(__file__).parent, FILES),
            *(Route(f"/studio/{name}", json_get(work)) for name, work in gets.items()),
            *(Route(f"/studio/{name}", json_post(work), methods=["POST"]) for name, work in posts.items()),
            Route("/studio/sound/{known}", sound),
            Route("/studio/report", report),
            Mount("/review/{name}", app=review),
        ]
        return page_app(routes, statuses={UnknownFolder: 404})
