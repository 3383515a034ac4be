"""Several corpora in one run: how they are named, mixed, prepared and continued."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SENTENCES, contents, load_command, prepare_and_count_reads, write_corpus
from training_fixtures import Start, arguments, assert_same_run, newest, stop_at

from myxtts.config import LANGUAGES, CorpusSource, DataSettings
from myxtts.data.batches import References
from myxtts.data.clips import ClipSet, Mixture, PreparedCorpus
from myxtts.data.codes import CodesCache
from myxtts.data.order import Batches, Cursor
from myxtts.data.prepare import prepare, prepared_before
from myxtts.errors import ConfigError, DatasetError
from myxtts.observe.metrics import json_lines
from myxtts.pipeline import feed
from myxtts.run import ONE_CORPUS, check_resumable, prepare_corpus, require_continuable
from myxtts.run_dir import RunDir
from myxtts.settings import load, to_yaml
from myxtts.terminal import show_corpus

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_working_folder")

Prepare = Callable[..., PreparedCorpus]


# Settings


def sources(text: str) -> tuple[CorpusSource, ...]:
    return load_command(f"--train-data {text}" if " --" in text else named(text)).settings.data.sources


def named(text: str) -> str:
    return " ".join(f"--train-data {word}" for word in text.split())


def test_how_corpora_are_written() -> None:
    assert sources("a b:0.3") == (CorpusSource(Path("a")), CorpusSource(Path("b"), 0.3))
    everything = CorpusSource(Path("b"), 2, "de", "x y", True)
    written = load_command(text='data: {train_data: [a, "b:2,language=de, speakers=x y,single-speaker"]}')
    assert written.settings.data.sources == (CorpusSource(Path("a")), everything)
    flow = load_command(text="data: {train_data: [a:single-speaker, b:0.5]}").settings.data.sources
    assert flow == (CorpusSource(Path("a"), single_speaker=True), CorpusSource(Path("b"), 0.5))
    block = load_command(text="data:\n  train_data:\n    - a\n    - b:0.5\n").settings.data
    assert block.sources == (CorpusSource(Path("a")), CorpusSource(Path("b"), 0.5))
    assert load_command("--train-data a").settings.data.train_data == Path("a"), "one folder is a path, as ever"
    assert load_command("--train-data none").settings.data.train_data is None


def test_a_colon_in_a_path_is_told_from_options() -> None:
    assert sources("/at/12:30/a") == (CorpusSource(Path("/at/12:30/a")),)
    assert sources("a:b/ c:1/:0.3") == (CorpusSource(Path("a:b")), CorpusSource(Path("c:1"), 0.3))
    assert sources("a:speakers=x/y/") == (CorpusSource(Path("a:speakers=x/y")),)
    with pytest.raises(ConfigError, match=r"ends with a slash: a:b/"):
        sources("a:b")


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a:b/", "a:speakers=x/y/", "a b:0.3", "a:2,language=de,speakers=x,single-speaker", "~ ./~:0.5"),
        *(f"a:{1 / 3} b:{2 / 3}", "a:1e-9"),
    ],
)
def test_corpora_survive_the_file_of_a_run(text: str, tmp_path: Path) -> None:
    settings = load_command(f"{named(text)} --val-data v:language=de,speakers=b").settings
    (tmp_path / "kept.yaml").write_text(to_yaml(settings), encoding="utf-8")
    assert load(tmp_path / "kept.yaml", {}).settings == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "'0' is no option"),
        ("a:-1", "'-1' is no option"),
        ("a:nan", "'nan' is no option"),
        ("a:101", "above 0 and up to 100"),
        ("a:0,3", "'0' is no option"),
        ("a:1,2", "each given once"),
        ("a:", "'' is no option"),
        ("a:language=german", "did you mean de?"),
        ("a:speakers=", "speakers=NAME"),
        ("a:speakers=x/y", "'speakers=x/y' is no option"),
        ("/at/a:2,speakers=x/y", "speakers=NAME (without a slash)"),
        ("a --val-data b:2", "data.val_data has a weight; leave it out"),
        ("a --val-data b --val-data ./b", "b more than once; name it once"),
        (":0.3", "expected the path of a folder"),
        ("a b ./a:0.3", r"/a more than once; name it once, with a weight such as a:2"),
    ],
)
def test_what_is_no_corpus_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sources(text)
    assert message in str(caught.value)


def test_a_missing_folder_suggests_the_one_with_a_colon(tmp_path: Path, run_prepare: Prepare) -> None:
    (tmp_path / "talks:12").mkdir()
    with pytest.raises(DatasetError, match=r"talks:12, with a colon in its name, give .*talks:12/"):
        run_prepare((CorpusSource(tmp_path / "talks", 12),))


# Which clips an epoch holds


def clip_set(languages: list[int], corpora: list[int]) -> ClipSet:
    numbers = np.arange(len(languages))
    every = {"audio_rows": numbers, "ids_rows": numbers, "speakers": numbers % 3}
    names = [str(number) for number in numbers]
    return ClipSet(None, None, **every, languages=np.array(languages), corpora=np.array(corpora), names=names)


def test_a_weight_is_the_times_an_epoch_takes_the_clips_of_a_corpus() -> None:
    mixture = Mixture(clip_set([0] * 130, [0] * 100 + [1] * 20 + [2] * 10), [1.0, 0.3, 2.5])
    assert mixture.num_clips == 100 + 6 + 25 and not mixture.is_plain
    seen: Counter[int] = Counter()
    for epoch in range(10):
        drawn = Counter(mixture.clips(7, epoch).tolist())
        assert {clip: drawn[clip] for clip in range(100)} == dict.fromkeys(range(100), 1)
        assert sum(drawn[clip] for clip in range(100, 120)) == 6
        assert all(2 <= drawn[clip] <= 3 for clip in range(120, 130) if epoch % 2 == 0)
        seen += drawn
    assert {seen[clip] for clip in range(100, 120)} == {3}, "in ten epochs each clip of the second has three turns"
    assert {seen[clip] for clip in range(120, 130)} == {25}
    assert mixture.times[[0, 100, 129]].tolist() == [1, 0.3, 2.5]


def test_an_epoch_depends_on_the_seed_and_its_number_alone() -> None:
    mixture = Mixture(clip_set([0] * 60, [0] * 40 + [1] * 20), [1.0, 0.5])
    first = [mixture.clips(1, epoch).tolist() for epoch in range(4)]
    assert [mixture.clips(1, epoch).tolist() for epoch in (3, 2, 1, 0)] == first[::-1]
    assert sorted(first[0]) != sorted(first[1]) != sorted(mixture.clips(2, 1).tolist())
    assert sorted(first[0][40:] + first[1][40:]) == list(range(40, 60))


def test_without_weights_the_order_is_that_of_one_corpus() -> None:
    tokens = np.random.default_rng(0).integers(50, 400, 90)
    plain, mixed = (
        Batches(tokens, 4, 5),
        Batches(tokens, 4, 5, mixture=Mixture(clip_set([0] * 90, [0] * 90), [1.0])),
    )
    assert mixed.budget == plain.budget
    for epoch in range(3):
        np.testing.assert_array_equal(mixed.epoch(epoch)[0], plain.epoch(epoch)[0])


@pytest.mark.parametrize(("temperature", "rare"), [(1.0, 10), (2.0, 91), (100.0, 489)])
def test_the_temperature_evens_out_languages(temperature: float, rare: int) -> None:
    mixture = Mixture(clip_set([0] * 1000 + [3] * 10, [0] * 1010), [1.0], temperature)
    drawn = mixture.clips(3, 5)
    found = int((drawn >= 1000).sum())
    assert abs(found - rare) <= (0.1 * rare if temperature > 1 else 0)
    assert abs(len(drawn) - 1010) <= 1, "an epoch keeps its length"
    assert mixture.is_plain == (temperature == 1)
    expected = 1010 * np.array([1000, 10]) ** (1 / temperature) / (np.array([1000, 10]) ** (1 / temperature)).sum()
    assert abs(expected[1] - found) < 1


def test_languages_are_evened_out_after_the_weights_over_all_corpora() -> None:
    """English of both corpora counts together, with the weight of each."""
    clips = clip_set([0] * 400 + [0] * 800 + [3] * 25, [0] * 400 + [1] * 825)
    mixture = Mixture(clips, [1.0, 0.25], 2.0)
    english, other = float(mixture.times[:1200].sum()), float(mixture.times[1200:].sum())
    weighed = np.array([400 + 0.25 * 800, 0.25 * 25])
    expected = np.sqrt(weighed) / np.sqrt(weighed).sum() * weighed.sum()
    assert abs(english - expected[0]) <= 2 and abs(other - expected[1]) <= 1
    assert mixture.times[0] == pytest.approx(4 * mixture.times[400], rel=0.02)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_an_epoch_of_any_mixture_within_the_budget(world_size: int) -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(50, 400, 300)
    tokens[290] = 3000  # one clip that is far longer than the others, in the corpus with the small weight
    mixture = Mixture(clip_set([0] * 300, [0] * 200 + [1] * 100), [1.0, 0.05])
    ranks = [Batches(tokens, 4, 9, rank, world_size, mixture) for rank in range(world_size)]
    seen = set()
    for epoch in range(20, 40):
        last = [Batches(tokens, 4, 9, rank, world_size, mixture, None, epoch + 1) for rank in range(world_size)]
        plans = [plan for each in last for plan in each.plans(Cursor(epoch))]
        clips, weights = np.stack([plan.clips for plan in plans]), np.stack([plan.weights for plan in plans])
        assert tokens[clips].sum(axis=1).max() <= ranks[0].budget
        assert Counter(clips[weights > 0].tolist()) == Counter(mixture.clips(9, epoch).tolist())
        seen |= set(clips[weights > 0].tolist())
    assert seen == set(range(300)), "even the longest clip has its turn"
    steps = [plan.after for plan, _ in zip(ranks[0].plans(Cursor(0, 1)), range(52), strict=False)]
    assert steps[-1] == Cursor(*divmod(1 + 52 * world_size, ranks[0].num_batches))


@pytest.mark.parametrize("seed", [12, 36])
def test_every_clip_of_a_large_mixture_has_its_turn(seed: int) -> None:
    """With these seeds the first two epochs, of five that hold every clip once, hold none of the long clips."""
    tokens = np.random.default_rng(0).integers(60, 200, 30000)
    tokens[long := [5, 900, 15000, 29999]] = 600
    mixture = Mixture(clip_set([0] * 30000, [0] * 30000), [0.2])
    assert mixture.num_clips > 5000
    batches = Batches(tokens, 2, seed, mixture=mixture)
    assert 660 <= batches.budget <= 680, "the longest clip and a short one"
    seen: Counter[int] = Counter()
    for epoch in range(5):
        clips, weights = batches.epoch(epoch)
        seen += Counter(clips[weights > 0].tolist())
    assert set(seen.values()) == {1} and seen.keys() >= set(long)


@pytest.mark.parametrize("weights", [[0.3, 1.6], [0.95, 0.95], [1.0, 0.02]])
def test_the_longest_epoch_holds_more_long_clips_than_others(weights: list[float]) -> None:
    random = np.random.default_rng(4)
    lengths = random.integers(50, 400, 500)
    mixture = Mixture(clip_set([0] * 500, [0] * 200 + [1] * 300), weights)
    longest = lengths[mixture.longest_epoch(lengths, 3.0)]
    assert len(longest) == mixture.num_clips and longest.max() == lengths.max()
    totals = [lengths[mixture.clips(1, epoch)].sum() for epoch in range(60)]
    assert max(totals) < longest.sum() < 1.1 * np.mean(totals)


def test_own_references_are_counted_as_an_epoch_holds_them(small_set: ClipSet) -> None:
    voices = np.where(small_set.corpora == 0, 0, np.arange(len(small_set)))
    mixture = Mixture(small_set, [1.0, 0.5])
    assert References(small_set, voices).own_share == pytest.approx(4 / 10)
    assert References(small_set, voices, times=mixture.times).own_share == pytest.approx(2 / 8)


@pytest.fixture
def small_set(make_corpus, run_prepare: Prepare) -> ClipSet:
    prepared = run_prepare(make_corpus(SENTENCES[:10]), val_fraction=0)
    return replace(prepared.train, corpora=np.array([0] * 6 + [1] * 4))


# Preparing


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two corpora with the same ids and the same names of speakers."""
    folders = tmp_path / "a" / "first", tmp_path / "b" / "second"
    for folder, texts, seconds in zip(folders, (SENTENCES[:6], SENTENCES[6:10]), (None, 1.0), strict=True):
        write_corpus(folder, texts, seconds=seconds)
        (folder / "speakers.csv").write_text("id|speaker\nclip000|ann\nclip001|ann\nclip002|bob\n")
    time.sleep(0.05)  # so that a snapshot trusts the times of the folders
    return folders


def together(two: tuple[Path, Path], **options: object) -> DataSettings:
    mixed = (CorpusSource(two[0]), CorpusSource(two[1], 0.5))
    given = {"train_data": mixed, "language": "en", "vocab_size": 256, "val_fraction": 0.0, "num_workers": 1}
    return DataSettings(**given | options)


def test_adding_a_corpus_decodes_only_its_own_clips(two: tuple[Path, Path], messages) -> None:
    alone = together(two, train_data=two[0])
    prepare(alone)
    assert messages.work()["AUDIO"] == 6
    prepared = prepare(together(two))
    assert messages.work() == {"AUDIO": 4, "TEXT": 4}
    prepare(together(two, train_data=two[1]))
    assert messages.work() == {}, "nor is anything left to do for the second alone"
    assert prepared.root == two[0] / ".myxtts" and prepared.other_roots == [two[1] / ".myxtts"]
    assert any(prepared.other_roots[0].glob("audio-*"))


def test_the_clips_of_all_corpora_are_as_they_are_alone(two: tuple[Path, Path]) -> None:
    prepared = prepare(together(two))
    vocabulary = two[0] / "vocab.json"
    vocabulary.write_text(prepared.vocabulary)
    found = contents(prepared)
    assert len(found) == 10
    for folder in two:
        for name, (samples, ids, _, language) in contents(
            prepare(together(two, train_data=folder, tokenizer=vocabulary))
        ).items():
            assert found[f"{folder.name}/{name}"][:2] == (samples, ids)
            assert found[f"{folder.name}/{name}"][3] == language
    batch = np.zeros((10, prepared.train.num_samples.max()), np.int16)
    order = np.random.default_rng(0).permutation(10)
    prepared.train.audio.gather(prepared.train.audio_rows[order], batch)
    for row, clip in zip(batch, order.tolist(), strict=True):
        samples = np.frombuffer(found[prepared.train.names[clip]][0], np.int16)
        np.testing.assert_array_equal(row[: len(samples)], samples)


@pytest.mark.parametrize("native_loading", [True, False])
def test_a_second_start_reads_no_metadata(
    two: tuple[Path, Path], native_loading: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    val = write_corpus(tmp_path / "val", SENTENCES[10:12])
    time.sleep(0.05)
    for data in (together(two, native_loading=native_loading), together(two, val_data=val)):
        first, started_at = prepare(data), time.perf_counter()
        second, reads = prepare_and_count_reads(data, monkeypatch)
        assert time.perf_counter() - started_at < 0.3 and reads == 0
        assert contents(second) == contents(first) and second.corpora == ["first", "second"]
        for name in ("speaker_names", "set_aside", "vocabulary", "weights", "root", "other_roots"):
            assert getattr(second, name) == getattr(first, name)
        np.testing.assert_array_equal(second.train.corpora, first.train.corpora)
        other = replace(data, train_data=tuple(replace(source, weight=3.0) for source in data.sources))
        weighed = prepared_before(other)
        assert weighed is not None and weighed.weights == (3.0, 3.0), "weights decide nothing that is kept"
        (two[1] / "metadata.csv").touch()
        write_corpus(two[1], SENTENCES[12:13], first=12 + 2 * native_loading)
        assert prepared_before(data) is None
        time.sleep(0.05)


def test_equal_names_in_two_corpora_are_two_people(two: tuple[Path, Path], tmp_path: Path) -> None:
    prepared = prepare(together(two))
    assert prepared.speaker_names == ["", "first/ann", "first/bob", "second/ann", "second/bob"]
    merged = tuple(CorpusSource(folder, speakers="x") for folder in two)
    assert prepare(together(two, train_data=merged)).speaker_names == ["", "x/ann", "x/bob"]
    same_name = write_corpus(tmp_path / "c" / "first", SENTENCES[:2])
    (same_name / "speakers.csv").write_text("id|speaker\nclip000|ann\n")
    twins = prepare(together(two, train_data=(CorpusSource(two[0]), CorpusSource(same_name))))
    assert twins.corpora == ["first", "first-2"] and "first-2/ann" in twins.speaker_names
    assert len(set(twins.train.names)) == 8


def test_clips_without_names_have_the_voice_of_their_corpus(two: tuple[Path, Path]) -> None:
    for folder in two:
        (folder / "speakers.csv").unlink()
    data = together(two)
    prepared = prepare(data)

    def voices(data: DataSettings) -> list[int]:
        return References(prepared.train, prepared.voices([prepared.train], data)).voices.tolist()

    assert voices(data) == [-1] * 10, "each clip is its own reference"
    assert len(set(voices(replace(data, single_speaker=True)))) == 1, "one person in all of them"
    both = voices(replace(data, train_data=tuple(CorpusSource(folder, single_speaker=True) for folder in two)))
    assert len(set(both[:6])) == len(set(both[6:])) == 1 and both[0] != both[6]
    one = voices(replace(data, train_data=(CorpusSource(two[0], single_speaker=True), data.sources[1])))
    assert len(set(one[:6])) == 1 and one[6:] == [-1] * 4
    assert prepared.unnamed_corpora == ["first", "second"]
    single = (CorpusSource(two[0], single_speaker=True), data.sources[1])
    assert prepare(replace(data, train_data=single)).unnamed_corpora == ["second"]
    assert prepare(replace(data, single_speaker=True)).unnamed_corpora == []


@pytest.mark.parametrize("options", [{"single_speaker": True}, {}])
def test_clips_without_names_in_validation_have_the_voice_of_training(
    two: tuple[Path, Path], tmp_path: Path, options: dict[str, bool]
) -> None:
    for folder in two:
        (folder / "speakers.csv").unlink()
    val, how = write_corpus(tmp_path / "val", SENTENCES[10:12]), {"speakers": "x", "single_speaker": True}
    chosen = [CorpusSource(two[0], **how), CorpusSource(two[1]), CorpusSource(val, **how)]
    if options:
        chosen = [CorpusSource(source.folder) for source in chosen]
    data = together(two, train_data=tuple(chosen[:2]), val_data=tuple(chosen[2:]), **options)
    prepared = prepare(data)
    voices = prepared.voices([prepared.val, prepared.train], data)
    assert References(prepared.val, voices, prepared.train).own_share == 0
    assert len(set(voices[:8])) == 1 and (voices[8] == voices[0]) == bool(options)


def test_speakers_of_validation_are_those_of_the_corpus_that_is_named(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    val = write_corpus(tmp_path / "val", SENTENCES[10:12])
    (val / "speakers.csv").write_text("id|speaker\nclip000|ann\nclip001|eve\n")
    given = f"--train-data {two[0]} --train-data {two[1]} --val-data {val}:speakers=second,language=de"
    data = load_command(f"{given} --language en --vocab-size 256 --num-workers 1").settings.data
    prepared = prepare(data)
    assert [prepared.speaker_names[number] for number in prepared.val.speakers] == ["second/ann", "second/eve"]
    assert [LANGUAGES[number] for number in prepared.val.languages] == ["de", "de"]
    assert prepared.val.names == ["clip000", "clip001"]
    shared = prepared.voices([prepared.val, prepared.train], data)
    assert shared[0] in shared[2:].tolist() and shared[1] not in shared[2:].tolist()


def test_several_corpora_validate(two: tuple[Path, Path], tmp_path: Path) -> None:
    from myxtts.evaluation import _unseen_texts

    vals = [write_corpus(tmp_path / name, SENTENCES[at : at + 2]) for at, name in ((10, "v"), (12, "w"))]
    time.sleep(0.05)  # so that a snapshot trusts the times of the folders
    data = together(two, val_data=tuple(CorpusSource(folder) for folder in vals))
    prepared = prepare(data)
    assert prepared.val.names == ["v/clip000", "v/clip001", "w/clip000", "w/clip001"]
    assert set(_unseen_texts(prepared, data).values()) == set(SENTENCES[10:14])
    second = prepared_before(data)
    assert second is not None and contents(second) == contents(prepared)


@pytest.mark.usefixtures("small")
def test_a_corpus_without_names_is_asked_about_and_the_share_is_kept(start: Start, two: tuple[Path, Path]) -> None:
    (two[1] / "speakers.csv").unlink()
    names = "".join(f"clip{number:03d}|ann\n" for number in range(6))
    (two[0] / "speakers.csv").write_text(f"id|speaker\n{names}")
    start.command("prepare", "--train-data", two[0], "--train-data", two[1], "--language", "en")
    shown = " ".join(start.out.split())
    assert (
        "Hint: In second: no clip names its speaker" in shown and "give the folder as DIR:single-speaker" in shown
    )
    single = f"{two[1]}:single-speaker"
    start.command("prepare", "--train-data", two[0], "--train-data", single, "--language", "en")
    assert "no clip names its speaker" not in start.out
    for options, share in ((":0.5", 2 / 8), (":0.5,single-speaker", 0.0)):
        run = start(
            f"--train-data {two[1]}{options} --stages gpt --max-steps 1 --max-mel-frames 300",
            f"run{share}",
            two[0],
        )
        begun = [line for line in json_lines(run / "metrics.jsonl") if line["kind"] == "begin"]
        assert [line["own_references"] for line in begun] == [pytest.approx(share)]
        asked = (
            "25 % of the clips have no other clip of their speaker and use themselves; if one person speaks in "
        )
        assert (asked + "all of second, give it as DIR:single-speaker" in start.out) == (share > 0)
    start("--stages gpt --max-steps 1 --max-mel-frames 300 --reference-clip same", "same", two[0])
    assert "Reference voices: each clip is conditioned on itself, as --reference-clip same asks" in start.out


def test_each_corpus_may_have_its_language(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    mixed = (CorpusSource(two[0], language="nl"), CorpusSource(two[1], 0.5, language="de"))
    prepared = prepare(together(two, train_data=mixed))
    spoken = [LANGUAGES[number] for number in prepared.train.languages.tolist()]
    assert spoken == ["nl"] * 6 + ["de"] * 4
    show_corpus(prepared, brief=True)
    out = " ".join(capsys.readouterr().out.split())
    hours = prepared.train.num_samples / 22050 / 3600
    share = 100 * hours[:6].sum() / (hours[:6].sum() + hours[6:].sum() / 2)
    assert f"corpus first 6 {hours[:6].sum():.2f} {share:.1f} % of an epoch" in out
    assert f"corpus second 4 {hours[6:].sum():.2f} {100 - share:.1f} % of an epoch, weight 0.5" in out
    assert f"language Dutch 6 {hours[:6].sum():.2f} {share:.1f} %" in out and "speaker first/ann 2" in out
    assert "An epoch has 8 clips of 10" in out


def test_what_is_set_aside_names_its_corpus(two: tuple[Path, Path]) -> None:
    (two[1] / "wavs" / "clip003.wav").unlink()
    assert [item.id for item in prepare(together(two)).set_aside] == ["second/clip003"]
    for path in (two[1] / "wavs").iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match=f"No usable clip in {two[1]}"):
        prepare(together(two))


def test_codes_that_either_corpus_has_are_not_computed_again(two: tuple[Path, Path]) -> None:
    def codes(prepared: PreparedCorpus) -> CodesCache:
        hashes = prepared.train.audio.hashes[prepared.train.audio_rows]
        lengths = np.full(len(hashes), 3)
        return CodesCache.open(prepared.root, hashes, lengths, "dvae", others=prepared.other_roots)

    for number, folder in enumerate(two):
        alone = codes(prepare(together(two, train_data=folder)))
        alone.write(np.arange(len(alone)), np.full((len(alone), 3), number + 1, np.uint16))
        alone.close()
    both = codes(prepare(together(two)))
    assert both.known(np.arange(10)).all()
    assert [both.row(clip).tolist() for clip in (0, 9)] == [[1] * 3, [2] * 3]


# Training


@pytest.mark.usefixtures("small")
def test_a_run_on_a_mixture_continues_exactly_with_any_number_of_workers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has 5 + 1 or 2 clips: the run goes through four of them, and stops in the second and third."""
    mixed = f"--train-data {start.clips(3)}:0.5 --stages gpt --max-steps 10"
    whole = start(mixed, "whole", 5)
    assert "An epoch has 7 clips of 8" in start.out
    stop_at(monkeypatch, 5, 8)
    for workers in (1, 2, 2):
        parts = start(f"{mixed} --num-workers {workers}", "parts", 5)
    assert newest(parts).state["cursor"] == [2, 2]
    assert_same_run(parts, whole, "gpt")


@pytest.mark.usefixtures("small")
def test_other_weights_or_another_order_are_refused(start: Start) -> None:
    first, second = start.clips(4), start.clips(3)
    start(f"--train-data {second}:0.5 --stages dvae --max-steps 1")
    start(f"--train-data {second}:0.7 --stages dvae --max-steps 2", code=2)
    assert "corpora and weights: the run has training-clips-4:1, training-clips-3:0.5, now" in start.err
    start(f"--train-data {first}:1 --stages dvae --max-steps 2", corpus=second, code=2)
    assert "corpora and weights" in start.err
    start(f"--train-data {second}:0.5 --language-temperature 2 --stages dvae --max-steps 2", code=2)
    assert "data.language_temperature: the run has 1.0, now 2.0" in start.err


@pytest.mark.usefixtures("small")
def test_check_refuses_what_train_refuses_where_weights_or_temperature_are_given_up(start: Start) -> None:
    clips, flags = start.clips(4), "--stages dvae --max-steps"
    start(f"{flags} 1", "weighed", Path(f"{clips}:{1 / 3}"))
    start(f"{flags} 1", "plain", clips)
    for run, corpus, says in (
        ("weighed", clips, f"the run has training-clips-4:{1 / 3}, now one corpus, each clip once"),
        ("plain", Path(f"{clips}:0.5"), "the run has one corpus, each clip once, now training-clips-4:0.5"),
    ):
        start(f"{flags} 2", run, corpus, code=2)
        assert f"corpora and weights: {says}" in start.err
        words = arguments(start.folder / run, corpus, f"{flags} 2")[1:]
        settings, folder = load_command(shlex.join(words)).settings, RunDir(start.folder / run)
        with pytest.raises(ConfigError, match="corpora and weights"):
            check_resumable(settings, folder, prepare_corpus(settings, continued=folder))
    saved = {"processes": 1, "data.batch_size": 1}
    require_continuable(Path(), saved, saved | ONE_CORPUS)  # older runs do not name what is usual


@pytest.mark.usefixtures("small")
def test_latents_are_kept_for_clips_that_the_first_epoch_does_not_hold(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, keep_latents = [], feed.keep_latents

    def see(ctx: feed.FeedContext, say: Callable[[str], None]) -> bool:
        found = keep_latents(ctx, say)
        train = ctx.prepared.train
        cache = feed._open_latents(ctx, train, feed._references(ctx, train))
        kept.append(bool(cache.known(np.arange(len(train))).all()))
        return found

    monkeypatch.setattr("myxtts.run.keep_latents", see)
    start(f"--train-data {start.clips(3)}:0.4 --stages decoder --max-steps 6")
    assert kept == [True]


def test_evaluation_and_samples_find_clips_of_every_corpus(two: tuple[Path, Path], tmp_path: Path) -> None:
    from myxtts.evaluation import _unseen_texts
    from myxtts.synthesis.synthesizer import example

    write_corpus(two[1], ["A long one that is chosen for the sample of the run."], first=20, seconds=4.0)
    data = together(two, val_fraction=0.3)
    prepared = prepare(data)
    unseen = _unseen_texts(prepared, data)
    assert unseen.keys() == set(prepared.val.names) and unseen
    longest = replace(data, val_fraction=0.0)
    said = example(longest, prepare(longest).train, tmp_path)
    assert said is not None and said.recording == two[1] / "wavs" / "clip020.wav"
