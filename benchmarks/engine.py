"""The engine without a server: speech per second, the first piece, and what a request that joins costs the others.

    python benchmarks/engine.py [--model DIR] [--at-once 1 2 4 8] [--rounds 3]

Every round sends so many requests at the same time, one sentence each, and waits for all of them. To compare, a
stream of the synthesizer speaks one sentence. Of the rounds, the fastest counts. The CPU time of all threads tells
what a machine could do if it were idle.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from harness import LiveTable, console, machine
from speak import SENTENCES

from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.engine import End, Engine, Piece, Request
from myxtts.synthesis.generation import Prompt, draws
from myxtts.synthesis.synthesizer import Synthesizer, load_synthesizer, usual_model
from myxtts.synthesis.voices import Voice, VoiceLibrary

SEED = 1
STEPS = 40  # to time a step


class Round(NamedTuple):
    wall_s: float
    cpu_s: float  # of all threads
    audio_s: float
    first_s: list[float]  # until the first piece of each request


def timed(work: Callable[[], tuple[float, list[float]]]) -> Round:
    began_at, cpu_at = time.perf_counter(), time.process_time()
    audio_s, first_s = work()
    return Round(time.perf_counter() - began_at, time.process_time() - cpu_at, audio_s, first_s)


def streamed(synthesizer: Synthesizer, voice: Voice) -> tuple[float, list[float]]:
    """One sentence by a stream of the synthesizer."""
    began_at, first_s, num_samples = time.perf_counter(), list[float](), 0
    for piece in synthesizer.stream(SENTENCES[0], voice, "en", seed=SEED):
        first_s += [time.perf_counter() - began_at] * (not first_s)
        num_samples += len(piece)
    return num_samples / OUTPUT_SAMPLE_RATE, first_s


def served(engine: Engine, voice: Voice, at_once: int) -> tuple[float, list[float]]:
    """So many sentences by the engine, at the same time."""
    began_at, first_s, num_samples = time.perf_counter(), dict[int, float](), [0] * at_once
    has_ended = [threading.Event() for _ in range(at_once)]

    def deliver(number: int, heard: Piece | End) -> None:
        if isinstance(heard, Piece):
            first_s.setdefault(number, time.perf_counter() - began_at)
            num_samples[number] += len(heard.wave)
        else:
            if heard.error is not None:
                console.print(f"request {number} failed: {heard.error}")
            has_ended[number].set()

    for number in range(at_once):
        request = Request(SENTENCES[number % len(SENTENCES)], voice, "en", seed=SEED)
        engine.submit(request, lambda heard, number=number: deliver(number, heard))
    for event in has_ended:
        event.wait()
    return sum(num_samples) / OUTPUT_SAMPLE_RATE, list(first_s.values())


def measure(options: argparse.Namespace) -> None:
    folder = options.model or usual_model()
    synthesizer = load_synthesizer(folder)
    voice = next(iter(VoiceLibrary(folder).built_in().values()))
    columns = ("audio s per s", "audio s per CPU s", "first piece, median (ms)", "slowest (ms)", "step (ms)")
    table = LiveTable(f"The engine, {torch.get_num_threads()} threads, {machine()}", "at once", *columns)

    def add(name: str, work: Callable[[], tuple[float, list[float]]], engine: Engine | None = None) -> None:
        rounds = [timed(work) for _ in range(options.rounds)]
        rate = max(each.audio_s / each.wall_s for each in rounds)
        cpu_rate = max(each.audio_s / each.cpu_s for each in rounds)
        first_ms = [1000 * min(times) for times in zip(*(sorted(each.first_s) for each in rounds), strict=True)]
        step = f"{engine.stats().step_ms:.1f}" if engine else ""
        table.add(
            name,
            f"{rate:.2f}",
            f"{cpu_rate:.2f}",
            f"{statistics.median(first_ms):.0f}",
            f"{max(first_ms):.0f}",
            step,
        )

    streamed(synthesizer, voice)
    add("stream", lambda: streamed(synthesizer, voice))
    for at_once in options.at_once:
        engine = Engine(synthesizer, slots=max(2, at_once))
        add(str(at_once), lambda engine=engine, at_once=at_once: served(engine, voice, at_once), engine)
        engine.close()
    table.show()
    for rows in options.at_once:
        joining(synthesizer, voice, rows)


def joining(synthesizer: Synthesizer, voice: Voice, rows: int) -> None:
    """Print the time of a step of so many rows, and of a part of a prefix that runs between two steps."""
    slots = synthesizer.new_slots(max(2, rows + 1))
    utterance, how = synthesizer.prepared(SENTENCES[0], voice, "en", {"seed": SEED})
    prompt = Prompt(utterance.sentences[0].ids, voice.latents, draws(SEED, 0, 0, synthesizer.limits.max_codes))
    running = [slots.join(prompt, how.sampling) for _ in range(rows)]
    for each in running:
        while not each.is_ready:
            slots.prefill(each)
    steps, parts = list[float](), list[float]()
    for _ in range(STEPS):
        steps.append(seconds(slots.step))
        if any(each.has_ended for each in running):
            break
    new = slots.join(prompt, how.sampling)
    while not new.is_ready:
        parts.append(seconds(lambda: slots.prefill(new)))
    step_ms, part_ms, whole_ms = 1000 * min(steps), 1000 * max(parts), 1000 * sum(parts)
    console.print(
        f"{rows} rows: a step takes {step_ms:.1f} ms; a request that joins delays {len(parts)} steps by "
        f"{whole_ms:.1f} ms, one of them by {part_ms:.1f} ms"
    )


def seconds(work: Callable[[], object]) -> float:
    """CPU time on a CPU, which others may share; else the time until the GPU has finished."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began_at = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began_at


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, help="by default the one that `myxtts speak` uses")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
