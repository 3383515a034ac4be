"""`myxtts collect` from recordings to a corpus, with stand-in models that recognise tones instead of speech."""

from __future__ import annotations

import errno
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from collect_fixtures import RATE, StandIn, recording, run, sentences, silence, spoken, voice

from myxtts import cli
from myxtts.audio import Wave
from myxtts.collect import edits
from myxtts.collect.catalog import Catalog, Segment, used
from myxtts.collect.recordings import cut_clip
from myxtts.data.corpus import read_corpus
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.terminal import show_collected

ROOT = Path(__file__).parent.parent


def said_in(out: Path) -> str:
    """The texts in use, in the order of the recording."""
    rows = [line.split("|") for line in (out / "metadata.csv").read_text(encoding="utf-8").splitlines()[1:]]
    return " ".join(row[1] for row in rows)


def joined(said: list[list[str]]) -> str:
    return " ".join(word for words in said for word in words)


def clips(out: Path) -> list[Segment]:
    with Catalog(out, lock=False) as catalog:
        return catalog.segments()


def unused(out: Path) -> dict[str, float]:
    """Seconds in no clip by reason."""
    found: dict[str, float] = defaultdict(float)
    with Catalog(out, lock=False) as catalog:
        for span in catalog.unused():
            found[span.reason] += span.end - span.start
    return found


def accounted(out: Path) -> None:
    """Every second of every recording is in exactly one clip or one span with a reason."""
    lines = (out / "metadata.csv").read_text(encoding="utf-8").splitlines()
    rejected = [line.split("|") for line in (out / "rejected.csv").read_text(encoding="utf-8").splitlines()[1:]]
    spans = [(row[4], row[5], float(row[6]), float(row[7])) for row in (line.split("|") for line in lines[1:])]
    spans += [(row[0], row[1], float(row[2]), float(row[3])) for row in rejected]
    by_channel = defaultdict(list)
    for path, channel, start, end in spans:
        by_channel[path, channel].append((start, end))
    with Catalog(out, lock=False) as catalog:
        seconds = {source.path: source.seconds for source in catalog.sources()}
    for (path, _), held in by_channel.items():
        at = 0.0
        for start, end in sorted(held):
            assert start == pytest.approx(at, abs=0.002)
            at = end
        assert at == pytest.approx(seconds[path], abs=0.002)
    assert not [row for row in rejected if row[4] in ("outside the cuts", "not processed yet")]


def test_a_recording_becomes_a_corpus_that_prepare_reads_with_every_word_whole(tmp_path: Path, capsys) -> None:
    said = sentences(30)
    outcome = run(tmp_path / "out", recording(tmp_path / "talk.wav", said))
    assert said_in(tmp_path / "out") == joined(said), "no word is cut, lost or twice"
    assert {"decoding", "texts", "clips", "voice activity", "words"} == outcome.times.keys()
    show_collected(outcome)
    assert re.search(r"time went into words \d\d %, voice activity \d\d %", capsys.readouterr().out)
    corpus = read_corpus(tmp_path / "out")
    assert len(corpus.clips) == outcome.table.used.segments and not corpus.set_aside
    assert all(2 <= clip.seconds <= 12 for clip in clips(tmp_path / "out"))
    found = clips(tmp_path / "out")[0]
    audio = sf.info(tmp_path / "out" / "wavs" / found.audio)
    assert (audio.format, audio.channels, audio.samplerate) == ("FLAC", 1, RATE)
    assert audio.duration == pytest.approx(found.seconds, abs=0.001)
    accounted(tmp_path / "out")


def test_a_second_call_adds_and_a_call_without_recordings_decides_again(tmp_path: Path) -> None:
    out, models = tmp_path / "out", StandIn()
    first = recording(tmp_path / "a.wav", sentences(6))
    run(out, first)
    run(out, first, recording(tmp_path / "b.wav", sentences(6, seed=1), speaker=1), models=models)
    assert models.questions == 5, "only the new recording is heard: speech, words twice, voices, quality"
    assert len({clip.speaker for clip in clips(out)}) == 2
    assert joined(sentences(6)) in said_in(out) and joined(sentences(6, seed=1)) in said_in(out)
    outcome = run(out, filters={"min_mos": 4.5})
    assert outcome.table.used.segments == 0 and outcome.table.set_aside[0].reason == "low quality"
    assert said_in(out) == ""
    assert run(out, filters={"min_mos": None}).table.used.segments == len(clips(out))


@pytest.mark.parametrize("kills", [4, pytest.param(48, marks=pytest.mark.soak)])
def test_after_kill_9_the_next_call_continues_to_the_same_corpus(tmp_path: Path, kills: int) -> None:
    paths = [recording(tmp_path / f"{name}.wav", sentences(24, seed), seed) for seed, name in enumerate("ab")]
    run(tmp_path / "whole", *paths)
    chance = random.Random(1)
    script = ROOT / "tests" / "collect_fixtures.py"
    for number in range(kills):
        question = 2 + 2 * number if kills < 10 else 1 + number % 11
        at = f"{chance.uniform(0, 3):.3f}" if number % 2 and kills > 10 else str(question)
        command = [sys.executable, str(script), str(tmp_path / "killed"), at, *map(str, paths)]
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
        ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        assert ended.returncode in (-signal.SIGKILL, 0), "0 once all is heard: nothing is asked any more"
    run(tmp_path / "killed", *paths)
    for name in ("metadata.csv", "rejected.csv"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
    accounted(tmp_path / "killed")
    files = {path.name for path in (tmp_path / "killed" / "wavs").iterdir() if not path.name.startswith(".")}
    assert files == {clip.audio for clip in clips(tmp_path / "killed")}


def test_a_clip_that_is_heard_otherwise_alone_is_set_aside(tmp_path: Path) -> None:
    said, models = sentences(3), StandIn()
    right = " ".join(said[1])
    models.mistakes = {(right, quick): "our small cold hills over and over again" for quick in (True, False)}
    run(tmp_path / "out", recording(tmp_path / "a.wav", said), models=models)
    accounted(tmp_path / "out")
    assert said_in(tmp_path / "out") == joined([said[0], said[2]])
    assert "|heard differently|" in (tmp_path / "out" / "rejected.csv").read_text()


def test_a_piece_that_seems_to_be_in_another_language_is_heard_in_the_usual_one_too(tmp_path: Path) -> None:
    class Polyglot(StandIn):
        """Takes one sentence for German; its English words have a certainty of their own."""

        def __init__(self, odd: str, certainty: float) -> None:
            super().__init__()
            self.odd, self.certainty = odd, certainty

        def hear(self, waves, languages, quick=False):
            found = super().hear(waves, languages, quick)
            for heard, asked in zip(found, languages, strict=True):
                if heard["text"] == self.odd:
                    german = asked in ("", "de")
                    heard |= {"language": "de" if german else "en", "languages": {"en": 0.001, "de": 0.99}}
                    heard["log_probability"] = -1.0 if german else self.certainty
            return found

    said = sentences(5)
    odd, path = " ".join(said[2]), recording(tmp_path / "a.wav", said)
    for certainty, language in ((-0.2, "en"), (-2.0, "de")):
        run(tmp_path / language, path, models=Polyglot(odd, certainty))
        assert [clip.language for clip in clips(tmp_path / language) if clip.text == odd] == [language]


def test_a_quick_mistake_is_heard_again_with_care(tmp_path: Path) -> None:
    said, models = sentences(3), StandIn()
    models.mistakes = {(" ".join(said[1]), True): "nothing of that"}
    run(tmp_path / "out", recording(tmp_path / "a.wav", said), models=models)
    assert said_in(tmp_path / "out") == joined(said)


def test_broken_files_get_reasons_and_do_not_stop_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    said = sentences(20)
    whole = recording(folder / "good.wav", said).read_bytes()
    (folder / "empty.mp3").touch()
    (folder / "text.wav").write_text("this is no audio" * 20)
    (folder / "text.flac").write_text("this is no audio" * 500)
    sf.write(folder / "nothing.wav", np.zeros(0), RATE)
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    flac = recording(folder / "cut.flac", said).read_bytes()
    (folder / "cut.flac").write_bytes(flac[: len(flac) // 2])
    (folder / "stub.flac").write_bytes(flac[:2000])
    sf.write(folder / "nan.wav", np.full(RATE, np.nan, np.float32), RATE, subtype="FLOAT")
    sf.write(folder / "silence.wav", silence(70), RATE)
    sf.write(folder / "noise.wav", silence(5, level=0.005), RATE)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    outcome = run(tmp_path / "out", folder)
    reasons = {Path(source.path).name: (source.state, source.reason) for source in outcome.sources}
    assert reasons["empty.mp3"] == ("failed", "empty file")
    assert reasons["text.wav"] == reasons["text.flac"] == ("failed", "not audio")
    assert reasons["nothing.wav"] == ("failed", "no samples")
    assert reasons["nan.wav"] == ("failed", "truncated or damaged")
    assert reasons["cut.wav"] == reasons["cut.flac"] == ("done", "truncated or damaged")
    assert reasons["stub.flac"][1] == "truncated or damaged"
    seconds = {Path(source.path).name: source.seconds for source in outcome.sources}
    assert seconds["cut.wav"] == pytest.approx(seconds["good.wav"], abs=0.01), "with what is missing"
    used_of = [Path(clip.audio).name.split("-")[0] for clip in clips(tmp_path / "out")]
    assert min(used_of.count("cut"), used_of.count("good")) > 5, "what is there is used"
    assert reasons["good.wav"] == reasons["silence.wav"] == ("done", "")
    assert unused(tmp_path / "out").keys() >= {"silence", "noise"}
    assert joined(said) in said_in(tmp_path / "out")
    rejected = (tmp_path / "out" / "rejected.csv").read_text()
    assert all(name in rejected for name in ("empty.mp3", "text.wav", "nan.wav", "noise.wav", "silence.wav"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "recordings are never changed"


def test_two_speakers_in_two_channels_are_kept_apart(tmp_path: Path) -> None:
    left, right, parts = sentences(6), sentences(6, seed=1), []
    for number, words in enumerate(words for pair in zip(left, right, strict=True) for words in pair):
        voice = np.concatenate([spoken(words, number % 2), silence(1.2)])
        quiet = silence(len(voice) / RATE)[: len(voice)] + 0.02 * voice  # the other side is heard faintly
        parts.append(np.stack([voice, quiet] if number % 2 == 0 else [quiet, voice], 1))
    sf.write(tmp_path / "call.wav", np.concatenate(parts), RATE)
    outcome = run(tmp_path / "out", tmp_path / "call.wav", speakers="file")
    assert outcome.sources[0].channels == 2 and set(outcome.speakers) == {"call-left", "call-right"}
    texts = {
        channel: [clip.text for clip in clips(tmp_path / "out") if clip.channel == channel] for channel in (0, 1)
    }
    assert " ".join(texts[0]) == joined(left) and " ".join(texts[1]) == joined(right)
    accounted(tmp_path / "out")


def test_a_script_gives_its_spelling_and_one_of_another_text_is_refused(tmp_path: Path) -> None:
    said = sentences(8)
    path = recording(tmp_path / "a.wav", said)
    written = ". ".join(" ".join(words).capitalize() for words in said) + "."
    path.with_suffix(".txt").write_text(f"Chapter one!\n\n{written}")
    outcome = run(tmp_path / "out", path)
    assert said_in(tmp_path / "out") == written
    assert {clip.origin for clip in clips(tmp_path / "out")} == {"script"}
    assert any("has the words of" in note for note in outcome.notes)
    path.with_suffix(".txt").unlink()
    path.with_suffix(".srt").write_text("1\n00:00:01,000 --> 00:00:05,000\nDer Regen hörte am Abend auf.\n" * 9)
    outcome = run(tmp_path / "other", path)
    assert said_in(tmp_path / "other") == joined(said)
    assert any("is not used" in note and "another text or language" in note for note in outcome.notes)


def test_a_script_is_used_after_a_stop_between_hearing_and_finishing(tmp_path: Path, monkeypatch) -> None:
    said = sentences(6)
    path = recording(tmp_path / "a.wav", said)
    written = ". ".join(" ".join(words).capitalize() for words in said) + "."
    path.with_suffix(".txt").write_text(written)
    monkeypatch.setattr("myxtts.collect.collect.finish", _stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", path)
    monkeypatch.undo()
    models = StandIn()
    run(tmp_path / "out", path, models=models)
    assert said_in(tmp_path / "out") == written and models.questions == 0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_of_a_repeated_sentence_the_last_take_is_kept(tmp_path: Path) -> None:
    said = sentences(5)
    run(tmp_path / "out", recording(tmp_path / "a.wav", [said[0], said[1], said[1], said[2]], seed=3))
    found = clips(tmp_path / "out")
    repeated = [clip for clip in found if "repeated take" in clip.flags]
    assert [clip.text for clip in repeated] == [" ".join(said[1])]
    last = [clip for clip in found if clip.text == " ".join(said[1]) and not clip.flags]
    assert len(last) == 1 and last[0].start > repeated[0].start


def test_speakers_are_told_apart_counted_or_named(tmp_path: Path) -> None:
    paths = [recording(tmp_path / f"{name}.wav", sentences(4, n), n, n) for n, name in enumerate(("ann", "ben"))]
    assert set(run(tmp_path / "auto", *paths).speakers) == {"speaker1", "speaker2"}
    assert set(run(tmp_path / "auto", speakers="one").speakers) == {"speaker1"}, "decided again"
    assert set(run(tmp_path / "auto", speakers="2").speakers) == {"speaker1", "speaker2"}
    assert set(run(tmp_path / "file", *paths, speakers="file").speakers) == {"ann", "ben"}
    assert set(run(tmp_path / "named", *paths, speaker="Ann").speakers) == {"Ann"}
    with pytest.raises(ConfigError, match="cannot be told apart without ECAPA"):
        run(tmp_path / "none", *paths, models=StandIn(without=("voice",)))
    outcome = run(tmp_path / "none", *paths, speakers="one", models=StandIn(without=("voice", "mos")))
    assert set(outcome.speakers) == {"speaker1"} and any("DistillMOS" in note for note in outcome.notes)


def test_a_person_s_edits_survive_another_call(tmp_path: Path) -> None:
    out, path = tmp_path / "out", recording(tmp_path / "a.wav", sentences(4))
    run(out, path)
    first, second = clips(out)[:2]
    with Catalog(out, lock=False) as catalog:
        edits.edit(catalog, "set_text", {"id": first.id, "value": "Mended by hand."}, partial(cut_clip, out))
        edits.edit(catalog, "set_speaker", {"id": second.id, "value": "Ann"}, partial(cut_clip, out))
    run(out, recording(tmp_path / "b.wav", sentences(4, 1), 1), speakers="auto")
    assert clips(out)[0].text == "Mended by hand." and clips(out)[1].speaker == "Ann"


def test_a_failure_of_the_models_ends_the_call_and_keeps_what_is_done(tmp_path: Path) -> None:
    class Failing(StandIn):
        def hear(self, *args, **options):
            if self.questions > 5:
                raise PipelineError("A model failed: out of memory")
            return super().hear(*args, **options)

    path = recording(tmp_path / "a.wav", sentences(30))
    with pytest.raises(PipelineError, match="out of memory"):
        run(tmp_path / "out", path, models=Failing())
    assert 0 < len(clips(tmp_path / "out")) < 30
    run(tmp_path / "out", path)
    assert said_in(tmp_path / "out") == joined(sentences(30))


def test_other_people_s_corpora_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.wav", sentences(2))
    (tmp_path / "corpus" / "wavs").mkdir(parents=True)
    (tmp_path / "corpus" / "metadata.csv").write_text("a|text\n")
    with pytest.raises(DatasetError, match="was not made by myxtts collect"):
        run(tmp_path / "corpus", path)
    assert (tmp_path / "corpus" / "metadata.csv").read_text() == "a|text\n"
    with pytest.raises(ConfigError, match="no such file or folder"):
        run(tmp_path / "out", tmp_path / "absent.wav")
    with pytest.raises(DatasetError, match="holds no collected corpus"):
        run(tmp_path / "out", filters={"min_mos": 3.0})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hours", "said", "most_mib"), [(3, 1, 120), pytest.param(10, 600, 400, marks=pytest.mark.soak)]
)
def test_memory_does_not_grow_with_the_length_of_a_recording(
    tmp_path: Path, hours: int, said: int, most_mib: int
) -> None:
    """Three hours with little speech, and ten hours of nothing else: 60 times the same ten minutes."""
    parts = [part for words in sentences(said) for part in (spoken(words, rate=8000), silence(1, 8000))]
    with sf.SoundFile(tmp_path / "long.wav", "w", 8000, 1, subtype="PCM_16") as file:
        for _ in range(6 * hours):
            file.write(np.resize(np.concatenate([*parts, silence(600, 8000)]), 600 * 8000))
    code = (
        "import resource, sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path; from collect_fixtures import run\n"
        "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = usage(); run(Path(sys.argv[1]), Path(sys.argv[2])); print(usage() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "long.wav")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(result.stdout) < most_mib
    assert sum(used(clip, _filters(tmp_path / "out")) for clip in clips(tmp_path / "out")) > 0


def _filters(out: Path):
    with Catalog(out, lock=False) as catalog:
        return catalog.filters


def test_the_command_explains_itself_and_refuses_nonsense(tmp_path: Path, capsys, monkeypatch) -> None:
    assert cli.main(["collect", str(tmp_path)]) == 2
    assert "--out DIR" in capsys.readouterr().err
    monkeypatch.setattr("myxtts.evaluation.find_judges", _no_judges)
    monkeypatch.setattr("myxtts.collect.listeners.find_spec", lambda _: None)
    path = recording(tmp_path / "a.wav", sentences(2))
    assert cli.main(["collect", str(path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "make judge" in message and "pip install -e '.[collect]'" in message
    with pytest.raises(SystemExit):
        cli.main(["collect", str(path), "--out", str(tmp_path / "out"), "--speakers", "many"])
    assert "neither a number of speakers" in capsys.readouterr().err
    run(tmp_path / "out", path)
    assert cli.main(["collect", "--out", str(tmp_path / "out"), "--min-mos", "4.5"]) == 0
    table = capsys.readouterr().out
    assert "low quality (4.5)" in table and "No clip is in use" in table and "make train" not in table
    assert cli.main(["collect", "--out", str(tmp_path / "out"), "--min-mos", "off"]) == 0
    assert f"make train DATA={tmp_path / 'out'}" in capsys.readouterr().out


def _no_judges(_: object) -> None:
    raise ConfigError("No judges of speech in .judge. To install them")


class Interrupted(StandIn):
    """Fails at a question, as a model or the user may."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._fails_at = fails_at

    def _count(self) -> None:
        super()._count()
        if self.questions == self._fails_at:
            raise KeyboardInterrupt


def test_a_stop_between_two_recordings_costs_neither_its_script(tmp_path: Path) -> None:
    paths = [recording(tmp_path / f"{name}.wav", sentences(6, seed), seed) for seed, name in enumerate("ab")]
    for path, seed in zip(paths, (0, 1), strict=True):
        path.with_suffix(".txt").write_text(joined(sentences(6, seed)).capitalize() + ".")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", *paths, models=Interrupted(8))
    run(tmp_path / "out", *paths)
    assert {clip.origin for clip in clips(tmp_path / "out")} == {"script"}
    assert {clip.source for clip in clips(tmp_path / "out")} == {1, 2}


def test_cuts_beyond_what_is_heard_so_far_cannot_be_moved_there(tmp_path: Path) -> None:
    class Slow(StandIn):
        """Fails at the second stretch, once the first is recorded."""

        def mos(self, waves: Sequence[Wave]) -> list[float]:
            for _ in range(100):
                if (out / "collect.db").exists() and clips(out):
                    raise KeyboardInterrupt
                if not self.mistakes:
                    self.mistakes = {("", False): ""}
                    break
                time.sleep(0.05)
            return super().mos(waves)

    path, out = recording(tmp_path / "a.wav", sentences(40)), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(out, path, models=Slow())
    last = clips(out)[-1]
    with Catalog(out, lock=False) as catalog, pytest.raises(ConfigError, match="still being collected"):
        times = {"id": last.id, "start": last.start, "end": last.end + 5}
        edits.edit(catalog, "move", times, partial(cut_clip, out))
    run(out, path)
    assert said_in(out) == joined(sentences(40))


def test_a_script_that_cannot_be_read_is_refused_before_anything_is_heard(tmp_path: Path) -> None:
    path, models = recording(tmp_path / "a.wav", sentences(3)), StandIn()
    path.with_suffix(".txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        run(tmp_path / "out", path, models=models)
    assert models.questions == 0


def test_a_script_and_a_name_that_come_later_are_used_and_a_persons_text_stays(tmp_path: Path) -> None:
    path, out, models = recording(tmp_path / "a.wav", sentences(6)), tmp_path / "out", StandIn()
    run(out, path)
    mended = clips(out)[0]
    with Catalog(out, lock=False) as catalog:
        edits.edit(catalog, "set_text", {"id": mended.id, "value": "By hand."}, partial(cut_clip, out))
    script = tmp_path / "book.txt"
    script.write_text(joined(sentences(6)).upper())
    outcome = run(out, path, script=script, speaker="ann", language="en", models=models)
    assert models.questions == 0 and "--language changes them only in a new --out" in " ".join(outcome.notes)
    first, *rest = clips(out)
    assert (first.text, first.origin) == ("By hand.", "person") and "script_error" not in first.scores
    assert all(clip.text.isupper() and clip.speaker == "ann" for clip in rest)


def test_files_that_are_moved_gone_broken_or_clips_are_not_heard_again(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    path = recording(folder / "a.wav", sentences(4))
    sf.write(folder / "nan.wav", np.full(RATE * 5, np.nan, np.float32), RATE, subtype="FLOAT")
    (folder / "gone.wav").symlink_to(tmp_path / "nowhere.wav")
    run(folder, folder)
    before, models = clips(folder), StandIn()
    (folder / "later").mkdir()
    path.rename(folder / "later" / "a.wav")
    outcome = run(folder, folder, models=models)
    assert models.questions == 0 and clips(folder) == before
    assert {Path(source.path).name: source.reason for source in outcome.sources if source.state == "failed"} == {
        "nan.wav": "truncated or damaged",
        "gone.wav": "missing file",
    }
    with Catalog(folder, lock=False) as catalog:
        assert {Path(source.path).parent.name for source in catalog.sources()} == {"talks", "later"}


def test_a_clip_with_a_second_voice_is_set_aside(tmp_path: Path) -> None:
    class TwoVoices(StandIn):
        def voices(self, waves: Sequence[Wave]) -> list[dict[str, Any]]:
            found = super().voices(waves)
            found[1]["windows"] = [found[1]["voice"], voice(1.0, -0.1)]
            return found

    said = sentences(4)
    run(tmp_path / "out", recording(tmp_path / "a.wav", said), models=TwoVoices())
    assert "|several speakers|" in (tmp_path / "out" / "rejected.csv").read_text()
    assert said_in(tmp_path / "out") != joined(said)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path, __: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DatasetError, match=r"No room for .*flac: No space left"):
        run(tmp_path / "out", recording(tmp_path / "a.wav", sentences(3)))
