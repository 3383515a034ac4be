"""The engine: many requests at once, each as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from synthesis_fixtures import LONG_TEXT, TEXTS

from myxtts.synthesis.engine import Cancelled, End, Engine, EngineClosed, Piece, QueueFull, Request
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.text import UnspeakableText
from myxtts.synthesis.voices import Voice

pytest_plugins = ["synthesis_fixtures", "training_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Listener:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ends: list[End] = []
        self._has_ended = threading.Event()

    def __call__(self, heard: Piece | End) -> None:
        if isinstance(heard, Piece):
            assert not self.ends, "nothing comes after the end"
            self.pieces.append(heard)
        else:
            self.ends.append(heard)
            self._has_ended.set()

    def end(self) -> End:
        assert self._has_ended.wait(60), "the request never ended"
        return self.ends[0]

    @property
    def wave(self) -> np.ndarray:
        assert self.end().error is None, self.ends
        return np.concatenate([piece.wave for piece in self.pieces])


@pytest.fixture
def engine(synthesizer: Synthesizer) -> Iterator[Engine]:
    engine = Engine(synthesizer, slots=8)
    yield engine
    engine.close(drain=False)


def test_a_request_is_spoken_as_a_stream_is(engine: Engine, synthesizer: Synthesizer, anna: Voice) -> None:
    expected = np.concatenate(list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4)))
    listener = Listener()
    engine.submit(Request(LONG_TEXT, anna, "en", seed=4), listener)
    assert np.array_equal(listener.wave, expected)
    report = listener.end().report
    assert report is not None and report.seed == 4


def test_what_cannot_be_spoken_is_refused_at_once(engine: Engine, anna: Voice) -> None:
    with pytest.raises(UnspeakableText):
        engine.submit(Request("!?", anna, "en"), Listener())


def test_a_cancelled_request_ends_with_an_error(engine: Engine, anna: Voice) -> None:
    listener = Listener()
    engine.submit(Request(LONG_TEXT, anna, "en", seed=4), listener).cancel()
    assert isinstance(listener.end().error, Cancelled)


def test_a_full_queue_says_when_to_try_again(synthesizer: Synthesizer, anna: Voice) -> None:
    engine, listeners = Engine(synthesizer, slots=2, queue_limit=1), [Listener() for _ in range(40)]
    with pytest.raises(QueueFull) as refused:
        for listener in listeners:
            engine.submit(Request(TEXTS[0], anna, "en", seed=4), listener)
    assert refused.value.retry_after_s >= 1
    engine.close(drain=True)
    assert all(end.error is None for listener in listeners for end in listener.ends)
    with pytest.raises(EngineClosed):
        engine.submit(Request(TEXTS[0], anna, "en"), Listener())
