"""Train the base model's vocabulary on sentences of all its languages: vocabulary.py TEXTS OUT [--size N]

TEXTS holds LANGUAGE.txt, one sentence a line. The vocabulary holds the letters of every language from the start,
so that a language can be added to the model without changing its shapes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from myxtts.text.normalize import normalize
from myxtts.text.tokenizer import train

SENTENCES = 30_000  # of each language: they weigh alike, however many there are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=2048)
    asked = parser.parse_args()
    texts, languages = [], []
    for path in sorted(asked.texts.glob("*.txt")):
        languages.append(path.stem)
        sentences = path.read_text(encoding="utf-8").splitlines()
        step = max(len(sentences) // SENTENCES, 1)
        texts += [normalize(sentence, path.stem) for sentence in sentences[::step][:SENTENCES]]
    vocabulary = train(texts, languages, asked.size)
    vocabulary.save(asked.out)
    sample = vocabulary.encode_batch(texts[:1000], ["en"] * 1000)
    letters, tokens = sum(map(len, texts[:1000])), sum(map(len, sample))
    print(f"{len(texts)} sentences in {', '.join(languages)}: {letters / tokens:.2f} letters a token")


if __name__ == "__main__":
    main()
