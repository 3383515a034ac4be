"""Equal error rates of speaker encoders on real people, from crops of three seconds.

    python experiments/base/eer.py FOLDER... [--run RUN] [--teacher ecapa-*.bin] [--held-out lj,cmu_bdl,...]

A folder holds metadata.csv with the columns path and speaker, or speakers.csv with id and speaker, and wavs/. A
person of an earlier folder is left out. Every crop is of another recording, and all are compared with each other.
The rate is where as many pairs of one person are refused as pairs of two are accepted: over all people, and over
the pairs of people who are held out from training.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr
import torch
import torch.nn.functional as F
from ecapa import Ecapa
from torch import Tensor

from myxtts.run_dir import RunDir
from myxtts.weights import load_folder

RATE, SECONDS = 16_000, 3
PER_PERSON = 20

Embed = Callable[[Tensor], Tensor]


class Crop(NamedTuple):
    speaker: str
    wave: Tensor  # [samples] at 16 kHz


def recordings(folder: Path) -> dict[str, list[Path]]:
    """The recordings of a folder by speaker."""
    listed = next(path for name in ("speakers.csv", "metadata.csv") if (path := folder / name).is_file())
    found: dict[str, list[Path]] = {}
    with listed.open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE):
            path = row.get("path") or f"wavs/{row['id']}.wav"
            found.setdefault(row["speaker"], []).append(folder / path)
    return found


def crops(speaker: str, paths: list[Path], per_person: int) -> Iterator[Crop]:
    """The middle of recordings of one person, chosen at random among those that are long enough."""
    num_found = 0
    for number in np.random.default_rng(0).permutation(len(paths)):
        with soundfile.SoundFile(sorted(paths)[number]) as file:
            if num_found == per_person or len(file) < SECONDS * file.samplerate:
                continue
            wave, rate = file.read(dtype="float32", always_2d=True), file.samplerate
        wave = soxr.resample(wave.mean(1), rate, RATE)
        first = (len(wave) - SECONDS * RATE) // 2
        num_found += 1
        yield Crop(speaker, torch.from_numpy(wave[first : first + SECONDS * RATE]))


def equal_error_rate(scores: np.ndarray, same: np.ndarray) -> float:
    """The share of errors at the threshold where both kinds are as frequent."""
    order = np.argsort(scores)
    refused = np.cumsum(same[order]) / same.sum()
    accepted = 1 - np.cumsum(~same[order]) / (~same).sum()
    at = int(np.argmin(np.abs(refused - accepted)))
    return float((refused[at] + accepted[at]) / 2)


@torch.no_grad()
def rates(embed: Embed, found: list[Crop], held_out: set[str]) -> dict[str, float]:
    """Rates over all pairs and over those of people held out, and the mean cosines of both kinds of pairs."""
    voices = torch.cat([embed(crop.wave[None]) for crop in found]).numpy()
    speakers = np.array([crop.speaker for crop in found])
    one, other = np.triu_indices(len(found), 1)
    scores, same = (voices @ voices.T)[one, other], speakers[one] == speakers[other]
    unheard = np.isin(speakers[one], sorted(held_out)) & np.isin(speakers[other], sorted(held_out))
    result = {"pairs": len(scores), "same": int(same.sum()), "eer": equal_error_rate(scores, same)}
    if held_out:
        result |= {"eer_held_out": equal_error_rate(scores[unheard], same[unheard])}
    result |= {"cosine_same": float(scores[same].mean()), "cosine_other": float(scores[~same].mean())}
    return {name: round(value, 4) for name, value in result.items()}


def encoder_of(folder: Path) -> Embed:
    """The speaker encoder of a run or of a folder of weights."""
    model = RunDir(folder).load_model(warn=False) if RunDir(folder).exists else load_folder(folder).model
    encoder = model.hifigan_decoder.speaker_encoder.eval()
    return lambda wave: encoder(wave, l2_norm=True)


def random_encoder(dim: int = 512) -> Embed:
    from myxtts.model.vocoder import SpeakerEncoder

    torch.manual_seed(0)
    encoder = SpeakerEncoder(proj_dim=dim).eval()
    return lambda wave: encoder(wave, l2_norm=True)


def mean_mel(wave: Tensor) -> Tensor:
    """The mean of the log-mels over time: what any encoder should surpass."""
    from myxtts.model.mel import SPEAKER_MEL, LogMel

    mel = LogMel(SPEAKER_MEL)(wave).mean(2)
    return F.normalize(mel - mel.mean(1, keepdim=True), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run or XTTS-v2 folder")
    parser.add_argument("--teacher", type=Path, nargs="+", help="its checkpoint, or ecapa-*.bin")
    parser.add_argument("--held-out", default="", help="people, with commas between, that no encoder has heard")
    parser.add_argument("--per-person", type=int, default=PER_PERSON)
    options = parser.parse_args()
    people: dict[str, list[Path]] = {}
    for folder in options.folders:
        people = {**recordings(folder), **people}
    found = [crop for speaker in sorted(people) for crop in crops(speaker, people[speaker], options.per_person)]
    held_out = set(filter(None, options.held_out.split(",")))
    if unknown := held_out - {crop.speaker for crop in found}:
        parser.error(f"--held-out names people who are not in the folders: {', '.join(sorted(unknown))}")
    encoders: dict[str, Embed] = {"mean log-mel": mean_mel, "random encoder": random_encoder()}
    if options.teacher:
        encoders["ECAPA-TDNN"] = Ecapa.read(options.teacher)
    encoders |= {str(run): encoder_of(run) for run in options.run}
    for name, embed in encoders.items():
        print(json.dumps({"encoder": name, "crops": len(found), **rates(embed, found, held_out)}), flush=True)


if __name__ == "__main__":
    main()
