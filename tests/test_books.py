"""Books become chapters of paragraphs, and chapters become files; an interrupted book is continued."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from synthesis_fixtures import TEXTS, make_model, vocabulary

from myxtts.audio import Wave
from myxtts.cli import main
from myxtts.errors import NO_PROGRESS, ConfigError, DatasetError
from myxtts.synthesis.audiobook import BookOptions, FinishedChapter, speak_book, usual_seed
from myxtts.synthesis.books import Book, Chapter, read_book
from myxtts.synthesis.narration import Narrator
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import Voice
from myxtts.weights import save_folder

pytest_plugins = ["synthesis_fixtures"]
CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>The Mill</dc:title><dc:language>en-GB</dc:language></metadata><manifest>
<item id="two" href="text/second%20part.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="text/first.xhtml" media-type="application/xhtml+xml"/>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="picture" href="cover.png" media-type="image/png"/></manifest>
<spine><itemref idref="picture"/><itemref idref="nav"/><itemref idref="one"/>
<itemref idref="two"/></spine></package>"""
PAGES = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": CONTAINER,
    "OEBPS/book.opf": PACKAGE,
    "OEBPS/nav.xhtml": "<html><body><nav>Contents</nav></body></html>",
    "OEBPS/text/first.xhtml": "<!DOCTYPE html><html><head><title>x</title><style>p {}</style></head><body>"
    "<h1>The <i>River</i></h1><p>It rained&nbsp;all day.</p><p>We <b>wal</b>ked<br/>home.<p>Then it&#8217;s over."
    "<script>alert(1)</script></body></html>",
    "OEBPS/text/second part.xhtml": "<html><body><div>No heading here.</div><hr/><p>* * *</p></body></html>",
}


def epub(path: Path, changes: Mapping[str, str | bytes | None] = {}) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {**PAGES, **changes}.items():
            if content is not None:
                file.writestr(name, content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        read_book(path)
    return str(caught.value)


def test_an_epub_has_its_chapters_in_the_order_of_the_spine(tmp_path: Path) -> None:
    book = read_book(epub(tmp_path / "mill.epub"))
    assert (book.title, book.language) == ("The Mill", "en")
    assert book.chapters == (
        Chapter("The River", ("The River", "It rained all day.", "We walked home.", "Then it’s over.")),
        Chapter("2", ("No heading here.",)),
    )


BOMB = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;&b;">]>'


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"META-INF/container.xml": None}, "missing"),
        ({"META-INF/container.xml": "<container/>"}, "names no package"),
        ({"OEBPS/book.opf": "<package"}, "not XML"),
        ({"OEBPS/book.opf": BOMB + PACKAGE}, "DOCTYPE"),
        ({"OEBPS/book.opf": (BOMB + PACKAGE).encode("utf-16")}, "DOCTYPE"),
        ({"OEBPS/book.opf": PACKAGE.replace("text/first", "../../../etc/passwd")}, "outside the book"),
        ({"OEBPS/book.opf": PACKAGE.replace("text/first", "text/gone")}, "missing"),
        ({"OEBPS/text/first.xhtml": b" " * 65_000_000}, "unpacks to more"),
        ({"OEBPS/text/first.xhtml": "", "OEBPS/text/second part.xhtml": "<p>* * *</p>"}, "no text"),
        (
            {
                "META-INF/encryption.xml": '<encryption><CipherReference URI="OEBPS/text/first.xhtml"/>'
                "</encryption>"
            },
            "encrypted",
        ),
    ],
)
def test_a_damaged_or_hostile_epub_is_refused(
    tmp_path: Path, changes: dict[str, str | bytes | None], said: str
) -> None:
    assert said in refusal(epub(tmp_path / "bad.epub", changes))


def test_what_is_no_book_is_refused(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.epub", b"hello", "damaged"),
        ("a.txt", b"\xff\xfe\xff", "UTF-8"),
        ("b.txt", b"* * *", "no text"),
        ("a.pdf", b"%PDF", ".epub"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in refusal(tmp_path / name)
    assert "cannot be read" in refusal(tmp_path / "gone.txt")
    whole = epub(tmp_path / "whole.epub").read_bytes()
    (tmp_path / "cut.epub").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(tmp_path / "cut.epub")


def test_chapters_of_a_text_begin_at_their_headings(tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text(
        "A foreword\nof two lines.\r\n\r\nChapter I. Rain\n\nIt rained.\n\nCHAPTER 2\n\nIt stopped.\n"
    )
    assert read_book(tmp_path / "tale.txt").chapters == (
        Chapter("tale", ("A foreword of two lines.",)),
        Chapter("Chapter I. Rain", ("Chapter I. Rain", "It rained.")),
        Chapter("CHAPTER 2", ("CHAPTER 2", "It stopped.")),
    )
    (tmp_path / "fa.txt").write_text("فصل اول\n\nباران آمد.\n\nفصل دوم: خانه\n\nبند آمد.")
    assert [chapter.title for chapter in read_book(tmp_path / "fa.txt").chapters] == ["فصل اول", "فصل دوم: خانه"]
    (tmp_path / "plain.txt").write_text("One paragraph.\n\nChapter and verse are\nquoted here.")
    assert len(read_book(tmp_path / "plain.txt").chapters) == 1


def test_markdown_loses_its_marks(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(
        "# One\n\nIt *really* [rained](http://a.b), in `snake_case`.\n\n```\n# code\n```\n\n"
        "- a point\n- another\n\n---\n\n### Not a chapter\n\n## Two ##\n\n![picture](x.png) **Over**.\n"
    )
    assert read_book(tmp_path / "notes.md").chapters == (
        Chapter("One", ("One", "It really rained, in snake_case.", "a point", "another", "Not a chapter")),
        Chapter("Two", ("Two", "Over.")),
    )


FOREIGN = "باران عصر بند آمد و ما کنار رودخانه رفتیم."
BOOK = Book(
    "Harbour",
    (
        Chapter("One: quiet/calm", ("One: quiet/calm", " ".join(TEXTS))),
        Chapter("Two", (TEXTS[1], FOREIGN, TEXTS[0])),
    ),
)


def spoken(
    out: Path, synthesizer: Synthesizer, voice: Voice, book: Book = BOOK, **options: str
) -> list[FinishedChapter]:
    narrator = Narrator(synthesizer, voice, seed=int(options.pop("seed", 1)), wants_words=True)
    return speak_book(book, narrator, out, BookOptions("en", **options), NO_PROGRESS, list[str]().append)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def test_a_book_is_a_file_for_each_chapter_with_subtitles(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice
) -> None:
    first, second = spoken(tmp_path, synthesizer, anna, subtitle_form="srt")
    assert [first.file.name, second.file.name] == ["01 One quiet calm.flac", "02 Two.flac"]
    wave, rate = soundfile.read(first.file)
    assert rate == 24000 and len(wave) / rate == pytest.approx(first.seconds)
    shown = (tmp_path / "01 One quiet calm.srt").read_text()
    assert "One: quiet/calm.\n\n2\n" in shown, "a heading is spoken alone"
    assert any(FOREIGN[:9] in note for note in second.notes)


@pytest.mark.parametrize("form", ["opus", "mp3", "wav"])
def test_the_format_of_the_files_can_be_chosen(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, form: str
) -> None:
    book = Book("short", (Chapter("Two", (TEXTS[1],)),))
    (chapter,) = spoken(tmp_path, synthesizer, anna, book, form=form)
    assert soundfile.info(chapter.file).duration == pytest.approx(chapter.seconds, abs=0.1)


def test_a_finished_book_is_not_spoken_again_and_only_a_changed_chapter_is(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice
) -> None:
    spoken(tmp_path, synthesizer, anna)
    before = contents(tmp_path)
    assert not any(chapter.is_new for chapter in spoken(tmp_path, synthesizer, anna))
    changed = Book("Harbour", (BOOK.chapters[0], Chapter("The end", (TEXTS[2],))))
    assert [chapter.is_new for chapter in spoken(tmp_path, synthesizer, anna, changed)] == [False, True]
    after = contents(tmp_path)
    assert after.keys() == {"01 One quiet calm.flac", "02 The end.flac"}
    assert after["01 One quiet calm.flac"] == before["01 One quiet calm.flac"]


def test_another_seed_or_voice_is_noticed(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, reference: Path
) -> None:
    spoken(tmp_path, synthesizer, anna)
    assert usual_seed(tmp_path) == 1 and usual_seed(tmp_path / "gone") is None
    with pytest.raises(ConfigError, match="seed"):
        spoken(tmp_path, synthesizer, anna, seed="2")
    with pytest.raises(ConfigError, match="voice"):
        spoken(tmp_path, synthesizer, synthesizer.voice([reference], "ben"))


def test_a_full_disk_loses_nothing_that_was_spoken(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken(tmp_path / "whole", synthesizer, anna)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("myxtts.synthesis.audiobook.os.fsync", full)
        with pytest.raises(DatasetError, match="same command"):
            spoken(tmp_path / "full", synthesizer, anna)
    assert (tmp_path / "full" / ".work" / "01.jsonl").stat().st_size
    spoken(tmp_path / "full", synthesizer, anna)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_a_book_is_continued_where_more_sentences_are_spoken_together(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken(tmp_path / "whole", synthesizer, anna)
    speak, calls = Narrator.speak, list[object]()

    def interrupted(narrator: Narrator, group: object) -> object:
        calls.append(group)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return speak(narrator, group)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Narrator, "speak", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spoken(tmp_path / "moved", synthesizer, anna)
    monkeypatch.setattr(
        Narrator, "groups", lambda _, lines: [lines[at : at + 16] for at in range(0, len(lines), 16)]
    )
    spoken(tmp_path / "moved", synthesizer, anna)
    assert contents(tmp_path / "moved") == contents(tmp_path / "whole")


CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_books
from synthesis_fixtures import speaking
synthesizer = speaking()
test_books.spoken(Path({out!r}), synthesizer, synthesizer.voice([{reference!r}]))
"""


def test_a_book_that_was_killed_is_continued_to_the_same_bytes(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, reference: Path
) -> None:
    spoken(tmp_path / "whole", synthesizer, anna)
    out, journal = tmp_path / "killed", tmp_path / "killed" / ".work" / "01.jsonl"
    script = CHILD.format(tests=str(Path(__file__).parent), out=str(out), reference=str(reference))
    child = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (journal.is_file() and journal.read_bytes().count(b"\n") > 1) and child.poll() is None:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    finally:
        child.wait()
    lines = journal.read_bytes().count(b"\n") if journal.is_file() else 0
    spoken(out, synthesizer, anna)
    assert contents(out) == contents(tmp_path / "whole")
    assert child.returncode == -signal.SIGKILL, f"it ended by itself, after {lines} lines"


def test_half_a_line_of_the_journal_and_sound_without_a_line_are_dropped(
    tmp_path: Path, synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken(tmp_path / "whole", synthesizer, anna)
    speak, calls = Narrator.speak, []

    def interrupted(narrator: Narrator, group: list[object]) -> object:
        calls.append(group)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return speak(narrator, group)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Narrator, "speak", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spoken(tmp_path / "torn", synthesizer, anna)
    work = tmp_path / "torn" / ".work"
    with open(work / "01.pcm", "ab") as sound, open(work / "01.jsonl", "ab") as journal:
        sound.write(b"\1" * 999)
        journal.write(b'{"end": 5, "cha')
    spoken(tmp_path / "torn", synthesizer, anna)
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_two_processes_do_not_speak_into_one_folder(tmp_path: Path, synthesizer: Synthesizer, anna: Voice) -> None:
    from myxtts.files import lock

    with lock(tmp_path / ".work", of="book"), pytest.raises(ConfigError, match=r"book .* in use"):
        spoken(tmp_path, synthesizer, anna)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_folder(folder, make_model(), vocabulary())
    return folder


def speak(folder: Path, speaker: Path, *words: object) -> int:
    flags = ["--model", folder, "--speaker", speaker, "--seed", 3]
    return main(["speak", *map(str, [*flags, *words])])


def test_the_command_speaks_ssml_and_writes_subtitles(folder: Path, reference: Path, tmp_path: Path) -> None:
    ssml = f'<speak xml:lang="en">{TEXTS[0]}<break time="1s"/>{TEXTS[1]}</speak>'
    out = tmp_path / "speech.wav"
    assert speak(folder, reference, ssml, "--out", out, "--subtitles", "vtt") == 0
    whole, _ = soundfile.read(out)
    quiet = np.flatnonzero(np.abs(whole) > 1e-4)
    assert np.diff(quiet).max() >= 24000
    shown = out.with_suffix(".vtt").read_text()
    assert shown.startswith("WEBVTT") and TEXTS[0] in shown and TEXTS[1] in shown
    assert speak(folder, reference, ssml, "--out", tmp_path / "streamed.wav", "--stream") == 0
    np.testing.assert_array_equal(soundfile.read(tmp_path / "streamed.wav")[0], whole)


def test_the_command_lets_whisper_choose_among_attempts(
    folder: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Wave] = []

    @contextlib.contextmanager
    def recogniser() -> Iterator[Callable[[Wave, str], str]]:
        def transcript(wave: Wave, language: str) -> str:
            assert language == "en"
            heard.append(wave)
            return "the harbor was quiet" if len(heard) < 2 else TEXTS[0].upper()

        yield transcript

    monkeypatch.setattr("myxtts.collect.listeners.start_recogniser", recogniser)
    out, flags = tmp_path / "speech.wav", ("--language", "en", "--listen", "--attempts", 4)
    assert speak(folder, reference, TEXTS[0], "--out", out, *flags) == 0
    assert len(heard) == 2, "no attempt is made after one without a mistake"
    kept = soxr.resample(soundfile.read(out, dtype="float32")[0], 24000, 16000)[: len(heard[1])]
    np.testing.assert_allclose(kept, heard[1][: len(kept)], atol=1e-3)


def test_the_command_speaks_a_book_and_continues_it(
    folder: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "tale.txt", tmp_path / "tale"
    text.write_text(f"Chapter 1\n\n{TEXTS[0]}\n\nChapter 2\n\n{TEXTS[1]}")
    asked = ("--book", text, "--out", out, "--language", "en", "--format", "wav", "--subtitles", "srt")
    assert speak(folder, reference, *asked) == 0
    assert {path.name for path in out.iterdir()} == {
        ".work", "01 Chapter 1.wav", "01 Chapter 1.srt", "02 Chapter 2.wav", "02 Chapter 2.srt"
    }  # fmt: skip
    assert "01 Chapter 1.wav  0:00:" in capsys.readouterr().out
    assert speak(folder, reference, *asked) == 0
    assert "01 Chapter 1.wav  0:00:" not in capsys.readouterr().out
    assert speak(folder, reference, *asked, "--speed", 1.5) == 2
    assert "speed (1.0, now 1.5)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--book", "a.txt", "hello"], "spoken alone"),
        (["--book", "a.txt", "--stream"], "spoken alone"),
        (["hello", "--format", "mp3"], "--format is for --book"),
        (["--book", "gone.txt"], "cannot be read"),
        (["<speak><brake/></speak>", "--language", "en"], "break?"),
        (["hello", "--attempts", "0"], "at least 1"),
    ],
)
def test_flags_that_contradict_each_other_are_explained(
    folder: Path, reference: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with contextlib.suppress(SystemExit):
        assert speak(folder, reference, *flags) != 0
    assert said in capsys.readouterr().err
