"""The vocabulary: XTTS-v2's format, ids that never move, and text that can never become a control token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError, DatasetError
from myxtts.text.tokenizer import Tokenizer, describe_characters, extend, learn_merges, train

ENGLISH = [
    "the quick brown fox, the lazy dog; the end.", "it's the thing that they thought of then!",
    "she said (quietly): nothing other than the truth...", "another brother, another mother",
] * 3  # fmt: skip
ARABIC = ["السلام عليكم ورحمة الله", "ذهب الولد إلى المدرسة"] * 3
PERSIAN = ["می‌خواهم به پارک بروم", "گل‌های باغچه را می‌بینم", "پدر گفت که می‌رود"] * 4
BASE = train(ENGLISH + ARABIC, ["en", "ar"], 400)
GROWN = extend(BASE, PERSIAN, "fas", 50)
OLD_LETTERS = "".join(sorted({letter for text in ENGLISH + ARABIC for letter in text}))


def content(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_json())


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return content(tokenizer)["model"]["vocab"]


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids after the language token."""
    tokens = {number: token for token, number in vocabulary(tokenizer).items()} | {2: " "}
    return "".join(tokens[number] for number in ids[1:])


def test_fixed_ids_and_order_of_a_trained_vocabulary() -> None:
    ids = vocabulary(BASE)
    by_id = sorted(ids, key=ids.__getitem__)
    assert by_id[:40] == ["[STOP]", "[UNK]", "[SPACE]", *"!'(),-./:;?", *"abcdefghijklmnopqrstuvwxyz"]
    assert by_id[40:59] == ["[START]", *(f"[{'zh-cn' if code == 'zh' else code}]" for code in LANGUAGES)]
    assert sorted(ids.values()) == list(range(BASE.num_tokens))
    assert (BASE.stop_id, BASE.unknown_id, BASE.start_id) == (0, 1, 40)
    assert BASE.languages == set(LANGUAGES)
    assert {"the", "th", "ال"} <= ids.keys()


def test_form_of_the_file_is_that_of_xtts() -> None:
    found = content(GROWN)
    model = found["model"]
    assert found["pre_tokenizer"] == {"type": "Whitespace"}
    assert (found["normalizer"], found["post_processor"], found["decoder"]) == (None, None, None)
    assert (model["type"], model["unk_token"], model["fuse_unk"]) == ("BPE", "[UNK]", False)
    assert all(isinstance(merge, str) and merge.count(" ") == 1 for merge in model["merges"])
    for token in found["added_tokens"]:
        assert token["special"] and not token["normalized"]
        assert model["vocab"][token["content"]] == token["id"]


def test_encoding_is_that_of_the_reference_pipeline() -> None:
    """Prefix and [SPACE] written out and handed to the library, as the reference does it."""
    plain = tokenizers.Tokenizer.from_str(BASE.to_json())
    text = "the other dog, they said."
    expected = plain.encode("[en]" + text.replace(" ", "[SPACE]")).ids
    assert BASE.encode_batch([text], ["en"]) == [expected]
    assert expected[0] == vocabulary(BASE)["[en]"]
    assert BASE.encode_batch(["ni3"], ["zh"])[0][0] == vocabulary(BASE)["[zh-cn]"]
    assert BASE.encode_batch([], []) == []


@settings(deadline=None)
@given(st.lists(st.text(OLD_LETTERS, max_size=40), max_size=5))
def test_known_text_round_trips(texts: list[str]) -> None:
    for text, ids in zip(texts, BASE.encode_batch(texts, ["en"] * len(texts)), strict=True):
        assert spelled(BASE, ids) == text
        assert BASE.unknown_id not in ids
        assert BASE.unknown_characters(text, "en") == []


@settings(deadline=None)
@given(st.text(max_size=30))
def test_unknown_characters_are_exactly_those_without_an_id(text: str) -> None:
    unknown = BASE.unknown_characters(text, "en")
    assert unknown == [c for c in dict.fromkeys(text) if c != " " and c not in vocabulary(BASE)]
    (ids,) = BASE.encode_batch([text], ["en"])
    if BASE.unknown_id in ids:
        assert unknown
    if not all(character.isspace() for character in unknown):
        assert BASE.unknown_id in ids


@settings(deadline=None)
@given(st.text(st.sampled_from("ab [](){}"), max_size=12), st.sampled_from(list(vocabulary(BASE))))
def test_text_never_becomes_a_control_token(around: str, token: str) -> None:
    text = around + token + around if token.startswith("[") else around
    (ids,) = BASE.encode_batch([text], ["en"])
    special = {token["id"] for token in content(BASE)["added_tokens"]}
    assert not special & set(ids[1:]) - {BASE.unknown_id, vocabulary(BASE)["[SPACE]"]}
    assert ids.count(vocabulary(BASE)["[SPACE]"]) == text.count(" ")
    assert ("[" in text) == ("[" in BASE.unknown_characters(text, "en"))
    assert ("[" in text) <= (BASE.unknown_id in ids)


def test_whitespace_the_encoder_would_drop_is_reported() -> None:
    assert BASE.encode_batch(["a\tb\u00a0"], ["en"]) == BASE.encode_batch(["a\nb"], ["en"])
    assert BASE.unknown_characters("a\tb\u00a0 c\x1f", "en") == ["\t", "\u00a0", "\x1f"]


def test_brackets_in_a_corpus_do_not_become_letters() -> None:
    assert not {"[", "]"} & vocabulary(train(["[laughs] aha [laughs]"], [], 200)).keys()
    assert not {"[", "]"} & vocabulary(extend(BASE, ["[قهقهه] پگاه"], "fas", 5)).keys()


def test_language_without_token_names_the_command() -> None:
    for call in (lambda: BASE.encode_batch(["a"], ["fas"]), lambda: BASE.unknown_characters("a", "fas")):
        with pytest.raises(DatasetError, match=r"no language token for fas.*myxtts vocabulary extend"):
            call()


def test_training_is_deterministic_across_processes_and_order() -> None:
    code = (
        "import sys; from tests.test_tokenizer import *\n"
        "texts = (ENGLISH + ARABIC)[:: int(sys.argv[1])]\n"
        "print(train(texts, ['ar', 'en'], 400).fingerprint, extend(BASE, PERSIAN, 'fas', 50).fingerprint)"
    )
    for seed, step in (("1", "1"), ("77", "-1")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed[0]}
        result = subprocess.run(
            [sys.executable, "-c", code, step], env=environment, check=True, capture_output=True, text=True
        )
        assert result.stdout.split() == [BASE.fingerprint, GROWN.fingerprint]


WORDS = st.dictionaries(st.text("abc", min_size=1, max_size=8), st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.integers(0, 20))
def test_merges_are_those_of_the_native_trainer(words: dict[str, int], num_tokens: int) -> None:
    letters = sorted({letter for word in words for letter in word})
    native = tokenizers.Tokenizer(tokenizers.models.BPE())
    native.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(letters) + num_tokens, min_frequency=2, show_progress=False
    )
    native.train_from_iterator([" ".join([word] * count) for word, count in words.items()], trainer)
    ours = {letter: number for number, letter in enumerate(letters)}
    learn_merges([(list(word), count) for word, count in words.items()], ours, num_tokens)
    assert ours == native.get_vocab()


def test_small_corpus_gets_fewer_merges_and_too_small_a_size_is_refused() -> None:
    assert train(["ab ab"], [], 5000).num_tokens == 60
    with pytest.raises(ConfigError, match="too small"):
        train(["ab"], [], 30)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(OLD_LETTERS + "ñøپگژ\u200c", max_size=30), max_size=6),
    old=st.text(OLD_LETTERS, max_size=60),
    language=st.sampled_from(LANGUAGES),
)
def test_extending_leaves_every_old_text_as_it_was(texts: list[str], old: str, language: str) -> None:
    for grown in (GROWN, extend(BASE, texts * 2 + [old] * 3, "xx", 30)):
        assert grown.encode_batch([old], [language]) == BASE.encode_batch([old], [language])


def test_extending_keeps_old_ids_and_appends_the_rest() -> None:
    old, new = vocabulary(BASE), vocabulary(GROWN)
    assert {token: new[token] for token in old} == old
    added = sorted(set(new) - set(old), key=new.__getitem__)
    assert [new[token] for token in added] == list(range(BASE.num_tokens, GROWN.num_tokens))
    assert added[0] == "[fas]" and set("پگچک\u200cی") <= set(added)
    assert GROWN.languages == BASE.languages | {"fas"}
    assert GROWN.start_id == BASE.start_id


def test_extending_makes_the_language_short_and_fully_known() -> None:
    letters_only = extend(BASE, PERSIAN, "fas", 0)
    for text in set(PERSIAN):
        assert GROWN.unknown_characters(text, "fas") == []
        (short,), (long,) = GROWN.encode_batch([text], ["fas"]), letters_only.encode_batch([text], ["fas"])
        assert len(short) < 0.8 * len(long)
        assert spelled(GROWN, short) == text
    assert any("\u200c" in token and len(token) > 1 for token in vocabulary(GROWN))
    assert 0 < GROWN.num_tokens - letters_only.num_tokens <= 50


def test_extending_joins_letters_that_no_old_merge_uses() -> None:
    base = train([*ENGLISH, *ARABIC, "ک", "ی"], ["en", "ar"], 400)
    assert {"ک", "ی"} <= vocabulary(base).keys()
    added = vocabulary(extend(base, PERSIAN, "fas", 50)).keys() - vocabulary(base).keys()
    assert any("ک" in token or "ی" in token for token in added)


def test_extending_in_known_letters_adds_the_token_alone() -> None:
    grown = extend(BASE, ["thin thin than than the"] * 5, "id", 50)
    assert grown.num_tokens == BASE.num_tokens + 1
    assert grown.encode_batch(["than"], ["id"])[0][1:] == BASE.encode_batch(["than"], ["en"])[0][1:]


def test_extending_a_known_language_adds_no_second_token() -> None:
    grown = extend(BASE, PERSIAN, "fa", 10)
    assert grown.languages == BASE.languages
    assert grown.encode_batch(["پدر"], ["fa"])[0][0] == vocabulary(BASE)["[fa]"]
    with pytest.raises(ConfigError, match="language code"):
        extend(BASE, PERSIAN, "STOP", 10)


def test_extending_over_gaps_and_repeated_merges() -> None:
    """XTTS-v2's own file has unused ids and lists merges more than once; of these the last counts."""
    found = content(BASE)
    found["model"]["merges"] += found["model"]["merges"][:3]
    found["model"]["vocab"]["zzz"] = BASE.num_tokens + 1
    odd = Tokenizer(json.dumps(found))
    grown = extend(odd, PERSIAN, "fas", 20)
    assert vocabulary(grown)["[fas]"] == odd.num_tokens
    languages = ["en"] * len(ENGLISH)
    assert grown.encode_batch(ENGLISH, languages) == odd.encode_batch(ENGLISH, languages)


def test_saving_and_loading(tmp_path: Path) -> None:
    for path, name in ((tmp_path, "vocab.json"), (tmp_path / "other.json", "other.json")):
        GROWN.save(path)
        assert (tmp_path / name).is_file()
        again = Tokenizer.load(path)
        assert again.fingerprint == GROWN.fingerprint
        assert again.encode_batch(PERSIAN, ["fas"] * 12) == GROWN.encode_batch(PERSIAN, ["fas"] * 12)


def test_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BASE.save(tmp_path)

    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DatasetError, match=r"(?s)vocab\.json: no space"):
        GROWN.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.json"]
    assert Tokenizer.load(tmp_path).fingerprint == BASE.fingerprint


def test_fingerprint_follows_meaning_not_layout() -> None:
    found = content(BASE)
    found["model"]["merges"] = [merge.split(" ") for merge in found["model"]["merges"]]
    found["model"]["vocab"] = dict(reversed(found["model"]["vocab"].items()))
    assert Tokenizer(json.dumps(found, indent=3)).fingerprint == BASE.fingerprint
    found["model"]["merges"].reverse()
    assert Tokenizer(json.dumps(found)).fingerprint != BASE.fingerprint
    assert GROWN.fingerprint != BASE.fingerprint


def without(token: str) -> str:
    found = content(BASE)
    kept = [entry for entry in found["added_tokens"] if entry["content"] != token]
    return json.dumps(found | {"added_tokens": kept})


def changed(**model: object) -> str:
    found = content(BASE)
    return json.dumps(found | {"model": found["model"] | model})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a vocabulary"), ("{", "not a vocabulary"), ("[]", "not a vocabulary"),
        (changed(vocab=["a"]), "not a vocabulary"), (changed(type="WordPiece"), "WordPiece"),
        (changed(dropout=0.1), "dropout"), (changed(merges=["q zzz"]), "not a usable vocabulary"),
        (without("[STOP]"), r"\[STOP\]"), (without("[UNK]"), r"\[UNK\]"), (without("[SPACE]"), r"\[SPACE\]"),
        (without("[START]"), r"\[START\]"), (BASE.to_json().replace("Whitespace", "ByteLevel"), "ByteLevel"),
        (BASE.to_json().replace('"[nl]"', '"<nl>"'), "square brackets"),
    ],
)  # fmt: skip
def test_unusable_vocabularies_are_named_and_explained(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "vocab.json").write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=complaint) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "vocab.json") in str(caught.value)
    (tmp_path / "vocab.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DatasetError, match="cannot be read"):
            Tokenizer.load(path)


def test_characters_are_described_for_people() -> None:
    assert describe_characters("ț") == "'ț' U+021B LATIN SMALL LETTER T WITH COMMA BELOW"
    assert describe_characters("\u200c\a") == r"'\u200c' U+200C ZERO WIDTH NON-JOINER, '\x07' U+0007 unnamed"
