"""What can be measured of a clip without a model: noise, clipping, bandwidth, music, loudness. Numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from myxtts.audio import Wave

LEVEL_SAMPLES = 128  # at 16 kHz: 8 ms
TARGET_LUFS, HIGHEST_PEAK_DB = -23.0, -1.0
_MUSIC_FROM = 0.5  # score of audio without speech that counts as music
SILENT_DB = -55.0  # audio without speech below this is silence, above it noise or music
_QUIETEST = 1e-10
_EMPHASIS, _MOST_RANGE_DB = 0.9, 60.0
_NOISE_SHARE = 0.1  # share of a clip whose level is that of the background
_FULL_SCALE, _FLAT, _FLAT_RUN = 0.99, 0.9995, 3
_SPECTRUM_SAMPLES, _SPECTRUM_SMOOTH, _BANDWIDTH_DB, _ABOVE_BACKGROUND_DB = 2048, 33, 65.0, 7.0
_TONE_FRAMES = 12  # fewer prove nothing: about 0.3 s
_TONE_SAMPLES, _TONE_HOP, _TONE_LAG, _TONE_BINS, _TONE_SMOOTH = 1024, 256, 4, slice(10, 192), 31
_TONAL = 0.5  # correlation of spectra 64 ms apart that is certainly music; noise has about 0
_AUDIBLE_DB = 45.0  # music this far below speech does not count
_GATE_S, _ABSOLUTE_GATE, _RELATIVE_GATE = 0.4, -70.0, -10.0

Levels = npt.NDArray[np.float32]


def levels_of(wave: Wave) -> Levels:
    """The level in dB of every 8 ms of samples at 16 kHz."""
    whole = wave[: len(wave) // LEVEL_SAMPLES * LEVEL_SAMPLES].reshape(-1, LEVEL_SAMPLES)
    levels: Levels = 10 * np.log10(np.square(whole).mean(1) + _QUIETEST)
    return levels


def contrast_of(wave: Wave) -> Levels:
    """How far every 8 ms of samples at 16 kHz is above the background in dB, at low frequencies or at high ones.

    The end of a word may be a burst above 3 kHz that is far weaker than a rumbling room.
    """
    found = []
    for part in (wave, wave - np.float32(_EMPHASIS) * np.concatenate([wave[:1], wave[:-1]])):
        levels = levels_of(part.astype(np.float32))
        if len(levels):
            found.append(levels - max(np.percentile(levels, 10), np.percentile(levels, 90) - _MOST_RANGE_DB))
    contrast: Levels = np.maximum(*found).astype(np.float32) if found else levels_of(wave)
    return contrast


def snr_db(levels: Levels, is_speech: npt.NDArray[np.bool_]) -> float:
    """The ratio of speech to the quietest tenth of a clip between its first word and its last.

    The silence at both ends does not count: noise may begin and end with the speech.
    """
    frames = np.flatnonzero(np.repeat(is_speech, 4)[: len(levels)])
    inside = levels[frames[0] : frames[-1] + 1] if len(frames) else levels
    power = np.sort(10 ** (inside / 10))
    count = max(1, round(_NOISE_SHARE * len(power)))
    noise, speech = float(power[:count].mean()), float(power[-5 * count :].mean())
    return float(10 * np.log10(max(speech - noise, _QUIETEST) / max(noise, _QUIETEST)))


def clipping(wave: Wave) -> float:
    """The share of samples at full scale, or in flat runs at the peak: clipped before the level was reduced."""
    loud = np.abs(wave)
    flat = loud >= _FLAT * max(float(loud.max(initial=0.0)), 1e-4)
    runs = np.convolve(flat, np.ones(_FLAT_RUN), "valid") >= _FLAT_RUN
    return float(max((loud >= _FULL_SCALE).mean(), runs.sum() * _FLAT_RUN / len(wave) if runs.sum() > 1 else 0.0))


def bandwidth_hz(wave: Wave, rate: int) -> float:
    """The highest frequency at which speech is above the clip's own background, and within 65 dB of its peak."""
    size = _SPECTRUM_SAMPLES
    if len(wave) < 4 * size:
        return rate / 2
    frames = np.lib.stride_tricks.sliding_window_view(wave, size)[:: size // 2] * np.hanning(size)
    power = np.square(np.abs(np.fft.rfft(frames)))
    quietest = np.argsort(power.sum(1))[: max(1, len(power) // 10)]
    kernel = np.ones(_SPECTRUM_SMOOTH) / _SPECTRUM_SMOOTH
    background, speech = (
        10 * np.log10(np.convolve(spectrum, kernel, "same") + 1e-12)
        for spectrum in (power[quietest].mean(0), np.percentile(power, 95, axis=0))
    )
    above = np.flatnonzero((speech > background + _ABOVE_BACKGROUND_DB) & (speech > speech.max() - _BANDWIDTH_DB))
    return float(above[-1] * rate / size) if len(above) else 0.0


def music(wave: Wave, is_speech: npt.NDArray[np.bool_] | None = None) -> float:
    """How likely tones last between the words (16 kHz), from 0 to 1; without a mask, anywhere.

    Voices change pitch within 64 ms, noise has no pitch: only what is played keeps its spectrum. Music far below
    the level of speech does not count.
    """
    size = _TONE_SAMPLES
    if len(wave) < 2 * size:
        return 0.0
    frames = np.lib.stride_tricks.sliding_window_view(wave, size)[::_TONE_HOP]
    level = np.square(frames).mean(1)
    loud = float(np.percentile(level, 90))
    usable = level > max(1e-8, loud * 10 ** (-_AUDIBLE_DB / 10))
    if is_speech is not None:
        usable &= _between_words(is_speech, len(frames))
    spectra = np.log(np.abs(np.fft.rfft(frames * np.hanning(size)))[:, _TONE_BINS] + 1e-6)
    around = np.pad(spectra, ((0, 0), (_TONE_SMOOTH // 2, _TONE_SMOOTH // 2)), "reflect")
    detail = spectra - np.lib.stride_tricks.sliding_window_view(around, _TONE_SMOOTH, 1).mean(2)
    detail /= np.linalg.norm(detail, axis=1, keepdims=True) + 1e-9
    both = usable[:-_TONE_LAG] & usable[_TONE_LAG:]
    alike = np.sum(detail[:-_TONE_LAG] * detail[_TONE_LAG:], 1)
    within = np.zeros(len(both), bool)  # music may begin and end with the speech
    words = np.flatnonzero(is_speech if is_speech is not None else [])
    if len(words):
        within[words[0] * 512 // _TONE_HOP : words[-1] * 512 // _TONE_HOP] = True
    similar = [float(alike[part].mean()) for part in (both, both & within) if part.sum() >= _TONE_FRAMES]
    return float(np.clip(max(similar, default=0.0) / _TONAL, 0.0, 1.0))


def _between_words(is_speech: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    """True for frames of the tone analysis that touch no frame of speech (of 512 samples)."""
    starts = np.arange(count) * _TONE_HOP // 512
    ends = (np.arange(count) * _TONE_HOP + _TONE_SAMPLES - 1) // 512
    before = np.concatenate([[0], np.cumsum(is_speech)])
    last = len(is_speech)
    found: npt.NDArray[np.bool_] = before[np.minimum(ends + 1, last)] == before[np.minimum(starts, last)]
    return found


def kind_without_speech(wave: Wave) -> str:
    """What audio without speech (16 kHz) is: silence, music or noise."""
    levels = levels_of(wave)
    if len(levels) == 0 or float(np.percentile(levels, 75)) < SILENT_DB:
        return "silence"
    return (
        "music" if music(wave) >= _MUSIC_FROM else "noise" if float(np.median(levels)) > SILENT_DB else "silence"
    )


def gain_db(wave: Wave, rate: int) -> float:
    """The gain that brings a clip to -23 LUFS (ITU-R BS.1770), or less if its peak would exceed -1 dB."""
    peak = 20 * np.log10(float(np.abs(wave).max(initial=0.0)) + _QUIETEST)
    wanted = TARGET_LUFS - loudness_lufs(wave, rate)
    return float(min(wanted, HIGHEST_PEAK_DB - peak)) if peak > -90 else 0.0


def loudness_lufs(wave: Wave, rate: int) -> float:
    """The integrated loudness of a mono wave, gated as the standard asks."""
    weighted = np.fft.irfft(np.fft.rfft(wave) * _k_weighting(len(wave), rate), len(wave))
    size = max(1, round(_GATE_S * rate))
    if len(weighted) < size:
        weighted = np.pad(weighted, (0, size - len(weighted)))
    total = np.concatenate([[0.0], np.cumsum(np.square(weighted))])
    starts = np.arange(0, len(weighted) - size + 1, max(1, size // 4))
    power = np.maximum((total[starts + size] - total[starts]) / size, 1e-12)
    loudness = -0.691 + 10 * np.log10(power)
    audible = power[loudness > _ABSOLUTE_GATE]
    if not len(audible):
        return _ABSOLUTE_GATE
    gate = -0.691 + 10 * np.log10(audible.mean()) + _RELATIVE_GATE
    kept = power[loudness > max(gate, _ABSOLUTE_GATE)]
    return float(-0.691 + 10 * np.log10(kept.mean()))


def _k_weighting(num_samples: int, rate: int) -> npt.NDArray[np.float64]:
    """The magnitude of the standard's two filters, which it gives for 48 kHz, at the frequencies of an FFT."""
    frequency = np.fft.rfftfreq(num_samples, 1 / rate)
    turn = np.exp(-2j * np.pi * np.minimum(frequency, 24_000) / 48_000)
    shelf = (1.53512485958697 - 2.69169618940638 * turn + 1.19839281085285 * turn**2) / (
        1 - 1.69065929318241 * turn + 0.73248077421585 * turn**2
    )
    high_pass = (1 - 2 * turn + turn**2) / (1 - 1.99004745483398 * turn + 0.99007225036621 * turn**2)
    found: npt.NDArray[np.float64] = np.abs(shelf * high_pass)
    return found
