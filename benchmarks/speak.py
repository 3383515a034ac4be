"""The speed of synthesis, ours and coqui-tts', on the same weights and by the same clock.

    python benchmarks/speak.py weights --out DIR [--size normal]
    python benchmarks/speak.py ours --weights DIR --out ours.json
    python benchmarks/speak.py coqui --weights DIR --out coqui.json         with coqui-tts: see coqui.py
    python benchmarks/speak.py compare ours.json coqui.json
    python benchmarks/speak.py cpu --weights DIR [--threads 2]              ours, and with plain float32 layers
    python benchmarks/speak.py base [--threads 2]                           the shipped model, real sentences

Fresh weights would never end a sentence. In these, one position embedding is so large that STOP is certain there:
both sides generate as many codes as `set_length` sets, with the default settings and checks. All sentences of a
batch are then equally long, which real ones are not. A wave counts once it is on the host.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import soundfile
import torch
from coqui import DEVICE, import_coqui, versions
from harness import add_command, console, fresh_weights, machine, make_table

from myxtts.config import BASE_FOLDER, CONDITIONING_TOKENS, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import SIZES, XTTS
from myxtts.synthesis.generation import Prompt, Shape, draws
from myxtts.synthesis.slots import Slots, slots_of
from myxtts.synthesis.synthesizer import Synthesizer, load_synthesizer
from myxtts.synthesis.vocoding import Frames, HifiGan
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.text.normalize import normalize
from myxtts.text.tokenizer import Tokenizer, train
from myxtts.weights import load_folder

OPENINGS = (
    "The harbour was quiet that morning and only two boats had gone out",
    "She opened the old window and listened to the bells of the valley",
    "My brother wrote every letter twice and kept the second one himself",
    "They carried the piano up four flights of stairs without a word",
)
ENDINGS = ("long before the rain began", "when the others came back", "though nobody saw it", "and so it remained")
SENTENCES = tuple(f"{opening}, {ending}." for opening in OPENINGS for ending in ENDINGS)
LONG_SENTENCE = (
    "The keeper of the lighthouse had seen a great many ships in his time, large ones and small ones, some of "
    "them proud and some of them barely afloat, but he had never seen one that came in with all its lamps out."
)
CODES, LONG_CODES = 130, (150, 300, 600)
"""About six seconds; and lengths of one long sentence, whose cost per code should not grow with its length."""
MARK = 1e4
STREAMS, VOICES, BATCHES, HEARD_PIECES = 5, 3, 3, 4
RTF, FIRST_CHUNK, GAIN = "real-time factor of one sentence", "first chunk (ms)", "gain of the batch (times)"
LINEAR = f"cost of a code in {LONG_CODES[-1]} / in {LONG_CODES[0]}"
AIMS = {RTF: "≤ 0.1", FIRST_CHUNK: "≤ 200", GAIN: "≥ 6", LINEAR: "≤ 1.1"}
MEMORY = "memory at its peak (MB)"
PART = "alone, s per s of speech: "
CPU_AIMS = {RTF: "≤ 0.5", FIRST_CHUNK: "≤ 1500", MEMORY: "≤ 1500"}  # of `base` on two cores
Result = TypeVar("Result")


class Ours:
    """MyXTTS. Like `Coqui` it returns numbers of samples, all of which are on the host."""

    name = "MyXTTS"

    def __init__(self, weights: Path, _: str) -> None:
        self._synthesizer = load_synthesizer(weights, device=torch.empty(0, device=DEVICE).device)
        self.gpt = self._synthesizer.gpt

    def hear(self, reference: Path) -> None:
        self._voice = self._synthesizer.voice([reference])

    def speak(self, text: str) -> int:
        return self.speak_all((text,))

    def speak_all(self, texts: tuple[str, ...]) -> int:
        speeches = self._synthesizer.speak_many(texts, self._voice, "en")
        for speech in speeches:
            if [sentence.num_attempts for sentence in speech.report.sentences] != [1]:
                raise RuntimeError(f"this was not one sentence said once: {speech.report}")
        return sum(len(speech.wave) for speech in speeches)

    def stream(self, text: str) -> Iterator[int]:
        return map(len, self._synthesizer.stream(text, self._voice, "en"))


class Coqui:
    """coqui-tts as in its documentation, with the settings of the folder's config.json."""

    def __init__(self, weights: Path, precision: str) -> None:
        import_coqui()
        self.name = f"coqui-tts {versions()['coqui-tts']} {precision}"
        config = importlib.import_module("TTS.tts.configs.xtts_config").XttsConfig()
        config.load_json(str(weights / "config.json"))
        self._model = importlib.import_module("TTS.tts.models.xtts").Xtts.init_from_config(config)
        self._model.load_checkpoint(config, checkpoint_dir=str(weights), eval=True)
        self._model.to(DEVICE)
        self.gpt = self._model.gpt
        names = ("temperature", "top_k", "top_p", "repetition_penalty", "length_penalty")
        self._settings = {name: getattr(config, name) for name in names}
        self._heard = {"gpt_cond_len": config.gpt_cond_len, "gpt_cond_chunk_len": config.gpt_cond_chunk_len}

    def hear(self, reference: Path) -> None:
        self._voice = self._model.get_conditioning_latents([str(reference)], max_ref_length=30, **self._heard)

    def speak(self, text: str) -> int:
        return len(self._model.inference(text, "en", *self._voice, **self._settings)["wav"])

    def stream(self, text: str) -> Iterator[int]:
        pieces = self._model.inference_stream(text, "en", *self._voice, **self._settings)
        return (len(piece.cpu()) for piece in pieces)


Speaker = Ours | Coqui


@torch.no_grad()
def set_length(gpt: Any, num_codes: int) -> None:
    """Make a GPT of `weights` end every sentence after so many codes."""
    rows = gpt.mel_pos_embedding.emb.weight
    rows[rows[:, 0] > MARK / 2] = rows[0].clone()
    rows[num_codes] = 0
    rows[num_codes, 0] = MARK


def make_stop_certain(model: XTTS) -> None:
    """Let the first channel of the GPT's last norm decide about STOP."""
    head, stop = model.gpt.mel_head.requires_grad_(False), model.gpt.dims.stop_code
    head.weight[stop], head.weight[stop, 0], head.bias[stop] = 0, 10, -100
    set_length(model.gpt, CODES)


def own_vocabulary() -> Tokenizer:
    texts = [normalize(text, "en") for text in (*SENTENCES, LONG_SENTENCE)]
    return train(texts, ["en"] * len(texts), 1000)


def weights(options: argparse.Namespace) -> None:
    """Write fresh weights that end every sentence after as many codes."""
    fresh_weights(options.out, options.size, own_vocabulary(), make_stop_certain)


def now() -> float:
    """The time at which the GPU has finished its queue."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[..., Result], *arguments: Any) -> tuple[float, Result]:
    """Return the seconds a call takes, and its result."""
    started_at = now()
    result = work(*arguments)
    return now() - started_at, result


def require_length(num_samples: int, num_codes: int) -> None:
    """Check that both sides do the same work; coqui-tts also renders the STOP code, and chunks end in pauses."""
    spoken = num_samples / OUTPUT_SAMPLE_RATE * SAMPLE_RATE / SAMPLES_PER_CODE
    if abs(spoken - num_codes) > 2:
        raise RuntimeError(f"{spoken:.1f} codes were spoken instead of {num_codes}")


def pieces_of(speaker: Speaker, text: str, num_codes: int, most: int | None = None) -> list[float]:
    """Seconds from the call, or from the previous chunk, to each chunk of a stream; at most `most` chunks."""
    set_length(speaker.gpt, num_codes)
    moments, num_samples = [now()], 0
    for piece in speaker.stream(text):
        moments.append(time.perf_counter())
        num_samples += piece
        if len(moments) - 1 == most:
            break
    else:
        require_length(num_samples, num_codes)
    return [after - before for before, after in pairwise(moments)]


def measure(speaker: Speaker, num_sentences: int) -> Iterator[tuple[str, float | None]]:
    """Yield every measurement with its name as soon as it is known."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.wav"
        noise = np.random.default_rng(0).normal(0, 0.1, 10 * SAMPLE_RATE)
        soundfile.write(reference, noise.clip(-1, 1), SAMPLE_RATE)
        yield "voice of 10 s, first (ms)", 1000 * timed(speaker.hear, reference)[0]
        again = [timed(speaker.hear, reference)[0] for _ in range(VOICES)]
        yield "voice of 10 s (ms)", 1000 * statistics.median(again)
    yield from measure_sentences(speaker, num_sentences)
    yield from measure_streams(speaker)


def measure_sentences(speaker: Speaker, num_sentences: int) -> Iterator[tuple[str, float | None]]:
    """Sentences one by one, each with its own length, and all in one batch."""
    set_length(speaker.gpt, CODES)
    yield "first sentence (s)", timed(speaker.speak, SENTENCES[0])[0]
    times, factors = [], []
    for num_codes, text in enumerate(SENTENCES[:num_sentences], CODES - len(SENTENCES) // 2):
        set_length(speaker.gpt, num_codes)
        seconds, num_samples = timed(speaker.speak, text)
        require_length(num_samples, num_codes)
        times.append(seconds)
        factors.append(seconds * OUTPUT_SAMPLE_RATE / num_samples)
    yield f"sentence of about {CODES} codes (ms)", 1000 * statistics.median(times)
    yield RTF, statistics.median(factors)
    yield "memory at its peak (GiB)", peak_memory()
    one_by_one = len(SENTENCES) * statistics.mean(times)
    yield f"{len(SENTENCES)} sentences one by one (s)", one_by_one
    set_length(speaker.gpt, CODES)
    if isinstance(speaker, Ours):  # coqui-tts has no batches
        first, num_samples = timed(speaker.speak_all, SENTENCES)
        require_length(num_samples // len(SENTENCES), CODES)
        batch = statistics.median(timed(speaker.speak_all, SENTENCES)[0] for _ in range(BATCHES))
        yield f"{len(SENTENCES)} sentences together, first (s)", first
        yield f"{len(SENTENCES)} sentences together (s)", batch
        yield GAIN, one_by_one / batch
        yield "memory at its peak, together (GiB)", peak_memory()


def measure_streams(speaker: Speaker) -> Iterator[tuple[str, float | None]]:
    """Streams of usual sentences, and of one that gets longer and longer."""
    first = pieces_of(speaker, SENTENCES[0], CODES, HEARD_PIECES)[0]
    yield "first chunk of the first stream (ms)", 1000 * first
    streams = [pieces_of(speaker, text, CODES, HEARD_PIECES) for text in SENTENCES[:STREAMS]]
    yield FIRST_CHUNK, 1000 * statistics.median(times[0] for times in streams)
    yield "first chunk, slowest (ms)", 1000 * max(times[0] for times in streams)
    yield "later chunks (ms)", 1000 * statistics.median(time for times in streams for time in times[1:])
    first = pieces_of(speaker, LONG_SENTENCE, LONG_CODES[0], 1)[0]
    yield "first chunk of the first long sentence (ms)", 1000 * first
    costs = []
    for num_codes in LONG_CODES:
        times = pieces_of(speaker, LONG_SENTENCE, num_codes)
        costs.append(sum(times) / num_codes)
        yield f"stream of {num_codes} codes (s)", sum(times)
        yield f"its second-last chunk, of {num_codes} codes (ms)", 1000 * times[-2]
    yield LINEAR, costs[-1] / costs[0]


def peak_memory() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None


def run(options: argparse.Namespace) -> None:
    """Measure one side, print the results as they come, and save them."""
    half = options.precision == "fp16"
    torch.backends.cuda.matmul.allow_tf32 = half
    load_s, speaker = timed(options.side, options.weights, options.precision)
    found: dict[str, float | None] = {"load (s)": load_s}
    with torch.autocast(DEVICE.type, torch.float16, enabled=half):
        for name, value in measure(speaker, options.sentences):
            found[name] = value
            console.print(f"{speaker.name}: {name} {shown(value)}")
    result = {"name": speaker.name, "machine": machine(), "versions": versions(), "found": found}
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    options.results = [options.out]
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Print a column for each result and, with several, the ratio of the last to the first."""
    results: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    machines = " / ".join(dict.fromkeys(result["machine"] for result in results))
    names = [result["name"] for result in results]
    table = make_table(f"Speaking, {machines}", "", *names, *["times"] * (len(results) > 1), "aim")
    for name in dict.fromkeys(name for result in results for name in result["found"]):
        values = [result["found"].get(name) for result in results]
        cells = [shown(value) for value in values]
        if len(results) > 1:
            cells.append(shown(values[-1] / values[0]) if values[0] and values[-1] else "")
        table.add_row(name, *cells, AIMS.get(name, ""))
    console.print(table)


class OnCpu:
    """A synthesizer on the CPU, or one with plain float32 layers."""

    def __init__(self, weights: Path, *, is_plain: bool) -> None:
        model, vocabulary, *_ = load_folder(weights)
        dtype = torch.float32 if is_plain else None
        build = partial(Synthesizer, model, vocabulary, torch.device("cpu"), dtype=dtype)
        self.build_s, self._synthesizer = timed(build)
        self._vocoder, self._voice = self._synthesizer.vocoder, random_voice(model)
        if is_plain:
            assert isinstance(self._vocoder, HifiGan)
            self._vocoder._alone = None
        set_length(model.gpt, CODES)

    def measure(self, guidance: float) -> dict[str, float]:
        """Times of one sentence: of its parts alone, whole, and as a stream."""
        synthesizer, sampling = self._synthesizer, replace(self._synthesizer.sampling, guidance=guidance)
        prompt = Prompt(range(40), self._voice.latents, draws(0, 0, 0, 2 * CODES))
        slots = Slots(synthesizer.gpt, Shape(slots_of(sampling), 40, 2 * CODES), None)
        running = slots.join(prompt, sampling)
        begin_s, _ = timed(lambda: [slots.prefill(running) for _ in running.parts[:]])
        finish_s, _ = timed(lambda: [slots.step() for _ in range(CODES + 1)])
        generated = slots.generated(running, 0, len(running.codes))
        assert isinstance(self._vocoder, HifiGan)
        speaker, codec = self._voice.speaker, self._vocoder.codec
        frames_s, frames = timed(Frames(1.0).push, generated, True, speaker, codec)
        waves_s, _ = timed(self._vocoder.generate, [frames], speaker[None], [(0, None)])
        given: Any = {"sampling": sampling, "num_attempts": 1}
        speak_s, speech = timed(lambda: synthesizer.speak(SENTENCES[0], self._voice, "en", **given))
        require_length(len(speech.wave), CODES)
        started_at = now()
        stream = synthesizer.stream(SENTENCES[0], self._voice, "en", **given)
        next(stream)
        first_s = now() - started_at
        list(stream)
        whole_s, length = now() - started_at, len(speech.wave) / OUTPUT_SAMPLE_RATE
        return {
            "first run of the GPT alone (ms)": 1000 * begin_s,
            "GPT alone, ms per code": 1000 * finish_s / len(generated.codes),
            f"{PART}GPT": (begin_s + finish_s) / length,
            f"{PART}{'DVAE and flow' if codec else 'interpolation'}": frames_s / length,
            f"{PART}HiFi-GAN": waves_s / length,
            RTF: speak_s / length,
            "real-time factor of its stream": whole_s / length,
            FIRST_CHUNK: 1000 * first_s,
        }


def fresh_model(size: str) -> tuple[XTTS, Tokenizer]:
    """A model of this size with fresh weights as `weights` writes them, and its vocabulary."""
    torch.manual_seed(0)
    vocabulary = own_vocabulary()
    model = XTTS(SIZES[size].with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id))
    make_stop_certain(model)
    return model, vocabulary


def random_voice(model: XTTS) -> Voice:
    speaker = torch.nn.functional.normalize(torch.randn(model.dims.speaker_dim), dim=0)
    return Voice("noise", torch.randn(1, CONDITIONING_TOKENS, model.dims.gpt.dim), speaker)


def cpu(options: argparse.Namespace) -> None:
    """Compare with plain float32 layers on a CPU, in turns; the fastest of several rounds counts."""
    torch.set_num_threads(options.threads)
    guidance: float = options.guidance
    if options.cpu_time:
        globals()["now"] = time.process_time
    ours = OnCpu(options.weights, is_plain=False)
    ours.measure(guidance)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sides = {"plain": OnCpu(options.weights, is_plain=True), "MyXTTS": ours}
    rounds = [{name: side.measure(guidance) for name, side in sides.items()} for _ in range(options.rounds)]
    title = f"Speaking, {options.threads} threads, guidance {guidance:g}, {machine()}"
    table = make_table(title, "", *sides, "times", "share", "aim")
    best = {row: [min(each[name][row] for each in rounds) for name in sides] for row in rounds[0]["plain"]}
    total = sum(after for row, (_, after) in best.items() if row.startswith(PART))
    for row, (before, after) in best.items():
        share = f"{after / total:.0%}" if row.startswith(PART) else ""
        table.add_row(row, shown(before), shown(after), shown(before / after), share, CPU_AIMS.get(row, ""))
    table.add_row("to make the synthesizer (s)", *(shown(side.build_s) for side in sides.values()))
    table.add_row(MEMORY, "", shown(memory_mb), "", "", CPU_AIMS[MEMORY])
    console.print(table)


def base(options: argparse.Namespace) -> None:
    """Speak with the shipped model on a CPU, each sentence whole and as a stream; times are medians."""
    torch.set_num_threads(options.threads)
    voices = VoiceLibrary(BASE_FOLDER)
    load_s, synthesizer = timed(partial(load_synthesizer, BASE_FOLDER, device="cpu"))
    voice = voices.load(voices.default("en"), synthesizer.fingerprint)
    synthesizer.speak(SENTENCES[-1], voice, "en", seed=0)
    factors, stream_factors, first_ms = [], [], []
    for number, text in enumerate(SENTENCES[: options.sentences]):
        speak_s, speech = timed(partial(synthesizer.speak, text, voice, "en", seed=number))
        started_at, stream = now(), synthesizer.stream(text, voice, "en", seed=number)
        pieces = [next(stream)]
        first_ms.append(1000 * (now() - started_at))
        pieces += stream
        stream_factors.append((now() - started_at) * OUTPUT_SAMPLE_RATE / sum(map(len, pieces)))
        factors.append(speak_s * OUTPUT_SAMPLE_RATE / len(speech.wave))
    rows = {
        RTF: factors,
        "real-time factor of its stream": stream_factors,
        FIRST_CHUNK: first_ms,
        MEMORY: [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024],
        "to load the model (s)": [load_s],
    }
    table = make_table(f"The base model, {options.threads} threads, {machine()}", "", "median", "worst", "aim")
    for name, found in rows.items():
        table.add_row(name, shown(statistics.median(found)), shown(max(found)), CPU_AIMS.get(name, ""))
    console.print(table)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = add_command(commands, "weights", weights)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--size", default="normal", choices=list(SIZES))
    for name, side, sentences in (("ours", Ours, len(SENTENCES)), ("coqui", Coqui, 3)):
        command = add_command(commands, name, run)
        command.set_defaults(side=side)
        command.add_argument("--weights", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--sentences", type=int, default=sentences, help="spoken one by one")
        choices = ("fp32", "fp16") if side is Coqui else ("default",)
        command.add_argument("--precision", choices=choices, default=choices[0])
    command = add_command(commands, "cpu", cpu)
    command.add_argument("--weights", type=Path, required=True)
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--guidance", type=float, default=2.0)
    command.add_argument("--cpu-time", action="store_true", help="of all threads, on a machine that is not idle")
    command = add_command(commands, "base", base)
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--sentences", type=int, default=8)
    command = add_command(commands, "compare", compare)
    command.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
