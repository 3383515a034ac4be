"""The engine: many requests at once, each spoken as if it were alone."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthesis_fixtures import CLEAR, CPU, LONG_TEXT, TEXTS, generate, make_model, speaking

from myxtts.audio import Wave
from myxtts.checkpoints import UnreadableWeights
from myxtts.devices import Stream
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.model.gpt import Said
from myxtts.model.xtts import XTTS
from myxtts.synthesis.alignment import TAIL_CODES
from myxtts.synthesis.engine import End, Engine, EngineClosed, QueueFull, Request
from myxtts.synthesis.generation import Prompt, Sampling, Shape, draws
from myxtts.synthesis.scheduler import GPU_BATCHES, GPU_PIECES, Cancelled, Job, Piece, Scheduler
from myxtts.synthesis.slots import PREFILL_TOKENS, Running, Slots
from myxtts.synthesis.synthesizer import PUBLISHED_SAMPLING, Report, Synthesizer, load_synthesizer
from myxtts.synthesis.text import UnspeakableText
from myxtts.synthesis.vocoding import HifiGan, HifiGanStream
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.weights import has_weights

pytest_plugins = ["synthesis_fixtures", "training_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
Patch = pytest.MonkeyPatch
SAMPLINGS = [
    PUBLISHED_SAMPLING,
    replace(PUBLISHED_SAMPLING, guidance=2.0),
    CLEAR,
    Sampling(greedy=True),
    Sampling(temperature=1.3, top_k=0, top_p=1.0, repetition_penalty=1.0),
]


class Listener:
    """Keeps what it is given, or only its end."""

    def __init__(self, *, keeps_pieces: bool = True) -> None:
        self._keeps_pieces = keeps_pieces
        self.pieces: list[Piece] = []
        self.ends: list[End] = []
        self._has_ended = threading.Event()

    def __call__(self, heard: Piece | End) -> None:
        assert not self.ends, "nothing comes after the end"
        if isinstance(heard, Piece):
            self.pieces += [heard] * self._keeps_pieces
        else:
            self.ends.append(heard)
            self._has_ended.set()

    @property
    def end(self) -> End:
        assert self._has_ended.wait(60), "the request never ended"
        return self.ends[0]

    @property
    def report(self) -> Report:
        assert self.end.report is not None, self.end.error
        return self.end.report

    @property
    def wave(self) -> Wave:
        assert self.report.sentences
        return np.concatenate([piece.wave for piece in self.pieces])


@pytest.fixture
def make(synthesizer: Synthesizer) -> Iterator[Callable[..., Engine]]:
    """Makes engines and closes them."""
    made: list[Engine] = []

    def make(speaker: Synthesizer = synthesizer, **options: Any) -> Engine:
        made.append(Engine(speaker, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close(drain=False)
        assert engine.stats().slots_used == engine.stats().active == engine.stats().queued == 0


Make = Callable[..., Engine]


def submit(engine: Engine, voice: Voice, text: str = TEXTS[0], **how: Any) -> Listener:
    listener = Listener()
    engine.submit(Request(text, voice, "en", **how), listener)
    return listener


# The slots


def run(slots: Slots, work: list[tuple[Prompt, Sampling]], chance: random.Random) -> list[list[int]]:
    """The codes of sentences that join, run their prefixes and leave at random times."""
    waiting, running, codes = list(range(len(work))), dict[int, Running](), dict[int, list[int]]()
    while waiting or running:
        if waiting and slots.num_slots - slots.num_used >= 2 and chance.random() < 0.5:
            number = waiting.pop(0)
            running[number] = slots.join(*work[number])
        for each in slots.joining:
            if chance.random() < 0.5:
                slots.prefill(each)
        slots.step()
        for number, each in [*running.items()]:
            if each.has_ended:
                codes[number] = each.codes
                slots.leave(running.pop(number))
    return [codes[number] for number in range(len(work))]


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_codes_are_the_same_bits_alone_and_among_31_others(dtype: torch.dtype | None) -> None:
    """With guidance, central and greedy codes next to each other."""
    model, chance = make_model(has_codebook=True), random.Random(0)
    gpt, vectors = speaking(model, dtype=dtype).gpt, model.dvae.codebook.embed.t().contiguous()
    torch.manual_seed(1)
    work = []
    for number in range(32):
        ids = torch.randint(3, 60, (3 + 2 * number,)).tolist()
        prompt = Prompt(ids, torch.randn(1, 32, 64), draws(0, number, 0, 40 + number))
        work.append((prompt, SAMPLINGS[number % len(SAMPLINGS)]))
    assert max(len(prompt.ids) for prompt, _ in work) + 34 > PREFILL_TOKENS, "prefixes run in several parts"
    slots = Slots(gpt, Shape(48, 100, 80), vectors)
    among = run(slots, work, chance)
    assert slots.num_used == 0 and len({len(codes) for codes in among}) > 5
    for one, codes in zip(work, among, strict=True):
        assert run(slots, [one], chance) == [codes]
        (alone,) = generate(gpt, [one[0]], one[1], vectors=vectors)
        assert alone.codes.tolist() == codes, "in slots that have just enough room too"


def test_a_step_can_be_captured() -> None:
    """It traces as one graph that serves every step: no value goes to the host."""
    model = make_model(has_codebook=True)
    gpt, vectors = speaking(model, dtype=torch.float32).gpt, model.dvae.codebook.embed.t().contiguous()
    torch.manual_seed(1)
    prompts = [Prompt([5, 6, 7], torch.randn(1, 32, 64), draws(0, row, 0, 30)) for row in range(2)]
    found = []
    for is_traced in (False, True):
        slots = Slots(gpt, Shape(4, 20, 40), vectors)
        running = [slots.join(prompt, CLEAR) for prompt in prompts]
        for each in running * 2:
            slots.prefill(each)
        if is_traced:
            torch._dynamo.reset()
            slots._step = torch.compile(slots._step, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(8):
                slots.step()
        found.append([each.codes for each in running])
    assert found[0] == found[1] and len(found[0][0]) == 8


class GraphOnCpu:
    """A graph that computes what it captured; as on a GPU, capturing runs the work before."""

    pool = None

    def __init__(self, work: Callable[[], Any], _stream: Stream, _pool: Any = None, *, warm_ups: int = 3) -> None:
        self.replay = work
        for _ in range(warm_ups):
            work()


def test_captured_steps_that_run_ahead_say_the_same(monkeypatch: Patch) -> None:
    """The way of a GPU, on a CPU: sizes are captured when they are met, while others are in their sentences."""
    model, chance = make_model(has_codebook=True), random.Random(0)
    gpt, vectors = speaking(model, dtype=torch.float32).gpt, model.dvae.codebook.embed.t().contiguous()
    monkeypatch.setattr("myxtts.synthesis.slots.CudaGraph", GraphOnCpu)
    torch.manual_seed(1)
    work = []
    for number in range(24):
        ids = torch.randint(3, 60, (3 + 5 * number,)).tolist()
        prompt = Prompt(ids, torch.randn(1, 32, 64), draws(0, number, 0, 40 + number))
        work.append((prompt, SAMPLINGS[number % len(SAMPLINGS)]))
    slots = Slots(gpt, Shape(12, 130, 80), vectors)
    slots._runs_ahead, slots._stream = True, Stream(torch.device("cpu"))
    among = run(slots, work, chance)
    assert slots.num_used == 0 and len(slots._graphs) > 5 and slots._prefixes is not None
    for one, codes in zip(work, among, strict=True):
        (alone,) = generate(gpt, [one[0]], one[1], vectors=vectors)
        assert alone.codes.tolist() == codes
    slots.capture(PUBLISHED_SAMPLING)
    assert run(slots, work[:2], chance) == among[:2]


def test_a_sentence_that_has_ended_writes_nothing_more() -> None:
    """The next prefix in its row may run beside steps that were launched before it left."""
    slots = Slots(speaking(make_model(), dtype=torch.float32).gpt, Shape(4, 20, 40), None)
    short, long = (
        slots.join(Prompt([5, 6], torch.randn(1, 32, 64), draws(0, 0, 0, num_codes)), PUBLISHED_SAMPLING)
        for num_codes in (3, 40)
    )
    for each in (short, long):
        slots.prefill(each)
    while not short.has_ended:
        slots.step()
    caches, (row,) = (slots._decoding.keys, slots._decoding.values), short.rows
    before = [cache[:, row, :, :-1].clone() for cache in caches]
    slots.leave(short)
    num_codes = len(long.codes)
    while not long.has_ended and len(long.codes) < num_codes + 5:
        slots.step()
    assert len(long.codes) > num_codes
    assert all(torch.equal(cache[:, row, :, :-1], kept) for cache, kept in zip(caches, before, strict=True))


def test_latents_are_not_read_before_their_row_was_moved(monkeypatch: Patch) -> None:
    """They are read on another stream, which does not wait for the stream of the steps by itself."""
    slots, calls = Slots(speaking(make_model(), dtype=torch.float32).gpt, Shape(8, 20, 40), None), list[Any]()
    *others, last = (
        slots.join(Prompt([5, 6], torch.randn(1, 32, 64), draws(0, 0, 0, 30)), PUBLISHED_SAMPLING)
        for _ in range(6)
    )
    slots.prefill(last)
    slots.step()
    before = slots.generated(last, 0, 1).latents
    for each in others:
        slots.leave(each)
    for name in ("record", "wait"):
        monkeypatch.setattr(Stream, name, lambda _, event, name=name: calls.append((name, event)))
    slots.step()
    assert last.rows == [0] and torch.equal(slots.generated(last, 0, 1).latents, before)
    name, event = calls.pop()
    assert name == "wait" and calls[0] == ("record", event)


@pytest.fixture
def as_on_gpu(monkeypatch: Patch) -> Callable[[XTTS], Synthesizer]:
    """Makes synthesizers that work as on a GPU, on a CPU: captured, ahead of the host, windows in batches."""
    monkeypatch.setattr("myxtts.synthesis.slots.CudaGraph", GraphOnCpu)
    monkeypatch.setattr("myxtts.synthesis.windows.CudaGraph", GraphOnCpu)
    first, scheduler = Slots.__init__, Scheduler.__init__

    def make_slots(self: Slots, *given: Any, **how: Any) -> None:
        first(self, *given, **how)
        self._runs_ahead, self._stream = True, Stream(CPU, high_priority=True)

    def make_scheduler(self: Scheduler, *given: Any, **how: Any) -> None:
        scheduler(self, *given, **how)
        self._on_cpu, self._stream, self._most_vocoding = False, Stream(CPU), GPU_PIECES * GPU_BATCHES

    monkeypatch.setattr(Slots, "__init__", make_slots)
    monkeypatch.setattr(Scheduler, "__init__", make_scheduler)

    def make(model: XTTS) -> Synthesizer:
        synthesizer = speaking(model, dtype=torch.float32)
        synthesizer.vocoder = HifiGan(model.hifigan_decoder, (model.dvae, model.mel_stats), window_frames=128)
        return with_pieces_of_gpu(synthesizer)

    return make


def with_pieces_of_gpu(synthesizer: Synthesizer) -> Synthesizer:
    real = synthesizer.job

    def job(*given: Any, **how: Any) -> Job:
        job, delay = real(*given, **how), synthesizer.vocoder.delay_codes
        job.first_codes, job.later_codes = delay + 3, 2 * job.chunk_codes
        return job

    synthesizer.job = job  # type: ignore[method-assign]
    return synthesizer


@pytest.mark.parametrize("decoder_input", ["latents", "mel"])
def test_the_way_of_a_gpu_speaks_as_the_plain_one(
    make: Make, anna: Voice, as_on_gpu: Callable[[XTTS], Synthesizer], decoder_input: str
) -> None:
    """The same codes, and the same wave up to rounding; alone and among others, whose batches differ, too."""
    model = make_model(decoder_input=decoder_input)
    if (flow := model.hifigan_decoder.waveform_decoder.flow) is not None:
        torch.nn.init.normal_(flow.last.weight, std=0.3)
    voice, plain = (
        replace(anna, fingerprint=""),
        with_pieces_of_gpu(speaking(deepcopy(model), dtype=torch.float32)),
    )
    engine = make(as_on_gpu(model), slots=12)
    listeners = [
        submit(engine, voice, LONG_TEXT, seed=seed, speed=1 + seed / 10, chunk_codes=12) for seed in range(3)
    ]
    others = [submit(engine, voice, seed=seed, sampling=SAMPLINGS[seed % 2]) for seed in range(10)]
    for seed, listener in enumerate(listeners):
        stream = plain.stream(LONG_TEXT, voice, "en", seed=seed, speed=1 + seed / 10, chunk_codes=12)
        expected = np.concatenate(list(stream))
        found = [sentence.codes for sentence in listener.report.sentences]
        assert found == [sentence.codes for sentence in stream.report.sentences]
        np.testing.assert_allclose(listener.wave, expected, atol=1e-3)
        assert len(listener.pieces) > len(TEXTS)
    assert all(len(other.wave) for other in others)
    again = submit(engine, voice, LONG_TEXT, seed=0, chunk_codes=12)
    pieces = [len(piece.wave) for piece in again.pieces] if again.end else []
    assert pieces == [len(piece.wave) for piece in listeners[0].pieces], "where pieces end never depends on time"


def test_a_gpu_captures_nothing_while_it_serves(
    make: Make, anna: Voice, as_on_gpu: Callable[[XTTS], Synthesizer]
) -> None:
    """Other sampling is served by what was captured for any."""
    engine = make(as_on_gpu(make_model(has_codebook=True)), slots=4)
    slots = engine._scheduler.slots
    slots.capture(PUBLISHED_SAMPLING)
    captured, voice = len(slots._graphs), replace(anna, fingerprint="")
    listeners = [submit(engine, voice, seed=1, sampling=sampling) for sampling in SAMPLINGS]
    assert all(len(listener.wave) for listener in listeners)
    assert captured == len(slots._graphs) > 5


@pytest.mark.parametrize("most", [16, 1])
def test_a_gpu_looks_for_the_ends_of_short_texts_together(
    make: Make, anna: Voice, as_on_gpu: Callable[[XTTS], Synthesizer], monkeypatch: Patch, most: int
) -> None:
    """One by one if memory is short."""
    together = list[int]()

    def end_at_9(_: object, sentences: Sequence[Said]) -> list[int]:
        together.append(len(sentences))
        if len(sentences) > most:
            raise torch.OutOfMemoryError
        return [9] * len(sentences)

    monkeypatch.setattr("myxtts.synthesis.scheduler.ends_of_texts", end_at_9)
    engine, voice = make(as_on_gpu(make_model(stop_bias=-100.0)), slots=8), replace(anna, fingerprint="")
    listeners = [submit(engine, voice, "Good morning.", seed=seed) for seed in range(8)]
    assert [listener.report.sentences[0].num_codes for listener in listeners] == [9 + TAIL_CODES] * 8
    assert max(together) > 1


@pytest.mark.gpu
def test_captured_steps_say_what_plain_ones_say(reference: Path) -> None:
    device, found = torch.device("cuda"), []
    for capture in (False, True):
        synthesizer = speaking(device=device, capture=capture, dtype=torch.float32)
        voice, engine = synthesizer.voice([reference]), Engine(synthesizer, slots=8)
        listeners = [submit(engine, voice, seed=seed) for seed in range(12)]
        found.append([[one.num_codes for one in each.report.sentences] for each in listeners])
        engine.close()
    assert found[0] == found[1]


def test_threads_take_short_turns_while_any_engine_serves(make: Make, anna: Voice) -> None:
    before, first, second = sys.getswitchinterval(), make(slots=2), make(slots=2)
    for engine in (first, second):
        assert len(submit(engine, anna).wave) and sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


# What is said


@pytest.mark.parametrize("chunk_codes", [7, 20])
def test_a_request_is_spoken_as_a_stream_is(
    make: Make, synthesizer: Synthesizer, anna: Voice, chunk_codes: int
) -> None:
    """Whatever else is going on, to the last bit."""
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, chunk_codes=chunk_codes)
    expected = np.concatenate(list(stream))
    engine = make(slots=12)
    alone = submit(engine, anna, LONG_TEXT, seed=4, chunk_codes=chunk_codes)
    assert np.array_equal(alone.wave, expected) and alone.report == stream.report
    others = [submit(engine, anna, seed=seed, sampling=SAMPLINGS[seed % 2], speed=1.2) for seed in range(16)]
    among = submit(engine, anna, LONG_TEXT, seed=4, chunk_codes=chunk_codes)
    assert np.array_equal(among.wave, expected) and among.report == stream.report
    assert all(len(other.wave) for other in others)
    numbers = [piece.sentence for piece in among.pieces]
    assert numbers == sorted(numbers) and len(among.pieces) > len(TEXTS)
    assert [piece.sentence for piece in among.pieces if piece.is_last_of_sentence] == [0, 1, 2]


@pytest.mark.parametrize("stop_bias", [0.5, 1.0])
def test_whole_sentences_are_spoken_as_speak_does(make: Make, anna: Voice, stop_bias: float) -> None:
    """With the best of all attempts, of which the listener hears nothing else; STOP is likely in the second."""
    synthesizer = speaking(make_model(stop_bias=stop_bias))
    engine, voice = make(synthesizer, slots=4), replace(anna, fingerprint="")
    for seed in range(3):
        speech = synthesizer.speak(LONG_TEXT, voice, "en", seed=seed)
        listener = submit(engine, voice, LONG_TEXT, seed=seed, chunk_codes=None)
        assert np.array_equal(listener.wave, speech.wave)
        assert listener.report.sentences == speech.report.sentences
        assert all(piece.is_last_of_sentence for piece in listener.pieces)


def test_a_sentence_is_tried_again_while_nothing_was_heard(make: Make, anna: Voice) -> None:
    synthesizer = speaking(make_model(stop_bias=1.0))
    engine, voice = make(synthesizer, slots=8), replace(anna, fingerprint="")
    listeners = [submit(engine, voice, LONG_TEXT, seed=seed) for seed in range(5)]
    attempts = []
    for seed, listener in enumerate(listeners):
        stream = synthesizer.stream(LONG_TEXT, voice, "en", seed=seed)
        assert np.array_equal(listener.wave, np.concatenate(list(stream)))
        assert listener.report == stream.report
        attempts += [sentence.num_attempts for sentence in listener.report.sentences]
    assert max(attempts) > 1


def test_griffin_lim_speaks_whole_sentences(make: Make, anna: Voice) -> None:
    synthesizer = speaking(vocoder="griffin-lim")
    voice = replace(anna, fingerprint="")
    expected = np.concatenate(list(synthesizer.stream(LONG_TEXT, voice, "en", seed=4)))
    listener = submit(make(synthesizer, slots=2), voice, LONG_TEXT, seed=4)
    np.testing.assert_array_equal(listener.wave, expected)
    assert len(listener.pieces) == 3


def test_what_cannot_be_spoken_is_refused_at_once(make: Make, anna: Voice) -> None:
    engine = make(slots=2)
    with pytest.raises(UnspeakableText):
        submit(engine, anna, "!?")
    with pytest.raises(ConfigError, match="speed is 9"):
        submit(engine, anna, speed=9.0)
    with pytest.raises(ConfigError, match="chunk_codes is 0"):
        submit(engine, anna, chunk_codes=0)
    with pytest.raises(UnreadableWeights, match="another model"):
        submit(engine, replace(anna, fingerprint="other"))
    with pytest.raises(ConfigError, match="only 0 fit"):
        make(memory_bytes=1000)


def test_a_voice_is_made_in_the_thread_that_speaks(
    make: Make, synthesizer: Synthesizer, anna: Voice, reference: Path, monkeypatch: Patch
) -> None:
    """So it may be made while others speak, and they say what they would have said."""
    expected = np.concatenate(list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4)))
    threads, real = list[str](), synthesizer.voice_of

    def voice(*given: Any) -> Voice:
        threads.append(threading.current_thread().name)
        return real(*given)

    monkeypatch.setattr(synthesizer, "voice_of", voice)
    engine = make(slots=2)
    listener = submit(engine, anna, LONG_TEXT, seed=4)
    made = engine.voice([reference], "new")
    assert threads == ["engine"] and made.name == "new" and torch.equal(made.latents, anna.latents)
    assert np.array_equal(listener.wave, expected)
    with pytest.raises(DatasetError):
        engine.voice([])
    engine.close()
    with pytest.raises(EngineClosed):
        engine.voice([reference])


# Turns


def test_clients_take_turns(make: Make, anna: Voice, monkeypatch: Patch) -> None:
    """One that sends much does not keep another waiting."""
    all_sent, real, order = threading.Event(), Slots.step, list[str]()
    monkeypatch.setattr(Slots, "step", lambda self, *given: all_sent.wait(60) and real(self, *given))
    engine = make(slots=2)

    def submit_for(client: str) -> None:
        def deliver(heard: Piece | End) -> None:
            order.extend([client] * isinstance(heard, End))

        engine.submit(Request(TEXTS[0], anna, "en", seed=4, client=client), deliver)

    for client in ["busy"] * 8 + ["quiet"] * 2:
        submit_for(client)
    all_sent.set()
    engine.close(drain=True)
    assert order.count("busy") == 8 and order.index("quiet") <= 4 and order[::-1].index("quiet") >= 3


def test_a_full_queue_says_when_to_try_again(make: Make, anna: Voice) -> None:
    engine, listeners = make(slots=2, queue_limit=2), list[Listener]()
    with pytest.raises(QueueFull, match="try again in") as refused:
        for _ in range(40):
            listeners.append(submit(engine, anna, LONG_TEXT, seed=4))
    assert refused.value.retry_after_s >= 1
    assert all(len(listener.wave) for listener in listeners)
    assert len(submit(engine, anna, seed=4).wave), "there is room again"


def test_a_listener_with_nothing_yet_comes_before_one_with_a_lead(
    make: Make, anna: Voice, monkeypatch: Patch
) -> None:
    """A long text does not delay the first piece of a new request by more than what is under way."""
    engine, made, real = make(slots=4), list[int](), HifiGanStream.push

    def push(self: HifiGanStream, *given: Any) -> Any:
        made.append(id(self))
        time.sleep(0.01)
        return real(self, *given)

    monkeypatch.setattr(HifiGanStream, "push", push)
    long = submit(engine, anna, " ".join([LONG_TEXT] * 4), seed=4, chunk_codes=5)
    while len(long.pieces) < 5:
        time.sleep(0.001)
    before = len(long.pieces)
    new = submit(engine, anna, seed=5, chunk_codes=20)
    while not new.pieces and not new.ends:
        time.sleep(0.001)
    assert not long.ends and len(long.pieces) - before < 40
    assert len(new.wave) and len(long.wave)


# Failures and ends


def test_a_cancelled_request_frees_its_slots(make: Make, anna: Voice) -> None:
    engine = make(slots=2)
    first, second, waiting = Listener(), Listener(), Listener()
    tickets = [
        engine.submit(Request(LONG_TEXT * 5, anna, "en", seed=4), each) for each in (first, second, waiting)
    ]
    while not (first.pieces and second.pieces and engine.stats().slots_used == 2):  # none between two sentences
        time.sleep(0.001)
    assert engine.stats().queued == 1
    for ticket in tickets:
        ticket.cancel()
        ticket.cancel()
    for listener in (first, second, waiting):
        assert isinstance(listener.end.error, Cancelled)
    assert engine.stats().slots_used == engine.stats().queued == 0 and engine.stats().cancelled == 3
    assert len(submit(engine, anna, seed=4).wave)


def test_a_failing_request_disturbs_no_other(make: Make, synthesizer: Synthesizer, anna: Voice) -> None:
    """NaN in its slots, a broken listener, a model that says nothing; then the slots serve others."""
    expected = np.concatenate(list(synthesizer.stream(TEXTS[0], anna, "en", seed=4)))
    engine = make(slots=3)
    damaged = replace(anna, latents=torch.full_like(anna.latents, torch.nan))
    for _ in range(3):
        broken = submit(engine, damaged)
        engine.submit(Request(TEXTS[0], anna, "en"), lambda _: 1 / 0)
        good = submit(engine, anna, seed=4)
        assert isinstance(broken.end.error, PipelineError) and "NaN" in str(broken.end.error)
        assert np.array_equal(good.wave, expected)
    engine.close(drain=True)  # nothing waits for the broken listeners otherwise
    assert engine.stats().failed == 6 and engine.stats().done == 3
    silent = submit(make(speaking(make_model(stop_bias=100.0)), slots=2), replace(anna, fingerprint=""))
    assert "said nothing" in str(silent.end.error)


def test_fewer_slots_serve_when_memory_is_short(
    make: Make, synthesizer: Synthesizer, anna: Voice, monkeypatch: Patch
) -> None:
    """What was being said goes on where it was."""
    expected = np.concatenate(list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4)))
    real, calls = Slots.step, list[int]()

    def step(self: Slots, *given: Any) -> Any:
        calls.append(self.num_used)
        if len(calls) in (30, 60) or self.num_slots > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, *given)

    monkeypatch.setattr(Slots, "step", step)
    engine = make(slots=32)
    listeners = [submit(engine, anna, LONG_TEXT, seed=4) for _ in range(4)]
    assert all(np.array_equal(listener.wave, expected) for listener in listeners)
    assert engine.stats().slots == 2 and engine.stats().failed == 0


def test_an_error_in_a_step_ends_what_was_generated_and_nothing_else(
    make: Make, anna: Voice, monkeypatch: Patch
) -> None:
    real, has_failed = Slots.step, list[int]()

    def step(self: Slots, *given: Any) -> Any:
        if self.num_used and not has_failed:
            has_failed.append(1)
            raise RuntimeError("a kernel failed")
        return real(self, *given)

    monkeypatch.setattr(Slots, "step", step)
    engine = make(slots=2)
    assert "a kernel failed" in str(submit(engine, anna).end.error)
    assert len(submit(engine, anna, seed=4).wave)


def test_a_device_that_fails_for_good_leaves_no_request_without_its_end(
    make: Make, anna: Voice, reference: Path, monkeypatch: Patch
) -> None:
    """Then nothing works any more: not even the end of a sentence, nor other slots."""
    engine = make(slots=2)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    real, begun = Slots.step, threading.Event()

    def step(self: Slots, *given: Any) -> Any:
        if not self.num_used:
            return real(self, *given)
        begun.wait(30)
        for name in ("step", "leave", "__init__"):
            monkeypatch.setattr(Slots, name, fail)
        return fail()

    monkeypatch.setattr(Slots, "step", step)
    listeners = [submit(engine, anna, LONG_TEXT) for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        voice = pool.submit(engine.voice, [reference])
        while not engine._calls and not voice.done():
            time.sleep(0.01)
        begun.set()
        assert all("illegal memory access" in str(listener.end.error) for listener in listeners)
        with contextlib.suppress(EngineClosed):  # unless it was made before
            voice.result(30)
    with pytest.raises(EngineClosed):
        submit(engine, anna)


def test_closing_finishes_what_was_accepted_or_cancels_it(make: Make, anna: Voice) -> None:
    for drain in (True, False):
        engine = make(slots=2)
        listeners = [submit(engine, anna, LONG_TEXT, seed=4) for _ in range(5)]
        engine.close(drain=drain)
        assert all((listener.end.error is None) == drain for listener in listeners)
        with pytest.raises(EngineClosed):
            submit(engine, anna)
    engine = make(slots=2)
    late = submit(engine, anna, LONG_TEXT * 50, seed=4)
    engine.close(drain=True, timeout_s=0.2)
    assert isinstance(late.end.error, Cancelled)
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.soak)])
def test_nothing_leaks(make: Make, anna: Voice, count: int) -> None:
    """Requests of all kinds, some cancelled at random times: every one ends once, and memory stays flat.

    They are the same ones again and again: PyTorch keeps a plan for every new length of a convolution.
    """

    def used_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    engine, chance, listeners, before_mb = make(slots=8), random.Random(0), list[Listener](), 0.0
    for number in range(count):
        listeners.append(Listener(keeps_pieces=False))
        how: Any = {"seed": number % 2, "sampling": SAMPLINGS[chance.randrange(2)], "client": str(number % 3)}
        how["chunk_codes"] = chance.choice([20, None])
        while engine.stats().queued > 20:
            time.sleep(0.001)
        ticket = engine.submit(Request(TEXTS[number % 3], anna, "en", **how), listeners[-1])
        if chance.random() < 0.3:
            threading.Timer(0.05 * chance.random(), ticket.cancel).start()
        if number == count // 2:
            before_mb = used_mb()
    ends = [listener.end for listener in listeners]
    stats = engine.stats()
    assert (stats.slots_used, stats.active, stats.queued, stats.failed) == (0, 0, 0, 0)
    assert stats.done + stats.cancelled == count and stats.cancelled == sum(end.error is not None for end in ends)
    assert stats.steps and stats.step_ms > 0 and stats.audio_seconds > 10
    assert used_mb() < before_mb + 32


# The base model


def test_the_base_model_speaks_the_same_alone_and_among_others(make: Make) -> None:
    folder = Path(__file__).parent.parent / "myxtts" / "base"
    if not has_weights(folder):
        pytest.skip("this copy has no base model")
    synthesizer = load_synthesizer(folder, device="cpu")
    voices = list(VoiceLibrary(folder).built_in().values())
    text = "It rained."
    stream = synthesizer.stream(text, voices[0], "en", seed=1)
    expected = np.concatenate(list(stream))
    engine = make(synthesizer)
    others = [submit(engine, voice, "Yes.", seed=2) for voice in voices[1:3]]
    listener = submit(engine, voices[0], text, seed=1)
    assert np.array_equal(listener.wave, expected) and listener.report == stream.report
    assert all(len(other.wave) for other in others)
