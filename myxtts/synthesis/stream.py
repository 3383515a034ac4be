"""Speech in pieces while it is being written: each piece costs what is new in it, and is heard at once.

Knows writers and vocoders, not where texts and voices come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from myxtts.audio import Wave
from myxtts.synthesis.guards import REPETITION, end_goes_in_circles
from myxtts.synthesis.progress import Advance, Bars
from myxtts.synthesis.speech import Report, SentenceReport, pause, sentence_report, softened
from myxtts.synthesis.takes import Manner, Part, Take, judge, require_finite
from myxtts.synthesis.writer import Writer, Writers, Written


class SentenceStream(Protocol):
    """A vocoder at one sentence."""

    def push(self, written: Written, last: bool) -> Tensor:
        """Samples on the host that some more codes make certain."""
        ...


class SpeechStream:
    """An iterator over waves of 24 kHz; once it is exhausted, `report` says how the whole came about.

    Nothing else may be spoken with the same synthesizer before it is exhausted or closed.
    """

    def __init__(
        self,
        writers: Writers,
        parts: Sequence[tuple[str, Part]],
        manner: Manner,
        begin: Callable[[], SentenceStream],
        report: Callable[[Sequence[SentenceReport], float], Report],
        chunk_codes: int,
        bars: Bars,
    ) -> None:
        self._writers, self._manner, self._begin = writers, manner, begin
        self._make_report = report
        self._chunk_codes = max(1, chunk_codes)
        self._started_at = time.perf_counter()
        self._report: Report | None = None
        self._waves = self._shown(parts, bars)

    def __iter__(self) -> Iterator[Wave]:
        return self

    def __next__(self) -> Wave:
        return next(self._waves)

    def close(self) -> None:
        """Leave the rest unsaid."""
        self._waves.close()

    @property
    def report(self) -> Report:
        if self._report is None:
            raise RuntimeError("the report of a stream is there when all of it has been heard")
        return self._report

    def _shown(self, parts: Sequence[tuple[str, Part]], bars: Bars) -> Generator[Wave]:
        with bars.bar("Speaking") as advance:
            yield from self._speak(parts, advance)

    def _speak(self, parts: Sequence[tuple[str, Part]], advance: Advance) -> Iterator[Wave]:
        reports: list[SentenceReport] = []
        heard = False
        for text, part in parts:
            num_samples, loudest = 0, 0.0
            sentence = _Sentence(self._writers, part, self._manner, self._begin, self._chunk_codes)
            for wave in sentence:
                if heard and not num_samples:
                    yield pause()
                heard = True
                num_samples += len(wave)
                loudest = max(loudest, float(abs(wave).max()))
                yield wave
            reports.append(sentence_report(text, sentence.take, num_samples, loudest))
            advance(1)
        self._report = self._make_report(reports, time.perf_counter() - self._started_at)


class _Sentence:
    """One sentence in pieces, tried again while nothing of it was heard; `take` is there at the end."""

    def __init__(
        self,
        writers: Writers,
        part: Part,
        manner: Manner,
        begin: Callable[[], SentenceStream],
        chunk_codes: int,
    ) -> None:
        self._writers, self._part, self._manner = writers, part, manner
        self._begin, self._chunk_codes = begin, chunk_codes
        self.take: Take

    def __iter__(self) -> Iterator[Wave]:
        for attempt in self._manner.attempts:
            is_last_attempt = attempt == self._manner.attempts[-1]
            drafts = [self._manner.draft(self._part, attempt)]
            writer = self._writers.begin(drafts, self._manner.sampling_of(attempt))
            heard = False
            for wave in self._pieces(writer, attempt, is_last_attempt):
                heard = True
                yield wave
            if heard or self.take.trouble is None:
                return

    def _pieces(self, writer: Writer, attempt: int, is_last_attempt: bool) -> Iterator[Wave]:
        vocoder = self._begin()
        codes: list[int] = []
        heard = ended = False
        while not ended:
            ended = writer.advance(self._chunk_codes)
            more = writer.written(0, len(codes))
            codes += more.codes.tolist()
            if not ended and end_goes_in_circles(codes, len(more.codes)):
                ended = True
                self.take = Take(writer.written(0), REPETITION, attempt + 1)
            elif ended:
                self.take = judge(writer.written(0), self._part.bounds, attempt)
            else:
                require_finite(more)
            if ended and self.take.trouble and not heard and not is_last_attempt:
                return
            wave = vocoder.push(more, last=ended).numpy()
            if len(wave):
                yield softened(wave, starts=not heard, ends=ended)
                heard = True
