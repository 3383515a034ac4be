"""Detects the language of texts; statistics are used only if the letters do not decide.

Three steps, cheapest first. The script decides Korean, Japanese, Chinese, Hindi, Russian and most Persian and
Arabic in a few microseconds per text. The rest is decided per speaker: a speaker's sentences, joined into a few
passages long enough to be classified with certainty, usually prove to be one language, and then none of them is
examined by itself. Only speakers whose passages disagree are classified sentence by sentence. Sentences added to a
corpus whose languages are known are classified by themselves, and take another language only on clear evidence.

`lingua` is imported when statistics are first needed, so importing this module is cheap.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myxtts.config import LANGUAGE_NAMES, LANGUAGES
from myxtts.errors import DatasetError
from myxtts.text.tables import fingerprint_of, load_table, table_files

if TYPE_CHECKING:
    from lingua import LanguageDetector

_Group = tuple[str, str | frozenset[str] | None]
"""Script and speaker of texts classified together: None for all speakers of few texts, and for added texts the
languages that are known of their speakers."""
_Codes = tuple[str, ...]
_Languages = dict[str, str | None]  # language by text
_Counts = defaultdict[str | None, Counter[str]]  # how often each language is known, by speaker; None for all

_SCRIPTS = re.compile(
    "(?P<latin>[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a]+)"
    "|(?P<arabic>[\u0620-\u064a\u066e-\u06d3\u06d5\u06fa-\u06ff\u0750-\u077f\u08a0-\u08c9\ufb50-\ufdfb\ufe70-\ufefc]+)"
    "|(?P<cyrillic>[\u0400-\u052f\u1c80-\u1c8a\ua640-\ua69f]+)"
    "|(?P<hangul>[\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7fb]+)"
    "|(?P<kana>[\u3041-\u3096\u30a1-\u30fa\u31f0-\u31ff\uff66-\uff9d]+)"
    "|(?P<han>[\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]+)"
    "|(?P<devanagari>[\u0900-\u0963\u0971-\u097f]+)"
    r"|(?P<other>[^\W\d_]+)"
)
# Letters that only one of the two languages writes. Arabic ي and ك are no evidence: much Persian text was typed on
# an Arabic keyboard. Neither are أ ؤ ئ and the tanwin of مثلاً, which Persian keeps in loan words. The article
# counts only before three more letters, because الان and البته are Persian.
_PERSIAN = re.compile("[\u067e\u0686\u0698\u06af\u06a9\u06cc\u06c0\u200c\u06f0-\u06f9]")
_ARABIC = re.compile(
    "[\u0629\u0625\u0671\u064c\u064d]|\\b[\u0648\u0641\u0628]?\u0627\u0644(?!\u0628\u062a\u0647\\b)\\w{3}"
)

_KANA_SHARE = 0.1  # least share of kana in Japanese; Chinese uses an occasional の too
_KANJI_ONLY_SHARE = 0.1
"""If a speaker has fewer kanji-only sentences than this per Japanese one, they are Japanese as well."""
_PASSAGE_CHARACTERS = 300
"""Enough to distinguish eleven languages; from 120 on, lingua's small models agree with its large ones."""
_PASSAGES_ODD, _PASSAGES_SPREAD = 4, 4
_TEXTS_COUNTED = 1000  # texts of a speaker whose words are counted to find the common ones
_LEAST_PASSAGES = 4  # fewer passages prove nothing: one could mix several languages
_CANDIDATES = 4  # languages compared by the large models at a time; each takes about 45 MB
_CANDIDATE_SHARE = 0.02
_FAMILIARITY = 5.0  # a speaker's known languages count this much more than others for an added sentence
_MOST_TEXTS = 1000  # texts whose script is compared with a named language, evenly spread
_NEARLY_ALL = 0.9
_NAME_IT = "Name the language with --language or add a language column to the metadata"

_log = logging.getLogger(__name__)


@cache
def _languages_by_script() -> dict[str, _Codes]:
    """Return the languages that are written in each script."""
    found: dict[str, list[str]] = defaultdict(list)
    for code in LANGUAGES:
        found[load_table(code).script].append(code)
    return {script: tuple(codes) for script, codes in found.items()}


@cache
def language_fingerprint() -> str:
    """Return a hash that changes when a detected language could: code, tables, version of lingua."""
    return fingerprint_of([Path(__file__), *table_files()], ["lingua_language_detector"])


def detect_languages(
    texts: Sequence[str], speakers: Sequence[str], known: Mapping[tuple[str, str], str] | None = None
) -> list[str]:
    """Return the language of every text, from its script, its speaker's other texts or its own statistics.

    `known` holds languages by (text, speaker) that were found before: they are evidence and not examined again.
    The result does not depend on the order of the texts. Texts without letters get the most frequent language of
    their speaker, or of the corpus.
    """
    by_text = {text: language for (text, _), language in (known or {}).items()}
    counts: _Counts = defaultdict(Counter)
    for (_, speaker), code in (known or {}).items():
        counts[speaker][code] += 1
        counts[None][code] += 1
    scripts = {text: _script_of(text) for text in texts}
    languages = [_language_in_script(text, scripts[text]) for text in texts]
    _settle_by_speaker(languages, [scripts[text] for text in texts], speakers, counts)
    languages = [language or by_text.get(text) for language, text in zip(languages, texts, strict=True)]

    open_texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for text, speaker, language in zip(texts, speakers, languages, strict=True):
        if language is None and scripts[text] in _languages_by_script():
            open_texts[scripts[text], speaker].add(text)
    found = _detect_by_speaker(open_texts, counts)
    triples = zip(languages, speakers, texts, strict=True)
    filled = [language or found.get((speaker, text)) for language, speaker, text in triples]
    return _fill_gaps(filled, speakers, counts)


def language_of(text: str, known: Collection[str], usual: str = "") -> str:
    """Return the language of a text: the only one of those `known` in its script, by statistics, or `usual`."""
    near = [code for code in _languages_by_script().get(_script_of(text), ()) if code in known]
    return near[0] if len(near) == 1 else detect_languages([text], [""], {("", ""): usual} if usual else None)[0]


def _script_of(text: str) -> str:
    """Return the script of most letters, "" without letters; Han counts as kana in Japanese text."""
    if text.isascii():
        return "latin" if any(map(str.isalpha, text)) else ""
    letters: Counter[str] = Counter()
    for run in _SCRIPTS.finditer(text):
        script = run.lastgroup or ""
        if script == "other":
            script = unicodedata.name(run[0][0], "").partition(" ")[0].lower()
        letters[script] += run.end() - run.start()
    chinese_characters = letters["han"] + letters["kana"]
    if letters["kana"] and letters["kana"] >= _KANA_SHARE * chinese_characters:
        letters["kana"], letters["han"] = chinese_characters, 0
    elif chinese_characters:
        letters["han"], letters["kana"] = chinese_characters, 0
    return max(letters, key=lambda script: letters[script], default="")


def _language_in_script(text: str, script: str) -> str | None:
    languages = _languages_by_script().get(script, ())
    if languages == ("ar", "fa"):
        persian, arabic = len(_PERSIAN.findall(text)), len(_ARABIC.findall(text))
        return None if persian == arabic else "fa" if persian > arabic else "ar"
    return languages[0] if len(languages) == 1 else None


def _settle_by_speaker(
    languages: list[str | None], scripts: Sequence[str], speakers: Sequence[str], known: _Counts
) -> None:
    """Decide by the speaker's other texts: kanji-only ones, and Arabic script without a telling letter."""
    counts = {speaker: known[speaker].copy() for speaker in set(speakers)}
    for speaker, language in zip(speakers, languages, strict=True):
        if language:
            counts[speaker][language] += 1
    for i, (speaker, script) in enumerate(zip(speakers, scripts, strict=True)):
        of = counts[speaker]
        if languages[i] == "zh" and of["zh"] < _KANJI_ONLY_SHARE * of["ja"]:
            languages[i] = "ja"
        elif languages[i] is None and script == "arabic" and (of["fa"] == 0) != (of["ar"] == 0):
            languages[i] = "fa" if of["fa"] else "ar"


def _detect_by_speaker(
    open_texts: dict[tuple[str, str], set[str]], known: _Counts
) -> dict[tuple[str, str], str | None]:
    """Return languages by (speaker, text) for texts by (script, speaker); speakers with few texts are pooled."""
    groups: dict[_Group, set[str]] = defaultdict(set)
    group_of: dict[tuple[str, str], _Group] = {}
    for (script, speaker), texts in open_texts.items():
        familiar = frozenset(known[speaker] or known[None]) & set(_candidates(script))
        alone = sum(map(len, texts)) >= _LEAST_PASSAGES * _PASSAGE_CHARACTERS
        group_of[script, speaker] = (script, familiar or (speaker if alone else None))
        groups[group_of[script, speaker]] |= texts

    answers: dict[_Group, _Languages] = {}
    for script in {group[0]: None for group in groups}:
        of_script = {group: texts for group, texts in groups.items() if group[0] == script}
        candidates = _candidates(script)
        if len(candidates) < 2:
            only = candidates[0] if candidates else None
            answers |= {group: dict.fromkeys(texts, only) for group, texts in of_script.items()}
            continue
        mixed = {group: group[1] for group in of_script if isinstance(group[1], frozenset)}
        passages = {group: _passages(texts) for group, texts in of_script.items() if group not in mixed}
        all_passages = [passage for sample in passages.values() for passage in sample]
        detected = iter(_detect(all_passages, candidates, False))
        for group, sample in passages.items():
            seen = {next(detected) for _ in sample}
            if len(sample) >= _LEAST_PASSAGES and len(seen) == 1 and None not in seen:
                answers[group] = dict.fromkeys(groups[group], seen.pop())
            else:
                mixed[group] = frozenset(language for language in seen if language)
        answers |= _detect_each({group: sorted(groups[group]) for group in mixed}, candidates, mixed)
    return {
        (speaker, text): answers[group_of[script, speaker]][text]
        for (script, speaker), texts in open_texts.items()
        for text in texts
    }


def _candidates(script: str) -> _Codes:
    """Return the languages in a script that lingua knows; others are found by script, --language or metadata."""
    known = _lingua().IsoCode639_1
    return tuple(code for code in _languages_by_script()[script] if hasattr(known, code.upper()))


def _passages(texts: Iterable[str]) -> list[str]:
    """Return a sample of passages of joined texts; empty if all texts together are too short for one.

    Half of the sample is the texts that share the fewest words with the rest: if a few are in another language,
    they collect there, however evenly they are spread.
    """
    in_order = sorted(texts)
    counted = in_order[:: max(1, len(in_order) // _TEXTS_COUNTED)]
    counts = Counter(word for text in counted for word in set(text.lower().split()))
    is_usual = {word for word, _ in counts.most_common(40)}.__contains__

    def usual_share(text: str) -> float:
        words = text.lower().split()
        return sum(map(is_usual, words)) / (len(words) or 1)

    oddest_first = sorted(in_order, key=usual_share)
    passages: list[str] = []
    pending: list[str] = []
    length = 0
    for text in oddest_first:
        pending.append(text)
        length += len(text)
        if length >= _PASSAGE_CHARACTERS:
            passages.append(" ".join(pending))
            pending, length = [], 0
    rest = passages[_PASSAGES_ODD:]
    step = max(1, len(rest) // _PASSAGES_SPREAD)
    return passages[:_PASSAGES_ODD] + rest[::-step][:_PASSAGES_SPREAD]


def _detect_each(
    texts_of: dict[_Group, list[str]], candidates: _Codes, seen: dict[_Group, frozenset[str]]
) -> dict[_Group, _Languages]:
    """Return the language of every text by itself: the small models narrow the choice, the large ones decide.

    The large models of all eleven Latin languages take 500 MB and three seconds to load. So only a few are loaded
    at a time, for all groups with that choice; if a group mixes more languages, the small models decide.
    """
    answers: dict[_Group, _Languages] = {}
    choices: dict[tuple[_Codes, frozenset[str]], list[_Group]] = defaultdict(list)
    for group, texts in texts_of.items():
        best, likely = _narrow(texts, candidates, seen[group])
        if 2 <= len(likely) <= _CANDIDATES:
            choices[likely, group[1] if isinstance(group[1], frozenset) else frozenset()].append(group)
        else:
            answers[group] = best if len(likely) != 1 else dict.fromkeys(texts, likely[0])
    for (likely, familiar), groups in choices.items():
        texts = sorted({text for group in groups for text in texts_of[group]})
        found = dict(zip(texts, _detect(texts, likely, True, familiar), strict=True))
        for group in groups:
            answers[group] = {text: found[text] for text in texts_of[group]}
    return answers


def _narrow(texts: list[str], candidates: _Codes, seen: frozenset[str]) -> tuple[_Languages, _Codes]:
    """Return the small models' answer for each text, and the languages that the large ones should compare."""
    rankings = _detector(candidates, accurate=False).compute_language_confidence_values_in_parallel(texts)
    weights = dict.fromkeys(candidates, 0.0)
    best: _Languages = {}
    for text, ranking in zip(texts, rankings, strict=True):
        for value in ranking:
            weights[_code_of(value.language)] += value.value
        first, second = ranking[:2]
        best[text] = _code_of(first.language) if first.value > second.value else None
    least = _CANDIDATE_SHARE * sum(weights.values())
    return best, tuple(code for code in candidates if weights[code] > least or code in seen)


def _detect(
    texts: list[str], candidates: _Codes, accurate: bool, familiar: frozenset[str] = frozenset()
) -> list[str | None]:
    """Return the most likely language of each text, None if undecided; familiar ones have the advantage."""
    detector = _detector(candidates, accurate)
    found: list[str | None] = []
    for ranking in detector.compute_language_confidence_values_in_parallel(texts):
        weights = {_code_of(value.language): value.value for value in ranking}
        weights |= {code: _FAMILIARITY * weights[code] for code in familiar}
        second, first = sorted(weights, key=weights.__getitem__)[-2:]
        found.append(first if weights[first] > weights[second] else None)
    if accurate:
        detector.unload_language_models()  # type: ignore[no-untyped-call]
    return found


@cache
def _detector(candidates: _Codes, accurate: bool) -> LanguageDetector:
    lingua = _lingua()
    codes = [getattr(lingua.IsoCode639_1, code.upper()) for code in candidates]
    builder = lingua.LanguageDetectorBuilder.from_iso_codes_639_1(*codes)
    detector: LanguageDetector = (builder if accurate else builder.with_low_accuracy_mode()).build()
    return detector


def _lingua() -> Any:
    try:
        import lingua
    except ImportError:
        advice = f"{_NAME_IT}, or run: pip install lingua-language-detector"
        raise DatasetError(
            f"Some texts need lingua to find their language; it is not installed. {advice}"
        ) from None
    return lingua


def _code_of(language: Any) -> str:
    return str(language.iso_code_639_1.name.lower())


def _fill_gaps(languages: list[str | None], speakers: Sequence[str], known: _Counts) -> list[str]:
    """Give undecided texts the most frequent language of their speaker, or of the corpus."""
    for speaker, language in zip(speakers, languages, strict=True):
        if language:
            known[speaker][language] += 1
            known[None][language] += 1
    if languages and not known[None]:
        raise DatasetError(f"No text could be recognised as one of {', '.join(LANGUAGES)}. {_NAME_IT}.")
    usual = {who: min(counts, key=lambda code: (-counts[code], code)) for who, counts in known.items() if counts}
    pairs = zip(speakers, languages, strict=True)
    return [language or usual.get(speaker, usual[None]) for speaker, language in pairs]


def warn_of_other_script(language: str, texts: Sequence[str]) -> None:
    """Warn if nearly all texts are in another script than `language`."""
    expected = {"kana": ("kana", "han")}.get(script := load_table(language).script, (script,))
    scripts = [(text, found) for text in texts[:: 1 + len(texts) // _MOST_TEXTS] if (found := _script_of(text))]
    others = [text for text, found in scripts if found not in expected]
    if others and len(others) >= _NEARLY_ALL * len(scripts):
        found = f"nearly all texts are written in other letters, such as {others[0][:40]!r}"
        advice = "name another language, or leave it out to have it detected"
        _log.warning(f"WARNING: --language {language} means {LANGUAGE_NAMES[language]}, but {found}: {advice}")
