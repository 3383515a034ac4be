"""Compares the word times of subtitles with those of Whisper base, on sentences that the base model speaks.

    python benchmarks/word_times.py [--judge .judge] [--seed 3]

A sentence counts if Whisper hears as many words as were written.
Prints the median and the 90th percentile of the differences.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from myxtts import config
from myxtts.evaluation import JUDGE_SCRIPT, find_judges
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.alignment import Word
from myxtts.synthesis.markup import Segment
from myxtts.synthesis.narration import Narrator
from myxtts.synthesis.synthesizer import load_synthesizer, save_wave
from myxtts.synthesis.voices import VoiceLibrary

SENTENCES = {
    "en": (
        "The rain stopped in the evening, and we walked along the river to the old mill.",
        "Nobody had lived there for twenty years, but the door was open.",
        "She laughed, took the lamp out of my hand and went up the stairs alone.",
        "With this change the art of printing touched bottom, so far as fine printing is concerned.",
        "In the morning the captain ordered breakfast, counted his men, and sailed before the fog had lifted.",
        "If you want to learn a language, read every day, listen carefully, and do not be afraid of mistakes.",
        "There were three chairs in the kitchen; only one of them was comfortable.",
        "The museum opens at nine, closes at five, and is free for children under twelve.",
        "When the train finally arrived, most of the passengers had already given up and gone home.",
        "My grandmother kept her letters in a small wooden box, which nobody was allowed to touch.",
        "It was not the cold that worried them, but the silence of the forest around the house.",
        "He bought bread, cheese, two apples and a newspaper, then waited at the corner.",
    ),
    "fa": (
        "باران عصر بند آمد، و ما کنار رودخانه قدم زدیم.",
        "مادرم هر روز صبح زود بیدار می‌شود، چای درست می‌کند و روزنامه می‌خواند.",
        "کتابخانه‌ی شهر ما بزرگ است، اما کتاب‌های قدیمی کمی دارد.",
        "وقتی به خانه رسیدم، همه خوابیده بودند.",
        "اگر هوا خوب باشد، فردا به کوه می‌رویم و ناهار را آنجا می‌خوریم.",
    ),
}
WHISPER = """
import importlib.util, json, sys
from pathlib import Path
from faster_whisper import WhisperModel
spec = importlib.util.spec_from_file_location("judge", sys.argv[1])
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)
model = WhisperModel(str(judge.whisper_folder(Path(sys.argv[2]))), device="cpu", compute_type="int8")
for path in sys.argv[4:]:
    options = {"language": sys.argv[3], "beam_size": 5, "word_timestamps": True}
    segments, _ = model.transcribe(judge.read_wave(Path(path)), **options)
    print(json.dumps([[word.start, word.end] for segment in segments for word in segment.words]))
"""


def heard(judge: Path | None, language: str, files: list[Path]) -> list[list[list[float]]]:
    """Start and end of each word of each file, by Whisper."""
    judges = find_judges(judge)
    command = [judges.python, "-I", "-c", WHISPER, JUDGE_SCRIPT, judges.home, language, *files]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def report(language: str, ours: list[tuple[Word, ...]], theirs: list[list[list[float]]]) -> None:
    """Print the differences of the sentences that have the same number of words."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if len(pair[0]) == len(pair[1])]
    num_words = sum(len(one) for one, _ in pairs)
    print(f"{language}: {len(pairs)} of {len(ours)} sentences are compared, {num_words} words")
    for name, place in (("start", 0), ("end", 1)) if pairs else ():
        off = [abs(word[place + 1] - time[place]) for pair in pairs for word, time in zip(*pair, strict=True)]
        median, most = 1000 * np.quantile(off, [0.5, 0.9])
        print(f"  {name}: median {median:.0f} ms, 90 % within {most:.0f} ms")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--judge", type=Path, help="folder of the judges")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    synthesizer, library = load_synthesizer(config.BASE_FOLDER), VoiceLibrary(config.BASE_FOLDER)
    for language, sentences in SENTENCES.items():
        voices = [voice for voice in library.all() if language in voice.languages]
        ours, files = [], []
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate(sentences):
                voice = voices[number % len(voices)]
                narrator = Narrator(synthesizer, voice, options.seed, wants_words=True)
                (spoken,) = narrator.speak(narrator.lines([Segment(text, language)]))
                ours.append(spoken.words)
                files.append(Path(folder) / f"{number}.wav")
                save_wave(files[-1], spoken.wave, OUTPUT_SAMPLE_RATE)
            report(language, ours, heard(options.judge, language, files))


if __name__ == "__main__":
    main()
