"""Texts of images, such as captions: how the cells of a file are read, how the texts are stored, and how a text tower's
tokenizer turns them into numbers, by the libraries `tokenizers` and `sentencepiece`."""

from __future__ import annotations

import functools
import html
import json
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from vitrail.errors import BundleError, ConfigError, DataError, plural
from vitrail.registry import optional_module

TEXTS = ("text", "texts", "caption", "captions", "sentence", "sentences", "title", "description", "alt_text")
"""Names of columns and of JSON fields that hold texts, in lower case. The first one that is present is used."""

_library = functools.partial(optional_module, extra="words")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that programs write for bytes that they cannot decode."""


@dataclass(frozen=True, eq=False)
class TextTable:
    """Different texts, one after another as UTF-8, so that a million of them are two arrays."""

    data: UInt8[np.ndarray, " bytes"]
    ends: Int64[np.ndarray, " n"]
    """The end of each text in `data`."""

    @staticmethod
    def of(texts: Iterable[str]) -> TextTable:
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return TextTable(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        return self.data[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes().decode()


class TextReader:
    """Reads the texts in cells, and counts those that are empty or broken.

    A cell is a text or a list of texts. Spaces at the ends are removed. A broken text is no text at all, or has
    characters that could not be decoded.
    """

    def __init__(self) -> None:
        self.empty = self.broken = 0

    def __call__(self, cell: object) -> tuple[str, ...]:
        """Return the texts of a cell, without those that are empty or broken."""
        found = [text for one in (cell if isinstance(cell, list | tuple) else [cell]) if (text := self._one(one))]
        return tuple(dict.fromkeys(found))

    def _one(self, cell: object) -> str:
        if cell is None or (isinstance(cell, str) and cell.strip().lower() in ("", "nan", "null")):
            self.empty += 1
            return ""
        # bytes that could not be decoded, and the character 0
        if not isinstance(cell, str) or any(one in f"\0{REPLACEMENT}" or "\ud800" <= one <= "\udfff" for one in cell):
            self.broken += 1
            return ""
        return cell.strip()

    def notes(self, title: str) -> Iterator[str]:
        """Yield a note about the texts that are not used."""
        found = (("empty", self.empty), ("broken (not a text, or characters that cannot be decoded)", self.broken))
        for kind, count in found:
            if count:
                yield f"{title}: {plural(count, 'text')} {'is' if count == 1 else 'are'} {kind} and not used"


def is_usable(text: str) -> bool:
    """Return True unless a text is empty or has a half of a character (a surrogate), which no tokenizer reads."""
    return bool(text.strip()) and text.encode(errors="ignore").decode() == text


def without_texts(title: str, names: Sequence[str]) -> DataError:
    """Return the error of a file without a column of texts."""
    return DataError(
        f"{title} has no column of texts: its columns are {', '.join(names) or 'none'}; the column of texts must be "
        f"called {', '.join(TEXTS[:4])} or the like, or chosen by adding ?text=COLUMN to the data's name"
    )


# --- the tokenizer


TokenizerKind = Literal["tokenizers", "sentencepiece"]
Cleaning = Literal["none", "lower", "casefold", "canonical", "clip", "clip-canonical"]

FILES: dict[TokenizerKind, str] = {"tokenizers": "tokenizer.json", "sentencepiece": "tokenizer.model"}
"""Name of the file in a model's folder that holds a tokenizer of a kind."""

START, END = "<|startoftext|>", "<|endoftext|>"
"""Names of the tokens at the begin and the end of a text in CLIP's table and in trained ones."""

WORD = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""Pattern of the words that CLIP's tokenizer does not merge with each other."""

SINGLE = (
    r"[!-/:-@\[-`{-~\p{P}\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}"
    r"\x{2F800}-\x{2FA1F}]"
)
"""Pattern of the characters that BERT's tokenizer divides from the rest: punctuation, and characters of Chinese."""


class TokenizedTexts(NamedTuple):
    """The tokens of texts."""

    tokens: Int64[np.ndarray, "n context"]
    """Numbers of tokens, filled with the padding token."""
    cut: tuple[int, ...]
    """Indices of the texts that have more tokens than the context. The text tower does not read their last tokens."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its rules. It can be pickled, so that worker processes can use it."""

    content: bytes
    """Content of the file that the library reads: `tokenizer.json`, or the model of `sentencepiece`."""
    kind: TokenizerKind
    """Library that reads the content."""
    context: int
    """Number of tokens of every text, after cutting and padding."""
    end_token: int | None
    """Number of the token that ends a text, or None if there is none. A text that is cut ends with it too."""
    padding: int
    """Number of the token that fills the context after a text."""
    start_token: int | None = None
    """Number of the token that begins a text, or None if there is none."""
    cleaning: Cleaning = "none"
    """Changes of a text before it is divided: nothing (none), lower case (lower), usual forms of characters and folded
    case (casefold, as BERT), lower case without punctuation (canonical, as SigLIP), repaired characters and HTML
    entities, single spaces and lower case (clip, as OpenAI's code and open_clip), or the same without punctuation and
    with spaces for underscores (clip-canonical, as SigLIP in open_clip)."""

    def __post_init__(self) -> None:
        for name in ("end_token", "padding", "start_token"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocabulary:
                raise BundleError(f"{name}={value} is not a token of the tokenizer, which has {self.vocabulary:,}")

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the tokenizer distinguishes."""
        return _read(self.content, self.kind)[0]

    def encode(self, texts: Sequence[str]) -> TokenizedTexts:
        """Return the tokens of texts, with a start token, an end token and padding, and the indices of the texts that
        were cut."""
        tokens, cut = np.full((len(texts), self.context), self.padding, np.int64), []
        start, end = ([] if token is None else [token] for token in (self.start_token, self.end_token))
        room = self.context - len(start) - len(end)
        divide, clean = _read(self.content, self.kind)[1], CLEANINGS[self.cleaning]
        for index, text in enumerate(texts):
            found = divide(clean(text))
            if len(found) > room:
                cut.append(index)
            row = [*start, *found[:room], *end]
            tokens[index, : len(row)] = row
        return TokenizedTexts(tokens, tuple(cut))

    def described(self) -> dict[str, Any]:
        """Return everything but the content as JSON values."""
        names = ("kind", "context", "end_token", "padding", "start_token", "cleaning")
        return {name: getattr(self, name) for name in names}


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = 8192, context: int = 77) -> TextTokenizer:
    """Return a tokenizer whose table is learned from texts by byte-pair encoding, with the rules of CLIP. The table has
    at most `vocabulary` tokens, of which 514 are bytes and the begin and the end of texts.

    Raise `ConfigError` for a smaller vocabulary."""
    if vocabulary < 514:
        raise ConfigError(
            f"vocabulary={vocabulary} is less than 514, the number of bytes, of bytes that end a word, and of both ends"
        )
    library = _library("tokenizers")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        special_tokens=[f"{unit}</w>" for unit in _units()],  # else their order differs from call to call
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner = clip_pipeline(library.models.BPE(end_of_word_suffix="</w>"))
    learner.train_from_iterator((text for text in texts), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"][: vocabulary - 514]
    return clip_tokenizer([tuple(merge) for merge in merges], context=context)


def clip_tokenizer(
    merges: Sequence[tuple[str, str]], *, context: int = 77, cleaning: Cleaning = "none", padding: int | None = None
) -> TextTokenizer:
    """Return a tokenizer of byte-pair encoding with the rules and the order of tokens of CLIP: bytes, bytes that end a
    word, merged pairs, start and end of a text. The default of `padding` is the end of a text."""
    library = _library("tokenizers")
    units = _units()
    pieces = [*units, *(f"{unit}</w>" for unit in units), *map("".join, merges), START, END]
    table = {piece: number for number, piece in enumerate(pieces)}
    if len(table) < len(pieces):
        raise BundleError("the pairs that a tokenizer merges name a token twice")
    model = library.models.BPE(vocab=table, merges=[*merges], end_of_word_suffix="</w>", unk_token=END)
    made = clip_pipeline(model)
    made.add_special_tokens([START, END])
    end = table[END]
    return TextTokenizer(
        made.to_str().encode(),
        "tokenizers",
        context,
        end_token=end,
        padding=end if padding is None else padding,
        start_token=table[START],
        cleaning=cleaning,
    )


def clip_pipeline(model: Any) -> Any:
    """Return a `tokenizers.Tokenizer` that divides texts into words as CLIP's does, before `model` divides words."""
    library = _library("tokenizers")
    made = library.Tokenizer(model)
    normalizers, pre_tokenizers = library.normalizers, library.pre_tokenizers
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(library.Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(library.Regex(WORD), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = library.decoders.ByteLevel()
    return made


def wordpiece_tokenizer(pieces: Sequence[str], *, context: int) -> TextTokenizer:
    """Return a tokenizer of WordPiece with the rules of BERT's tokenizer for lower case in tensorflow_text, as LiT uses
    it: a text begins with [CLS], has no token at its end, and is filled with [PAD], the first piece.

    Tokens are those of tensorflow_text, except in words of at most 100 characters but more than 100 bytes, which are
    unknown there, and for characters that are newer than this Python. Raise `BundleError` if the pieces are not those
    of such a tokenizer."""
    library = _library("tokenizers")
    table = {piece: number for number, piece in enumerate(pieces)}
    if len(table) < len(pieces) or table.get("[PAD]") != 0 or not {"[UNK]", "[CLS]"} <= table.keys():
        raise BundleError("a vocabulary of BERT has no piece twice, begins with [PAD], and contains [UNK] and [CLS]")
    normalizers, pre_tokenizers = library.normalizers, library.pre_tokenizers
    made = library.Tokenizer(library.models.WordPiece(table, unk_token="[UNK]", max_input_chars_per_word=100))
    replaced = ((r"\p{Default_Ignorable_Code_Point}", ""), (r"\p{Mn}", ""), (r"[\p{Cc}\p{Cf}]", " "))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), *(normalizers.Replace(library.Regex(pattern), text) for pattern, text in replaced)]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(library.Regex(" +"), behavior="removed"),
            pre_tokenizers.Split(library.Regex(SINGLE), behavior="isolated"),
        ]
    )
    made.decoder = library.decoders.WordPiece()
    return TextTokenizer(
        made.to_str().encode(), "tokenizers", context, end_token=None, padding=0, start_token=table["[CLS]"],
        cleaning="casefold",
    )  # fmt: skip


def _units() -> list[str]:
    """Return the character that stands for each byte in byte-level tables, in CLIP's order: printable bytes first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + place) for place in range(len(others)))]


def _canonical(text: str) -> str:
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def _clip(text: str) -> str:
    return " ".join(html.unescape(html.unescape(_library("ftfy").fix_text(text))).split()).lower()


CLEANINGS: dict[Cleaning, Callable[[str], str]] = {
    "none": str, "lower": str.lower, "canonical": _canonical, "clip": _clip,
    "casefold": lambda text: unicodedata.normalize("NFKC", text).casefold(),
    "clip-canonical": lambda text: _canonical(_clip(text).replace("_", " ")),
}  # fmt: skip
"""Function of each cleaning."""


@functools.lru_cache(maxsize=8)
def _read(content: bytes, kind: TokenizerKind) -> tuple[int, Callable[[str], list[int]]]:
    """Return the number of tokens of a tokenizer, and the function that divides a text into them. Raise `BundleError`
    if the library cannot read the content."""
    library = _library(kind)
    if kind == "sentencepiece":
        try:
            pieces = library.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError) as error:
            raise BundleError(f"the tokenizer is not a model of sentencepiece: {error}") from error
        return pieces.get_piece_size(), pieces.encode
    try:
        reader = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        raise BundleError(f"the tokenizer is not a tokenizer.json of the library tokenizers: {error}") from error
    reader.no_truncation()
    reader.no_padding()
    return reader.get_vocab_size(), lambda text: reader.encode(text, add_special_tokens=False).ids
