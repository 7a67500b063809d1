"""Text to token ids: plain bytes, or a byte-level BPE that is trained once and cached.

Both are lossless: `decode(encode(text)) == text` for every string that UTF-8 can hold.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
_END_SPELLINGS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_CHUNK = 1 << 15


class DataError(ValueError):
    """Text, tokens or a tokenizer that can't be used: says where, what was found, what to do."""


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    @property
    def name(self) -> str:
        """For tables and run folders."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The id put after each document, or None if the vocabulary has none."""
        ...

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Returns the ids of `text`."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of `ids`."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document: int | None = 256

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Returns the UTF-8 bytes of `text` as uint16."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint16)

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text; bytes that aren't UTF-8 come back as U+FFFD, 256 as nothing."""
        ids = np.asarray(ids).ravel()
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class BPETokenizer:
    """A `tokenizers.Tokenizer` behind the same interface.

    Text is encoded in pieces of about 2^15 characters that end at a line break, so that memory
    stays bounded and all cores work; a string always gives the same ids.
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str):
        # A document that spells the end token out must not end there.
        inner.encode_special_tokens = True
        self._inner = inner
        self.name = name
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        found = (inner.token_to_id(spelling) for spelling in _END_SPELLINGS)
        self.end_of_document: int | None = next((id_ for id_ in found if id_ is not None), None)

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Returns the ids of `text`, uint16 or uint32 as the vocabulary needs."""
        _utf8(text)
        pieces = self._inner.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
        dtype = token_dtype(self.vocab_size)
        return np.concatenate([np.zeros(0, dtype)] + [np.array(p.ids, dtype) for p in pieces])

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text; the end token comes back as nothing."""
        return self._inner.decode(np.asarray(ids).ravel().tolist(), skip_special_tokens=True)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Returns the narrowest of uint16 and uint32 that holds ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def load_tokenizer(
    spec: str, texts: Iterable[str], *, cache_dir: str | os.PathLike[str], vocab_size: int
) -> Tokenizer:
    """Returns the tokenizer that `spec` names.

    Args:
      spec: "bytes"; "bpe", trained on `texts`; or the path of a `tokenizer.json`.
      texts: documents to train on; only "bpe" reads them.
      cache_dir: where a trained BPE is kept, under a name made of its texts and size.
      vocab_size: of "bpe", the end-of-document token included; a small text may give fewer.

    Raises:
      DataError: unknown `spec`; a `tokenizer.json` that can't be read; a vocabulary too small.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "bpe":
        return _load_bpe(list(texts), Path(cache_dir), vocab_size)
    if spec.endswith(".json"):
        return BPETokenizer(_read_tokenizer(Path(spec)), spec)
    raise DataError(
        f'tokenizer: "{spec}" is unknown; wanted "bytes", "bpe" or the path of a tokenizer.json'
    )


def _load_bpe(texts: Sequence[str], cache_dir: Path, vocab_size: int) -> BPETokenizer:
    if not 257 <= vocab_size <= 1 << 24:
        raise DataError(
            f"tokenizer: a byte-level BPE of {vocab_size} tokens can't be; wanted 257 (256 bytes "
            f'and the end of a document) to {1 << 24}; raise the vocabulary or take "bytes"'
        )
    digest = hashlib.sha256(f"adahop-bpe-1 {vocab_size}".encode())
    for text in texts:
        data = _utf8(text)
        digest.update(len(data).to_bytes(8, "little") + data)
    cached = cache_dir / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}.json"
    content = _read_cache(cached)
    if content is None:
        content = train_bpe(texts, vocab_size)
        _write_cache(cached, content)
    return BPETokenizer(tokenizers.Tokenizer.from_str(content), "bpe")


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Returns a byte-level BPE trained on `texts`, as the text of a tokenizer.json.

    `vocab_size` counts the end-of-document token; a small text may give fewer.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    return inner.to_str()


def _read_cache(path: Path) -> str | None:
    """Returns the tokenizer kept at `path`, or None if nothing whole is there."""
    try:
        digest, _, content = path.read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except NotADirectoryError as error:
        raise DataError(
            f"tokenizer: the cache folder {path.parent} is a file, or below one; name another "
            "with --cache-dir"
        ) from error
    except OSError as error:
        raise DataError(
            f"tokenizer: {path} can't be read ({error.strerror}); remove it, or name another cache"
        ) from error
    return content if digest == hashlib.sha256(content.encode()).hexdigest() else None


def _write_cache(path: Path, content: str) -> None:
    digest = hashlib.sha256(content.encode()).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            file.write(f"{digest}\n{content}")
        os.replace(file.name, path)
    except OSError as error:
        raise DataError(
            f"tokenizer: {path} can't be written ({error.strerror}); name another cache folder"
        ) from error


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    wanted = "wanted a tokenizer.json as the tokenizers library saves it"
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer: {path} can't be read ({error}); {wanted}") from error
    try:
        model = json.loads(content)["model"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"tokenizer: {path} holds no model ({error!r}); {wanted}") from error
    try:
        inner = tokenizers.Tokenizer.from_str(content)
    except BaseException as error:
        # The library raises the bare class and nothing narrower; all else isn't about the file.
        if type(error) is not Exception:
            raise
        raise DataError(f"tokenizer: {path} is refused ({error}); {wanted}") from error
    if not inner.get_vocab_size():
        raise DataError(f"tokenizer: {path}: the model {str(model)[:40]} has no tokens; {wanted}")
    return inner


def _pieces(text: str) -> Iterable[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _CHUNK) + 1 or len(text)
        yield text[start:end]
        start = end


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"tokenizer: character {error.start} of the text is the lone surrogate "
            f"{text[error.start]!r}, which UTF-8 can't hold; read the text as UTF-8"
        ) from error
