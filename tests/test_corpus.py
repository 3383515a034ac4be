"""The metadata reader: every form users bring, every broken line named, nothing dropped without a word."""

import codecs
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.data.corpus import COLUMN_NAMES, Clip, Corpus, language_code, read_corpus
from myxtts.errors import DatasetError

Read = Callable[..., Corpus]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a folder with this metadata; audio files are empty, for the reader opens none."""

    def read(
        metadata: str | bytes, audio: str = "wavs/a.wav wavs/b.wav wavs/c.wav", **more: str | bytes
    ) -> Corpus:
        for name in audio.split():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        for name, content in {"metadata": metadata, **more}.items():
            raw = content if isinstance(content, bytes) else content.encode()
            (tmp_path / f"{name}.csv").write_bytes(raw)
        return read_corpus(tmp_path)

    return read


def texts(corpus: Corpus) -> dict[str, str]:
    return {clip.id: clip.text for clip in corpus.clips}


def reasons(corpus: Corpus) -> list[tuple[str, str, str]]:
    return [(item.id, item.reason, item.where) for item in corpus.set_aside]


def test_two_and_three_columns(read: Read) -> None:
    corpus = read("a|Hello.\nb|Dr. No|Doctor No\nc|raw only|\n")
    assert texts(corpus) == {"a": "Hello.", "b": "Doctor No", "c": "raw only"}
    assert corpus.set_aside == []
    places = [("wavs/a.wav", "metadata.csv:1"), ("wavs/b.wav", "metadata.csv:2"), ("wavs/c.wav", "metadata.csv:3")]
    assert [(clip.path, clip.where) for clip in corpus.clips] == places


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        ("audio_file|speaker_name", "no column for the text; expected one of normalized_text, .*sentence"),
        ("id|words", "no column for the text"),
        ("text|speaker", "no column for the recordings; expected one of audio_file"),
    ],
)
def test_a_header_that_lacks_a_column_is_told_from_a_clip(read: Read, header: str, missing: str) -> None:
    with pytest.raises(DatasetError, match=missing):
        read(f"{header}\na|x\nb|x\n")


def test_a_first_clip_is_not_taken_for_a_header(read: Read) -> None:
    assert texts(read("a|text\nb|file\n")) == {"a": "text", "b": "file"}
    assert texts(read("file|Where is it?\n", "wavs/file.wav")) == {"file": "Where is it?"}


def test_a_missing_file_is_named_as_the_metadata_names_it(read: Read) -> None:
    corpus = read("audio_file|text\nclips/x.ogg|Hello.\ny|Hi.\n")
    assert [item.detail.partition(" in ")[0] for item in corpus.set_aside] == [
        "no file clips/x.ogg",
        "no y.wav|.flac|.mp3|.ogg|.opus",
    ]


def test_train_and_eval_files(read: Read, tmp_path: Path) -> None:
    corpus = read(
        "a|ignored where metadata_train.csv exists\n", metadata_train="a|One.\n", metadata_eval="b|Two.\n"
    )
    assert texts(corpus) == {"a": "One.", "b": "Two."}
    assert [clip.held_out for clip in corpus.clips] == [False, True]
    (tmp_path / "metadata_train.csv").unlink()
    assert [(clip.text, clip.held_out) for clip in read_corpus(tmp_path).clips] == [
        ("ignored where metadata_train.csv exists", False),
        ("Two.", True),
    ]


@pytest.mark.parametrize(
    "columns",
    [
        "audio_file text speaker_name language",
        "language speaker_name text audio_file",
        "TEXT Speaker LANG Path",
        "id speaker language text",
        "file_name locale sentence speaker_id",
    ],
)
def test_headers_in_any_order(read: Read, columns: str) -> None:
    values = {"text": "Hello there.", "speaker": "ann", "language": "en-US", "audio": "a"}
    meaning = {"sentence": "text", "lang": "language", "locale": "language", "speaker": "speaker"}
    meaning |= {"speaker_name": "speaker", "speaker_id": "speaker", "text": "text", "language": "language"}
    fields = [values[meaning.get(name.lower(), "audio")] for name in columns.split()]
    (clip,) = read("|".join(columns.split()) + "\n" + "|".join(fields) + "\n").clips
    assert (clip.id, clip.text, clip.speaker, clip.language) == ("a", "Hello there.", "ann", "en")


def test_a_header_with_both_texts_takes_the_normalised_one(read: Read) -> None:
    corpus = read("id|text|normalized_text\na|Dr. No|Doctor No\nb|too few\n")
    assert texts(corpus) == {"a": "Doctor No"}
    assert reasons(corpus) == [("b", "malformed line", "metadata.csv:3")]


def test_speaker_and_language_may_be_left_out_of_a_line(read: Read) -> None:
    corpus = read("audio_file|text|speaker_name|language\na|One.|ann|fa\nb|Two.|ann\nc|Three.\n")
    assert [(clip.speaker, clip.language) for clip in corpus.clips] == [("ann", "fa"), ("ann", ""), ("", "")]


def test_speakers_file(read: Read) -> None:
    corpus = read("a|One.\nb|Two.\nc|Three.\n", speakers='id|speaker|language\na|ann|fa\n"b"|"bob"|\n')
    assert [(clip.speaker, clip.language) for clip in corpus.clips] == [("ann", "fa"), ("bob", ""), ("", "")]
    corpus = read("audio_file|text|speaker\na|One.|carl\nb|Two.|\n")
    assert [clip.speaker for clip in corpus.clips] == ["carl", "bob"]


@pytest.mark.parametrize(
    ("content", "found"),
    [("a|ann\n", "a|ann"), ("", "expected the header"), (b"id|speaker\na|Ren\xe9\n", "speakers.csv:2.*0xe9")],
)
def test_a_speakers_file_that_cannot_be_used(read: Read, content: str | bytes, found: str) -> None:
    with pytest.raises(DatasetError, match=found):
        read("a|One.\n", speakers=content)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.replace("\n", "\r\n").encode("utf-16-be"),
        lambda text: text.rstrip().encode(),
        lambda text: text.replace("\n", "\n\n \n").encode(),
        lambda text: text.replace("|", " |\t").encode(),
    ],
    ids=["bom", "crlf", "bom+crlf", "cr", "utf16", "utf16be+crlf", "no-newline", "blank-lines", "spaces"],
)
def test_what_editors_do_to_a_file(read: Read, encode: Callable[[str], bytes]) -> None:
    corpus = read(encode("a|One, très bien.\nb|سلام دنیا\nc|Three.\n"))
    assert texts(corpus) == {"a": "One, très bien.", "b": "سلام دنیا", "c": "Three."}
    assert corpus.set_aside == []


def test_a_line_in_another_encoding_costs_one_line(read: Read) -> None:
    corpus = read("a|One.\nb|caf\xe9\nc|Three.\n".encode("latin-1"))
    assert list(texts(corpus)) == ["a", "c"]
    assert reasons(corpus) == [("b", "wrong encoding", "metadata.csv:2")]
    assert "0xe9" in corpus.set_aside[0].detail


def test_damaged_utf16_costs_one_line(read: Read) -> None:
    raw = "a|One.\nb|Two \ud800.\nc|Three.\n".encode("utf-16", "surrogatepass")
    corpus = read(raw)
    assert list(texts(corpus)) == ["a", "c"]
    assert reasons(corpus) == [("b", "wrong encoding", "metadata.csv:2")]
    assert len(read(raw + b"c").set_aside) == 2  # half a character at the end


def test_only_undecodable_lines(read: Read) -> None:
    cause = r"no usable line\. metadata\.csv:1: byte 0xe9 is not UTF-8; save the file as UTF-8\.$"
    with pytest.raises(DatasetError, match=cause):
        read("a|caf\xe9\nb|na\xefve\n".encode("latin-1"))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"id|text\na|caf\xe9\n", "byte 0xe9 is not UTF-8"),
        (b"a;some text\n", "separated by ';'"),
        (b"a,some text\n", "separated by ','"),
        (b"a|b|c|d\n", "4 fields"),
        (b"a|\n", "the text column is empty"),
        (b"|text\n", "the id is empty"),
        (b"absent|text\n", "no absent.wav"),
    ],
)
def test_a_single_line_that_cannot_be_used_has_its_cause(read: Read, line: bytes, cause: str) -> None:
    corpus = read(line)
    assert corpus.clips == [] and len(corpus.set_aside) == 1 and cause in corpus.set_aside[0].detail


def test_quotes(read: Read) -> None:
    corpus = read(
        '"a"|"She said ""no"" twice."\n'
        'b|"Quoted" at the start only.\n'
        'c|An odd " in the middle, and one at the end"\n'
        'd|"A lone quote at the start.\n'
        'e|""\n',
        audio="wavs/a.wav wavs/b.wav wavs/c.wav wavs/d.wav wavs/e.wav",
    )
    assert texts(corpus) == {
        "a": 'She said "no" twice.',
        "b": '"Quoted" at the start only.',
        "c": 'An odd " in the middle, and one at the end"',
        "d": '"A lone quote at the start.',
    }
    assert reasons(corpus) == [("e", "empty text", "metadata.csv:5")]


def test_every_kind_of_bad_line(read: Read) -> None:
    corpus = read(
        "a|One.\na|Again.\nb|\nb2|  |  \nno separator\nc|x|y|z\n|no id\nabsent|Nothing there.\nnul\0id|Text.\n",
        metadata_eval="a|Also in the other file.\n",
    )
    assert list(texts(corpus)) == ["a"]
    assert reasons(corpus) == [
        ("a", "duplicate id", "metadata.csv:2"),
        ("b", "empty text", "metadata.csv:3"),
        ("b2", "empty text", "metadata.csv:4"),
        ("no separator", "malformed line", "metadata.csv:5"),
        ("c", "malformed line", "metadata.csv:6"),
        ("", "malformed line", "metadata.csv:7"),
        ("absent", "missing file", "metadata.csv:8"),
        ("nul\0id", "missing file", "metadata.csv:9"),
        ("a", "duplicate id", "metadata_eval.csv:1"),
    ]
    assert all(item.detail for item in corpus.set_aside)
    assert "metadata.csv:1" in corpus.set_aside[0].detail


def test_an_unknown_language_is_named(read: Read) -> None:
    corpus = read("id|text|language\na|Hei maailma.|fi\nb|Hello.|EN_gb\nc|سلام|Farsi\n")
    assert [clip.language for clip in corpus.clips] == ["en", "fa"]
    assert reasons(corpus) == [("a", "unknown language", "metadata.csv:2")]
    assert "'fi'" in corpus.set_aside[0].detail


def test_language_codes() -> None:
    assert [language_code(name) for name in ("en", " zh-cn", "PT_br", "Persian", "xx", "")] == [
        "en", "zh", "pt", "fa", "", "",
    ]  # fmt: skip
    assert all(language_code(code) == code for code in LANGUAGES)


def test_where_audio_is_looked_for(read: Read, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.opus").touch()
    audio = "wavs/a.flac wavs/deep/er/b.mp3 c.ogg wavs/d.with.dots.wav clips/e.wav wavs/dir.wav/x"
    far = f"{elsewhere}/far"
    names = ("a", "deep/er/b", "c", "d.with.dots", "clips/e.wav", "wavs/a.flac", far, "dir", "../up")
    corpus = read("".join(f"{name}|Text.\n" for name in names), audio=audio)
    found = ["wavs/a.flac", "wavs/deep/er/b.mp3", "c.ogg", "wavs/d.with.dots.wav", "clips/e.wav", "wavs/a.flac"]
    assert [clip.path for clip in corpus.clips] == [*found, f"{far}.opus"]
    assert [item.id for item in corpus.set_aside] == ["dir", "../up"]


def test_a_broken_link_is_a_missing_file(read: Read, tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs/a.wav").symlink_to("gone.wav")
    corpus = read("a|One.\nb|Two.\n", audio="wavs/b.wav")
    assert reasons(corpus) == [("a", "missing file", "metadata.csv:1")]


def test_a_speaker_column_without_a_header_is_refused(read: Read) -> None:
    lines = [f"a{number}|Sentence number {number}.|{'ann' if number % 2 else 'bob'}" for number in range(20)]
    with pytest.raises(DatasetError, match=r"(?s)third column.*audio_file\|text\|speaker_name"):
        read("\n".join(lines))
    with_header = read("\n".join(["audio_file|text|speaker_name", *lines]))
    assert len(with_header.set_aside) == 20  # missing files, but read as meant


@pytest.mark.parametrize("line", ["Hello.|Hello.", "text {}|"], ids=["equal sentences", "empty"])
def test_other_third_columns_name_no_speakers(read: Read, line: str) -> None:
    corpus = read("".join(f"a{number}|{line.format(number)}\n" for number in range(20)))
    assert {item.reason for item in corpus.set_aside} == {"missing file"}


@pytest.mark.parametrize("content", ["", "\n\n", "   \n", codecs.BOM_UTF8.decode()])
def test_empty_metadata(read: Read, content: str) -> None:
    with pytest.raises(DatasetError, match="no usable line"):
        read(content)


def test_folders_that_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"(?s)No such corpus folder.*metadata\.csv"):
        read_corpus(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DatasetError, match=r"(?s)holds: notes\.txt.*metadata_train\.csv"):
        read_corpus(tmp_path)
    with pytest.raises(DatasetError, match="is a file: name its folder"):
        read_corpus(tmp_path / "notes.txt")


def decoded(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def is_header(line: str) -> bool:
    names = {re.sub(r'^"(.*)"$', r"\1", name.strip(), flags=re.S).strip() for name in line.lower().split("|")}
    return bool(names & set(COLUMN_NAMES["audio"])) and bool(names & set(COLUMN_NAMES["text"]))


def check_every_line_is_accounted_for(raw: bytes) -> None:
    """Each line that is neither blank nor a header is one clip or one entry of the set-aside list."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wavs").mkdir()
        (folder / "wavs" / "a.wav").touch()
        (folder / "wavs" / "b.wav").touch()
        (folder / "metadata.csv").write_bytes(raw)
        try:
            corpus = read_corpus(folder)
        except DatasetError:
            return
    assert all(isinstance(clip, Clip) and clip.text and clip.id for clip in corpus.clips)
    assert all(item.reason and item.detail for item in corpus.set_aside)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raw = raw.decode("utf-16", "replace").encode()
    raw = raw.removeprefix(codecs.BOM_UTF8)
    lines = raw.split(b"\n" if b"\n" in raw else b"\r")
    read = {number: decoded(line) for number, line in enumerate(lines, 1)}
    numbers = [number for number, line in read.items() if line is None or line.strip()]
    first = next((number for number in numbers if read[number] is not None), 0)
    if first and is_header(read[first]):
        numbers.remove(first)
    places = sorted(int(entry.where.split(":")[1]) for entry in (*corpus.clips, *corpus.set_aside))
    assert places == numbers


PIECES = st.sampled_from(
    [
        *b"a b | | \n \n \r \r\n text id / . ' \"".split(b" "),
        *(b" ", b"\0", b"\xe9", b"a|One.\n", b"b|One.|Two.\n"),
        *(codecs.BOM_UTF8, "\u200c\u06cc".encode(), "\u2028".encode()),
    ]
)


@settings(deadline=None, max_examples=400)
@given(
    st.lists(PIECES, max_size=30).map(b"".join)
    | st.binary(max_size=200)
    | st.lists(PIECES, max_size=20).map(lambda pieces: b"".join(pieces).decode("latin-1").encode("utf-16"))
)
@example(b"\xff\xfea")
@example(b"\xfe\xff\xd8\x00\n\x00|\x00")
@example(b"id|text\n")
@example(b"text|id\n|\n")
@example(b"/|x\n.|x\n..|x\n")
@example(b"a" * 5000 + b"|x")
@example(b"a|One.\n" * 3)
def test_any_bytes_give_a_corpus_or_a_dataset_error(raw: bytes) -> None:
    check_every_line_is_accounted_for(raw)


def test_columns_that_mean_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metadata.csv").write_text("audio|sentence|who|lang\na|text|ann|en\n")
    with caplog.at_level("INFO"):
        read_corpus(tmp_path)
    assert "columns not used: who" in caplog.text
