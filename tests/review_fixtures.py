"""A small collected corpus for the review page: tones as clips, and texts that need care."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import soundfile as sf

from myxtts.collect.catalog import Catalog, Segment, Source, Unused, write_corpus

RATE = 8000
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script> & "quotes"'
TEXTS = [
    ("It was a bright cold day in April, and the clocks were striking thirteen.", "en", "ann"),
    ("باران عصر بند آمد و کتاب‌ها را به خانه بردیم.", "fa", "مریم"),
    (HOSTILE, "en", '<b onclick="x()">bob</b>'),
    ("In 2024 مریم bought 3 books, and then some more.", "en", "ann"),
    ("Der Zug nach Köln fährt heute leider nicht.", "de", "kerstin"),
    ("می‌خواهم ساعت ۷:۳۰ به فرودگاه بروم؛ پرواز ۲۱۴ است.", "fa", "مریم"),
]


def cutter(folder: Path):  # type: ignore[no-untyped-def]
    def cut(source: Source, channel: int, start: float, end: float, gain_db: float) -> str:  # noqa: ARG001
        name = f"{source.id}-{channel}-{start:.3f}-{end:.3f}.flac"
        with sf.SoundFile(source.path) as file:
            file.seek(round(start * RATE))
            sf.write(folder / "wavs" / name, file.read(round((end - start) * RATE)), RATE)
        return name

    return cut


def recording(path: Path, num_clips: int) -> list[tuple[float, float]]:
    """Write tones with pauses between them; returns their times."""
    times, parts, at = [], [], 0.0
    for number in range(num_clips):
        seconds = 2.5 + number % 3
        moment = np.arange(round(seconds * RATE)) / RATE
        swell = 0.2 + 0.6 * np.abs(np.sin(2.3 * moment)) * np.exp(-((moment - seconds / 2) ** 2))
        parts += [np.zeros(RATE // 2), 0.5 * swell * np.sin(2 * np.pi * (180 + 40 * (number % 5)) * moment)]
        times.append((at + 0.5, at + 0.5 + seconds))
        at += 0.5 + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    sf.write(path, np.concatenate([*parts, np.zeros(RATE)]), RATE)
    return times


def collected(folder: Path, num_clips: int = 12) -> Path:
    """Make the catalog of one recording with this many clips; returns its folder."""
    source_path, chance = folder.parent / "recordings" / "<i>chapter 1 & 2.wav", random.Random(1)
    times = recording(source_path, num_clips)
    with Catalog(folder, create=True) as catalog:
        size, total = source_path.stat().st_size, times[-1][1] + 1
        source = catalog.add_source(str(source_path), size, 0, total, RATE, 1)
        cut, clips = cutter(folder), []
        for number, (start, end) in enumerate(times):
            text, language, speaker = TEXTS[number % len(TEXTS)]
            bad = number % 6 == 4
            scores = {
                "heard_error": 0.42 if bad else chance.uniform(0, 0.1),
                "mos": chance.uniform(2.6, 4.5), "snr_db": chance.uniform(15, 60), "clipping": 0.0,
                "bandwidth_hz": 4000.0 if number == 7 else 10500.0, "music": 0.02, "gain_db": -1.5,
            }  # fmt: skip
            clips.append(
                Segment(
                    source=source.id, start=start, end=end, text=text, language=language, speaker=speaker,
                    scores=scores, heard=text.replace("not", "nicht") + (" something else" if bad else ""),
                    flags=("repeated take",) if number == 5 else (), notes={"repeated take": "as at 0:34"},
                    audio=cut(source, 0, start, end, 0.0),
                )
            )  # fmt: skip
        pauses = [(end - start, start) for start, end in times]
        silent = [Unused(source.id, 0, start - 0.5, start, "silence") for _, start in pauses]
        catalog.add_segments(source.id, clips, silent, total)
        catalog.update_source(source.id, state="done")
        write_corpus(catalog)
    return folder
