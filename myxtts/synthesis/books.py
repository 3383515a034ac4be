"""Books as chapters of paragraphs: plain text, Markdown and EPUB. Knows no model and no sound.

An EPUB is a ZIP archive. It is read in memory, never unpacked, and no more of it than `MOST_BYTES`.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

from myxtts.config import LANGUAGES
from myxtts.errors import DatasetError

FORMATS = (".txt", ".md", ".epub")
MOST_BYTES = 64_000_000  # of the texts of a book; the longest novels have 12 MB
_HEADING = re.compile(
    r"(?:chapter|part|book|prologue|epilogue|preface|introduction|capítulo|chapitre|kapitel|capitolo|rozdział|"
    r"hoofdstuk|kapitola|глава|bölüm|الفصل|فصل|بخش|مقدمه|پیشگفتار|第.{1,6}章)(?:[\s.:\u200c—–-].{0,100})?",
    re.IGNORECASE,
)
_MARKDOWN_HEADING = re.compile(r"(#{1,2})\s+(.+?)\s*#*")
_MARKDOWN_MARKS = (
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*#{1,6}[ \t]+(.*)$", re.MULTILINE), r"\n\1\n"),
    (re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}\.)[ \t]+", re.MULTILINE), r"\n"),
    (re.compile(r"^[ \t]*>+[ \t]?", re.MULTILINE), ""),
    (re.compile(r"(\*\*|__|\*|(?<!\w)_|_(?!\w)|`+|~~)"), ""),
)
_BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "dd", "div", "dl", "dt", "figcaption", "figure", "footer",
    "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table",
    "td", "th", "tr", "ul",
))  # fmt: skip
_SILENT = frozenset(("head", "script", "style", "svg", "math", "rt", "rp", "audio", "video", "noscript"))
_TITLES = frozenset(("h1", "h2", "h3"))
_DECLARATION = re.compile(r"<!(?!--|\[CDATA\[)")


class Chapter(NamedTuple):
    title: str
    paragraphs: tuple[str, ...]  # with the title, if it is part of the text


@dataclass(frozen=True)
class Book:
    title: str
    chapters: tuple[Chapter, ...]
    language: str = ""  # as the book names it; empty if it names none that we know

    @property
    def sample(self) -> str:
        """Some of its text, to detect the language."""
        longest = max(self.chapters, key=lambda chapter: sum(map(len, chapter.paragraphs)))
        return "\n".join(longest.paragraphs)[:5000]


def read_book(path: Path) -> Book:
    """Read a book by the extension of its file; a DatasetError says why one cannot be read."""
    if path.suffix.lower() not in FORMATS:
        raise DatasetError(f"{path}: a book is one of {', '.join(FORMATS)}")
    try:
        if path.suffix.lower() == ".epub":
            book = _read_epub(path)
        else:
            with open(path, "rb") as file:
                content = file.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise DatasetError(f"{path}: more than {MOST_BYTES / 1e6:.0f} MB of text; is it a book?")
            read = _markdown_chapters if path.suffix.lower() == ".md" else _text_chapters
            text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            book = Book(path.stem, tuple(read(text, path.stem)))
    except UnicodeDecodeError:
        raise DatasetError(f"{path}: it is not UTF-8 text; convert it: iconv -t UTF-8") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from None
    if not book.chapters:
        raise DatasetError(f"{path}: there is no text in it")
    return book


def _paragraphs(text: str) -> tuple[str, ...]:
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return tuple(part for part in found if any(map(str.isalnum, part)))


def _text_chapters(text: str, name: str) -> Iterator[Chapter]:
    """Chapters begin at paragraphs of one line such as `Chapter 3` or `فصل سوم`."""
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    starts = [at for at, block in enumerate(blocks) if "\n" not in block and _HEADING.fullmatch(block)]
    for start, end in zip([0, *starts], [*starts, len(blocks)], strict=True):
        title = " ".join(blocks[start].split()) if start in starts else name
        if found := _paragraphs("\n\n".join(blocks[start:end])):
            yield Chapter(title, found)


def _markdown_chapters(text: str, name: str) -> Iterator[Chapter]:
    """Chapters begin at headings of the first two levels; code is left out."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    title, lines = name, list[str]()
    for line in [*text.split("\n"), "# end"]:
        if heading := _MARKDOWN_HEADING.fullmatch(line.strip()):
            if found := _paragraphs(_unmarked("\n".join(lines))):
                yield Chapter(title, found)
            title, lines = _unmarked(heading[2]), [heading[2], ""]
        else:
            lines.append(line)


def _unmarked(text: str) -> str:
    for pattern, replacement in _MARKDOWN_MARKS:
        text = pattern.sub(replacement, text)
    return text


class _Archive:
    """The files of an EPUB, read within limits."""

    def __init__(self, path: Path, files: zipfile.ZipFile) -> None:
        self._path, self._files, self._left = path, files, MOST_BYTES

    def read(self, name: str) -> bytes:
        """The content of a file by its path in the archive."""
        name = posixpath.normpath(name)
        if name.startswith(("/", "..")):
            raise DatasetError(f"{self._path}: it refers to {name[:80]!r}, outside the book")
        try:
            with self._files.open(name) as file:
                content = file.read(self._left + 1)
        except KeyError:
            raise DatasetError(f"{self._path}: damaged: the file {name[:80]!r} is missing in it") from None
        except RuntimeError:
            raise DatasetError(
                f"{self._path}: {name[:80]!r} is encrypted; only books without DRM can be read"
            ) from None
        self._left -= len(content)
        if self._left < 0:
            raise DatasetError(f"{self._path}: it unpacks to more than {MOST_BYTES / 1e6:.0f} MB of text")
        return content

    def xml(self, name: str) -> ElementTree.Element:
        """A file of XML; one that declares entities is refused."""
        content = self.read(name)
        try:
            text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
            if _DECLARATION.search(text):
                raise DatasetError(f"{self._path}: {name[:80]!r} has a DOCTYPE, which is not accepted")
            return ElementTree.fromstring(text)
        except (ElementTree.ParseError, ValueError) as error:
            raise DatasetError(f"{self._path}: damaged: {name[:80]!r} is not XML ({error})") from None

    def has(self, name: str) -> bool:
        return name in self._files.namelist()


def _read_epub(path: Path) -> Book:
    try:
        with zipfile.ZipFile(path) as files:
            return _epub_book(path, _Archive(path, files))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise DatasetError(f"{path}: damaged, or not an EPUB: {error}") from None


def _epub_book(path: Path, archive: _Archive) -> Book:
    root = archive.xml("META-INF/container.xml").find(".//{*}rootfile")
    package = root.get("full-path", "") if root is not None else ""
    if not package:
        raise DatasetError(f"{path}: damaged: META-INF/container.xml names no package")
    content, folder = archive.xml(package), posixpath.dirname(package)
    items = {item.get("id", ""): item for item in content.iterfind("{*}manifest/{*}item")}
    protected = archive.xml("META-INF/encryption.xml") if archive.has("META-INF/encryption.xml") else None
    locked = (
        {each.get("URI", "") for each in protected.iterfind(".//{*}CipherReference")}
        if protected is not None
        else set()
    )
    chapters: list[Chapter] = []
    for place in content.iterfind("{*}spine/{*}itemref"):
        item = items.get(place.get("idref", ""))
        is_text = item is not None and item.get("media-type", "") in ("application/xhtml+xml", "text/html")
        if item is None or not is_text or "nav" in item.get("properties", "").split():
            continue
        name = posixpath.join(folder, unquote(item.get("href", "")).partition("#")[0])
        if name in locked:
            raise DatasetError(f"{path}: {name[:80]!r} is encrypted; only books without DRM can be read")
        page = _Page()
        page.feed(archive.read(name).decode("utf-8", errors="replace"))
        page.close()
        if paragraphs := page.paragraphs():
            chapters.append(Chapter(page.title() or f"{len(chapters) + 1}", paragraphs))
    title = " ".join((content.findtext("{*}metadata/{*}title") or path.stem).split())
    language = re.split("[-_]", (content.findtext("{*}metadata/{*}language") or "").strip().lower())[0]
    return Book(title, tuple(chapters), language if language in LANGUAGES else "")


class _Page(HTMLParser):
    """The paragraphs of a page of XHTML, as forgiving as a browser."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._headings: list[str] = []
        self._num_silent = 0
        self._in_title = ""

    def paragraphs(self) -> tuple[str, ...]:
        return _paragraphs("".join(self._parts))

    def title(self) -> str:
        """The first heading."""
        return next((" ".join(each.split()) for each in self._headings if any(map(str.isalnum, each))), "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._num_silent += tag in _SILENT
        self.handle_startendtag(tag, attrs)
        if tag in _TITLES:
            self._in_title = tag
            self._headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag == "br":
            self._parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._num_silent = max(0, self._num_silent - (tag in _SILENT))
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        if tag == self._in_title:
            self._in_title = ""

    def handle_data(self, data: str) -> None:
        if self._num_silent:
            return
        text = re.sub(r"\s+", " ", data)
        self._parts.append(text)
        if self._in_title:
            self._headings[-1] += text
