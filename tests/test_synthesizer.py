"""Speaking with small random networks: what is said, that it is the same every time, and what is refused."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import shutil
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import soundfile as sf
import torch
import torch.nn.functional as F
from synthesis_fixtures import CLEAR, CPU, LONG_TEXT, TEXTS, make_model, num_codes, speaking, vocabulary
from training_fixtures import Clips, newest, train

from myxtts.checkpoints import UnreadableWeights
from myxtts.cli import main
from myxtts.devices import Plan, allocatable_bytes, apply_caps, release_memory
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.model.gpt import Said
from myxtts.run_dir import inherited
from myxtts.synthesis.alignment import TAIL_CODES
from myxtts.synthesis.generation import Sampling
from myxtts.synthesis.slots import Slots
from myxtts.synthesis.synthesizer import (
    CHUNK_CODES,
    FAINT_NOTE,
    PUBLISHED_SAMPLING,
    SILENT,
    SynthesisOptions,
    Synthesizer,
    VocoderName,
    load_synthesizer,
    override_sampling,
    usable_vocoder,
)
from myxtts.synthesis.text import UnspeakableText, bounds
from myxtts.synthesis.vocoding import HifiGan, is_faint
from myxtts.synthesis.voices import Voice
from myxtts.weights import save_folder

pytest_plugins = ["synthesis_fixtures", "training_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
Capture, Log, Patch = pytest.CaptureFixture[str], pytest.LogCaptureFixture, pytest.MonkeyPatch


# What is said


def test_text_and_a_reference_become_a_wave(synthesizer: Synthesizer, anna: Voice, tmp_path: Path) -> None:
    speech = synthesizer.speak(TEXTS[0], anna, "en", seed=4)
    assert speech.wave.dtype == np.float32 and np.isfinite(speech.wave).all()
    assert speech.wave[0] == speech.wave[-1] == 0, "an edge that jumps is heard as a click"
    report = speech.report
    assert (report.voice, report.language, report.vocoder, report.seed) == ("anna", "en", "hifigan", 4)
    assert report.seconds == pytest.approx(len(speech.wave) / 24000)
    assert report.seconds == pytest.approx(num_codes(speech)[0] * 1024 / 22050, abs=0.03)
    (tmp_path / "file").touch()
    for said in (speech, synthesizer.stream(TEXTS[0], anna, "en", seed=4)):
        out = tmp_path / type(said).__name__ / "out.wav"
        said.save(out)
        written, rate = sf.read(out)
        assert rate == 24000 and len(written) == len(speech.wave)
        with pytest.raises(ConfigError, match="cannot be written"):
            said.save(tmp_path / "file" / "out.wav")
    with pytest.raises(ConfigError, match=r"\.wav or \.flac"):
        speech.save(tmp_path / "out.txt")


def test_a_seed_decides_what_is_said_by_the_published_settings(synthesizer: Synthesizer, anna: Voice) -> None:
    published = Sampling(temperature=0.75, top_k=50, top_p=0.85, repetition_penalty=5.0)
    one, other, drawn = (synthesizer.speak(TEXTS[0], anna, "en", seed=seed) for seed in (4, 5, None))
    assert not np.array_equal(one.wave, other.wave)
    for speech in (one, drawn):
        same = synthesizer.speak(TEXTS[0], anna, "en", seed=speech.report.seed, sampling=published)
        assert np.array_equal(speech.wave, same.wave)


def test_a_sentence_does_not_depend_on_the_batch(synthesizer: Synthesizer, anna: Voice) -> None:
    torch.manual_seed(1)
    other = Voice("other", torch.randn(1, 32, 64), F.normalize(torch.randn(16), dim=0))
    texts, voices = [*TEXTS, TEXTS[0]], [anna, anna, anna, other]
    together = synthesizer.speak_many(texts, voices, ["en", "en", "en-us", "en"], seed=5)
    assert len({len(speech.wave) for speech in together}) > 1
    assert [speech.report.voice for speech in together] == ["anna", "anna", "anna", "other"]
    assert not np.array_equal(together[0].wave, together[3].wave)
    for text, voice, speech in zip(texts, voices, together, strict=True):
        alone = synthesizer.speak(text, voice, "en", seed=5)
        assert np.array_equal(alone.wave, speech.wave)


def test_speed_changes_the_length_and_not_the_codes(synthesizer: Synthesizer, anna: Voice) -> None:
    usual, slow, fast = (synthesizer.speak(TEXTS[0], anna, "en", seed=4, speed=speed) for speed in (1, 0.8, 1.5))
    assert num_codes(usual) == num_codes(slow) == num_codes(fast)
    assert len(slow.wave) / len(usual.wave) == pytest.approx(1 / 0.8, rel=0.02)
    assert len(fast.wave) / len(usual.wave) == pytest.approx(1 / 1.5, rel=0.02)


def test_only_the_first_attempt_takes_central_codes() -> None:
    options = SynthesisOptions(CLEAR, seed=0)
    assert [sampling.central for sampling in options.attempts] == [True, False, False]
    assert options.attempts[1].guidance == CLEAR.guidance


# Streams


@pytest.mark.parametrize(
    ("chunk_codes", "speed", "reads"), [(3, 1.0, "latents"), (20, 1.3, "latents"), (20, 1.0, "mel")]
)
def test_a_stream_says_what_speak_says(
    synthesizer: Synthesizer, anna: Voice, speed: float, chunk_codes: int, reads: str
) -> None:
    if reads == "mel":
        model = make_model(decoder_input=reads)
        model.gpt.load_state_dict(make_model().gpt.state_dict())
        synthesizer, anna = speaking(model), replace(anna, fingerprint="")
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, speed=speed, chunk_codes=chunk_codes)
    with pytest.raises(RuntimeError, match="when all"):
        _ = stream.report
    pieces = list(stream)
    speech = synthesizer.speak(LONG_TEXT, anna, "en", seed=4, speed=speed)
    assert len(pieces) >= (2 if reads == "latents" else 1) * len(TEXTS)
    whole = np.concatenate(pieces)
    if chunk_codes == CHUNK_CODES:
        assert np.array_equal(whole, speech.wave)
    np.testing.assert_allclose(whole, speech.wave, atol=2e-4)
    assert stream.report.sentences == speech.report.sentences
    assert [sentence.text for sentence in speech.report.sentences] == TEXTS
    pauses = 2 * 0.1
    assert len(whole) / 24000 == pytest.approx(speech.report.seconds + pauses, abs=0.001)
    assert list(stream) == [] and stream.report.seed == 4


def test_the_first_piece_comes_before_the_rest_is_generated(anna: Voice) -> None:
    model = make_model()
    steps: list[int] = []
    model.gpt.final_norm.register_forward_hook(lambda *_: steps.append(1))
    stream = speaking(model).stream(LONG_TEXT, anna, "en", seed=4, chunk_codes=10)
    assert len(next(stream)) > 2000
    num_steps = len(steps)
    assert num_steps >= 10 and list(stream) and len(steps) > num_steps


def test_a_stream_that_is_left_leaves_no_thread_behind(synthesizer: Synthesizer, anna: Voice) -> None:
    before = threading.active_count(), torch.get_num_threads()
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4)
    assert len(next(stream))
    stream.close()
    assert (threading.active_count(), torch.get_num_threads()) == before
    assert list(stream) == []


def test_griffin_lim_speaks_and_streams_whole_sentences(anna: Voice) -> None:
    synthesizer = speaking(vocoder="griffin-lim")
    speech = synthesizer.speak(LONG_TEXT, anna, "en", seed=4, speed=2.0)
    assert speech.report.vocoder == "griffin-lim"
    assert np.isfinite(speech.wave).all()
    pieces = list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4, speed=2.0))
    assert len(pieces) == 3
    assert np.array_equal(np.concatenate(pieces), speech.wave)


# Attempts


def test_bad_sentences_are_tried_again_with_other_random_numbers(anna: Voice) -> None:
    """STOP is likely: many attempts are too short, and with enough of them one is not."""
    synthesizer = speaking(make_model(stop_bias=1.0))
    problems = []
    for num_attempts in (1, 8):
        speeches = synthesizer.speak_many(TEXTS, anna, "en", seed=0, num_attempts=num_attempts)
        problems.append([speech.report.sentences[0].problem for speech in speeches])
    assert problems[1].count("too short") < problems[0].count("too short")
    healed = [speech.report for speech in speeches if speech.report.sentences[0].num_attempts > 1]
    assert healed and any("attempts" in note for note in healed[0].notes())


def test_a_stream_tries_again_while_nothing_was_heard(synthesizer: Synthesizer, anna: Voice) -> None:
    once, often = (synthesizer.stream(TEXTS[0], anna, "en", seed=0, num_attempts=n) for n in (1, 6))
    assert list(once) and list(often)
    assert once.report.sentences[0].problem == "too short"
    assert often.report.sentences[0].problem is None and often.report.sentences[0].num_attempts > 1


def test_a_run_away_ends_and_is_reported(anna: Voice) -> None:
    synthesizer, bars = speaking(make_model(stop_bias=-100.0)), Bars()
    report = synthesizer.speak("A short text.", anna, "en", seed=4, num_attempts=2, progress=bars).report
    assert report.sentences[0].problem == "run-away" and report.seconds < 5
    assert any("run-away, 2 attempts" in note for note in report.notes())
    assert [(title, done[-1]) for title, _, done in bars.shown] == [("Speaking", 1)]


def test_what_is_said_after_a_short_text_is_left_out(anna: Voice, monkeypatch: Patch) -> None:
    """Codes are looked at after fixed numbers of them: a stream and side by side, the same is cut."""
    numbers = set[int]()

    def end_at_9(_: object, sentences: Sequence[Said]) -> list[int]:
        numbers.update(len(said.codes) for said in sentences)
        return [9] * len(sentences)

    synthesizer = speaking(make_model(stop_bias=-100.0))
    whole = synthesizer.speak("Good morning.", anna, "en", seed=4, num_attempts=1)
    assert whole.report.sentences[0].problem == "run-away"
    monkeypatch.setattr("myxtts.synthesis.scheduler.ends_of_texts", end_at_9)
    speech = synthesizer.speak("Good morning.", anna, "en", seed=4)
    (sentence,) = speech.report.sentences
    assert sentence.problem is None and sentence.num_attempts == 1
    assert sentence.codes == whole.report.sentences[0].codes[: 9 + TAIL_CODES]
    others = synthesizer.speak_many([TEXTS[0], "Good morning."], anna, "en", seed=4)
    assert others[1].report.sentences[0].codes == sentence.codes
    assert np.array_equal(np.concatenate([*synthesizer.stream("Good morning.", anna, "en", seed=4)]), speech.wave)
    (piece,) = synthesizer.stream("Good morning.", anna, "en", seed=4, chunk_codes=7)
    assert np.array_equal(piece, speech.wave) and numbers == {20, 40}


def test_few_codes_are_not_searched_for_what_follows_a_short_text(anna: Voice, monkeypatch: Patch) -> None:
    """So few are left after every text: nothing could be left out."""
    monkeypatch.setattr("myxtts.synthesis.scheduler.ends_of_texts", lambda *_: pytest.fail("searched"))
    synthesizer = speaking(make_model(stop_bias=100.0))
    with pytest.raises(PipelineError, match="said nothing in 3 attempts"):
        synthesizer.speak("Good morning.", anna, "en")


def test_a_model_that_says_nothing_is_an_error(anna: Voice) -> None:
    synthesizer = speaking(make_model(stop_bias=100.0))
    with pytest.raises(PipelineError, match="said nothing in 3 attempts"):
        synthesizer.speak(TEXTS[0], anna, "en")
    with pytest.raises(PipelineError, match="said nothing"):
        list(synthesizer.stream(TEXTS[0], anna, "en"))
    (speech,) = synthesizer.speak_many(TEXTS[:1], anna, "en")
    assert len(speech.wave) == 0 and speech.report.sentences[0].problem == "empty"


def test_a_stream_in_a_loop_is_stopped(anna: Voice) -> None:
    model = make_model(stop_bias=-100.0)
    model.gpt.mel_head.bias.data[7] += 100
    stream = speaking(model).stream(TEXTS[0], anna, "en", seed=4, sampling=Sampling(repetition_penalty=1.0))
    seconds = sum(map(len, stream)) / 24000
    assert stream.report.sentences[0].problem == "repetition"
    assert seconds < 3 < bounds(len(TEXTS[0]), 602).most / 21.5


def test_silence_is_reported(anna: Voice) -> None:
    model = make_model()
    model.hifigan_decoder.waveform_decoder.conv_post.weight.data.zero_()
    report = speaking(model).speak(TEXTS[0], anna, "en", seed=4).report
    assert report.sentences[0].problem == "silent" and FAINT_NOTE in report.notes()


def test_a_constant_is_no_sound() -> None:
    wave = np.full(24000, 0.4, np.float32)
    assert is_faint(wave) and is_faint(wave[:100])
    assert not is_faint(wave + 0.05 * np.sin(np.arange(24000) / 20).astype(np.float32))


# Lack of memory


def test_fewer_sentences_at_a_time_are_spoken_when_memory_is_short(
    synthesizer: Synthesizer, anna: Voice, reference: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Slots and batches of sound become smaller; if one sentence is too much, the error says what to do."""
    texts, real_slots, real_sound = [*TEXTS, *TEXTS[:2]], Slots.__init__, HifiGan.push_many
    most, lack = 16, "CUDA out of memory. Tried to allocate 2.00 GiB"
    expected = synthesizer.speak_many(texts, anna, "en", seed=5, num_attempts=1)

    def few_slots(self: Slots, gpt: Any, shape: Any, *given: Any, **named: Any) -> None:
        if shape.sentences > most:
            raise torch.OutOfMemoryError(lack)
        real_slots(self, gpt, shape, *given, **named)

    def little_sound(self: HifiGan, pushes: Any) -> Any:
        if len(pushes) > most:
            raise torch.OutOfMemoryError(lack)
        return real_sound(self, pushes)

    monkeypatch.setattr(Slots, "__init__", few_slots)
    monkeypatch.setattr(HifiGan, "push_many", little_sound)
    for most in (2, 1):
        caplog.clear()
        spoken = synthesizer.speak_many(texts, anna, "en", seed=5, num_attempts=1)
        assert all(np.array_equal(one.wave, other.wave) for one, other in zip(expected, spoken, strict=True))
        assert [record.args for record in caplog.records] == [(5, 2), (2, 1)][: 3 - most]
    most = 0
    for speak in (synthesizer.speak, lambda *given: list(synthesizer.stream(*given))):
        with pytest.raises(PipelineError, match=r"Out of memory on cpu while speaking one sentence.*DEVICES="):
            speak(TEXTS[0], anna, "en")
    monkeypatch.setattr(synthesizer._encoder, "voice", lambda *_, **__: little_sound(synthesizer.vocoder, [1]))  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"Out of memory on cpu while encoding a voice\. Close"):
        synthesizer.voice([reference])


def test_a_piece_that_runs_out_of_memory_once_is_made_again(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: Patch
) -> None:
    expected, real, calls = synthesizer.speak(TEXTS[0], anna, "en", seed=4), HifiGan.generate, list[int]()

    def fails_at_first(*given: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] % 2 == 0:
            raise torch.OutOfMemoryError
        return real(*given, **named)

    monkeypatch.setattr(HifiGan, "generate", fails_at_first)
    pieces = list(synthesizer.stream(TEXTS[0], anna, "en", seed=4))
    assert np.array_equal(np.concatenate(pieces), expected.wave)
    assert len(calls) > 3


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_memory_does_not_grow_with_the_sentences(synthesizer: Synthesizer, anna: Voice, count: int) -> None:
    """The same five again and again: PyTorch keeps a plan for every new length of a convolution, up to a limit.

    After many other tests the allocator needs some hundred sentences to settle: the second half counts, without
    what was freed and is kept for later.
    """

    def used_mb() -> float:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    before = 0.0
    for number in range(10 + count):
        if number == 10 + count // 2:
            before = used_mb()
        text, seed = TEXTS[number % 5 % 3], number % 5
        if seed:
            synthesizer.speak(text, anna, "en", seed=seed, num_attempts=1)
        else:
            list(synthesizer.stream(text, anna, "en", seed=seed, num_attempts=1))
    assert used_mb() < before + 8


# What is refused


@pytest.mark.parametrize("text", ["", "  \n ", "... !? «»", "😀 🎉", "\x00\x07"])
def test_a_text_without_words_is_refused(synthesizer: Synthesizer, anna: Voice, text: str) -> None:
    for speak in (synthesizer.speak, synthesizer.stream):
        with pytest.raises(UnspeakableText, match="nothing to say"):
            speak(text, anna, "en")


def test_unknown_characters_are_reported(synthesizer: Synthesizer, anna: Voice) -> None:
    report = synthesizer.speak("The café was quiet ∂ when the first boat came in.", anna, "en", seed=4).report
    assert report.unknown_characters == {"é": "e", "∂": ""}
    assert any("'é' as 'e', '∂' left out" in note for note in report.notes())


def test_settings_that_make_no_sense_are_all_named(synthesizer: Synthesizer, anna: Voice) -> None:
    """Before anything is generated: a stream has not begun."""
    wrong = Sampling(temperature=0, top_p=2, guidance=0.5, central=True)
    told = r"(?s)speed is 9.*temperature is 0.*top_p is 2.*guidance is 0\.5"
    told += r".*DVAE, which is missing or was never trained.*without --central.*attempts are 0.*seed is -1"
    for speak in (synthesizer.speak, synthesizer.stream):
        with pytest.raises(ConfigError, match=told):
            speak(TEXTS[0], anna, "en", speed=9, sampling=wrong, seed=-1, num_attempts=0)


# Progress


class Bars:
    """Records bars: title, total, and how many were done after every advance."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, int, list[int]]] = []
        self.is_open = False

    def begin(self, title: str, total: int) -> None:
        assert not self.is_open
        self.is_open = True
        self.shown.append((title, total, [0]))

    def advance(self, count: int) -> None:
        assert self.is_open
        done = self.shown[-1][2]
        done.append(done[-1] + count)

    def end(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("vocoder", ["hifigan", "griffin-lim"])
def test_sentences_are_counted_and_spoken_in_groups(
    synthesizer: Synthesizer, anna: Voice, vocoder: VocoderName
) -> None:
    groups, bars = speaking(vocoder=vocoder, batch_size=2), Bars()
    speech = groups.speak(LONG_TEXT, anna, "en", seed=4, num_attempts=1, progress=bars)
    assert bars.shown == [("Speaking", 3, [0, 0, 1, 2, 3])] and not bars.is_open
    assert num_codes(speech) == num_codes(synthesizer.speak(LONG_TEXT, anna, "en", seed=4, num_attempts=1))


def test_a_stream_counts_its_sentences(synthesizer: Synthesizer, anna: Voice) -> None:
    whole, cut_short = Bars(), Bars()
    list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4, progress=whole))
    assert whole.shown == [("Speaking", 3, [0, 0, 1, 2, 3])] and not whole.is_open
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, progress=cut_short)
    assert len(next(stream)) and cut_short.is_open
    stream.close()
    assert not cut_short.is_open


def test_weights_that_compute_nan_are_an_error_that_ends_the_bar(anna: Voice) -> None:
    model = make_model()
    model.gpt.final_norm.weight.data[3] = torch.nan
    synthesizer, bars = speaking(model), Bars()
    with pytest.raises(PipelineError, match="NaN"):
        synthesizer.speak(TEXTS[0], anna, "en", progress=bars)
    assert bars.shown and not bars.is_open
    with pytest.raises(PipelineError, match="NaN"):
        list(synthesizer.stream(TEXTS[0], anna, "en"))


# Folders and the command line


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model that can be heard, and one that has hardly learnt to make sound."""
    made = {}
    for name, loudness in (("loud", 1.0), ("faint", 0.002)):
        model = make_model()
        model.hifigan_decoder.waveform_decoder.conv_post.weight.data.mul_(100 * loudness)
        made[name] = tmp_path_factory.mktemp(name)
        save_folder(made[name], model, vocabulary())
    return made


def speak(model: Path, speaker: Path, *words: object) -> int:
    given = ["--model", model, "--speaker", speaker, "--language", "en", *words]
    return main(["speak", *map(str, given)])


@pytest.mark.parametrize(("name", "way"), [("loud", "--stream"), ("faint", "--stream"), ("faint", "--from-file")])
def test_a_file_that_cannot_be_heard_is_reported(
    folders: dict[str, Path], reference: Path, tmp_path: Path, capfd: Capture, name: str, way: str
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.wav"
    text.write_text(LONG_TEXT)
    said = text if way == "--from-file" else LONG_TEXT
    assert speak(folders[name], reference, way, said, "--seed", 4, "--out", out) == 0
    shown = capfd.readouterr()
    loudest = abs(sf.read(out)[0]).max()
    assert (loudest > 0.05) if name == "loud" else (SILENT < loudest < 0.01)
    assert shown.out.splitlines().count(FAINT_NOTE) == (name == "faint")
    assert shown.out.splitlines()[-1] == str(out)
    assert "Speaking" not in shown.err, "no bars without a terminal"


def test_flags_decide_how_a_folder_speaks(
    folders: dict[str, Path], reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = Bars()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("myxtts.terminal.ProgressLines", lambda: bars)
    flags = ["--temperature", "0.5", "--repetition-penalty", "3", "--guidance", "2", "--speed", "1.25"]
    out = ["--seed", 4, "--out", tmp_path / "out.wav"]
    assert speak(folders["loud"], reference, LONG_TEXT, *flags, *out) == 0
    assert bars.shown[-1][0] == "Speaking" and bars.shown[-1][2][-1] == 3, "a terminal shows bars"
    synthesizer = load_synthesizer(folders["loud"], device=CPU)
    sampling = replace(PUBLISHED_SAMPLING, temperature=0.5, repetition_penalty=3.0, guidance=2.0)
    voice = synthesizer.voice([reference])
    speech = synthesizer.speak(LONG_TEXT, voice, "en", seed=4, speed=1.25, sampling=sampling)
    speech.save(tmp_path / "same.wav")
    assert (tmp_path / "out.wav").read_bytes() == (tmp_path / "same.wav").read_bytes()
    assert speak(folders["loud"], reference, LONG_TEXT, *flags, *out, "--device", "cpu") == 0
    assert (tmp_path / "out.wav").read_bytes() == (tmp_path / "same.wav").read_bytes()
    asked = Namespace(central=True, temperature=None)
    assert override_sampling(PUBLISHED_SAMPLING, asked) == replace(PUBLISHED_SAMPLING, central=True)


def test_a_device_that_is_not_there_is_named(folders: dict[str, Path], reference: Path, capfd: Capture) -> None:
    assert speak(folders["loud"], reference, "Hello.", "--device", "cuda:9") == 2
    assert "--device cuda:9: there is no such device. Found: " in capfd.readouterr().err


def test_only_the_command_changes_the_current_gpu(
    folders: dict[str, Path], reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, second = Mock(), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", current)
    with contextlib.suppress(AssertionError, RuntimeError):  # this machine may have no such GPU
        load_synthesizer(folders["loud"], device=second)
    assert not current.called
    monkeypatch.setattr("myxtts.devices.device_named", lambda _: second)
    monkeypatch.setattr("myxtts.synthesis.synthesizer.load_synthesizer", Mock(side_effect=ConfigError("enough")))
    assert speak(folders["loud"], reference, "Hello.") == 2
    assert current.call_args_list == [call(second)], "the main thread opens no context on the first GPU"


class Payload:
    """Creates a file in the working folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("file", ["model.pth", "dvae.pth"])
@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_nothing_executes_what_a_file_of_weights_says(
    folders: dict[str, Path], reference: Path, clips: Clips, tmp_path: Path, capsys: Capture, file: str, form: str
) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(folders["loud"], hostile)
    if form == "bare":
        (hostile / file).write_bytes(pickle.dumps(Payload()))
    else:
        content = {"model": {"x": torch.zeros(1)}, "config": Payload()}
        torch.save(content, hostile / file, _use_new_zipfile_serialization=form == "zip")
    assert speak(hostile, reference, "Hello.") == 1
    assert main(["export", str(hostile), "--out", "out"]) == 1
    assert train(tmp_path / "run", clips(), f"--init-from {hostile} --max-steps 1") == 1
    assert capsys.readouterr().err.count("not loaded") == 3 and not Path("touched").exists()


DEEP = "[" * 10**6


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("vocab.json", DEEP, "not a vocabulary"),
        ("vocab.json", '"' + "x" * 100_000_000, "too large: 100 MB; a vocabulary has at most 32 MB"),
        ("myxtts.json", DEEP, "not what an export wrote"),
        ("model.json", DEEP, "is no run of MyXTTS"),
        ("model.pth", "", "damaged or no PyTorch checkpoint"),
        ("model.pth", None, "No model.pth or best_model.pth or weights-1.npz"),
    ],
)
def test_damaged_folders_are_refused_soon(
    folders: dict[str, Path], tmp_path: Path, file: str, content: str | None, problem: str
) -> None:
    shutil.copytree(folders["loud"], tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    started_at = time.process_time()
    with pytest.raises(DatasetError, match=problem):
        load_synthesizer(tmp_path, device=CPU)
    assert time.process_time() - started_at < 5


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_an_interrupt_leaves_no_incomplete_file(
    folders: dict[str, Path],
    reference: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    flags: list[str],
) -> None:
    """Neither the file that was being written nor, without --stream, a damaged older one."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sf.SoundFile, "write", interrupted)
    out = tmp_path / "speech.wav"
    out.write_bytes(b"older")
    assert speak(folders["loud"], reference, TEXTS[0], "--out", out, *flags) == 130
    assert "interrupted; no incomplete file was left" in capsys.readouterr().err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if flags else [b"older"])


def test_a_stream_says_why_it_cannot_be_written(
    folders: dict[str, Path], reference: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "speech.wav"
    out.symlink_to("/dev/full")
    assert speak(folders["loud"], reference, TEXTS[0], "--out", out, "--stream") == 2
    assert f"{out} cannot be written: No space left on device" in capsys.readouterr().err
    assert not out.is_symlink()


def test_an_interrupted_book_can_be_continued(
    folders: dict[str, Path], reference: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Synthesizer, "speak_many", interrupted)
    (tmp_path / "book.txt").write_text(TEXTS[0])
    given = ("--book", tmp_path / "book.txt", "--speaker", reference, "--out", tmp_path / "out")
    assert main(["speak", "--model", str(folders["loud"]), *map(str, given)]) == 130
    assert "interrupted; what was spoken is kept, and the same command continues" in capsys.readouterr().err


def test_without_a_model_the_flag_of_speak_is_named(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["speak", "Hello.", "--speaker", "x.wav", "--language", "en"]) != 0
    shown = capsys.readouterr().err
    assert "no run in the folder checkpoints" in shown and "has no base model" in shown
    assert "--model" in shown and "--checkpoint-dir" not in shown


def test_missing_parts_and_validation_decide_the_vocoder() -> None:
    decoder, dvae = "hifigan_decoder.waveform_decoder", "dvae"
    young, grown = {"decoder": 0.613, "griffin_lim": 0.35}, {"decoder": 0.2, "griffin_lim": 0.35}
    hollow = "no trained decoder; using Griffin-Lim, which sounds hollow"
    for given, expected in (
        ([[]], ("hifigan", "")),
        ([[dvae], None, young], ("hifigan", "")),
        ([[], "hifigan", young], ("hifigan", "")),
        ([[], "griffin-lim", grown], ("griffin-lim", "")),
        ([[decoder], "griffin-lim"], ("griffin-lim", "")),
        ([[decoder]], ("griffin-lim", hollow)),
    ):
        assert usable_vocoder(*given) == expected  # type: ignore[arg-type]
    for distances, name in ((young, "griffin-lim"), (grown, "hifigan")):
        found = usable_vocoder([], None, distances)
        assert found.name == name and "0.35" in found.note and f"{distances['decoder']:.2f}" in found.note
    for parts, vocoder, problem in (
        ([decoder, dvae], None, r"decoder and the dvae .*--stages decoder or --stages dvae\)\.$"),
        ([decoder], "hifigan", r"decoder .* not trained.*--stages decoder.*griffin-lim"),
        ([dvae], "griffin-lim", r"dvae of this model is not trained.*--stages dvae\)\.$"),
        (["mel_stats"], None, "mel_stats"),
    ):
        with pytest.raises(UnreadableWeights, match=problem):
            usable_vocoder(parts, vocoder)  # type: ignore[arg-type]
    with pytest.raises(UnreadableWeights, match=r"^The dvae of this .* is not trained.*\(--stages dvae\)\.$"):
        usable_vocoder([dvae], reads_mels=True)


@pytest.mark.usefixtures("small")
def test_a_run_says_which_vocoder_is_nearer_to_its_validation_clips_and_what_it_never_learnt(
    clips: Clips, reference: Path, tmp_path: Path, capsys: Capture
) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    assert train(run, clips(6), f"--max-steps 1 --decoder-steps 1 --val-data {clips(3)}") == 0
    found = newest(run, "decoder").state["notes"]["vocoder"]
    assert found.keys() == {"decoder", "griffin_lim"} and all(0 < distance <= 1 for distance in found.values())
    assert main(["export", str(run), "--out", str(exported)]) == 0
    better = "hifigan" if found["decoder"] <= found["griffin_lim"] else "griffin-lim"
    for folder in (run, exported):
        assert load_synthesizer(folder).vocoder.name == better
    assert inherited(run)["languages"] == inherited(exported)["languages"] == ["en"]
    numbers = f"(distance {found['griffin_lim']:.2f}, the decoder {found['decoder']:.2f})"
    for flags in ([], ["--vocoder", "griffin-lim", "--language", "de"]):
        capsys.readouterr()
        assert speak(run, reference, "Hello.", "--seed", 1, *flags) == 0
        shown = capsys.readouterr().out
        assert (numbers in shown) == (not flags) and "no trained decoder" not in shown
        assert ("the model was never trained on German, only on English" in shown) == bool(flags)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [PUBLISHED_SAMPLING, CLEAR])
def test_captured_steps_say_what_plain_ones_say(reference: Path, sampling: Sampling) -> None:
    device, model = torch.device("cuda", 0), make_model(has_codebook=True)
    synthesizers = [
        speaking(deepcopy(model), device=device, dtype=torch.float32, capture=capture) for capture in (True, False)
    ]
    own_voices = [synthesizer.voice([reference]) for synthesizer in synthesizers]
    for texts in ([TEXTS[0]], TEXTS, [TEXTS[1]], TEXTS[:2]):  # shapes are used again
        captured, plain = (
            synthesizer.speak_many(texts, voice, "en", seed=7, sampling=sampling)
            for synthesizer, voice in zip(synthesizers, own_voices, strict=True)
        )
        for one, other in zip(captured, plain, strict=True):
            assert num_codes(one) == num_codes(other)
            np.testing.assert_allclose(one.wave, other.wave, atol=1e-3)


@pytest.mark.gpu
def test_speaking_goes_on_in_smaller_batches_under_a_cap(
    reference: Path, caplog: Log, request: pytest.FixtureRequest
) -> None:
    device, outcomes = torch.device("cuda", 0), set()
    apply_caps(Plan(device, device, model_cap_mb=torch.cuda.memory_reserved() // 2**20 + 4096))
    request.addfinalizer(lambda: apply_caps(Plan(device, device, model_cap_mb=10**9)))
    for room_mb in (1024, 512, 256, 128, 96, 64, 48, 32, 24, 16, 8, 4):
        synthesizer = speaking(device=device, batch_size=256)
        voice = synthesizer.voice([reference])
        release_memory()
        # Memory that is reserved in pieces counts as allocatable, but one tensor cannot have it.
        in_pieces = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        num_bytes = allocatable_bytes(device) - in_pieces - room_mb * 2**20
        filler = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        caplog.clear()
        try:
            synthesizer.speak_many(TEXTS * 80, voice, "en", seed=7, num_attempts=1)
            outcomes.add("smaller batches" if caplog.records else "whole batches")
        except PipelineError as error:
            assert "one sentence at a time" in str(error)
        del filler, synthesizer
        release_memory()
    assert outcomes == {"whole batches", "smaller batches"}


@pytest.mark.gpu
def test_a_stream_on_the_gpu_starts_soon_and_says_what_speak_says(reference: Path) -> None:
    synthesizer = speaking(device=torch.device("cuda", 0))
    voice = synthesizer.voice([reference])
    list(synthesizer.stream(TEXTS[0], voice, "en", seed=4))
    started_at = time.perf_counter()
    stream = synthesizer.stream(TEXTS[0], voice, "en", seed=4)
    pieces = [next(stream)]
    assert time.perf_counter() - started_at < 0.5
    pieces += stream
    speech = synthesizer.speak(TEXTS[0], voice, "en", seed=4)
    np.testing.assert_allclose(np.concatenate(pieces), speech.wave, atol=5e-3)
