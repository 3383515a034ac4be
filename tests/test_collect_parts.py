"""The parts of `myxtts collect` that need no pipeline: cuts, texts, voices, measurements, files, processes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from collect_fixtures import RATE, recording, sentences, silence, spoken

from myxtts.audio import UnusableAudio
from myxtts.collect import listen, quality, speakers
from myxtts.collect.catalog import Source
from myxtts.collect.cutting import FRAME_S, LEVELS_PER_FRAME, NO_PAUSE, NO_SPEECH, PIECE, TOO_SHORT, plan, windows
from myxtts.collect.listeners import Listener
from myxtts.collect.recordings import Recording, cut_clip, find_recordings, has_speaker_per_channel, script_of
from myxtts.collect.script import (
    Script,
    divide,
    edit_distance,
    error_rate,
    is_foreign,
    is_repeated,
    is_said_twice,
    read_script,
)
from myxtts.errors import ConfigError, PipelineError

SPEECH, QUIET, MUSIC, FAINT = (0.9, -20.0), (0.02, -70.0), (0.05, -25.0), (0.05, -22.0)


def heard(*parts: tuple[float, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and levels of parts that each last some seconds."""
    counts = [round(seconds / FRAME_S) for seconds, _ in parts]
    values = [np.repeat([kind[which] for _, kind in parts], counts).astype(np.float32) for which in (0, 1)]
    return values[0], np.repeat(values[1], LEVELS_PER_FRAME)


whole = partial(plan, is_start=True, is_end=True)


def kinds(spans) -> list[str]:
    return [span.kind for span in spans]


def test_cuts_are_made_in_the_middle_of_silence_and_cover_everything() -> None:
    spans = whole(
        *heard((1, QUIET), (5, SPEECH), (0.4, QUIET), (8, SPEECH), (3, QUIET), (4, SPEECH), (0.2, QUIET))
    )
    assert kinds(spans) == [NO_SPEECH, PIECE, PIECE, NO_SPEECH, PIECE]
    assert spans[0].start == 0 and all(one.end == other.start for one, other in pairwise(spans))
    assert spans[1].end == pytest.approx(6.2, abs=0.04), "the middle of the pause"
    assert spans[2].end == pytest.approx(14.4 + 0.35, abs=0.04), "of a long pause 0.35 s are kept"
    assert all(2 <= span.seconds <= 12 for span in spans if span.kind == PIECE)


def test_speech_is_never_cut_where_there_is_no_silence() -> None:
    assert kinds(whole(*heard((20, SPEECH), (1.5, QUIET), (3, SPEECH)))) == [NO_PAUSE, NO_SPEECH, PIECE]
    closure = whole(*heard((3, SPEECH), (0.15, QUIET), (3, SPEECH)))
    assert kinds(closure) == [PIECE], "the closure of a stop is no pause"
    loud = whole(*heard((7, SPEECH), (0.4, FAINT), (7, SPEECH), (1, QUIET)))
    assert kinds(loud) == [NO_PAUSE, NO_SPEECH], "a pause for the VAD alone is none"
    quiet = whole(*heard((7, SPEECH), (0.4, (0.9, -70.0)), (7, SPEECH), (1, QUIET)))
    assert kinds(quiet) == [NO_PAUSE, NO_SPEECH], "nor is one for the level alone"


def test_short_speech_is_joined_or_set_aside_and_music_is_in_no_piece() -> None:
    assert kinds(whole(*heard((1, SPEECH), (2, QUIET), (4, SPEECH)))) == [TOO_SHORT, NO_SPEECH, PIECE]
    assert kinds(whole(*heard((1, SPEECH), (0.5, QUIET), (4, SPEECH)))) == [PIECE]
    spans = whole(*heard((3, SPEECH), (0.5, QUIET), (6, MUSIC), (0.5, QUIET), (4, SPEECH)))
    assert kinds(spans) == [PIECE, NO_SPEECH, PIECE] and spans[1].seconds > 6
    assert kinds(whole(*heard((5, QUIET)))) == kinds(whole(*heard((5, MUSIC)))) == [NO_SPEECH]
    assert whole(*heard()) == []


def test_a_plan_stops_where_later_audio_could_change_it() -> None:
    parts = heard((3, SPEECH), (2, QUIET), (3, SPEECH), (0.4, QUIET), (2, SPEECH))
    spans = plan(*parts, is_start=True, is_end=False)
    assert kinds(spans) == [PIECE, NO_SPEECH] and spans[-1].end == pytest.approx(4.75, abs=0.04)
    endless = plan(*heard((100, SPEECH)), is_start=True, is_end=False)
    assert kinds(endless) == [NO_PAUSE], "memory is bounded"
    rest = plan(*heard((5, SPEECH), (2, QUIET), (3, SPEECH)), is_start=False, is_end=True)
    assert kinds(rest) == [NO_PAUSE, NO_SPEECH, PIECE], "what continues a refused part is refused"


def test_neighbours_are_heard_together_up_to_half_a_minute() -> None:
    spans = whole(*heard(*[(7, SPEECH), (1.2, QUIET)] * 8))
    groups = windows([span for span in spans if span.kind == PIECE])
    assert [len(group) for group in groups] == [3, 3, 2]
    assert all(group[-1].end - group[0].start <= 30 for group in groups)


def test_a_transcript_is_divided_by_words_and_compared() -> None:
    text = "Hello there, my friend. How are you today? I am fine."
    parts = divide(text, ["hello there my frend", "how are you to day", "I'm fine"])
    assert parts == ["Hello there, my friend.", "How are you today?", "I am fine."]
    assert divide("one two", ["", "one", "two"]) == ["", "one", "two"] and divide("", ["a", "b"]) == ["", ""]
    assert (
        "".join(divide("今日は天気がいい。明日は雨です。", ["今日は天気がいい", "明日は雨です"]))
        == "今日は天気がいい。明日は雨です。"
    )
    assert error_rate("Fourteen men, he said.", "14 men he said", "en") == 0
    assert error_rate("a cat", "a bat", "en") == pytest.approx(0.25)
    assert (error_rate("", "", "en"), error_rate("", "word", "en"), error_rate("word", "", "en")) == (0, 1, 1)


def test_edit_distance_is_the_textbook_s() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        one, other = ("".join(random.choice(list("abc"), random.integers(0, 9))) for _ in range(2))
        row = list(range(len(other) + 1))
        for number, letter in enumerate(one, 1):
            before, row[0] = row[0], number
            for place, wanted in enumerate(other, 1):
                best = min(row[place] + 1, row[place - 1] + 1, before + (letter != wanted))
                before, row[place] = row[place], best
        assert edit_distance(one, other) == row[-1]


def test_a_clip_is_found_in_a_book_whose_words_win_where_both_agree() -> None:
    filler = " ".join(f"word{number} and word{number + 1}" for number in range(3000))
    book = Script(f"{filler} The tap-room and bar were just behind the felons' lodge, seven. {filler}")
    found = book.find("the tap room in bar were just behind the felon's lodge", "en")
    assert found is not None and found.text == "The tap-room and bar were just behind the felons' lodge,"
    numbers = Script("He paid twelve hundred pounds to nine hundred people in all.")
    assert numbers.find("He paid 1,200 pounds to 900 people in all", "en") is not None
    assert book.find("quite another sentence that is nowhere in there", "en") is None
    twice = Script("It rains all day long. Then nothing. It rains all day long.")
    first = twice.find("it rains all day long", "en", 0)
    assert first is not None and first.end == 5
    second = twice.find("it rains all day long", "en", 6)
    assert second is not None and second.end == 12
    assert is_foreign(1, 20) and not is_foreign(15, 20) and not is_foreign(0, 2)


def test_subtitles_give_words_and_unreadable_scripts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.vtt").write_text("WEBVTT\n\n1\n00:01.000 --> 00:04.000\n<v Ann>Hello <b>there</b>.\n")
    assert read_script(tmp_path / "a.vtt").split() == ["Hello", "there."]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_script(tmp_path / "b.txt")


def test_only_what_is_said_again_is_a_repeated_take() -> None:
    assert is_repeated("The quick brown", ["The quick brown fox jumps over the dog."])
    assert is_repeated("It was a dark and stormy night", ["It was a", "dark and stormy night, and cold."])
    assert not is_repeated("The quick brown fox", ["Something else is said in this clip."])
    assert not is_repeated("Yes.", ["Yes."]), "too short to prove anything"
    assert is_said_twice("You were destroying my life. You were destroying my life.")
    assert not is_said_twice("The quick brown fox jumps over the lazy dog.") and not is_said_twice("No, no.")


def test_voices_are_grouped_counted_and_named() -> None:
    random = np.random.default_rng(0)
    centres = random.standard_normal((3, 192))
    truth = random.permutation(np.repeat([0, 1, 2], [60, 30, 12]))
    voices = (centres[truth] + 0.8 * random.standard_normal((len(truth), 192))).astype(np.float32)
    voices /= np.linalg.norm(voices, axis=1, keepdims=True)
    labels = speakers.group(voices)
    assert (labels == np.array([0, 1, 2])[truth]).all(), "the most frequent first"
    assert set(speakers.group(voices, 2)) == {0, 1}
    many = np.tile(voices, (45, 1))
    assert (speakers.group(many) == np.tile(labels, 45)).all(), "more clips than are compared at a time"
    assert speakers.named(labels[:4], [""] * 4, ["speaker1"])[0] == "speaker2"
    assert set(speakers.assigned(voices[truth == 2], {"Ann": voices[truth == 2][:3]})) == {"Ann"}
    assert set(speakers.assigned(voices[truth == 1], {"Ann": voices[truth == 2]})) == {""}
    assert len(speakers.group(voices[:0])) == 0


def test_measurements_find_what_is_planted() -> None:
    random = np.random.default_rng(0)
    speech = np.concatenate([silence(0.5, 16000), _voiced(4), silence(0.5, 16000)])
    noisy = speech + 0.02 * random.standard_normal(len(speech)).astype(np.float32)
    words = np.ones(len(speech) // 512, bool)
    words[60:70] = False
    speech[60 * 512 : 70 * 512] = silence(0.32, 16000)
    noisy[60 * 512 : 70 * 512] -= noisy[60 * 512 : 70 * 512] - 0.02 * random.standard_normal(5120)
    clean, noise = (quality.snr_db(quality.levels_of(wave), words) for wave in (speech, noisy))
    assert clean > 40 > 20 > noise > 8
    assert quality.clipping(speech) == 0 < 0.01 < quality.clipping(0.5 * np.clip(4 * speech, -0.3, 0.3))
    chord = sum(np.sin(2 * np.pi * pitch * np.arange(len(speech)) / 16000) for pitch in (220, 277, 330))
    chord = (0.02 * chord).astype(np.float32)
    mask = np.zeros(len(speech) // 512 + 1, bool)
    mask[14:142] = True
    assert quality.music(speech, mask) < 0.2 < 0.8 < quality.music(speech + chord, mask)
    assert quality.kind_without_speech(chord) == "music"
    assert quality.kind_without_speech(noisy[:4000] - speech[:4000]) == "noise"
    assert quality.kind_without_speech(silence(1, 16000)) == "silence"
    gain = quality.gain_db(speech, 16000)
    assert quality.loudness_lufs(speech * 10 ** (gain / 20), 16000) == pytest.approx(-23, abs=0.2)
    click = np.zeros(16000, np.float32)
    click[8000] = 0.9
    assert quality.gain_db(click, 16000) <= 0, "never beyond full scale"
    sine = np.sin(2 * np.pi * 997 * np.arange(48000 * 5) / 48000).astype(np.float32)
    assert quality.loudness_lufs(sine, 48000) == pytest.approx(-3.01, abs=0.1), "the standard's test tone"


def _voiced(seconds: float) -> np.ndarray:
    """A gliding voice with harmonics up to 7 kHz, in syllables."""
    time = np.arange(round(seconds * 16000)) / 16000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.5 * time)) / 16000
    wave = sum(np.sin(number * phase) / number for number in range(1, 40))
    return (0.1 * wave * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time))).astype(np.float32)


def test_bandwidth_of_a_phone_call_is_seen_in_spite_of_noise() -> None:
    import soxr

    speech = np.concatenate([silence(0.5, 16000), _voiced(4), silence(0.5, 16000)])
    phone = soxr.resample(soxr.resample(speech, 16000, 7000), 7000, 16000)
    noise = 0.001 * np.random.default_rng(0).standard_normal(len(phone)).astype(np.float32)
    assert quality.bandwidth_hz(phone + noise, 16000) < 4500 < 5000 < quality.bandwidth_hz(speech, 16000)


def test_recordings_are_found_decoded_in_blocks_and_cut_exactly(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.flac", sentences(3))
    (tmp_path / "notes.md").touch()
    (tmp_path / "a.txt").touch()
    (tmp_path / "out" / "wavs").mkdir(parents=True)
    recording(tmp_path / "out" / "wavs" / "clip.wav", sentences(1))
    assert find_recordings([tmp_path, path], tmp_path / "out") == [path.resolve()]
    assert script_of(path) == tmp_path / "a.txt"
    samples, _ = sf.read(path, dtype="float32")
    with Recording(path) as opened:
        blocks = list(opened.blocks(1.0, 2.5))
        assert np.array_equal(np.concatenate([block.samples for block in blocks])[:, 0], samples[RATE:])
        assert [block.start for block in blocks[:2]] == [1.0, 3.5]
    about = path.stat()
    source = Source(7, str(path), about.st_size, about.st_mtime_ns, 0.0, RATE, 1)
    name = cut_clip(tmp_path / "out", source, 0, 1.0, 3.0, -6.0)
    clip, rate = sf.read(tmp_path / "out" / "wavs" / name, dtype="float32")
    assert rate == RATE and np.allclose(clip, samples[RATE : 3 * RATE] * 10 ** (-6 / 20), atol=1e-4)
    with pytest.raises(UnusableAudio, match="samples could be read"):
        cut_clip(tmp_path / "out", source, 0, 1.0, 3600.0, 0.0)
    path.touch()
    with pytest.raises(UnusableAudio, match="has changed since it was collected"):
        cut_clip(tmp_path / "out", source, 0, 1.0, 3.0, 0.0)


def test_video_is_decoded_with_pyav_and_named_if_that_is_missing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("myxtts.collect.recordings.find_spec", lambda _: None)
    (tmp_path / "film.mp4").write_bytes(b"\0" * 2000)
    with pytest.raises(UnusableAudio) as caught:
        Recording(tmp_path / "film.mp4")
    assert caught.value.reason == "needs PyAV" and "pip install -e '.[collect]'" in caught.value.detail
    monkeypatch.undo()
    av = pytest.importorskip("av")
    voice = spoken(sentences(1)[0], rate=48000)
    with av.open(str(tmp_path / "film.m4a"), "w") as file:
        stream = file.add_stream("aac", rate=48000)
        stream.layout = "mono"
        for start in range(0, len(voice), 1024):
            frame = av.AudioFrame.from_ndarray(voice[None, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with Recording(tmp_path / "film.m4a") as opened:
        found = np.concatenate([block.samples for block in opened.blocks(0, 1.0)])[:, 0]
        assert np.array_equal(opened.part(1.0, 1.5)[:, 0], found[48000:72000])
    assert len(found) == pytest.approx(len(voice), abs=3000)
    with pytest.raises(UnusableAudio, match="not audio"):
        Recording(tmp_path / "film.mp4")


def test_channels_are_apart_only_if_speakers_take_turns_in_them(tmp_path: Path) -> None:
    voice = spoken(sentences(1)[0])
    turns = np.stack([np.concatenate([voice, 0.01 * voice]), np.concatenate([0.01 * voice, voice])], 1)
    sf.write(tmp_path / "call.wav", turns, RATE)
    sf.write(tmp_path / "music.wav", np.stack([voice, 0.7 * voice], 1), RATE)
    sf.write(tmp_path / "one-sided.wav", np.stack([voice, 0 * voice], 1), RATE)
    found = [has_speaker_per_channel(tmp_path / f"{name}.wav") for name in ("call", "music", "one-sided")]
    assert found == [True, False, False]


def test_a_listening_process_that_dies_says_why(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit('There is no model here.')")
    listener = Listener([sys.executable, str(tmp_path / "ends.py")])
    with pytest.raises(PipelineError, match="There is no model here"):
        _ = listener.models
    with pytest.raises(PipelineError, match="There is no model here"):
        listener.ask("speech", [np.zeros(512, np.float32)])
    listener.close()


def test_a_listening_process_answers_many_threads_and_its_errors_are_told(tmp_path: Path) -> None:
    script = Path(listen.__file__)
    (tmp_path / "adds.py").write_text(
        f"import sys; sys.path.insert(0, {str(script.parent)!r}); import listen\n"
        "models = {'add': lambda waves, times: [float(wave.sum()) * times for wave in waves]}\n"
        "listen.serve(models, 2, sys.stdin.buffer, sys.stdout.buffer)\n"
    )
    listener = Listener([sys.executable, str(tmp_path / "adds.py")])
    assert listener.models == {"add": "add"}
    with ThreadPoolExecutor(8) as pool:
        waves = [[np.ones(length, np.float32), np.ones(3, np.float32)] for length in range(50)]
        answers = list(pool.map(lambda pair: listener.ask("add", pair, times=2), waves))
    assert answers == [[2.0 * length, 6.0] for length in range(50)]
    assert listener.times.keys() == {"add"} and 0 < listener.times["add"] < 60
    with pytest.raises(PipelineError, match="A model failed: TypeError"):
        listener.ask("add", waves[0], unknown=1)
    listener.close()


def test_a_listening_process_that_dies_in_the_middle_of_an_answer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, sys\n"
        "print('{\"models\": {}}', flush=True)\n"
        "sys.stdin.buffer.readline()\n"
        "print('{\"id\": 0, \"answ', end='', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    listener = Listener([sys.executable, str(tmp_path / "dies.py")])
    for _ in range(2):
        with pytest.raises(PipelineError, match="status -9"):
            listener.ask("speech", [np.zeros(512, np.float32)])
    listener.close()


def test_numbers_and_notes_that_are_spoken_stay_in_subtitles(tmp_path: Path) -> None:
    path = tmp_path / "a.vtt"
    cues = "7\n00:01.000 --> 00:02.000\nIn 7\n1984\n\n00:02.000 --> 00:03.000\nNOTE well\n"
    path.write_text(f"WEBVTT\n\nNOTE by the editor\nof this\n\n{cues}")
    assert read_script(path).split() == ["In", "7", "1984", "NOTE", "well"]
