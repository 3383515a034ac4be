"""Speaks segments sentence by sentence: pauses, languages and rates, the best of several attempts, subtitles.

    segments ─ Narrator.lines ─► lines ─ groups ─► Synthesizer.speak_many ─► Spoken lines ─► sound, cues

The sound of a line depends on its group, the voice and the options, not on what was spoken before. So a long
narration can be continued at any group.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from myxtts.audio import Wave
from myxtts.errors import NO_PROGRESS, Progress, progress_bar
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.alignment import Word, word_times
from myxtts.synthesis.generation import Sampling
from myxtts.synthesis.markup import Segment
from myxtts.synthesis.synthesizer import (
    BATCH_SIZE,
    NUM_ATTEMPTS,
    Report,
    SentenceReport,
    Speech,
    SpeechStream,
    SynthesisArguments,
    Synthesizer,
)
from myxtts.synthesis.text import PROBLEMS, UnspeakableText
from myxtts.synthesis.vocoding import pause
from myxtts.synthesis.voices import Voice

SENTENCE_PAUSE_S = len(pause()) / OUTPUT_SAMPLE_RATE
SUBTITLE_FORMATS = ("srt", "vtt")
_LINE_CHARACTERS, _CUE_LINES = 42, 2  # of a subtitle
_SENTENCE_ENDS = tuple(".!?…؟।۔。！？:;")

Judge = Callable[[Wave, str, str], float]
"""The share of wrong words in a wave of 24 kHz that should say a text in a language."""


class Line(NamedTuple):
    """One sentence of a narration."""

    text: str
    language: str
    rate: float
    pause_s: float  # silence after it


class SpokenLine(NamedTuple):
    """A line with its sound, without the silence after it."""

    line: Line
    wave: Wave
    report: Report
    words: tuple[Word, ...]  # empty if their times are unknown
    error_rate: float | None  # of the words, by the judge


class Cue(NamedTuple):
    """Text and when it is heard, in seconds; `words` may be empty."""

    start_s: float
    end_s: float
    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Narrator:
    """A voice and how it speaks."""

    synthesizer: Synthesizer
    voice: Voice
    seed: int
    speed: float = 1.0
    sampling: Sampling | None = None
    num_attempts: int = NUM_ATTEMPTS
    judge: Judge | None = None
    """Without it, a sentence is spoken again only if it fails the quality check. With it, also if a word is wrong,
    and the attempt with the fewest wrong words is kept."""
    wants_words: bool = False

    def lines(self, segments: Iterable[Segment]) -> list[Line]:
        """The sentences of segments; raises an error for what cannot be spoken."""
        lines: list[Line] = []
        for segment in segments:
            text, language, rate, pause_s = segment
            if text.strip():
                said, _ = self.synthesizer.prepared(text, self.voice, language, self._arguments(rate, 0))
                pauses = [SENTENCE_PAUSE_S] * (len(said.sentences) - 1) + [silence_after(segment)]
                pairs = zip(said.sentences, pauses, strict=True)
                lines += [Line(sentence.text, said.language, rate, after) for sentence, after in pairs]
            elif pause_s:
                lines.append(Line("", language, rate, pause_s))
        return lines

    def groups(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Lines that are spoken together: several on a GPU, where a batch takes hardly longer than a sentence."""
        most = 1 if self.synthesizer.device.type == "cpu" else BATCH_SIZE
        groups: list[list[Line]] = []
        for line in lines:
            if not groups or len(groups[-1]) == most or groups[-1][0].rate != line.rate:
                groups.append([])
            groups[-1].append(line)
        return groups

    def speak(self, group: Sequence[Line]) -> list[SpokenLine]:
        """The best attempt at each line of a group."""
        best: dict[int, SpokenLine] = {
            number: SpokenLine(line, np.zeros(0, np.float32), _silent(line, self), (), None)
            for number, line in enumerate(group)
            if not line.text
        }
        waiting = [number for number, line in enumerate(group) if line.text]
        for attempt in range(self.num_attempts if self.judge else 1):
            texts, languages = [group[each].text for each in waiting], [group[each].language for each in waiting]
            if not waiting:
                break
            how = self._arguments(group[0].rate, attempt)
            speeches = self.synthesizer.speak_many(texts, self.voice, languages, **how)
            for number, speech in zip(waiting, speeches, strict=True):
                found = self._judged(group[number], speech)
                if number not in best or _rank(found) < _rank(best[number]):
                    best[number] = found
            waiting = [number for number in waiting if _rank(best[number]) > (0, 0.0)]
        chosen = [best[number] for number in range(len(group))]
        return [self._with_words(each) for each in chosen] if self.wants_words else chosen

    def stream(
        self, lines: Sequence[Line], cues: list[Cue] | None = None, progress: Progress = NO_PROGRESS
    ) -> SpeechStream:
        """The sound of lines, sentence by sentence; adds to `cues` when each of them is heard."""
        if not any(line.text for line in lines):
            raise UnspeakableText("There is nothing to say: the text has only silence.")
        return SpeechStream(self._stream(lines, [] if cues is None else cues, progress))

    def _stream(self, lines: Sequence[Line], cues: list[Cue], progress: Progress) -> Generator[Wave, None, Report]:
        reports: list[Report] = []
        num_samples = 0
        with progress_bar(progress, "Speaking", len(lines)) as advance:
            for group in self.groups(lines):
                for spoken in self.speak(group):
                    cues += cues_of(spoken, num_samples / OUTPUT_SAMPLE_RATE)
                    wave = with_silence(spoken)
                    num_samples += len(wave)
                    reports += [spoken.report] * bool(spoken.line.text)
                    advance(1)
                    yield wave
        return merged(reports).require_sound()

    def _arguments(self, rate: float, attempt: int) -> SynthesisArguments:
        """How an attempt is spoken; every one has other random numbers."""
        seed = (self.seed + attempt * 1_000_003) % 2**31
        num_attempts = NUM_ATTEMPTS if self.judge else self.num_attempts
        speed = self.speed * rate
        return {"sampling": self.sampling, "speed": speed, "seed": seed, "num_attempts": num_attempts}

    def _judged(self, line: Line, speech: Speech) -> SpokenLine:
        error_rate = self.judge(speech.wave, line.text, line.language) if self.judge else None
        return SpokenLine(line, speech.wave, speech.report, (), error_rate)

    def _with_words(self, spoken: SpokenLine) -> SpokenLine:
        sentences = spoken.report.sentences
        if len(sentences) != 1 or sentences[0].text != spoken.line.text:
            return spoken
        made = (sentences[0].ids, sentences[0].codes, spoken.wave)
        about = (self.voice.latents, spoken.line.text, spoken.line.language)
        return spoken._replace(words=word_times(self.synthesizer.gpt, *about, *made))


def silence_after(segment: Segment) -> float:
    """The seconds of silence after a segment: those it asks for, or as after any sentence if it ends one."""
    if segment.pause_s is not None:
        return segment.pause_s
    return SENTENCE_PAUSE_S if segment.text.rstrip().endswith(_SENTENCE_ENDS) else 0.0


def with_silence(spoken: SpokenLine) -> Wave:
    """The sound of a line and the silence after it."""
    silence = np.zeros(round(spoken.line.pause_s * OUTPUT_SAMPLE_RATE), np.float32)
    return np.concatenate([spoken.wave, silence])


def merged(reports: Sequence[Report]) -> Report:
    """One report of all lines, about as the synthesizer would report on the whole text."""
    sentences = [sentence for report in reports for sentence in report.sentences]
    unknown = {character: said for report in reports for character, said in report.unknown_characters.items()}
    notes = dict.fromkeys(note for report in reports for note in report.other_notes)
    return replace(reports[0], sentences=tuple(sentences), unknown_characters=unknown, other_notes=tuple(notes))


def _silent(line: Line, narrator: Narrator) -> Report:
    how = (narrator.synthesizer.vocoder.name, narrator.seed, narrator.speed)
    return Report(line.language, narrator.voice.name, *how, (), {})


def _rank(spoken: SpokenLine) -> tuple[int, float]:
    """Lower is better: the worst problem, then the share of wrong words."""
    problems = [_severity(sentence) for sentence in spoken.report.sentences]
    return max(problems, default=0), spoken.error_rate or 0.0


def _severity(sentence: SentenceReport) -> int:
    return PROBLEMS.index(sentence.problem) if sentence.problem in PROBLEMS else len(PROBLEMS)


# Subtitles


def cues_of(spoken: SpokenLine, starts_s: float) -> Iterator[Cue]:
    """The cues of a line that is heard from `starts_s` on: one, or several if it is long and has word times."""
    if not spoken.line.text or not len(spoken.wave):
        return
    ends_s = starts_s + len(spoken.wave) / OUTPUT_SAMPLE_RATE
    words = [Word(text, starts_s + start, starts_s + end) for text, start, end in spoken.words]
    if not words:
        yield Cue(starts_s, ends_s, spoken.line.text)
        return
    parts: list[list[Word]] = [[]]
    for part in textwrap.wrap(" ".join(word.text for word in words), _LINE_CHARACTERS * _CUE_LINES):
        num_words = 0
        while words and num_words < len(part.split()):
            num_words += len(words[0].text.split())
            parts[-1].append(words.pop(0))
        parts.append([])
    for part_words in [part for part in parts if part]:
        text = " ".join(word.text for word in part_words)
        yield Cue(part_words[0].start_s, part_words[-1].end_s, text, tuple(part_words))


def subtitles(cues: Iterable[Cue], form: str) -> str:
    """The text of an SRT or WebVTT file. WebVTT has a time for each word that is known."""
    blocks = ["WEBVTT"] if form == "vtt" else []
    for number, cue in enumerate(cues, 1):
        mark = "." if form == "vtt" else ","
        times = f"{_clock(cue.start_s, mark)} --> {_clock(cue.end_s, mark)}"
        if form == "vtt":
            blocks.append(f"{times}\n{_timed(cue)}")
        else:
            blocks.append(f"{number}\n{times}\n{_wrapped(cue.text)}")
    return "\n\n".join(blocks) + "\n"


def _timed(cue: Cue) -> str:
    """The text of a WebVTT cue, each word but the first after its time."""
    if not cue.words:
        return _escaped(_wrapped(cue.text))
    first, *others = cue.words
    timed = [f"<{_clock(word.start_s, '.')}><c>{_escaped(word.text)}</c>" for word in others]
    return " ".join([_escaped(first.text), *timed])


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _LINE_CHARACTERS, break_long_words=False)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, mark: str) -> str:
    whole, ms = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{ms:03}"
