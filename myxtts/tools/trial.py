"""One configuration tried out: how fast it trains, with what memory, and how long each stage takes.

Codes are found as in every epoch but the first, and whatever is written goes to a temporary folder. A trial may
run in a process of its own, so that its memory is measured alone and its end, whatever it is, hurts nobody. Knows
no other configuration to compare with.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from myxtts.assembly.identity import require_source
from myxtts.config import Settings
from myxtts.data.clips import Prepared
from myxtts.data.fill import Progress
from myxtts.data.prepare import prepare
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.settings import Loaded
from myxtts.tools.noted import NotedRehearsal, mean_stage_ms

PROBE_STEPS = 8
"""Steps that tell how long one takes, and the fewest that count then."""
MOST_S = 8.0
"""Seconds of training that are enough to tell a speed."""


class Refused(PipelineError):
    """A configuration that this machine cannot train."""

    def __init__(self, reason: str, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class Trial:
    """What a configuration does."""

    clips_per_s: float
    """In the long run: what buffers held at the start and no longer at the end is not counted."""
    fed_clips_per_s: float
    """If every batch had been there at once."""
    memory_mb: dict[str, float]
    """The most that each role took; empty on the CPU."""
    stage_ms: dict[str, float]
    """Mean time of each stage for a batch."""

    @property
    def headspace(self) -> float:
        """How many times faster a perfect feed would be."""
        return max(self.fed_clips_per_s / max(self.clips_per_s, 1e-9), 1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Measure = Callable[[Loaded], Trial]


def prepare_corpus(settings: Settings, progress: Progress | None = None) -> Prepared:
    """The corpus as a new run would train on it."""
    require_source(settings, None)
    data, source = settings.data, settings.training.init_from
    if data.tokenizer is None and source is not None:
        data = replace(data, tokenizer=source)
    return prepare(data, progress)


@contextlib.contextmanager
def set_apart(prepared: Prepared) -> Iterator[Prepared]:
    """The same corpus with a temporary place for codes, so that fresh weights leave none in the user's cache."""
    with tempfile.TemporaryDirectory(prefix="myxtts-trial-") as folder:
        yield replace(prepared, root=Path(folder))


def try_out(loaded: Loaded, prepared: Prepared, stage: str, num_steps: int) -> Trial:
    """Time at most so many steps in this process, fewer if they are slow; Refused if that is not possible."""
    try:
        with set_apart(prepared) as apart:
            rehearsal = NotedRehearsal(loaded, apart, stage)
            rehearsal.fill_codes()
            most_steps = num_steps
            if num_steps > PROBE_STEPS:
                step_s = (probe := rehearsal.measure(PROBE_STEPS)).seconds / len(probe.times)
                most_steps = max(int(MOST_S / step_s), PROBE_STEPS)
            num_steps = min(num_steps, most_steps)
            measured = rehearsal.steady(num_steps, most_steps)
    except torch.OutOfMemoryError as error:
        raise Refused(str(error).splitlines()[0], out_of_memory=True) from error
    except (PipelineError, ConfigError) as error:
        raise Refused(str(error), isinstance(error.__cause__, torch.OutOfMemoryError)) from error
    idle_share = sum(step.gap_ms for step in measured.times) / max(sum(s.step_ms for s in measured.times), 1e-9)
    return Trial(
        clips_per_s=rehearsal.long_run_clips_per_s(measured),
        fed_clips_per_s=measured.clips_per_s / max(1 - idle_share, 1e-3),
        memory_mb=measured.memory_mb,
        stage_ms=mean_stage_ms(measured),
    )


def try_out_apart(loaded: Loaded, stage: str, num_steps: int, limit_s: float = math.inf) -> Trial:
    """The same in a process of its own, which is ended after `limit_s`."""
    context = multiprocessing.get_context("spawn")
    answers, questions = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(questions, loaded, stage, num_steps), name="trial")
    process.start()
    questions.close()
    try:
        if not answers.poll(None if math.isinf(limit_s) else limit_s):
            raise Refused(f"no answer within {limit_s:.0f} s")
        answer = answers.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -9
        died = "it was killed, which is what the system does when host memory runs out" if killed else "it crashed"
        raise Refused(f"the process that tried it ended: {died}", out_of_memory=killed) from None
    finally:
        process.terminate()
        process.join()
        answers.close()
    if isinstance(answer, Trial):
        return answer
    reason, out_of_memory, about_data = answer
    raise DatasetError(reason) if about_data else Refused(reason, out_of_memory)


def _answer(connection: Connection, loaded: Loaded, stage: str, num_steps: int) -> None:
    """In the process of a trial: send what was measured, or why nothing was."""
    try:
        connection.send(try_out(loaded, prepare_corpus(loaded.settings), stage, num_steps))
    except Refused as error:
        connection.send((str(error), error.out_of_memory, False))
    except DatasetError as error:
        connection.send((str(error), False, True))
    except Exception as error:  # whatever a compiler or driver raises is the answer, not a traceback in the way
        first = (str(error).splitlines() or [""])[0]
        connection.send((f"{type(error).__name__}: {first}", "out of memory" in str(error), False))
