"""What a feed delivers: every batch once, in order, equal to what each clip gives alone, however it got there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pipeline_fixtures import (
    LATENTS,
    PLANS,
    SEED,
    SHORT,
    SPEECH,
    Corpus,
    Read,
    Stamps,
    assert_same,
    codes_alone,
    crop_mels_alone,
    jobs,
    read,
    reading_mels,
    references_alone,
    short,
    speech,
    wait_for,
    wave_alone,
)
from torch import Tensor

from myxtts.config import SAMPLE_RATE, SAMPLES_PER_CODE, num_codes_of
from myxtts.data.batches import (
    FLOW_CODES,
    MARGIN_CODES,
    MAX_CROP_FRAMES,
    SEGMENT_CODES,
    Gatherer,
    GatherJob,
    segments,
)
from myxtts.data.order import Cursor
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import pack
from myxtts.model.mel import DVAE_MEL, SPEAKER_SAMPLE_RATE, LogMel, resample
from myxtts.model.vocoder import CROP_SAMPLES, frames_of
from myxtts.pipeline.feed import Depths
from myxtts.pipeline.frontend import DecoderFrontend, DvaeFrontend, GptFrontend, SpeakerFrontend

__all__ = ["short", "speech"]

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCH = 5
"""Batches of an epoch: fourteen clips by threes."""


def check_inputs(corpus: Corpus, batch: Read, job: GatherJob) -> None:
    """Ids, codes and conditioning mels against those of every clip alone."""
    clips, tensors = corpus.clips, batch.tensors
    for slot, clip in enumerate(job.plan.clips.tolist()):
        ids, codes = clips.ids[clips.ids_rows[clip]].tolist(), codes_alone(corpus, clip).tolist()
        assert tensors["num_ids"][slot] == len(ids)
        assert tensors["ids"][slot].tolist() == ids + [0] * (tensors["ids"].shape[1] - len(ids))
        assert tensors["num_codes"][slot] == len(codes)
        assert tensors["codes"][slot].tolist() == codes + [0] * (tensors["codes"].shape[1] - len(codes))
    mels = crop_mels_alone(corpus, job.plan.clips, job.plan.epoch)
    assert tensors["num_frames"].tolist() == [len(mel) for mel in mels]
    expected = torch.zeros_like(tensors["mel"])
    expected[: sum(map(len, mels))] = torch.cat(mels)
    torch.testing.assert_close(tensors["mel"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("code_budget", [None, 64], ids=["packed", "more codes than there is room for"])
def test_an_epoch_and_more_equals_every_clip_heard_alone(
    speech: Corpus, code_budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code_budget is not None:
        make = Gatherer.__init__

        def make_small(gatherer: Gatherer, *arguments: Any, **options: Any) -> None:
            make(gatherer, *arguments, **options)
            gatherer.code_budget = code_budget

        monkeypatch.setattr(Gatherer, "__init__", make_small)
    with speech.feed(num_batches=EPOCH + 1) as feed:
        batches = read(feed)
    expected = jobs(speech, EPOCH + 1)
    assert len(batches) == len(expected)
    for batch, job in zip(batches, expected, strict=True):
        check_inputs(speech, batch, job)
        assert batch.after == job.plan.after
        assert batch.tensors["weights"].tolist() == job.plan.weights.tolist()
        assert batch.tensors["totals"].tolist() == job.totals.tolist()
    codes = torch.cat([batch.tensors["codes"].flatten() for batch in batches])
    assert len(codes.unique()) > 10  # this network tells sounds apart
    assert batches[0].after == Cursor(0, 1)
    assert batches[-1].after == Cursor(1, 1)


def test_clips_of_one_voice_are_references_for_each_other(speech: Corpus) -> None:
    shared = replace(speech, voices=np.arange(len(speech.clips)) % 2)
    with shared.feed(num_batches=EPOCH) as feed:
        batches = read(feed)
    for batch, job in zip(batches, jobs(shared, EPOCH), strict=True):
        check_inputs(shared, batch, job)
    with shared.feed(make_frontend=DecoderFrontend, num_batches=1) as feed:
        check_decoder(shared, read(feed)[0], jobs(shared, 1)[0])


def test_crops_for_the_speaker_encoder_are_of_one_voice_and_repeat_short_recordings(speech: Corpus) -> None:
    voices = np.arange(len(speech.clips)) % 2
    voices[3] = 9  # has no other clip
    shared = replace(speech, voices=voices)
    with shared.feed(make_frontend=SpeakerFrontend, num_batches=EPOCH) as feed:
        batches = read(feed)
    span = CROP_SAMPLES * SAMPLE_RATE // SPEAKER_SAMPLE_RATE
    for batch, job in zip(batches, jobs(shared, EPOCH), strict=True):
        clips = job.plan.clips
        expected = np.where(voices[clips] < 9, voices[clips], -1)
        assert batch.tensors["voices"].tolist() == expected.tolist()
        num_codes = num_codes_of(shared.clips.num_samples[clips])
        starts = SAMPLES_PER_CODE * segments(SEED, job.plan.epoch, clips, num_codes, SEGMENT_CODES)
        others = references_alone(shared, clips, job.plan.epoch)
        for slot, (clip, start) in enumerate(zip(clips.tolist(), starts.tolist(), strict=True)):
            for crop, wave, first in zip(
                batch.tensors["crops"][slot], (wave_alone(shared, clip), others[slot]), (start, 0), strict=True
            ):
                wave = wave.flatten()
                whole = wave.repeat(-(-(first + span) // len(wave)))[first : first + span]
                torch.testing.assert_close(crop, resample(whole, SPEAKER_SAMPLE_RATE))


def test_mels_for_the_dvae_equal_every_clip_heard_alone(speech: Corpus) -> None:
    with speech.feed(make_frontend=DvaeFrontend, num_batches=2) as feed:
        batches = read(feed)
    for batch, job in zip(batches, jobs(speech, 2), strict=True):
        expected = torch.zeros_like(batch.tensors["mel"])
        for slot, clip in enumerate(job.plan.clips.tolist()):
            mel = LogMel(DVAE_MEL)(wave_alone(speech, clip), speech.model.mel_stats)[0]
            expected[slot, :, : mel.shape[1]] = mel
            assert batch.tensors["num_frames"][slot] == mel.shape[1]
        torch.testing.assert_close(batch.tensors["mel"], expected, rtol=1e-4, atol=1e-4)
        assert batch.tensors["totals"].tolist() == job.totals.tolist()


def latents_alone(corpus: Corpus, clip: int, mel: Tensor) -> Tensor:
    """The GPT's latents [codes, dim] of one clip in a row of its own."""
    clips, gpt, codes = corpus.clips, corpus.model.gpt, codes_alone(corpus, clip)[None]
    ids = torch.from_numpy(clips.ids[clips.ids_rows[clip]].copy())[None]
    frames = pack_frames(mel, torch.tensor([len(mel)]), MAX_CROP_FRAMES)
    numbers = torch.tensor([ids.shape[1]]), torch.tensor([codes.shape[1]])
    packed = pack(gpt.dims, frames, ids, numbers[0], codes, numbers[1], budget=200)
    return gpt.code_latents(packed)[0, : codes.shape[1]]


def check_decoder(corpus: Corpus, batch: Read, job: GatherJob) -> None:
    """Latents, sound and voice against those of every clip alone."""
    clips, num_samples = job.plan.clips, corpus.clips.num_samples[job.plan.clips]
    length = FLOW_CODES if corpus.model.dims.reads_mels else SEGMENT_CODES
    pieces = segments(SEED, 0, clips, num_codes_of(num_samples), length)
    references = references_alone(corpus, clips, 0)
    encoder = corpus.model.hifigan_decoder.speaker_encoder
    for slot, mel in enumerate(crop_mels_alone(corpus, clips, 0)):
        clip, piece = int(clips[slot]), int(pieces[slot])
        latents = latents_alone(corpus, clip, mel)
        silence = torch.zeros(latents.shape[1])
        if corpus.model.dims.reads_mels:
            codes = codes_alone(corpus, clip)[None].long()
            mels = corpus.model.dvae.mel_rows(codes, corpus.model.mel_stats)[0]
            silence = torch.cat([torch.full((mels.shape[1],), math.log(1e-5)), silence])
            latents = torch.cat([mels, latents], 1)
        places = torch.arange(piece - MARGIN_CODES, piece + length + MARGIN_CODES)
        repeated = latents[places.clamp(0, len(latents) - 1)]
        expected = torch.where((places < len(latents) + MARGIN_CODES)[:, None], repeated, silence)
        torch.testing.assert_close(batch.tensors["latents"][slot], expected, rtol=1e-3, atol=1e-4)
        alone, sound = wave_alone(corpus, clip), batch.tensors["wave"][slot]
        before, after = torch.zeros(1, MARGIN_CODES * SAMPLES_PER_CODE), torch.zeros(1, 2 * len(sound))
        whole = torch.cat([before, alone, after], 1)[:, piece * SAMPLES_PER_CODE :]
        first = frames_of(MARGIN_CODES) * 256
        expected = resample(whole, 24000)[0, first : first + len(sound)]
        torch.testing.assert_close(sound[64:-64], expected[64:-64], rtol=1e-4, atol=1e-5)
        heard = references[slot].repeat(1, 20)[:, : 3 * SAMPLE_RATE]
        voice = encoder(resample(heard, 16000), l2_norm=True)[0]
        torch.testing.assert_close(batch.tensors["speaker"][slot], voice, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [SEGMENT_CODES, 24])
def test_what_the_decoder_learns_from_equals_every_clip_heard_alone(
    speech: Corpus, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("myxtts.data.batches", "pipeline_fixtures", __name__):
        monkeypatch.setattr(f"{module}.SEGMENT_CODES", length)
    with speech.feed(make_frontend=DecoderFrontend, num_batches=EPOCH) as feed:
        batches = read(feed)
    assert 13 < num_codes_of(speech.clips.num_samples).min() < 24
    for batch, job in zip(batches, jobs(speech, EPOCH), strict=True):
        check_decoder(speech, batch, job)


def test_mels_for_the_decoder_equal_every_clip_heard_alone(
    speech: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("myxtts.data.batches", __name__):  # shorter than some clips, longer than others
        monkeypatch.setattr(f"{module}.FLOW_CODES", 24)
    mels = reading_mels(speech)
    with mels.feed(make_frontend=DecoderFrontend, num_batches=2) as feed:
        for batch, job in zip(read(feed), jobs(mels, 2), strict=True):
            check_decoder(mels, batch, job)


@pytest.fixture(scope="module")
def plain(short: Corpus) -> list[Read]:
    """Two epochs and a bit, in the plainest way."""
    with short.feed(depths=Depths(1, 1, 1), num_batches=2 * EPOCH + 2) as feed:
        return read(feed)


@pytest.mark.parametrize("mode", PLANS)
@pytest.mark.parametrize("gatherers", [1, 3])
def test_modes_and_threads_change_no_bit(short: Corpus, plain: list[Read], mode: str, gatherers: int) -> None:
    with short.feed(PLANS[mode], depths=Depths(4, 3, gatherers), num_batches=len(plain)) as feed:
        assert_same(read(feed), plain)


@pytest.mark.parametrize(("taken", "accumulate"), [(0, 1), (3, 1), (4, 1), (5, 1), (7, 1), (4, 2), (6, 3)])
def test_a_feed_continues_where_another_was_left(short: Corpus, taken: int, accumulate: int) -> None:
    options = {"make_frontend": Stamps, "accumulate": accumulate}
    with short.feed(**options) as feed:
        whole = read(feed, 12)
    with short.feed(**options) as feed:
        first = read(feed, taken)
        cursor = feed.cursor()
    assert cursor == Cursor(*divmod(taken, EPOCH))
    with short.feed(cursor=cursor, **options) as feed:
        assert_same(first + read(feed, 12 - taken), whole)
    totals = [batch.tensors["totals"].tolist() for batch in whole]
    assert all(totals[at] == totals[at - at % accumulate] for at in range(12))


def test_a_batch_that_was_not_trained_on_does_not_count(short: Corpus) -> None:
    with short.feed(make_frontend=Stamps) as feed:
        read(feed, 2)
        with pytest.raises(KeyboardInterrupt), feed.next():
            raise KeyboardInterrupt
        assert feed.cursor() == Cursor(0, 2)


@pytest.mark.parametrize("mode", PLANS)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_finite_feed_ends_with_none_again_and_again(short: Corpus, mode: str, ahead: bool) -> None:
    data = replace(SHORT, prefetch_to_gpu=ahead)
    for count in (0, 1, 7):
        with short.feed(PLANS[mode], Stamps, data=data, num_batches=count) as feed:
            assert len(read(feed)) == count
            for _ in range(2):
                with feed.next() as batch:
                    assert batch is None


def test_replay_gives_one_batch_for_ever(short: Corpus, plain: list[Read]) -> None:
    with short.feed(replay=True) as feed:
        assert_same(read(feed, 25), [plain[0]] * 25)


def test_codes_are_computed_once_and_then_read(
    short: Corpus, plain: list[Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodes = Mock(side_effect=short.model.dvae.encode_packed)
    monkeypatch.setattr(short.model.dvae, "encode_packed", encodes)
    cache = short.cache(tmp_path)
    with short.feed(codes=cache, num_batches=EPOCH) as feed:
        assert_same(read(feed), plain[:EPOCH])
        assert encodes.call_count == EPOCH
        wait_for(lambda: cache.known(np.arange(len(cache))).all())
    cache.close()
    cache = short.cache(tmp_path)  # as the next run opens it
    with short.feed(PLANS["dual"], codes=cache, num_batches=len(plain)) as feed:
        assert_same(read(feed), plain)
    assert encodes.call_count == EPOCH
    cache.close()
    other = short.cache(tmp_path, dvae_key="another DVAE")
    with short.feed(codes=other, num_batches=2) as feed:
        assert_same(read(feed), plain[:2])
    assert encodes.call_count == EPOCH + 2
    other.close()


def test_the_decoder_gets_the_same_from_loose_shapes(speech: Corpus) -> None:
    batches = []
    for fixed in (True, False):
        data = replace(SPEECH, pad_to_fixed_length=fixed)
        with speech.feed(make_frontend=DecoderFrontend, data=data, num_batches=2) as feed:
            batches.append(read(feed))
    for static, loose in zip(*batches, strict=True):
        assert loose.sizes != static.sizes
        for name in ("latents", "wave", "speaker"):
            torch.testing.assert_close(loose.tensors[name], static.tensors[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("mode", "reads_mels"), [*((mode, False) for mode in PLANS), ("buffered", True)])
def test_latents_are_computed_once_and_then_read(
    speech: Corpus, mode: str, reads_mels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In later epochs other segments are cut from them; references stay those of the first."""
    if reads_mels:
        speech = reading_mels(speech)
        monkeypatch.setattr("myxtts.data.batches.FLOW_CODES", 24)
        monkeypatch.setattr("pipeline_fixtures.LATENTS", LATENTS._replace(segment=24))
    computed, compute = [], DecoderFrontend._encode_latents
    monkeypatch.setattr(DecoderFrontend, "_encode_latents", lambda *given: computed.append(1) or compute(*given))
    data = replace(SPEECH, cache_latents=True)

    def read_from(folder: str, cursor: Cursor, count: int) -> list[Read]:
        computed.clear()
        cache = speech.latents(tmp_path / folder)
        options = {"codes": cache, "data": data, "num_batches": count, "cursor": cursor}
        with speech.feed(PLANS[mode], DecoderFrontend, **options) as feed:
            batches = read(feed)
        cache.close()
        return batches

    first = read_from("kept", Cursor(), EPOCH)
    assert len(computed) == EPOCH
    again = read_from("kept", Cursor(), 2 * EPOCH)
    assert not computed
    assert_same(read_from("kept", Cursor(), 2 * EPOCH), again)
    second = read_from("other", Cursor(1), EPOCH)
    assert len(computed) == EPOCH
    with speech.feed(PLANS[mode], DecoderFrontend, num_batches=EPOCH) as feed:
        plain = read(feed)
    for found, expected in zip([*first, *again], [*plain, *plain, *second], strict=True):
        for name, value in expected.tensors.items():  # kept in bf16
            rounding = 2e-2 if name in ("latents", "speaker") else 0
            torch.testing.assert_close(found.tensors[name], value, rtol=rounding, atol=rounding, msg=name)


@pytest.mark.parametrize("make_frontend", [GptFrontend, DvaeFrontend])
@pytest.mark.parametrize("mode", PLANS)
def test_loose_shapes_follow_the_batch_and_hold_the_same(
    short: Corpus, make_frontend: type[GptFrontend], mode: str
) -> None:
    loose = replace(SHORT, pad_to_fixed_length=False)
    with short.feed(make_frontend=make_frontend, num_batches=2 * EPOCH) as feed:
        static = read(feed)
    with short.feed(PLANS[mode], make_frontend, data=loose, num_batches=2 * EPOCH) as feed:
        following = read(feed)
    assert len({batch.tensors["mel"].shape for batch in static}) == 1
    assert len({batch.tensors["mel"].shape for batch in following}) > 1
    for one, other in zip(static, following, strict=True):
        for name, tensor in other.tensors.items():
            full = one.tensors[name]
            inside = full[tuple(slice(size) for size in tensor.shape)]
            torch.testing.assert_close(tensor, inside, rtol=1e-5, atol=1e-5)
            assert full.count_nonzero() == inside.count_nonzero()  # what was cut off held nothing
