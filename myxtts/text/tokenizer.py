"""The tokenizer: token ids of normalised text, in the format of XTTS-v2's `vocab.json`.

That file is a HuggingFace `tokenizers` JSON with a BPE: text is split into words and runs of punctuation, each
starts as single letters, and pairs are joined in the order of the merges. A language token such as `[en]` comes
first, and every space is the token `[SPACE]`. Vocabularies are loaded as they are, trained on a corpus (`train`),
or extended by a language that leaves the others unchanged (`extend`).

This module does not know how text is normalised. START and STOP are added by the model.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import tokenizers

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError, DatasetError
from myxtts.files import write_text_atomically
from myxtts.text.tables import fingerprint_of

Pair = tuple[str, str]
LEAST_COUNT = 2  # a pair that occurs once is chance


def learn_merges(
    words: list[tuple[list[str], int]],
    vocabulary: dict[str, int],
    num_tokens: int,
    must_contain: frozenset[str] | None = None,
) -> list[Pair]:
    """Join the most frequent pair of neighbours repeatedly, until `num_tokens` tokens are made; return the merges.

    `words` are pieces with their counts; the pieces are joined in place. The token of a merge is added to
    `vocabulary` with the next id. Ties go to the smaller ids, so the order of the words does not matter. With
    `must_contain`, only tokens with one of these letters are made.
    """
    next_id = max(vocabulary.values()) + 1
    end_id = next_id + num_tokens
    counts: Counter[Pair] = Counter()
    found_in: dict[Pair, set[int]] = defaultdict(set)

    def count(index: int, sign: int) -> set[Pair]:
        pieces, times = words[index]
        pairs = list(pairwise(pieces))
        if must_contain is not None:
            pairs = [pair for pair in pairs if not must_contain.isdisjoint(pair[0] + pair[1])]
        for pair in pairs:
            counts[pair] += sign * times
            found_in[pair].add(index)
        return set(pairs)

    def ranked(pair: Pair) -> tuple[int, int, int, Pair]:
        return -counts[pair], vocabulary[pair[0]], vocabulary[pair[1]], pair

    for index in range(len(words)):
        count(index, +1)
    # Counts in the queue may be out of date: one that fell is corrected when it is popped, one that rose is pushed
    # again at once.
    queue = [ranked(pair) for pair in counts]
    heapq.heapify(queue)
    merges: list[Pair] = []
    while queue and next_id < end_id:
        entry = heapq.heappop(queue)
        pair = entry[-1]
        if counts[pair] < LEAST_COUNT:
            continue
        if -entry[0] != counts[pair]:
            heapq.heappush(queue, ranked(pair))
            continue
        merges.append(pair)
        if pair[0] + pair[1] not in vocabulary:
            vocabulary[pair[0] + pair[1]] = next_id
            next_id += 1
        risen = set()
        for index in sorted(found_in.pop(pair)):
            count(index, -1)
            words[index][0][:] = joined(words[index][0], pair)
            risen |= count(index, +1)
        for other in risen:
            heapq.heappush(queue, ranked(other))
    return merges


def joined(pieces: list[str], pair: Pair) -> list[str]:
    """Return the pieces with every occurrence of the pair joined, from the left."""
    result: list[str] = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


FILE_NAME = "vocab.json"
MAX_FILE_BYTES = 32_000_000  # that of XTTS-v2 has 0.4 MB
STOP, UNKNOWN, SPACE, START = "[STOP]", "[UNK]", "[SPACE]", "[START]"

_FIRST_LETTERS = "!'(),-./:;?abcdefghijklmnopqrstuvwxyz"  # ids 3 to 39 of every XTTS vocabulary
_LANGUAGE_TOKEN = re.compile(r"\[([a-z]{2,3})(-[a-z]+)?\]")
_NEVER_A_LETTER = "\uffff"
"""A code point that Unicode never assigns; it replaces `[`, which could begin a special token."""
_UNUSED_OPTIONS = (
    "dropout", "continuing_subword_prefix", "end_of_word_suffix",
    "fuse_unk", "byte_fallback", "ignore_merges",
)  # fmt: skip
_BRACKETS = str.maketrans("[]", "  ")


class Tokenizer:
    """A BPE vocabulary with its language tokens.

    The native library uses all cores for a batch unless the environment has `TOKENIZERS_PARALLELISM=false`, as
    worker processes do.
    """

    def __init__(self, text: str, *, source: str = "the vocabulary") -> None:
        """Read the JSON of a vocabulary; `source` names it in errors."""
        self._content = _checked_content(text, source)
        try:
            self._native = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise DatasetError(f"{source} is not a usable vocabulary: {error}") from error
        self._vocabulary: dict[str, int] = self._content["model"]["vocab"]
        self.num_tokens = max(self._vocabulary.values()) + 1
        self.start_id, self.stop_id, self.unknown_id = (self._vocabulary[name] for name in (START, STOP, UNKNOWN))
        self._prefixes = {
            match[1]: token["content"]
            for token in self._content["added_tokens"]
            if (match := _LANGUAGE_TOKEN.fullmatch(token["content"]))
        }
        self.languages = frozenset(self._prefixes)
        letters = {token for token in self._vocabulary if len(token) == 1 and not token.isspace()}
        self._letters = (letters | {" "}) - {"["}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `vocab.json` as XTTS-v2 publishes it, given the file or its folder."""
        file = path / FILE_NAME if path.is_dir() else path
        try:
            if (num_bytes := file.stat().st_size) > MAX_FILE_BYTES:
                limit = f"a vocabulary has at most {MAX_FILE_BYTES / 1e6:.0f} MB"
                raise DatasetError(f"The vocabulary {file} is too large: {num_bytes / 1e6:.0f} MB; {limit}")
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DatasetError(f"The vocabulary {file} cannot be read: {reason}") from error
        return cls(text, source=str(file))

    def save(self, path: Path) -> None:
        """Write the file, or `vocab.json` in a folder, atomically."""
        write_text_atomically(path / FILE_NAME if path.is_dir() else path, self.to_json())

    def to_json(self) -> str:
        """Return the JSON from which `Tokenizer(text)` makes an equal tokenizer."""
        return json.dumps(self._content, ensure_ascii=False, indent=1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes exactly when some text could get other ids."""
        merges = list(dict.fromkeys(reversed(self._merges)))[::-1]  # the last of a repeated merge counts
        special = sorted((token["content"], token["id"]) for token in self._content["added_tokens"])
        canonical = json.dumps([sorted(self._vocabulary.items()), merges, special])
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @property
    def _merges(self) -> list[Pair]:
        written = self._content["model"]["merges"]  # "a b" in XTTS-v2's file, ["a", "b"] in newer ones
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in written)
        return [(first, second) for first, second in pairs]

    def encode_batch(self, texts: Sequence[str], languages: Sequence[str]) -> list[list[int]]:
        """Return the ids of normalised texts, language token first, without START and STOP, in one native call.

        Text in brackets is never read as a special token: `[` becomes unknown.
        """
        self._require(languages)
        marked = [
            self._prefixes[language] + text.replace("[", _NEVER_A_LETTER).replace(" ", SPACE)
            for text, language in zip(texts, languages, strict=True)
        ]
        return [encoding.ids for encoding in self._native.encode_batch_fast(marked, add_special_tokens=False)]

    def unknown_characters(self, text: str, language: str) -> list[str]:
        """Return the distinct characters without an id, in order; also whitespace that the encoder would drop."""
        self._require([language])
        return [character for character in dict.fromkeys(text) if character not in self._letters]

    def _require(self, languages: Sequence[str]) -> None:
        if missing := sorted(set(languages) - self.languages):
            has = f"{', '.join(missing)} (it has {', '.join(sorted(self.languages))})"
            add = "Add the language with `myxtts vocabulary extend`."
            raise DatasetError(f"The vocabulary has no language token for {has}. {add}")


@cache
def tokenizer_fingerprint() -> str:
    """Return a hash that changes when a vocabulary could give other ids, or texts another vocabulary."""
    return fingerprint_of([Path(__file__)], ["tokenizers"])


def describe_characters(characters: Iterable[str]) -> str:
    """Return characters with code point and name, so that invisible and similar ones can be found."""
    return ", ".join(f"{one!r} U+{ord(one):04X} {unicodedata.name(one, 'unnamed')}" for one in characters)


def train(texts: Iterable[str], languages: Iterable[str], num_tokens: int) -> Tokenizer:
    """Train a vocabulary of at most `num_tokens` on normalised texts; common tokens have XTTS-v2's ids.

    The order is: STOP, UNK, SPACE, punctuation, a to z, START, a token for each supported language and any other
    one named, the other letters of the texts by code point, merges. Brackets are not letters. The same texts give
    the same vocabulary, in any order, on any machine.
    """
    words = _count_words(texts)
    codes = dict.fromkeys((*LANGUAGES, *sorted(set(languages))))
    tokens = [STOP, UNKNOWN, SPACE, *_FIRST_LETTERS, START, *map(_language_token, codes)]
    tokens += sorted({letter for word in words for letter in word} - set(_FIRST_LETTERS))
    if len(tokens) > num_tokens:
        what = f"the letters of these texts and the special tokens alone are {len(tokens)}"
        raise ConfigError(f"A vocabulary of {num_tokens} tokens is too small: {what}.")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = [(list(word), count) for word, count in words.items()]
    merges = learn_merges(pieces, vocabulary, num_tokens - len(vocabulary))
    return Tokenizer(json.dumps(_content(vocabulary, merges, [t for t in tokens if len(t) > 1])))


def extend(base: Tokenizer, texts: Iterable[str], language: str, num_merges: int) -> Tokenizer:
    """Return the vocabulary with one more language; old ids and the ids of text in old languages do not change.

    Appended are the language token, missing letters of the texts, and up to `num_merges` tokens learned on the
    texts after the old merges. Only pairs with an added letter are joined, or with a letter that no old merge
    contains, such as Persian ک in XTTS-v2's vocabulary, because words of the old languages do not use it. So a
    language that shares all its letters with old languages gets a token and no merges; the old merges spell it.
    The texts may be few, and the vocabulary may already have the language.
    """
    words = _count_words(texts)
    vocabulary = dict(base._vocabulary)
    added = [] if language in base.languages else [_language_token(language)]
    letters = sorted({letter for word in words for letter in word} - vocabulary.keys())
    for token in (*added, *letters):
        vocabulary[token] = max(vocabulary.values()) + 1
    special = [token["content"] for token in base._content["added_tokens"]] + added
    spelled = Tokenizer(json.dumps(_content(vocabulary, base._merges, special)))
    # encode_batch_fast would leave `tokens` empty.
    encodings = spelled._native.encode_batch(list(words), add_special_tokens=False)
    pieces = [(encoding.tokens, count) for encoding, count in zip(encodings, words.values(), strict=True)]
    joined_before = {letter for pair in base._merges for piece in pair for letter in piece}
    unjoined = {letter for word in words for letter in word if letter.isalpha()} - joined_before
    merges = base._merges + learn_merges(pieces, vocabulary, num_merges, frozenset(letters) | unjoined)
    return Tokenizer(json.dumps(_content(vocabulary, merges, special)))


def _checked_content(text: str, source: str) -> dict[str, Any]:
    """Return the parsed JSON after checking everything this module relies on."""
    try:
        content: dict[str, Any] = json.loads(text)
        model, special = content["model"], {token["content"] for token in content["added_tokens"]}
        kind, known = model["type"], special & model["vocab"].keys()
        cutting = (content.get("pre_tokenizer") or {}).get("type")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "a vocabulary of XTTS-v2's form (JSON of the `tokenizers` library)"
        raise DatasetError(f"{source} is not {expected}: {error!r}") from error
    unlike = [name for name in _UNUSED_OPTIONS if model.get(name)]
    unlike += [name for name in ("normalizer", "post_processor") if content.get(name)]
    if kind != "BPE" or cutting != "Whitespace" or unlike:
        found = f"a {kind} model, pre-tokenizer {cutting}, {', '.join(unlike) or 'no options'}"
        expected = "XTTS-v2's form: BPE, pre-tokenizer Whitespace, no options"
        raise DatasetError(f"{source} holds {found}; expected is {expected}.")
    if missing := [token for token in (STOP, UNKNOWN, SPACE, START) if token not in known]:
        raise DatasetError(f"{source} lacks special tokens of every XTTS vocabulary: {', '.join(missing)}.")
    if stray := sorted(token for token in special if not (token.startswith("[") and token.endswith("]"))):
        raise DatasetError(f"{source} has the special token {stray[0]!r}; expected are names in square brackets.")
    return content


def _content(vocabulary: dict[str, int], merges: list[Pair], special: Iterable[str]) -> dict[str, Any]:
    """Return the JSON of a vocabulary in the form of XTTS-v2's file."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": UNKNOWN, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "vocab": vocabulary,
        "merges": [" ".join(pair) for pair in merges],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": vocabulary[t], "special": True, "content": t, **flags} for t in special],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": model,
    }  # fmt: skip


def _language_token(language: str) -> str:
    token = "[zh-cn]" if language == "zh" else f"[{language}]"
    if not _LANGUAGE_TOKEN.fullmatch(token):
        raise ConfigError(f"{language!r} is not a language code; expected are two or three letters: 'fa'.")
    return token


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words, split as the tokenizer splits them."""
    cut = tokenizers.pre_tokenizers.Whitespace().pre_tokenize_str
    return Counter(word for text in texts for word, _ in cut(text.translate(_BRACKETS)))
