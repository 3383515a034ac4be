"""Listen to speech with Silero VAD, Whisper, ECAPA-TDNN and DistillMOS: the process behind `listeners.Listener`.

A standalone script that imports nothing of MyXTTS except its neighbour tools/judge.py, so that it runs in the venv
of the judges as well. It reads requests from standard input, each a line of JSON followed by float32 samples of
16 kHz, and writes answers as lines of JSON, in any order. It ends when its input ends.

    {"id": 1, "do": "hear", "lengths": [48000], "languages": ["en"]}    then 48,000 samples
    {"id": 1, "answer": [{"text": "…", "language": "en", …}], "seconds": 1.5}
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

RATE = 16_000
FRAME_SAMPLES = 512  # of Silero's VAD: 32 ms
LONGEST_FRAMES, FRAMES_PER_SECOND = 3000, 100  # Whisper hears 30 s at a time
SPARE_FRAMES = 600  # silence after a clip that is heard quickly; with less, Whisper base makes many more mistakes
BEAM, MOST_TOKENS = 5, 224
WINDOW_SAMPLES = 3 * RATE // 2  # in which one voice is heard
BATCH = {"cpu": 4, "cuda": 16}  # clips that Whisper hears at a time

Answer = list[Any]

_log = logging.getLogger("listen")


class Speech:
    """Tells speech from everything else: Silero's VAD, whose weights come with faster-whisper."""

    name = "Silero VAD"

    def __init__(self) -> None:
        from faster_whisper.vad import get_vad_model

        self._model = get_vad_model()

    def __call__(self, waves: Sequence[Any]) -> Answer:
        """The probability of speech in each frame of 512 samples."""
        import numpy as np

        padded = (np.pad(wave, (0, -len(wave) % FRAME_SAMPLES)) for wave in waves)
        return [np.round(self._model(wave).reshape(-1), 4).tolist() for wave in padded]  # changes its argument


class Words:
    """Writes down what is said: Whisper, on the GPU if there is one."""

    def __init__(self, folder: Path, threads: int, workers: int) -> None:
        import ctranslate2
        import numpy as np
        from faster_whisper import WhisperModel
        from faster_whisper.tokenizer import Tokenizer
        from faster_whisper.transcribe import get_suppressed_tokens

        def make(device: str, kind: str) -> Any:
            options = {"device": device, "compute_type": kind, "cpu_threads": threads, "num_workers": workers}
            return WhisperModel(str(folder), **options)

        self.device, kind = ("cuda", "float16") if ctranslate2.get_cuda_device_count() else ("cpu", "int8")
        try:
            self._model = make(self.device, kind)
            self._model.encode(np.zeros((self._model.feature_extractor.mel_filters.shape[0], 2), np.float32))
        except RuntimeError as error:  # the driver is there, but not the libraries of CUDA
            if self.device == "cpu":
                raise
            _log.warning("Whisper runs on the CPU: %s", error)
            self.device, kind = "cpu", "int8"
            self._model = make(self.device, kind)
        several = self._model.model.is_multilingual
        self._language = None if several else "en"
        self._tokens = Tokenizer(self._model.hf_tokenizer, several, task="transcribe", language="en")
        self._prompt = self._model.get_prompt(self._tokens, [], without_timestamps=True)
        self._suppressed = list(get_suppressed_tokens(self._tokens, [-1]))
        self.name = f"Whisper {folder.name.removeprefix('whisper-')} on {self.device}, {kind}"

    def __call__(
        self, waves: Sequence[Any], languages: Sequence[str], among: Sequence[str], quick: bool = False
    ) -> Answer:
        """Text, language and certainty of each clip of up to 30 s; an empty language is detected among those."""
        size = BATCH[self.device]
        quick = quick and self.device == "cpu"
        batches = (slice(at, at + size) for at in range(0, len(waves), size))
        return [heard for part in batches for heard in self._hear(waves[part], languages[part], among, quick)]

    def _hear(self, waves: Sequence[Any], languages: Sequence[str], among: Sequence[str], quick: bool) -> Answer:
        import numpy as np

        longest = max(map(len, waves)) * FRAMES_PER_SECOND // RATE + SPARE_FRAMES
        frames = min(LONGEST_FRAMES, longest + longest % 2) if quick else LONGEST_FRAMES
        features = np.stack([self._features(wave, frames) for wave in waves])
        encoded = self._model.encode(features)
        found = self._detect(encoded, len(waves), among)
        spoken = [
            given or max(likely, key=likely.__getitem__) for given, likely in zip(languages, found, strict=True)
        ]
        options = {"beam_size": BEAM, "max_length": MOST_TOKENS, "suppress_tokens": self._suppressed}
        prompts = [self._prompt_in(language) for language in spoken]
        results = self._model.model.generate(encoded, prompts, return_scores=True, **options)
        return [
            {
                "text": self._tokens.decode(result.sequences_ids[0]).strip(),
                "language": language,
                "languages": likely,
                "log_probability": round(result.scores[0], 4),
            }
            for result, language, likely in zip(results, spoken, found, strict=True)
        ]

    def _features(self, wave: Any, frames: int) -> Any:
        import numpy as np

        found = self._model.feature_extractor(wave, padding=160)[:, :frames]
        return np.pad(found, ((0, 0), (0, frames - found.shape[1])))

    def _detect(self, encoded: Any, count: int, among: Sequence[str]) -> list[dict[str, float]]:
        """The probability of each language by its code."""
        if self._language is not None:
            return [{self._language: 1.0}] * count
        found = [dict(likely) for likely in self._model.model.detect_language(encoded)]
        return [{code: round(likely.get(f"<|{code}|>", 0.0), 4) for code in among} for likely in found]

    def _prompt_in(self, language: str) -> list[int]:
        if self._language is not None:
            return list(self._prompt)
        at = self._prompt.index(self._tokens.language)
        token = self._tokens.tokenizer.token_to_id(f"<|{language}|>")
        return [*self._prompt[:at], token, *self._prompt[at + 1 :]]


class Voices:
    """Tells voices apart: an embedding of each clip, and of each 1.5 s of it."""

    def __init__(self, judge: Any) -> None:
        self._ecapa, self.name = judge.Ecapa(), judge.Ecapa.name

    def __call__(self, waves: Sequence[Any]) -> Answer:
        found = []
        for wave in waves:
            last = max(0, len(wave) - WINDOW_SAMPLES)
            starts = [*range(0, last, WINDOW_SAMPLES), last]
            windows = [self._ecapa.voice(wave[start : start + WINDOW_SAMPLES]).tolist() for start in starts]
            found.append({"voice": self._ecapa.voice(wave).tolist(), "windows": windows})
        return found


class Quality:
    """Predicts the mean opinion score of listeners."""

    def __init__(self, judge: Any) -> None:
        self._distillmos, self.name = judge.DistillMos(), judge.DistillMos.name

    def __call__(self, waves: Sequence[Any]) -> Answer:
        return [self._distillmos.mos(wave) for wave in waves]


def whisper_folder(judge: Any, named: str, home: Path, download: bool) -> Path:
    """The folder of Whisper's files: one given, one in the local cache, or Whisper base, which is verified."""
    if not named:
        folder: Path = judge.whisper_folder(home)
        judge.verified(folder / "model.bin")
        return folder
    if (Path(named) / "model.bin").is_file():
        return Path(named)
    if Path(named).is_dir():
        raise SystemExit(f"{named} holds no model.bin. Expected the files of a CTranslate2 Whisper model.")
    from faster_whisper.utils import download_model

    try:
        return Path(download_model(named, local_files_only=not download))
    except ValueError as error:
        raise SystemExit(f"--whisper {named}: neither a folder nor a model. {error}") from None
    except Exception as error:
        why = "cannot be downloaded" if download else "is not in the local cache"
        raise SystemExit(
            f"Whisper {named} {why} ({type(error).__name__}). Add --download, or put config.json, model.bin, "
            f"tokenizer.json and vocabulary.* of its CTranslate2 form into a folder and give that to --whisper."
        ) from None


def load(options: argparse.Namespace) -> dict[str, Any]:
    """The models that were asked for and are installed, by what they do."""
    judge = _judge()
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "speech": ("faster_whisper", Speech),
        "hear": ("faster_whisper", lambda: _words(judge, options)),
        "voice": ("speechbrain", lambda: Voices(judge)),
        "mos": ("distillmos", lambda: Quality(judge)),
    }
    if options.checks_threads:
        with contextlib.suppress(ImportError):
            import torch

            torch.set_num_threads(options.checks_threads)
    asked = options.models.split(",")
    return {name: make() for name, (package, make) in makers.items() if name in asked and _installed(package)}


def _words(judge: Any, options: argparse.Namespace) -> Words:
    folder = whisper_folder(judge, options.whisper, options.home, options.download)
    return Words(folder, options.threads, options.workers)


def _judge() -> Any:
    """tools/judge.py, which the other venv cannot import as a part of MyXTTS."""
    place = Path(__file__).resolve().parent.parent / "tools" / "judge.py"
    spec = importlib.util.spec_from_file_location("judge", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def serve(models: Mapping[str, Any], workers: int, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until they end; each model has threads of its own."""
    import numpy as np

    guard = threading.Lock()

    def write(line: dict[str, Any]) -> None:
        with guard:
            answers.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            answers.flush()

    def answer(request: dict[str, Any], samples: Any) -> None:
        number, what, began = request.pop("id"), request.pop("do"), time.perf_counter()
        waves = np.split(samples, np.cumsum(request.pop("lengths"))[:-1])
        try:
            found = models[what](waves, **request)
            write({"id": number, "answer": found, "seconds": time.perf_counter() - began})
        except Exception as error:
            _log.exception("%s failed", what)
            write({"id": number, "error": f"{type(error).__name__}: {error}"})

    names = {what: getattr(model, "name", what) for what, model in models.items()}
    write({"models": names})
    pools = {what: ThreadPoolExecutor(workers) for what in models}
    while line := requests.readline():
        request = json.loads(line)
        samples = np.frombuffer(requests.read(4 * sum(request["lengths"])), np.float32).copy()
        pools[request["do"]].submit(answer, request, samples)
    os._exit(0)  # nobody waits for what is not finished


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--home", type=Path, required=True, help="where Whisper base is unpacked")
    add("--models", default="speech,hear,voice,mos", help="what to load")
    add("--whisper", default="", help="a folder, or the name of a model in the cache [default: Whisper base]")
    add("--download", action="store_true", help="download a model that is not in the cache")
    add("--threads", type=int, default=0, help="threads of one hearing")
    add("--workers", type=int, default=1, help="requests answered at a time")
    add("--checks-threads", type=int, default=0, help="threads of one check")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    if not options.download:
        os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the output of packages apart from the answers
    serve(load(options), options.workers, sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
