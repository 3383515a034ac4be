"""The engine without a server: first sound, throughput, real-time streams, memory, and the cost of joining.

    python benchmarks/engine.py                                 `normal` with fresh weights, and the shipped model
    python benchmarks/engine.py --models tiny --clients 1 2 --streams 1 2 --seconds 2           a trial on a CPU

A model is a size, with fresh weights that end every sentence after about six seconds, or `shipped`. At steady load
every client sends its next request as soon as the last one has ended; they begin one after the other. Of real-time
streams, each is a listener who plays the sound as it arrives and asks for more at its end; a gap is a wait of more
than 20 ms. A rate holds if no listener of that many had a gap.

Short texts of two or three words have 30 codes each. `--engine "" "slots.FUSES=False"` makes an engine for each of
these settings, one after the other with the same vocoder, and measures all of it; constants are those of
`myxtts.synthesis`, or `host.TURN_S`. For every `--variant "scheduler.GPU_STEPS=1 slots.COMPACT=0.9"` clients and
joining are measured again, with the first engine.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import importlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from harness import LiveTable, console, machine
from speak import CODES, SENTENCES, fresh_model, random_voice, set_length

from myxtts.config import BASE_FOLDER
from myxtts.devices import device_named, release_memory
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.engine import End, Engine, Request, Stats, Ticket
from myxtts.synthesis.scheduler import Piece
from myxtts.synthesis.synthesizer import Synthesizer, load_synthesizer
from myxtts.synthesis.voices import Voice, VoiceLibrary

GAP_S = 0.02
AIMS = {"first 1": "≤ 60", "first 64": "≤ 80 / ≤ 200", "rate 128": "≥ 1,000", "streams": "≥ 200"}
AIMS |= {"memory 128": "≤ 16", "joining": "≤ +5 %"}
JOIN_EVERY_S, JOIN_ROUNDS = 0.05, 4
CONSTANTS = ("engine", "generation", "host", "scheduler", "slots", "synthesizer", "vocoding", "windows")
SHORT_TEXTS = ("Good morning.", "Not today.", "See you soon.", "Yes, of course.", "Thank you.", "Who is there?")
SHORT_CODES = 30


@dataclass
class Heard:
    """One request, as its listener hears it."""

    sent_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    audio_s: float = 0.0
    gap_s: float = 0.0  # the longest wait after the first sound
    error: Exception | None = None

    def take(self, heard: Piece | End) -> None:
        now = time.perf_counter()
        if isinstance(heard, End):
            self.ended_at, self.error = now, heard.error
            return
        self.first_at = self.first_at or now
        self.gap_s = max(self.gap_s, now - self.first_at - self.audio_s)
        self.audio_s += len(heard.wave) / OUTPUT_SAMPLE_RATE


@dataclass
class Clients:
    """Clients of an engine, each with one request at a time."""

    engine: Engine
    voice: Voice
    number: int
    plays: bool = False  # ask for more when the last sound has been played, not when it has arrived
    texts: Sequence[str] = SENTENCES
    step_ms: float = 0.0  # from step to step, while it was measured
    heard: list[Heard] = field(default_factory=list)
    _due: list[tuple[float, int]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, spread_s: float, warm_s: float, seconds: float) -> tuple[list[Heard], float]:
        """What was sent in `seconds` after `warm_s`, and the sound per second of that time."""
        began_at = time.perf_counter()
        self._due = [(began_at + number * spread_s / self.number, number) for number in range(self.number)]
        heapq.heapify(self._due)
        measured_at, end_at, seeds = began_at + spread_s + warm_s, 0.0, itertools.count()
        end_at, seen = measured_at + seconds, list[Stats]()
        marks = [measured_at, end_at]
        while marks:
            with self._changed:
                now, next_at = time.perf_counter(), self._due[0][0] if self._due else marks[0]
                if now < min(next_at, marks[0]):
                    self._changed.wait(min(next_at, marks[0]) - now)
                    continue
                due = heapq.heappop(self._due) if self._due and self._due[0][0] <= now else None
            if now >= marks[0]:
                seen.append(self.engine.stats())
                marks.pop(0)
            if due:
                self._send(due[1], next(seeds))
        self._wait_for_all()
        if failed := next((each.error for each in self.heard if each.error), None):
            raise RuntimeError("a request failed") from failed
        found = [each for each in self.heard if measured_at <= each.sent_at < end_at]
        self.step_ms = 1000 * seconds / max(1, seen[1].steps - seen[0].steps)
        return found or self.heard, (seen[1].audio_seconds - seen[0].audio_seconds) / seconds

    def _send(self, client: int, seed: int) -> None:
        heard = Heard(time.perf_counter())
        self.heard.append(heard)

        def deliver(arrived: Piece | End) -> None:
            heard.take(arrived)
            if isinstance(arrived, End):
                next_at = heard.first_at + heard.audio_s if self.plays else heard.ended_at
                with self._changed:
                    heapq.heappush(self._due, (next_at, client))
                    self._changed.notify()

        text = self.texts[seed % len(self.texts)]
        self.engine.submit(Request(text, self.voice, "en", seed=seed, client=str(client)), deliver)

    def _wait_for_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(each.ended_at for each in self.heard), 60)


def set_constants(settings: Sequence[str]) -> list[str]:
    """Change constants, also where they were imported; returns the settings that undo it."""
    modules = {name: importlib.import_module(f"myxtts.synthesis.{name}") for name in CONSTANTS if name != "host"}
    modules["host"], before = importlib.import_module("myxtts.host"), list[str]()
    for setting in settings:
        place, value = setting.split("=", 1)
        module, name = place.split(".")
        before.append(f"{place}={getattr(modules[module], name)!r}")
        for each in modules.values():
            if hasattr(each, name):
                setattr(each, name, ast.literal_eval(value))
    return before


def milliseconds(times: Sequence[float]) -> str:
    middle, late = 1000 * np.percentile(times, [50, 95]) if len(times) else (np.nan, np.nan)
    return f"p50 {middle:.0f}, p95 {late:.0f} ({len(times)} requests)"


class Measured:
    """An engine and the rows of its table."""

    def __init__(self, name: str, synthesizer: Synthesizer, voice: Voice, options: argparse.Namespace) -> None:
        self._name, self._voice, self._options, self._synthesizer = name, voice, options, synthesizer
        self._table = LiveTable(f"{name}, {machine()}, {os.cpu_count()} cores", "", "found", "aim")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began_at = time.perf_counter()
        self._engine = Engine(synthesizer, slots=options.slots)
        self._add("to make the engine (s)", f"{time.perf_counter() - began_at:.1f}")
        windows = getattr(synthesizer.vocoder, "_windows", None)
        self._add("fused kernels in the vocoder", "yes" if getattr(windows, "fused", None) else "no")
        self._add("fused kernels in steps", "yes" if self._engine._scheduler.slots._decoding.fused else "no")
        self._texts_per_s(synthesizer)

    def _add(self, what: str, found: str, aim: str = "") -> None:
        self._table.add(what, found, AIMS.get(aim, ""))

    def _texts_per_s(self, synthesizer: Synthesizer) -> None:
        began_at = time.perf_counter()
        for text in SENTENCES:
            synthesizer.prepared(text, self._voice, "en", {"seed": 0})
        self._add("to prepare a text (ms)", f"{1000 * (time.perf_counter() - began_at) / len(SENTENCES):.2f}")

    def run(self, variants: Sequence[str]) -> None:
        options, stats = self._options, self._engine.stats()
        self._warm_up()
        self._add(
            f"memory of {stats.slots} slots (GiB)", f"{stats.memory_bytes / 2**30:.2f}", f"memory {stats.slots}"
        )
        self._clients()
        self._joining(options.speaking)
        self._short()
        if options.streams:
            self._streams()
        for variant in variants:
            before = set_constants(variant.split())
            self._add("with", variant)
            self._clients()
            self._joining(options.speaking)
            set_constants(before)
        if torch.cuda.is_available():
            self._add("GPU memory at its peak (GiB)", f"{torch.cuda.max_memory_allocated() / 2**30:.2f}")
        self._engine.close(drain=False)
        self._table.show()

    def _clients(self) -> None:
        for clients in self._options.clients:
            self._steady(Clients(self._engine, self._voice, clients), f"clients: {clients}", str(clients))

    def _short(self) -> None:
        """Texts after which the model may go on: where they end is looked for."""
        if self._name != "shipped":
            set_length(self._synthesizer.gpt, SHORT_CODES)
        for clients in self._options.short:
            load = Clients(self._engine, self._voice, clients, texts=SHORT_TEXTS)
            self._steady(load, f"short texts, clients: {clients}", "")
        if self._name != "shipped":
            set_length(self._synthesizer.gpt, CODES)

    def _steady(self, load: Clients, what: str, aim: str) -> None:
        found, rate = load.run(0.5, 0.5, self._options.seconds)
        first_s = [each.first_at - each.sent_at for each in found if each.first_at]
        self._add(f"first sound, {what} (ms)", milliseconds(first_s), f"first {aim}")
        self._add(f"audio s per s, {what}", f"{rate:,.1f}", f"rate {aim}")
        host = self._engine.stats().step_ms
        self._add(f"from step to step, {what} (ms)", f"{load.step_ms:.2f} (waiting and reading: {host:.2f})")

    def _warm_up(self) -> None:
        """All sizes of batches are met once."""
        for clients in sorted({1, *self._options.clients}):
            Clients(self._engine, self._voice, clients).run(0.2, 0.0, 0.3)

    def _streams(self) -> None:
        most = 0
        for streams in self._options.streams:
            listeners = Clients(self._engine, self._voice, streams, plays=True)
            found, _ = listeners.run(self._options.play_s, 0.0, self._options.play_s)
            gaps = [each.gap_s for each in found]
            broken = sum(gap > GAP_S for gap in gaps)
            worst = f"{broken} of {len(gaps)} with a gap, the longest {1000 * max(gaps, default=0):.0f} ms"
            first_s = [each.first_at - each.sent_at for each in found if each.first_at]
            self._add(f"real-time streams: {streams}", f"{worst}; first sound {milliseconds(first_s)}")
            if broken:
                break
            most = streams
        self._add("real-time streams without a gap", f"{most}", "streams")

    def _joining(self, speaking: int) -> None:
        """The time of a step while so many speak, without and with requests that join and leave all the time."""
        tickets = [self._submit(number, 2 * SENTENCES) for number in range(speaking)]
        self._settle(speaking)
        found: list[list[float]] = [[], []]
        for number in range(2 * JOIN_ROUNDS):
            joins = number % 2 == 1
            found[joins].append(self._step_ms(self._options.seconds / JOIN_ROUNDS, joins=joins))
        alone, joined = (float(np.median(times)) for times in found)
        for ticket in tickets:
            ticket.cancel()
        name = f"step while {speaking} speak (ms)"
        self._add(name, f"{alone:.2f} (of {min(found[0]):.2f} to {max(found[0]):.2f})")
        per_s = f"{1 / JOIN_EVERY_S:.0f} requests per second join"
        self._add(f"{name}, {per_s}", f"{joined:.2f} ({joined / alone - 1:+.1%})", "joining")

    def _submit(self, seed: int, sentences: Sequence[str]) -> Ticket:
        request = Request(" ".join(sentences), self._voice, "en", seed=seed, client=str(seed))
        return self._engine.submit(request, lambda _: None)

    def _settle(self, speaking: int) -> None:
        for _ in range(600):
            if self._engine.stats().slots_used >= speaking:
                return
            time.sleep(0.05)

    def _step_ms(self, seconds: float, *, joins: bool) -> float:
        before, began_at, number = self._engine.stats().steps, time.perf_counter(), 10_000
        while (now := time.perf_counter()) < began_at + seconds:
            if joins:
                number += 1
                ticket = self._submit(number, SENTENCES[:1])
                threading.Timer(JOIN_EVERY_S, ticket.cancel).start()
            time.sleep(JOIN_EVERY_S)
        return 1000 * (now - began_at) / max(1, self._engine.stats().steps - before)


def measure(name: str, options: argparse.Namespace) -> None:
    device = device_named(options.device)
    if name == "shipped":
        synthesizer, voices = load_synthesizer(BASE_FOLDER, device=device), VoiceLibrary(BASE_FOLDER)
        voice = voices.load(voices.default("en"), synthesizer.fingerprint)
    else:
        model, vocabulary = fresh_model(name)
        voice, synthesizer = random_voice(model), Synthesizer(model, vocabulary, device)
    for settings in options.engine:
        before = set_constants(settings.split())
        if settings:
            console.rule(settings)
        Measured(name, synthesizer, voice, options).run(options.variant if settings == options.engine[0] else ())
        synthesizer.vocoder.capture = lambda: None  # type: ignore[union-attr, method-assign]  # it was
        set_constants(before)
        release_memory()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["normal", "shipped"])
    parser.add_argument("--device")
    parser.add_argument("--slots", type=int, default=128 if on_gpu else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 128] if on_gpu else [1, 2, 4])
    parser.add_argument("--streams", type=int, nargs="*", default=[200, 300] if on_gpu else [1, 2, 3])
    parser.add_argument("--speaking", type=int, default=64 if on_gpu else 2, help="while requests join")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--short", type=int, nargs="*", default=[64] if on_gpu else [2], help="clients")
    parser.add_argument("--engine", nargs="+", default=[""], metavar="'MODULE.NAME=VALUE …'")
    parser.add_argument("--variant", action="append", default=[], metavar="'MODULE.NAME=VALUE …'")
    parser.add_argument("--play-s", type=float, default=7.0, help="of listening in real time, twice")
    options = parser.parse_args()
    logging.basicConfig()
    for module in ("generation", "windows"):
        logging.getLogger(f"myxtts.synthesis.{module}").setLevel(logging.DEBUG)  # why there are no fused kernels
    for name in options.models:
        began_at = time.perf_counter()
        measure(name, options)
        console.print(f"{name}: {time.perf_counter() - began_at:.0f} s")


if __name__ == "__main__":
    main()
