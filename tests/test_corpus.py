"""The metadata reader: every form users bring, every broken line named, nothing dropped without a word."""

import codecs
import gc
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.data.corpus import Corpus, language_code, read_corpus
from myxtts.errors import DatasetError

Read = Callable[..., Corpus]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a folder with this metadata; audio files are empty, because the reader opens none."""

    def read(
        metadata: str | bytes, audio: str = "wavs/a.wav wavs/b.wav wavs/c.wav", **more: str | bytes
    ) -> Corpus:
        for name in audio.split():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        for name, content in {"metadata": metadata, **more}.items():
            (tmp_path / f"{name}.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
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
def test_a_header_that_lacks_a_column_is_refused(read: Read, header: str, missing: str) -> None:
    with pytest.raises(DatasetError, match=missing):
        read(f"{header}\na|x\nb|x\n")


def test_a_first_clip_is_not_taken_for_a_header(read: Read) -> None:
    assert texts(read("a|text\nb|file\n")) == {"a": "text", "b": "file"}
    assert texts(read("file|Where is it?\n", "wavs/file.wav")) == {"file": "Where is it?"}


def test_a_missing_file_is_named_as_in_the_metadata(read: Read) -> None:
    corpus = read("audio_file|text\nclips/x.ogg|Hello.\ny|Hi.\n")
    details = [item.detail.partition(" in ")[0] for item in corpus.set_aside]
    assert details == ["no regular file clips/x.ogg", "no regular file y.wav|.flac|.mp3|.ogg|.opus"]


def test_train_and_eval_files(read: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    corpus = read("a|Without the others.\n", metadata_train="a|One.\n", metadata_eval="b|Two.\n")
    assert [(clip.text, clip.held_out) for clip in corpus.clips] == [("One.", False), ("Two.", True)]
    assert "metadata_train.csv is read, metadata.csv is not" in caplog.text
    (tmp_path / "metadata_train.csv").unlink()
    found = [(clip.text, clip.held_out) for clip in read_corpus(tmp_path).clips]
    assert found == [("Without the others.", False), ("Two.", True)]


@pytest.mark.parametrize(
    "lines",
    [
        "audio_file|text|speaker_name|language\na|Hello there.|ann|en-US",
        "language|speaker_name|text|audio_file\nEN_gb|ann|Hello there.|a",
        "TEXT|Speaker|LANG|Path\nHello there.|ann|English|a",
        "id|speaker|language|text\na|ann|en|Hello there.",
        "file_name|locale|sentence|speaker_id\na|en_US|Hello there.|ann",
    ],
)
def test_headers_in_any_order(read: Read, lines: str) -> None:
    (clip,) = read(lines).clips
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


@pytest.mark.parametrize(
    "raw",
    ["a|One.\nb|caf\xe9\nc|Three.\n".encode("latin-1"), "a|1\nb|\ud800.\nc|3\n".encode("utf-16", "surrogatepass")],
    ids=["latin-1", "damaged utf-16"],
)
def test_an_undecodable_line_costs_one_line(read: Read, raw: bytes) -> None:
    corpus = read(raw)
    assert list(texts(corpus)) == ["a", "c"]
    assert reasons(corpus) == [("b", "wrong encoding", "metadata.csv:2")]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('"She said ""no"" twice."', 'She said "no" twice.'),
        *((kept, kept) for kept in ('"Quoted" at the start.', 'An odd " and one at the end"', '"A lone quote.')),
    ],
)
def test_quotes(read: Read, written: str, text: str) -> None:
    assert texts(read(f'"a"|{written}\n')) == {"a": text}


BAD_LINES = [
    ("a|Again.", "a", "duplicate id", "metadata.csv:1"),
    ("b|", "b", "empty text", "the text column is empty"),
    ("b2|  |  ", "b2", "empty text", ""),
    ('b3|""', "b3", "empty text", ""),
    ("no separator", "no separator", "malformed line", ""),
    ("c;some text", "c;some text", "malformed line", "put every text"),
    ("c,some text", "c,some text", "malformed line", "put every text"),
    ("c|x|y|z", "c", "malformed line", "4 fields"),
    ("|no id", "", "malformed line", "the id is empty"),
    ("absent|Nothing there.", "absent", "missing file", "no regular file absent.wav"),
    ("nul\0id|Text.", "nul\0id", "missing file", ""),
]


def test_every_kind_of_bad_line(read: Read) -> None:
    lines = ["a|One.", *(line for line, *_ in BAD_LINES)]
    corpus = read("\n".join(lines), metadata_eval="a|Also in the other file.\n")
    assert list(texts(corpus)) == ["a"]
    expected = [(name, reason, f"metadata.csv:{at}") for at, (_, name, reason, _) in enumerate(BAD_LINES, 2)]
    assert reasons(corpus) == [*expected, ("a", "duplicate id", "metadata_eval.csv:1")]
    for item, (*_, detail) in zip(corpus.set_aside, BAD_LINES, strict=False):
        assert item.detail and detail in item.detail


def test_an_unknown_language_is_named(read: Read) -> None:
    corpus = read("id|text|language\na|Hei maailma.|fi\nb|سلام|Farsi\n")
    assert [clip.language for clip in corpus.clips] == ["fa"]
    assert reasons(corpus) == [("a", "unknown language", "metadata.csv:2")]
    assert "'fi'" in corpus.set_aside[0].detail


def test_language_codes() -> None:
    names = ("en", " zh-cn", "PT_br", "Persian", "xx", "")
    assert [language_code(name) for name in names] == ["en", "zh", "pt", "fa", "", ""]
    assert all(language_code(code) == code for code in LANGUAGES)


def test_where_audio_is_looked_for(read: Read, tmp_path: Path) -> None:
    far = tmp_path / "elsewhere" / "far"
    audio = "wavs/a.flac wavs/deep/er/b.mp3 c.ogg wavs/d.with.dots.wav clips/e.wav wavs/dir.wav/x"
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs" / "broken.wav").symlink_to("gone.wav")
    names = ("a", "deep/er/b", "c", "d.with.dots", "clips/e.wav", "wavs/a.flac", far, "dir", "../up", "broken")
    corpus = read("".join(f"{name}|Text.\n" for name in names), audio=f"{audio} elsewhere/far.opus")
    found = ["wavs/a.flac", "wavs/deep/er/b.mp3", "c.ogg", "wavs/d.with.dots.wav", "clips/e.wav", "wavs/a.flac"]
    assert [clip.path for clip in corpus.clips] == [*found, f"{far}.opus"]
    missing = [(item.id, item.reason) for item in corpus.set_aside]
    assert missing == [(name, "missing file") for name in ("dir", "../up", "broken")]


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


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        *((content, "") for content in ("", "\n\n", "   \n", codecs.BOM_UTF8.decode())),
        (b"a|caf\xe9\nb|na\xefve\n", r"\. metadata\.csv:1: byte 0xe9 is not UTF-8; save the file as UTF-8\.$"),
    ],
)
def test_metadata_without_a_usable_line(read: Read, content: str | bytes, cause: str) -> None:
    with pytest.raises(DatasetError, match=f"no usable line{cause}"):
        read(content)


def test_folders_that_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"(?s)No such corpus folder.*metadata\.csv"):
        read_corpus(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DatasetError, match=r"(?s)holds: notes\.txt.*metadata_train\.csv"):
        read_corpus(tmp_path)
    with pytest.raises(
        DatasetError, match=r"is a file\. Name its folder, or make a sharded corpus of it: myxtts prepare"
    ):
        read_corpus(tmp_path / "notes.txt")
    for name in ("Interview 1.MP3", "talk.wav", "a.ogg", "b.ogg", "c.ogg", "d.ogg"):
        (tmp_path / name).touch()
    advice = r"clips of 2 to 12 seconds, each with its text\. myxtts collect.*DIR/metadata\.csv.*DIR/ID\.txt"
    with pytest.raises(DatasetError, match=rf"(?s)only 6 recording.*: Interview 1\.MP3,.*…\..*{advice}"):
        read_corpus(tmp_path)
    with pytest.raises(DatasetError, match=rf"(?s)talk\.wav is a single recording.*{advice}"):
        read_corpus(tmp_path / "talk.wav")


@pytest.mark.parametrize("mark", "\t,;")
def test_other_separators(read: Read, mark: str) -> None:
    table = 'path|sentence|client_id|up_votes\na|"Yes, well; no."|ann|2\nb|Two.||0\n'
    clips = read(table.replace("|", mark), speakers="id|speaker|language\nb|eve|fa\n".replace("|", mark)).clips
    found = [(clip.id, clip.text, clip.speaker, clip.language) for clip in clips]
    assert found == [("a", "Yes, well; no.", "ann", ""), ("b", "Two.", "eve", "fa")]
    lines = "".join(f'x{number}|"One, two; three."\n' for number in range(9)) + "a|One|2|3|4\n"
    corpus = read(lines.replace("|", mark), "".join(f"wavs/x{number}.wav " for number in range(9)))
    assert list(texts(corpus).values()) == ["One, two; three."] * 9
    assert [item.reason for item in corpus.set_aside] == ["malformed line"]


def test_recordings_with_texts_of_the_same_name(tmp_path: Path) -> None:
    def write(name: str, text: str | bytes | None = None) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if text is not None:
            path.with_suffix(".txt").write_bytes(text.encode("utf-8-sig") if isinstance(text, str) else text)

    write("one.wav", "First\nline.\n")
    write("ann/two.MP3", "Two.")
    write("wavs/one.wav", "Another one.")
    write("wavs/bob/three.flac", "raw 3")
    (tmp_path / "wavs/bob/three.normalized.txt").write_text("three")
    write("no text.ogg")
    write("latin.wav", b"caf\xe9")
    write("a/b/c/d/deep.wav", "Deep.")
    write("a/b/c/d/e/deeper.wav", "Too deep.")
    (tmp_path / "ann" / "loop").symlink_to(tmp_path)
    corpus = read_corpus(tmp_path)
    assert {clip.path: (clip.text, clip.speaker) for clip in corpus.clips} == {
        "one.wav": ("First line.", ""), "wavs/one.wav": ("Another one.", ""), "a/b/c/d/deep.wav": ("Deep.", "a"),
        "ann/two.MP3": ("Two.", "ann"), "wavs/bob/three.flac": ("three", "bob"),
    }  # fmt: skip
    assert {item.id: item.reason for item in corpus.set_aside} == {
        "no text.ogg": "no text", "latin.wav": "wrong encoding", "ann/loop": "folder not searched",
        "a/b/c/d/e": "folder not searched",
    }  # fmt: skip


def test_what_is_no_regular_file_is_not_opened(read: Read, tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    os.mkfifo(tmp_path / "wavs" / "pipe.wav")
    (tmp_path / "wavs" / "zero.wav").symlink_to("/dev/zero")
    (tmp_path / "wavs" / "self.wav").symlink_to("self.wav")
    corpus = read("a|One.\npipe|Two.\nzero|Three.\nself|Four.\n")
    assert list(texts(corpus)) == ["a"]
    assert ["no regular file" in item.detail for item in corpus.set_aside] == [True] * 3


def test_long_lines_and_many_missing_files(read: Read) -> None:
    def seconds(num_lines: int) -> float:
        """The fastest of three: the machine may be busy, and collecting garbage takes longer after other tests."""
        found = []
        for _ in range(3):
            gc.disable()
            start = time.process_time()
            corpus = read("a|One.\n" + "".join(f"x{number}|Text.\n" for number in range(num_lines)))
            found.append(time.process_time() - start)
            gc.enable()
            assert len(corpus.set_aside) == num_lines
        return min(found)

    few, many = seconds(10_000), seconds(40_000)
    assert many < 10 * max(few, 0.05), "linear: four times as long, not sixteen"
    corpus = read("a|One.\n" + "b|" + "word " * 1_000_000 + "\n" + "," * 1_000_000 + "\n")
    assert [clip.id for clip in corpus.clips] == ["a", "b"] and len(corpus.set_aside) == 1


PIECES = st.lists(
    st.sampled_from(
        [
            *b"a b | | \n \n \r \r\n text id / . ' \"".split(b" "),
            *(b" ", b"\0", b"\xe9", b"a|One.\n", b"b|One.|Two.\n"),
            *(codecs.BOM_UTF8, "\u200c\u06cc".encode(), "\u2028".encode()),
        ]
    ),
    max_size=30,
).map(b"".join)


@pytest.fixture(scope="module")
def two_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "wavs").mkdir()
    (folder / "wavs" / "a.wav").touch()
    (folder / "wavs" / "b.wav").touch()
    return folder


@settings(deadline=None, max_examples=300)
@given(raw=PIECES | st.binary(max_size=200) | PIECES.map(lambda raw: raw.decode("latin-1").encode("utf-16")))
@example(raw=b"\xff\xfea")
@example(raw=b"\xfe\xff\xd8\x00\n\x00|\x00")
@example(raw=b"id|text\n")
@example(raw=b"text|id\n|\n")
@example(raw=b"/|x\n.|x\n..|x\n")
@example(raw=b"a" * 5000 + b"|x")
@example(raw=b"a|One.\n" * 3)
def test_every_line_is_a_header_a_clip_or_set_aside_whatever_the_bytes(two_clips: Path, raw: bytes) -> None:
    (two_clips / "metadata.csv").write_bytes(raw)
    try:
        corpus = read_corpus(two_clips)
    except DatasetError:
        return
    assert all(clip.text and clip.id for clip in corpus.clips)
    assert all(item.reason and item.detail for item in corpus.set_aside)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raw = raw.decode("utf-16", "replace").encode()
    raw = raw.removeprefix(codecs.BOM_UTF8)
    lines = [line.decode(errors="replace") for line in raw.split(b"\n" if b"\n" in raw else b"\r")]
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    places = sorted(int(entry.where.split(":")[1]) for entry in (*corpus.clips, *corpus.set_aside))
    header = [number for number in numbers if number not in places]
    assert sorted([*places, *header]) == numbers
    assert not header or (len(header) == 1 and {"id", "text"} & set(re.split(r"\W", lines[header[0] - 1].lower())))


def test_columns_that_mean_nothing_are_named(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        read("audio|sentence|who|lang\na|text|ann|en\n")
    assert "columns not used: who" in caplog.text
