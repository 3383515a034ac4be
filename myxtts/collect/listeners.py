"""Starts processes that listen to audio (`listen.py`) and asks them for speech, words, voices and quality.

They run in the venv of the judges if there is one, else in this interpreter with what is installed. Knows nothing
of recordings, clips or catalogs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Protocol

import numpy as np

from myxtts.audio import Wave
from myxtts.config import LANGUAGES
from myxtts.errors import INSTALL_EXTRA, ConfigError, PipelineError
from myxtts.host import usable_cores

SCRIPT = Path(__file__).with_name("listen.py")
_JUDGE = SCRIPT.parent.parent / "tools" / "judge.py"
INSTALL = (
    "To install the models that collect needs, in a venv of their own (2 GB):\n"
    f"  python3 -I {_JUDGE} --install .judge\n"
    "In a checkout of MyXTTS, make judge does this."
)
_WITHOUT_SPEAKERS = (
    f"If you name the speakers, {INSTALL_EXTRA.format('collect')} is enough: voice activity and words (200 MB)."
)
_SHOWN_LINES = 8
_THREADS = 4  # of one hearing; more give little


Heard = dict[str, Any]
"""What Whisper says of a clip: text, language, languages (their probabilities), log_probability, no_speech."""


class Listening(Protocol):
    """What the pipeline asks of models; tests pass a stand-in."""

    @property
    def models(self) -> dict[str, str]: ...
    def speech(self, wave: Wave) -> Wave: ...
    def hear(self, waves: Sequence[Wave], languages: Sequence[str], quick: bool = False) -> list[Heard]: ...
    def voices(self, waves: Sequence[Wave]) -> list[dict[str, Any]]: ...
    def mos(self, waves: Sequence[Wave]) -> list[float]: ...
    def times(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class Listener:
    """One process with models. Any thread may ask; an answer is waited for."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # Ctrl-C is for this process, which then ends the other one.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=self._errors, start_new_session=True)
        self._guard, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}
        self.times: dict[str, float] = defaultdict(float)
        """Seconds that each model worked."""
        self._ended: PipelineError | None = None
        self._ready: Future[dict[str, str]] = Future()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def models(self) -> dict[str, str]:
        """The models by what they do, as soon as they are loaded."""
        return self._ready.result()

    def ask(self, what: str, waves: Sequence[Wave], **options: Any) -> list[Any]:
        """Return a model's answer about each wave."""
        answer: Future[list[Any]] = Future()
        with self._guard:
            if self._ended is not None:
                raise self._ended
            number = next(self._numbers)
            self._waiting[number] = what, answer
            head = {"id": number, "do": what, "lengths": [len(wave) for wave in waves], **options}
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(head).encode() + b"\n")
                for wave in waves:
                    self._process.stdin.write(np.ascontiguousarray(wave, np.float32).tobytes())
                self._process.stdin.flush()
            except (OSError, ValueError):
                self._process.kill()  # the reader then fails what waits
        return answer.result()

    def close(self) -> None:
        """End the process; what still waits for an answer fails. It may be called twice."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what was not written yet cannot be
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(json.JSONDecodeError):  # half a line: the process died while it wrote
            for line in self._process.stdout:
                message = json.loads(line)
                if "models" in message:
                    self._ready.set_result(message["models"])
                    continue
                what, answer = self._waiting.pop(message["id"])
                if "error" in message:
                    answer.set_exception(PipelineError(f"A model failed: {message['error']}"))
                else:
                    self.times[what] += message["seconds"]
                    answer.set_result(message["answer"])
        self._process.kill()
        failure = self._failure()
        with self._guard:
            self._ended = failure
            for answer in (self._ready, *(answer for _, answer in self._waiting.values())):
                if not answer.done():
                    answer.set_exception(failure)

    def _failure(self) -> PipelineError:
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-_SHOWN_LINES:]
        if status == 1 and last:  # a message for users
            return PipelineError(last[-1])
        return PipelineError("\n  ".join([f"The listening process ended with status {status}.", *last]))


@dataclass
class Listeners:
    """The processes that hear words and that check clips; without ECAPA and DistillMOS there is only the first."""

    words: Listener
    checks: Listener

    @property
    def models(self) -> dict[str, str]:
        return self.words.models | self.checks.models

    def speech(self, wave: Wave) -> Wave:
        """The probability of speech in each frame of 32 ms."""
        return np.array(self.words.ask("speech", [wave])[0], np.float32)

    def hear(self, waves: Sequence[Wave], languages: Sequence[str], quick: bool = False) -> list[Heard]:
        """Text and language of each clip; an empty language is detected."""
        return self.words.ask("hear", waves, languages=list(languages), among=LANGUAGES, quick=quick)

    def voices(self, waves: Sequence[Wave]) -> list[dict[str, Any]]:
        """The voice of each clip, and the voices of its windows of 1.5 s, as embeddings."""
        return self.checks.ask("voice", waves)

    def mos(self, waves: Sequence[Wave]) -> list[float]:
        """The predicted mean opinion score of each clip."""
        return self.checks.ask("mos", waves)

    def times(self) -> dict[str, float]:
        """Seconds that each model worked."""
        return {**self.words.times, **self.checks.times}

    def close(self) -> None:
        """End the processes; what still waits for an answer fails."""
        self.words.close()
        self.checks.close()


@contextlib.contextmanager
def start_listeners(judge: Path | None, whisper: str, download: bool) -> Iterator[Listeners]:
    """Start the processes; yields them once their models are loaded."""
    command = _command(judge, whisper)
    words = [*command, "--models", "speech,hear", "--whisper", whisper, *(["--download"] * download)]
    listeners = Listeners(Listener(words), Listener([*command, "--models", "voice,mos"]))
    try:
        if "hear" not in listeners.models:
            raise ConfigError(f"{command[0]} has no faster-whisper.\n{INSTALL}\n{_WITHOUT_SPEAKERS}")
        yield listeners
    finally:
        listeners.close()


@contextlib.contextmanager
def start_recogniser() -> Iterator[Callable[[Wave, str], str]]:
    """Start Whisper alone; yields the function that transcribes a clip of 16 kHz and up to 30 s in a language."""
    command = _command(None, "")
    listener = Listener([*command, "--models", "hear"])
    try:
        if "hear" not in listener.models:
            raise ConfigError(f"{command[0]} has no faster-whisper.\n{INSTALL}")

        def transcript(wave: Wave, language: str) -> str:
            (heard,) = listener.ask("hear", [wave], languages=[language], among=LANGUAGES)
            return str(heard["text"])

        yield transcript
    finally:
        listener.close()


def _command(judge: Path | None, whisper: str) -> list[str]:
    """How the listening process is started, but for the models that it loads."""
    python, home = _interpreter(judge, whisper)
    cores = usable_cores()
    command = [str(python), "-I", str(SCRIPT), "--home", str(home), "--threads", str(min(cores, _THREADS))]
    return [*command, "--workers", str(max(1, cores // _THREADS)), "--checks-threads", "1"]


def _interpreter(judge: Path | None, whisper: str) -> tuple[Path, Path]:
    """The Python that has the models, and the folder where Whisper base is unpacked."""
    from myxtts.evaluation import find_judges  # imports PyTorch

    # Clips have many lengths: few plans and few heaps are kept for these.
    usual = {"OMP_WAIT_POLICY": "PASSIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "2"}
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    try:
        return find_judges(judge)
    except ConfigError as error:
        if judge is None and whisper and find_spec("faster_whisper"):
            return Path(sys.executable), Path.home()
        where = str(error).splitlines()[0].split(". ")[0]
        raise ConfigError(f"{where}.\n{INSTALL}\n{_WITHOUT_SPEAKERS}") from None
