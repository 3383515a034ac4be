"""What bounds the engine on a GPU: its parts alone, together, and the host's share while many speak.

    python benchmarks/engine_parts.py [--models normal shipped] [--clients 128] [--variants]

Times of captured work are those of replays on an otherwise idle GPU. Sound per second is what a part alone could
make. `--variants` also times other ways to compute attention and a block of the vocoder.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from engine import Clients, milliseconds
from harness import LiveTable, console, machine
from speak import fresh_model, random_voice

from myxtts.config import BASE_FOLDER, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.devices import CudaGraph, Stream, device_named
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, SAMPLES_PER_FRAME
from myxtts.synthesis.engine import Engine
from myxtts.synthesis.generation import Generated
from myxtts.synthesis.slots import Slots
from myxtts.synthesis.synthesizer import Synthesizer, load_synthesizer
from myxtts.synthesis.vocoding import HifiGan
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.synthesis.windows import FADE_FRAMES, REACH_FRAMES, Push, Windows, WindowStream

CODE_S = SAMPLES_PER_CODE / SAMPLE_RATE
FRAME_S = SAMPLES_PER_FRAME / OUTPUT_SAMPLE_RATE
ROUNDS = 10
FILLED = (80, 140, 200, 480)  # slots: of a sentence that begins, is in its middle, ends; of a long one


def timed_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Time of a call on the GPU, once warm."""
    work()
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(rounds):
        work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / rounds


class Clock:
    """Time and CPU time of methods while they are called by several threads."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = defaultdict[str, float](float), defaultdict[str, float](float)
        self.calls, self.sizes = Counter[str](), Counter[tuple[str, int]]()
        self._lock = threading.Lock()

    def watch(self, owner: Any, *names: str, sized: bool = False) -> None:
        for name in names:
            real = getattr(owner, name)

            def watched(*given: Any, real: Any = real, name: str = name, **how: Any) -> Any:
                began = time.perf_counter(), time.thread_time()
                try:
                    return real(*given, **how)
                finally:
                    with self._lock:
                        self.wall_s[name] += time.perf_counter() - began[0]
                        self.cpu_s[name] += time.thread_time() - began[1]
                        self.calls[name] += 1
                        if sized:
                            self.sizes[name, len(given[0])] += 1

            setattr(owner, name, watched)

    def clear(self) -> None:
        with self._lock:
            for each in (self.wall_s, self.cpu_s, self.calls, self.sizes):
                each.clear()


class Parts:
    """The parts of one model's engine."""

    def __init__(self, name: str, synthesizer: Synthesizer, voice: Voice, options: argparse.Namespace) -> None:
        self._table = LiveTable(f"{name}, {machine()}", "", "found")
        self._synthesizer, self._voice, self._options = synthesizer, voice, options
        for owner, what in ((Slots, "capture"), (HifiGan, "capture")):
            self._time_captures(owner, what)
        began_at = time.perf_counter()
        self._engine = Engine(synthesizer, slots=options.slots)
        self._add("to make the engine (s)", f"{time.perf_counter() - began_at:.1f}")
        for owner in (Slots, HifiGan):
            owner.capture = owner.capture.__wrapped__  # type: ignore[attr-defined]

    def _time_captures(self, owner: Any, what: str) -> None:
        real = getattr(owner, what)

        def capture(*given: Any) -> None:
            began_at = time.perf_counter()
            real(*given)
            self._add(f"to capture {owner.__name__} (s)", f"{time.perf_counter() - began_at:.1f}")

        capture.__wrapped__ = real  # type: ignore[attr-defined]
        setattr(owner, what, capture)

    def _add(self, what: str, found: str) -> None:
        self._table.add(what, found)

    def run(self) -> None:
        if torch.cuda.is_available():
            for part in (self._steps, self._prefixes, self._vocoder, self._together, self._kernels):
                try:
                    part()
                except Exception as error:
                    self._add(f"{part.__name__} failed", f"{type(error).__name__}: {error}")
        self._load()
        self._engine.close(drain=False)
        self._table.show()

    @property
    def _slots(self) -> Slots:
        return self._engine._scheduler.slots

    @property
    def _windows(self) -> Windows:
        vocoder = self._synthesizer.vocoder
        assert isinstance(vocoder, HifiGan) and vocoder._windows is not None
        return vocoder._windows

    def _graph(self, rows: int, slots: int) -> Any:
        """The captured step that serves so many rows."""
        sizes = self._slots._graphs
        fitting = [size for size in sizes if size.rows >= rows and size.slots >= slots]
        return sizes[min(fitting)]

    @contextlib.contextmanager
    def _speaking(self, filled: int) -> Iterator[None]:
        """Let all rows be in sentences, with so many slots filled."""
        slots = self._slots
        slots._ended.fill_(False)
        slots._place.zero_()
        slots._most.fill_(slots.shape.steps)
        slots._decoding.starts.fill_(filled)
        try:
            yield
        finally:
            for row in range(slots._num_rows):
                slots._clear(row)

    def _step_ms(self, rows: int, filled: int) -> float:
        with self._speaking(filled):
            return timed_ms(self._graph(rows, filled + 2 * ROUNDS).replay)

    def _steps(self) -> None:
        self._add("captured steps", str(len(self._slots._graphs)))
        for rows in (1, 16, 64, 68, 72, 96, 128):
            found = [f"{filled}: {self._step_ms(rows, filled):.2f}" for filled in FILLED]
            self._add(f"step of {rows} rows, by the slots they have filled (ms)", ", ".join(found))
        step_ms = self._step_ms(128, FILLED[1])
        self._add("sound of steps of 128 alone (s per s)", f"{128 * CODE_S / step_ms * 1000:,.0f}")

    def _prefixes(self) -> None:
        prefixes = self._slots._prefixes
        assert prefixes is not None
        found = [f"{count}: {timed_ms(graph.replay):.2f}" for count, graph in sorted(prefixes._begins.items())]
        self._add("prefixes, by how many begin together (ms)", ", ".join(found))
        self._add("a later part of a prefix (ms)", f"{timed_ms(prefixes._extends.replay):.2f}")

    def _vocoder(self) -> None:
        by_size: defaultdict[int, list[str]] = defaultdict(list)
        for (size, count), program in sorted(self._windows._programs.items()):
            assert program.graph is not None
            found_ms = timed_ms(program.graph.replay)
            sound_s = count * (size - 2 * REACH_FRAMES - FADE_FRAMES) * FRAME_S
            by_size[size].append(f"{count}: {found_ms:.2f} ms, {sound_s / found_ms * 1000:,.0f}")
        for size, found in by_size.items():
            self._add(f"windows of {size} frames together: time, s per s", "; ".join(found))
        codes, dim = torch.zeros(40).long(), self._synthesizer.gpt.dims.dim
        part = Generated(codes, torch.zeros(40, dim, device=self._synthesizer.device))
        for count in (1, 16):
            streams = [WindowStream(self._windows, self._voice.speaker, 1.0) for _ in range(count)]
            pushes = [Push(stream, part, last=False) for stream in streams]
            for _ in range(3):
                self._windows.push_many(pushes)
            clock = Clock()
            clock.watch(self._windows, "push_many", "_launched")
            for _ in range(ROUNDS):
                self._windows.push_many(pushes)
            wall_ms, cpu_ms = (1000 * each["push_many"] / ROUNDS for each in (clock.wall_s, clock.cpu_s))
            self._add(f"{count} pieces of 40 codes (ms)", f"{wall_ms:.2f}, of the CPU {cpu_ms:.2f}")

    def _together(self) -> None:
        """Steps, and the vocoder and prefixes on streams of their own, alone and at the same time."""
        device, prefixes = self._synthesizer.device, self._slots._prefixes
        program = self._windows._programs[max(self._windows._programs)].graph
        assert program is not None and prefixes is not None
        step, begin = self._graph(128, 256), prefixes._begins[1]
        first, other = Stream(device, high_priority=True), Stream(device)

        def run(num_steps: int, num_others: int, work: Callable[[], object]) -> tuple[float, float]:
            torch.cuda.synchronize()
            ends, began_at, found = [], time.perf_counter(), [0.0, 0.0]
            for stream, count, call in ((other, num_others, work), (first, num_steps, step.replay)):
                with stream.use():
                    for _ in range(count):
                        call()
                    ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    ends[-1].record()
            while not all(found):
                for at, end in enumerate(ends):
                    if not found[at] and end.query():
                        found[at] = 1000 * (time.perf_counter() - began_at)
            return found[1], found[0]

        for name, work in (("vocoder", program.replay), ("prefix", begin.replay)):
            work_ms, step_ms = timed_ms(work), self._step_ms(128, FILLED[1])
            others = max(1, round(60 * step_ms / work_ms))
            with self._speaking(FILLED[1]):
                steps_ms, _ = run(30, 4 * others, work)
            self._add(f"step of 128 while the {name} runs (ms)", f"{steps_ms / 30:.2f} (alone {step_ms:.2f})")
            with self._speaking(FILLED[0]):
                _, others_ms = run(240, others, work)
            self._add(f"{name} while steps run (ms)", f"{others_ms / others:.2f} (alone {work_ms:.2f})")

    def _kernels(self) -> None:
        """The kernels that take the most time."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        program = self._windows._programs[max(self._windows._programs)].graph
        assert program is not None
        for name, work in (("step of 128", self._graph(128, 256).replay), ("the vocoder", program.replay)):
            work()
            torch.cuda.synchronize()
            with self._speaking(FILLED[1]), torch.profiler.profile(activities=activities) as profile:
                for _ in range(3):
                    work()
                torch.cuda.synchronize()
            found = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
            total = sum(each.self_device_time_total for each in found) / 3000
            self._add(f"kernels of {name}", f"{sum(each.count for each in found) // 3}, {total:.2f} ms")
            for each in found[:12]:
                what = f"{each.self_device_time_total / 3000:.2f} ms in {each.count // 3}"
                self._add(f"  {what}", each.key[:110])

    def _load(self) -> None:
        """The host's work while many speak."""
        clock, scheduler = Clock(), self._engine._scheduler
        clock.watch(scheduler, "_take_sound", "_admit", "_make_sound", "_prefill", "_step", "turn")
        clock.watch(self._slots, "join", "leave", "_launch", "_read", "_compact")
        clock.watch(scheduler, "_look", "_collect")
        clock.watch(self._synthesizer.vocoder, "push_many", sized=True)
        for clients in self._options.clients:
            Clients(self._engine, self._voice, clients).run(0.3, 0.0, 0.5)
            clock.clear()
            steps, began_at, cpu_s = self._engine.stats().steps, time.perf_counter(), time.process_time()
            found, rate = Clients(self._engine, self._voice, clients).run(0.5, 0.5, self._options.seconds)
            seconds, steps = time.perf_counter() - began_at, self._engine.stats().steps - steps
            cpu_s = time.process_time() - cpu_s
            first_s = [each.first_at - each.sent_at for each in found if each.first_at]
            self._add(f"{clients} clients: s per s; first sound (ms)", f"{rate:,.0f}; {milliseconds(first_s)}")
            self._add("  steps per s", f"{steps / seconds:.0f}")
            for name in clock.calls:
                shares = [f"{each[name] / seconds:.1%}" for each in (clock.wall_s, clock.cpu_s)]
                each_ms = 1000 * clock.cpu_s[name] / clock.calls[name]
                what = f"{shares[0]} of the time, CPU {shares[1]}, {clock.calls[name] / seconds:.0f} per s"
                self._add(f"  {name}", f"{what}, CPU {each_ms:.2f} ms each")
            sizes = Counter({size: count for (_, size), count in clock.sizes.items()})
            self._add("  pieces per batch: batches", str(dict(sorted(sizes.items()))))
            self._add("  CPU of the process (cores)", f"{cpu_s / seconds:.2f}")


# Other ways to compute the same


def attention_variants(table: LiveTable, layers: int = 30, rows: int = 128, heads: int = 16) -> None:
    device, dim, num_slots = torch.device("cuda"), 64, 1040
    shape = (layers, rows, num_slots, heads, dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)
    lengths = torch.linspace(75, 204, rows, device=device).int()
    at = torch.arange(rows + 1, device=device, dtype=torch.int32)

    def split(used: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = torch.zeros(rows, used, device=device, dtype=torch.bfloat16)
        mask.masked_fill_(torch.arange(used, device=device) >= lengths[:, None], -torch.inf)
        return (*(each[:, :, :used].transpose(2, 3) for each in (keys, values)), mask[:, None, None])

    def sdpa(used: int) -> list[torch.Tensor]:
        k, v, mask = split(used)
        return [
            F.scaled_dot_product_attention(q[:, :, None], *kv, attn_mask=mask)[:, :, 0]
            for kv in zip(k, v, strict=True)
        ]

    def products(used: int) -> list[torch.Tensor]:
        k, v, mask = split(used)
        return [
            (((q[:, :, None] * dim**-0.5) @ one.mT + mask).softmax(-1) @ other)[:, :, 0]
            for one, other in zip(k, v, strict=True)
        ]

    def flash(_: int) -> list[torch.Tensor]:
        flat = (each.view(layers, rows * num_slots, heads, dim) for each in (keys, values))
        given = (at, at * num_slots, 1, num_slots, 0.0, False, False)
        return [
            torch.ops.aten._flash_attention_forward(q, *kv, *given, seqused_k=lengths)[0]
            for kv in zip(*flat, strict=True)
        ]

    expected = sdpa(256)[0]
    for work, used in ((sdpa, 208), (sdpa, 256), (products, 208), (products, 256), (flash, 0)):
        try:
            graph = CudaGraph(lambda work=work, used=used: work(used), Stream(device))  # type: ignore[misc]
            error = float((graph.replay()[0].float() - expected.float()).abs().max())
            table.add(
                f"attention: {work.__name__} of {used}", f"{timed_ms(graph.replay):.2f} ms, error {error:.1e}"
            )
        except Exception as failure:
            table.add(f"attention: {work.__name__} of {used}", f"{type(failure).__name__}: {str(failure)[:200]}")


def block_variants(table: LiveTable, generator: Any) -> None:
    """A block of the vocoder for 16 windows of 208 frames: as it is, with more plans, and compiled."""
    for index, (channels, length) in {5: (128, 208 * 64), 11: (32, 208 * 256)}.items():
        block = generator.resblocks[index]
        x = torch.randn(16, channels, 1, length, device="cuda", dtype=torch.half)
        x = x.contiguous(memory_format=torch.channels_last)
        for limit in (4, 10, 0):
            began_at = time.perf_counter()
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=limit):
                graph = CudaGraph(lambda block=block, x=x: block(x), Stream(x.device))  # type: ignore[misc]
            took_s = time.perf_counter() - began_at
            table.add(
                f"block of {channels} channels, plans tried: {limit}",
                f"{timed_ms(graph.replay):.3f} ms, {took_s:.1f} s",
            )
        compiled = torch.compile(block, dynamic=False)
        began_at = time.perf_counter()
        try:
            with torch.no_grad():
                compiled(x)
                graph = CudaGraph(lambda compiled=compiled, x=x: compiled(x), Stream(x.device))  # type: ignore[misc]
            took_s = time.perf_counter() - began_at
            found = f"{timed_ms(graph.replay):.3f} ms, {took_s:.1f} s"
        except Exception as failure:
            found = f"{type(failure).__name__}: {str(failure)[:200]}"
        table.add(f"block of {channels} channels, compiled", found)


def variants() -> None:
    table = LiveTable("Other ways", "", "found")
    table.add(
        "triton, a C compiler",
        f"{importlib.util.find_spec('triton')}, {shutil.which('gcc') or shutil.which('cc')}",
    )
    with torch.inference_mode():
        attention_variants(table)
    model, _ = fresh_model("normal")
    model.hifigan_decoder.remove_weight_norm()
    generator = model.hifigan_decoder.waveform_decoder.cuda().half().eval().requires_grad_(False)
    with torch.no_grad():
        block_variants(table, generator)
    table.show()


def measure(name: str, options: argparse.Namespace) -> None:
    device = device_named(options.device)
    if name == "shipped":
        synthesizer, voices = load_synthesizer(BASE_FOLDER, device=device), VoiceLibrary(BASE_FOLDER)
        voice = voices.load(voices.default("en"), synthesizer.fingerprint)
    else:
        model, vocabulary = fresh_model(name)
        voice, synthesizer = random_voice(model), Synthesizer(model, vocabulary, device)
    Parts(name, synthesizer, voice, options).run()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["normal", "shipped"])
    parser.add_argument("--device")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 128])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args(arguments)
    for name in options.models:
        began_at = time.perf_counter()
        try:
            measure(name, options)
        except Exception:
            console.print_exception()
        console.print(f"{name}: {time.perf_counter() - began_at:.0f} s")
    if options.variants:
        variants()


if __name__ == "__main__":
    main()
