"""Speaks the clips of texts.py with the teacher, on one GPU: a corpus folder of 24 kHz WAV files and metadata.csv.

    python experiments/base/speech.py --texts texts.npz --teacher FOLDER --hours 150 --out DIR

Needs torch, numpy and the standard library alone.
"""

from __future__ import annotations

import argparse
import math
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from teacher import FRAME, KERNELS, SAMPLE_RATE, Spoken, Teacher, exact
from texts import HEADER, Texts
from torch import Tensor
from voices import SHIFTS
from weights import load

LABEL = "Synthetic speech (Kokoro-82M, mixed voices). Persian is spoken by a teacher that never heard Persian.\n"
BLOCK = 2048  # clips that are read before any of them is spoken
READ_ROWS = 1024  # of one batch of texts
BUCKET = 16  # frames: clips whose lengths round up to the same multiple share a batch
UNFINISHED = 64  # batches that may wait for the disk
WARM_UP = 3  # batches that are not counted in the speed: compilers and allocators start
LONGEST = 12.0  # seconds
SLOWEST = 0.13  # seconds per phoneme, above one second for the pauses at both ends


class Reading(NamedTuple):
    """Clips by descending length, what was read of them, and their frames, which are on their way to the CPU."""

    clips: list[int]
    spoken: Spoken
    frames: Tensor
    arrival: torch.cuda.Event | None


class Pending(NamedTuple):
    """A clip whose text is read and whose sound is still to be made."""

    clip: int
    frames: int
    spoken: Spoken


def resampling_filter(speed: tuple[int, int], crossings: int = 24) -> Tensor:
    """Return windowed sinc filters (outputs per step, taps) that play a signal at p/q of its speed."""
    p, q = speed
    cut = 0.97 * min(1.0, q / p)
    width = math.ceil(crossings / cut)
    at = torch.arange(-width, width + p)[None] - torch.arange(q)[:, None] * (p / q)
    at = (at.double() * cut).clamp(-crossings, crossings)
    return (cut * torch.sinc(at) * torch.cos(at * (math.pi / 2 / crossings)).square()).float()


def resample(x: Tensor, filters: Tensor, speed: tuple[int, int]) -> Tensor:
    """Return (B, N) played at p/q of its speed."""
    width = (filters.shape[1] - speed[0]) // 2
    with exact():
        y = F.conv1d(F.pad(x, (width, width + speed[0]))[:, None], filters[:, None], stride=speed[0])
    return y.transpose(1, 2).flatten(1)[:, : played_samples(x.shape[1], speed)]


def played_samples(samples: int, speed: tuple[int, int]) -> int:
    """Return the number of samples at another speed."""
    return samples * speed[1] // speed[0]


class Speaker:
    """The teacher with all voices: reads texts and speaks them, without waiting for the GPU."""

    def __init__(self, folder: Path, texts: Texts, device: torch.device, dtype: torch.dtype) -> None:
        state, known, styles = load(folder)
        if known != texts.known:
            raise SystemExit("The texts were made for another set of the teacher's voices.")
        self.texts, self.device = texts, device
        self.teacher = Teacher().eval()
        self.teacher.load_state_dict(state)
        self.teacher.convert(dtype).to(device)
        weights = torch.from_numpy(texts.voices.weights).to(device)
        self.styles = torch.einsum("vk,ktd->vtd", weights, styles.to(device).float()).half()
        self.filters = [resampling_filter(speed).to(device) for speed in SHIFTS]

    def put(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Return an array on the device, copied without waiting for what the device is doing."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def style(self, clips: list[int]) -> Tensor:
        """Return the style vectors of clips, which depend on the number of phonemes."""
        length = np.array([len(self.texts.ids(clip)) for clip in clips])
        return self.styles[self.put(self.texts.clip_voice[clips]), self.put((length - 1).clip(0, 509))].float()

    def read(self, clips: list[int]) -> Reading:
        """Start to read the texts of clips."""
        ids = {clip: self.texts.ids(clip) for clip in clips}
        clips = sorted(clips, key=lambda clip: -len(ids[clip]))
        lengths = np.array([len(ids[clip]) + 2 for clip in clips])
        padded = np.zeros((len(clips), lengths[0]), np.int64)
        for row, clip in enumerate(clips):
            padded[row, 1 : lengths[row] - 1] = ids[clip]
        voice = self.texts.clip_voice[clips]
        fraction = np.array([p / q for p, q in SHIFTS], np.float32)[self.texts.voices.shifts[voice]]
        speed = self.put(self.texts.voices.tempos[voice] / fraction)  # so that shifting leaves the tempo alone
        spoken = self.teacher.read(self.put(padded), torch.from_numpy(lengths), self.style(clips), speed)
        frames = spoken.durations.sum(1)
        if self.device.type != "cuda":
            return Reading(clips, spoken, frames, None)
        frames, arrival = frames.to("cpu", non_blocking=True), torch.cuda.Event(blocking=True)
        arrival.record()
        return Reading(clips, spoken, frames, arrival)

    def speak(self, batch: list[Pending], frames: int) -> tuple[Tensor, Tensor, list[int]]:
        """Return 16-bit samples, peak, loudness and share of clipped samples of each row, and samples per row."""
        counts = np.array([item.frames for item in batch])
        spoken = Spoken(*map(_padded, zip(*(item.spoken for item in batch), strict=True)))
        clips = [item.clip for item in batch]
        wave = self.teacher.speak(spoken, torch.from_numpy(counts), self.style(clips), frames)
        shift = self.texts.voices.shifts[self.texts.clip_voice[clips]]
        lengths = [played_samples(int(n) * FRAME, SHIFTS[s]) for n, s in zip(counts, shift, strict=True)]
        longest = max(played_samples(wave.shape[1], SHIFTS[s]) for s in {0, *shift.tolist()})
        out = F.pad(wave, (0, longest - wave.shape[1]))
        for kind in sorted({*shift.tolist()} - {0}):
            rows = self.put(np.flatnonzero(shift == kind))
            played = resample(wave[rows], self.filters[kind], SHIFTS[kind])
            out[rows] = F.pad(played, (0, longest - played.shape[1]))
        size = out.abs()
        power = out.square().sum(1) / self.put(np.array(lengths, np.float32))
        checks = torch.stack([size.amax(1), power.sqrt(), (size >= 0.999).float().mean(1)], 1)
        return (out.clamp(-1, 1) * 32767).round().short(), checks, lengths


def _padded(rows: tuple[Tensor, ...]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def fault(checks: npt.NDArray[np.float32], seconds: float, phonemes: int) -> str:
    """Return why a clip is not used; empty if it is fine."""
    peak, loudness, clipped = (float(value) for value in checks)
    if not math.isfinite(peak + loudness):
        return "not a number"
    if loudness < 2e-3:
        return "silent"
    if clipped > 1e-3:
        return "clipped"
    return "too long" if seconds > min(LONGEST, 1 + SLOWEST * phonemes) else ""


@dataclass
class Corpus:
    """Writes clips and their lines of metadata from several threads; adds to what the folder holds already."""

    out: Path
    texts: Texts
    seconds: float = 0.0
    clips: int = 0
    voices: set[int] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        (self.out / "wavs").mkdir(parents=True, exist_ok=True)
        path = self.out / "metadata.csv"
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        self.known = {line.partition("|")[0] for line in before.splitlines()}
        self._metadata = open(path, "a", encoding="utf-8")  # noqa: SIM115 (until close)
        self._metadata.write("" if before else f"{HEADER}\n")
        (self.out / "source.txt").write_text(LABEL, encoding="utf-8")
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(12)
        self._unfinished: deque[Future[None]] = deque()

    def path(self, clip: int) -> str:
        return f"wavs/{self.texts.language(clip)}_{clip:06d}.wav"

    def add(self, clips: list[int], lengths: list[int], samples: Tensor, checks: Tensor) -> None:
        """Take a batch from the device; wait only if many batches are not on disk yet."""
        event = None
        if samples.is_cuda:
            samples, checks = (tensor.to("cpu", non_blocking=True) for tensor in (samples, checks))
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._unfinished.append(self._pool.submit(self._write, clips, lengths, samples, checks, event))
        while len(self._unfinished) > UNFINISHED or (self._unfinished and self._unfinished[0].done()):
            self._unfinished.popleft().result()

    def _write(
        self, clips: list[int], lengths: list[int], samples: Tensor, checks: Tensor, event: torch.cuda.Event | None
    ) -> None:
        if event is not None:
            event.synchronize()
        pcm, found, lines, seconds = samples.numpy(), checks.numpy(), [], 0.0
        dropped: Counter[str] = Counter()
        for row, (clip, length) in enumerate(zip(clips, lengths, strict=True)):
            duration = length / SAMPLE_RATE
            if why := fault(found[row], duration, len(self.texts.ids(clip))):
                dropped[why] += 1
                continue
            language, voice = self.texts.language(clip), int(self.texts.clip_voice[clip])
            path = self.path(clip)
            data = pcm[row, :length].tobytes()
            (self.out / path).write_bytes(_wav_header(len(data)) + data)
            name = self.texts.voices.names[voice]
            lines.append(f"{path}|{name}|{language}|{self.texts.text(clip)}|{duration:.3f}|{SAMPLE_RATE}\n")
            seconds += duration
        with self._lock:
            self._metadata.writelines(lines)
            self._metadata.flush()
            self.seconds += seconds
            self.clips += len(lines)
            self.voices.update(int(self.texts.clip_voice[clip]) for clip in clips)
            self.dropped += dropped

    def close(self) -> None:
        for future in self._unfinished:
            future.result()
        self._pool.shutdown()
        self._metadata.close()


def _wav_header(data: int) -> bytes:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SAMPLE_RATE, SAMPLE_RATE * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", 36 + data, b"WAVE") + form + struct.pack("<4sI", b"data", data)


def read_ahead(speaker: Speaker, clips: list[int]) -> Iterator[list[Pending]]:
    """Yield blocks of clips whose texts are read; the next block is always queued before one is handed out."""
    waiting: deque[list[Reading]] = deque()
    for start in range(0, len(clips), BLOCK):
        block = sorted(clips[start : start + BLOCK], key=lambda clip: len(speaker.texts.ids(clip)))
        waiting.append([speaker.read(block[at : at + READ_ROWS]) for at in range(0, len(block), READ_ROWS)])
        if len(waiting) > 1:
            yield _pending(waiting.popleft(), speaker.texts)
    while waiting:
        yield _pending(waiting.popleft(), speaker.texts)


def _pending(readings: list[Reading], texts: Texts) -> list[Pending]:
    """Return every clip with a copy of its own part, so that no clip keeps a whole batch in memory."""
    found = []
    for reading in readings:
        if reading.arrival is not None:
            reading.arrival.synchronize()
        for row, clip in enumerate(reading.clips):
            end = len(texts.ids(clip)) + 2
            own = Spoken(*(value[row, :end].clone() for value in reading.spoken))
            found.append(Pending(clip, int(reading.frames[row]), own))
    return found


def batches(blocks: Iterator[list[Pending]], budget: int, enough: float) -> Iterator[tuple[list[Pending], int]]:
    """Yield batches of clips of similar length, each with the frames to pad to, until there are `enough` seconds.

    Batches of one length always have the same number of rows, so that few shapes occur.
    """
    pools: dict[int, list[Pending]] = {}
    total = 0.0
    for block in blocks:
        for item in block:
            frames = -(-item.frames // BUCKET) * BUCKET
            pool = pools.setdefault(frames, [])
            pool.append(item)
            total += item.frames * FRAME / SAMPLE_RATE
            if len(pool) >= max(2, budget // frames):
                yield sorted(pools.pop(frames), key=lambda item: -item.frames), frames
        if total >= enough:
            break
    rest = sorted((item for pool in pools.values() for item in pool), key=lambda item: -item.frames)
    while rest:
        frames = -(-rest[0].frames // BUCKET) * BUCKET
        rows = max(2, budget // frames)
        yield rest[:rows], frames
        rest = rest[rows:]


def generate(speaker: Speaker, corpus: Corpus, clips: list[int], options: argparse.Namespace) -> None:
    """Speak clips until hours or seconds are reached, and print the speed."""
    started, made, counted = time.perf_counter(), 0.0, 0.0
    steady = started
    source = batches(read_ahead(speaker, clips), options.frames, options.hours * 3600)
    for number, (batch, frames) in enumerate(source, 1):
        samples, checks, lengths = speaker.speak(batch, frames)
        corpus.add([item.clip for item in batch], lengths, samples, checks)
        made += sum(lengths) / SAMPLE_RATE
        if number == WARM_UP:
            _wait(speaker.device)
            steady, counted = time.perf_counter(), made
            print(f"warm after {steady - started:.1f} s and {number} batches", flush=True)
        if number % 16 == 0:
            print(f"{made / 3600:.1f} h queued after {time.perf_counter() - started:.0f} s", flush=True)
        if number >= WARM_UP and time.perf_counter() - steady > options.seconds:
            break
    _wait(speaker.device)
    spoken = time.perf_counter()
    corpus.close()
    ended = time.perf_counter()
    speed = (made - counted) / (spoken - steady) if counted else made / (spoken - started)
    dropped = ", ".join(f"{count} {why}" for why, count in sorted(corpus.dropped.items())) or "none"
    print(f"{corpus.seconds / 3600:.2f} hours, {corpus.clips} clips, {len(corpus.voices)} voices")
    print(f"dropped: {dropped}")
    print(f"{speed:.0f} x real time without the first {WARM_UP} batches, {made / (ended - started):.0f} x in all")
    print(f"{ended - started:.1f} s, of which {ended - spoken:.1f} s waited for the disk after the last batch")
    if speaker.device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="texts.npz of texts.py")
    parser.add_argument("--teacher", type=Path, help="folder of teacher-*.bin; that of the texts if not given")
    parser.add_argument("--out", type=Path, required=True, help="the corpus folder to write")
    parser.add_argument("--hours", type=float, default=math.inf, help="stop when so much is spoken")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, without the start")
    parser.add_argument("--languages", default="", help="such as en,fa; all if not given")
    parser.add_argument("--frames", type=int, default=49_152, help="of 25 ms in a batch")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--benchmark", action=argparse.BooleanOptionalAction, default=False, help="of cuDNN")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = options.benchmark
    torch.manual_seed(options.seed)
    if options.compile:
        KERNELS.compile()
    texts = Texts.load(options.texts)
    wanted = set(options.languages.split(",")) - {""}
    corpus = Corpus(options.out, texts)
    clips = [at for at in range(len(texts.clips)) if not wanted or texts.language(at) in wanted]
    clips = [at for at in clips if corpus.path(at) not in corpus.known]
    with torch.inference_mode():
        speaker = Speaker(options.teacher or options.texts.parent, texts, device, getattr(torch, options.dtype))
        generate(speaker, corpus, clips, options)


if __name__ == "__main__":
    main()
