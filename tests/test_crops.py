"""Reference voices and decoder pieces: the same for the same clip and epoch, always inside the clip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE
from myxtts.data.batches import (
    FRAME_MULTIPLE,
    MAX_CROP_FRAMES,
    Batches,
    crops,
    fit,
    frame_budget,
    packed_tokens,
    segments,
    voices_of,
)
from myxtts.data.store import Rows


def lengths(num_clips: int, seed: int = 0, least_s: float = 0.5, most_s: float = 12.0) -> Rows:
    seconds = np.random.default_rng(seed).uniform(least_s, most_s, num_clips)
    return (seconds * SAMPLE_RATE).astype(np.int64)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 5))
def test_the_reference_is_the_next_clip_of_the_same_voice(voices: list[int], epoch: int) -> None:
    size = len(voices)
    num_samples = lengths(2 * size, seed=size).reshape(2, size)
    rows = np.array([voices, voices[::-1]])
    found = crops(1, epoch, np.arange(2 * size).reshape(2, size), num_samples, rows)
    for row, of_batch in enumerate(rows.tolist()):
        for slot, voice in enumerate(of_batch):
            others = [(slot + step) % size for step in range(1, size) if of_batch[(slot + step) % size] == voice]
            source = found.slots[row, slot]
            assert source == (others[0] if others else slot)
            end = found.starts[row, slot] + found.samples[row, slot]
            assert 0 <= found.starts[row, slot] < end <= num_samples[row, source]
            if others and num_samples[row, source] < 3 * SAMPLE_RATE:
                assert found.samples[row, slot] == num_samples[row, source], "all of it may be heard"


def test_a_clip_that_only_fills_a_batch_up_is_nobodys_reference() -> None:
    num_samples = lengths(20, seed=3)
    clips, weights = Batches(packed_tokens(np.full(20, 30), num_samples), batch_size=32, seed=1).epoch(0)
    assert (weights == 0).sum() == 12
    alike = voices_of(clips, weights, np.zeros(20, np.int64))
    slots = crops(1, 0, clips, num_samples[clips], alike).slots
    heard = np.take_along_axis(clips, slots, -1)[weights > 0]
    assert sorted(heard) == list(range(20)), "each lends its voice once"
    assert (heard != clips[weights > 0]).all(), "nobody hears himself"


def test_the_cut_of_a_clip_depends_on_nothing_but_seed_epoch_and_clip() -> None:
    num_samples, clips = lengths(200), np.arange(200)
    whole = crops(1, 7, clips, num_samples)
    order = np.random.default_rng(4).permutation(200)[:50]  # fewer, in another order, in another company
    part = crops(1, 7, order, num_samples[order])
    assert np.array_equal(whole.starts[order], part.starts)
    assert np.array_equal(whole.samples[order], part.samples)
    pieces = segments(1, 7, clips, num_samples // 1024, 32)
    assert np.array_equal(pieces[order], segments(1, 7, order, num_samples[order] // 1024, 32))


def test_these_cuts_are_for_ever() -> None:
    """A run that is resumed with another version must hear the same reference voices."""
    found = crops(1234, 3, np.array([0, 1, 99_999]), np.array([200_000, 90_000, 30_000]))
    assert found.starts.tolist() == [45451, 1555, 7119]
    assert found.samples.tolist() == [80074, 85138, 15000]
    assert segments(1234, 3, np.array([0, 1, 99_999]), np.array([200, 90, 30]), 32).tolist() == [77, 9, 0]


@pytest.mark.parametrize("other", [(2, 7), (1, 8), (2**32 - 1, 7), (1, 100_000)])
def test_another_seed_or_epoch_cuts_otherwise(other: tuple[int, int]) -> None:
    num_samples, clips = lengths(500, least_s=7.0), np.arange(500)
    one, two = crops(1, 7, clips, num_samples), crops(*other, clips, num_samples)
    assert (one.starts != two.starts).mean() > 0.99
    assert (one.samples != two.samples).mean() > 0.99
    pieces = segments(1, 7, clips, num_samples // 1024, 32), segments(*other, clips, num_samples // 1024, 32)
    assert (pieces[0] != pieces[1]).mean() > 0.9


def test_length_start_and_piece_are_independent_and_use_their_whole_range() -> None:
    num_samples, clips = np.full(20_000, 10 * SAMPLE_RATE), np.arange(20_000)
    chosen = crops(3, 0, clips, num_samples)
    pieces = segments(3, 0, clips, np.full(20_000, 215), 32)
    length = (chosen.samples - 3 * SAMPLE_RATE) / (3 * SAMPLE_RATE)
    start = chosen.starts / (num_samples - chosen.samples)
    for values in (length, start, pieces / 183):
        assert (values.min(), values.max()) == pytest.approx((0, 1), abs=0.002)
        assert np.histogram(values, 10)[0] / 2000 == pytest.approx(np.ones(10), abs=0.15)
    assert np.abs(np.corrcoef([length, start, pieces]) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(length[1:], length[:-1])[0, 1]) < 0.03  # neighbours neither


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.lists(st.integers(1, 700_000), min_size=1, max_size=40)
)
def test_crops_and_pieces_lie_inside_their_clips(seed: int, epoch: int, samples: list[int]) -> None:
    num_samples, clips = np.array(samples), np.arange(len(samples))
    chosen = crops(seed, epoch, clips, num_samples)
    assert (chosen.starts >= 0).all()
    assert (chosen.samples >= 1).all()
    assert (chosen.starts + chosen.samples <= num_samples).all()
    full = (chosen.samples >= 3 * SAMPLE_RATE) & (chosen.samples <= 6 * SAMPLE_RATE)
    assert (full | (chosen.samples == np.maximum(num_samples // 2, 1))).all()
    assert full[num_samples >= 6 * SAMPLE_RATE].all()
    assert not full[num_samples < 3 * SAMPLE_RATE].any()
    assert (chosen.frames == chosen.samples // HOP_SAMPLES + 1).all()
    assert chosen.frames.max() <= MAX_CROP_FRAMES
    num_codes = -(-(num_samples // HOP_SAMPLES + 1) // 4)
    starts = segments(seed, epoch, clips, num_codes, 32)
    assert (starts >= 0).all()
    assert (starts + 32 <= np.maximum(num_codes, 32)).all()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20), st.integers(0, 1000), st.floats(0, 1))
def test_fitted_crops_keep_to_the_budget_and_their_starts(num_clips: int, seed: int, share: float) -> None:
    num_samples = lengths(num_clips, seed)
    chosen = crops(1, 0, np.arange(num_clips), num_samples)
    budget = int(2 * num_clips + share * (chosen.frames.sum() + 10 - 2 * num_clips))
    fitted = fit(chosen, budget)
    assert fitted.frames.sum() <= budget
    assert np.array_equal(fitted.starts, chosen.starts)
    assert (fitted.samples <= chosen.samples).all()
    assert (fitted.samples >= np.minimum(chosen.samples, HOP_SAMPLES)).all()
    if chosen.frames.sum() <= budget:
        assert np.array_equal(fitted.samples, chosen.samples)


def test_a_small_excess_is_shared_by_all() -> None:
    num_samples = lengths(10, least_s=8.0)
    chosen = crops(1, 0, np.arange(10), num_samples)
    fitted = fit(chosen, int(chosen.frames.sum()) - 15)
    assert set((chosen.samples - fitted.samples).tolist()) == {2 * HOP_SAMPLES}


@pytest.mark.parametrize(("num_clips", "batch_size"), [(40, 4), (500, 16), (2000, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_the_frame_budget_is_enough_for_nearly_every_batch(num_clips: int, batch_size: int, seed: int) -> None:
    num_samples = lengths(num_clips, seed)
    batches = Batches(packed_tokens(num_samples // 2000, num_samples), batch_size, seed)
    budget = frame_budget(batches, num_samples, seed)
    assert budget % FRAME_MULTIPLE == 0
    needed = []
    for epoch in range(12):
        clips, _ = batches.epoch(epoch)
        frames = crops(seed, epoch, clips.ravel(), num_samples[clips.ravel()]).frames
        needed.append(frames.reshape(clips.shape).sum(axis=1))
    assert max(needed[0].max(), needed[1].max()) <= budget
    excess = np.maximum(np.concatenate(needed) - budget, 0)
    assert (excess == 0).mean() > 0.9
    assert excess.sum() < 0.002 * np.concatenate(needed).sum()  # what the others lose is not worth a longer row
    assert budget < max(needed[0].max(), needed[1].max()) + FRAME_MULTIPLE  # and not more than that
