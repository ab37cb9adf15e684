"""Tests of tokenizers of texts: their tokens are those of transformers, open_clip and sentencepiece."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.words import PIECES
from vitrail.data.texts import CLEANINGS, TextTokenizer, clip_tokenizer, train_tokenizer, wordpiece_tokenizer
from vitrail.errors import BundleError, ConfigError

TEXTS = [
    "a photo of a bee.", "", " ", "A  Wasp's\tnest\n", "don't, I'LL, we're", "naïve café — “quotes” … ½ ﬁne",
    "&amp;lt;b&gt;", "日本語のテキスト", "Привет, мир!", "مرحبا بالعالم", "हिन्दी", "👩\u200d👧🏳️\u200d🌈", "a\x00b\x07c",
    "x" * 300, "<|endoftext|> ends", "<unk></s>▁a", "١٢٣ 123 ⅷ", "İstanbul ẞ ŒUVRE", "e\u0301 é", "\u202eabc\ufeff",
    "price: $3.50 (50%) #1 @me", "_under_score_", "▁", "</w> a</w>",
]  # fmt: skip
"""Texts in several languages, odd and hostile ones."""

SENTENCES = [f"a {colour} photo of the {insect}" for colour in ("red", "blue") for insect in ("bee", "wasp")]
CORPUS = [text for text in TEXTS if len(text) < 100] * 3 + SENTENCES * 9


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return train_tokenizer(CORPUS, vocabulary=700, context=24)


def table_of(tokenizer: TextTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.content)["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@pytest.mark.slow
def test_a_trained_tokenizer_has_the_tokens_of_transformers(trained: TextTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary, merges = table_of(trained)
    other = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=24)
    found = trained.encode(TEXTS)
    expected = other(TEXTS, padding="max_length", truncation=True, max_length=24)["input_ids"]
    assert np.array_equal(found.tokens, np.array(expected))
    assert TEXTS.index("x" * 300) in found.cut and 0 not in found.cut
    assert 514 < trained.vocabulary <= 700 and trained.end_token == trained.vocabulary - 1


def test_the_same_texts_train_the_same_tokenizer(trained: TextTokenizer) -> None:
    again = pickle.loads(pickle.dumps(train_tokenizer(iter(CORPUS), vocabulary=700, context=24)))
    assert again == trained and np.array_equal(again.encode(TEXTS).tokens, trained.encode(TEXTS).tokens)


@pytest.mark.slow
def test_the_tokens_of_clip_are_those_of_open_clip() -> None:
    found = importlib.util.find_spec("open_clip")
    if found is None or found.origin is None:
        pytest.skip("open_clip is not installed")
    folder = Path(found.origin).parent
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", folder / "tokenizer.py")
    assert spec is not None and spec.loader is not None
    theirs: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    lines = gzip.decompress((folder / "bpe_simple_vocab_16e6.txt.gz").read_bytes()).decode().split("\n")[1:48895]
    ours = clip_tokenizer([(first, second) for first, second in map(str.split, lines)], cleaning="clip", padding=0)
    expected = theirs.tokenize([text for text in TEXTS if "<|" not in text]).numpy()
    assert np.array_equal(ours.encode([text for text in TEXTS if "<|" not in text]).tokens, expected)
    assert ours.vocabulary == 49408 and ours.end_token == 49407


@pytest.fixture(scope="module")
def pieces() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.lower() for text in CORPUS]), model_writer=model, vocab_size=260,
        character_coverage=1.0, pad_id=0, eos_id=1, bos_id=-1, unk_id=2, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def test_the_tokens_of_siglip_are_those_of_transformers(pieces: bytes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "spiece.model").write_bytes(pieces)
    other = transformers.SiglipTokenizer(str(tmp_path / "spiece.model"), model_max_length=16)
    ours = TextTokenizer(pieces, "sentencepiece", 16, end_token=1, padding=1, cleaning="canonical")
    texts = [text for text in TEXTS if "</s>" not in text]  # transformers reads it as the end of a text
    expected = other(texts, padding="max_length", truncation=True, max_length=16)["input_ids"]
    found = ours.encode(texts)
    for text, row, theirs in zip(texts, found.tokens.tolist(), expected, strict=True):
        assert row == theirs, text
    assert ours.encode(["</s>"]).tokens[0].tolist() != [1] * 16, "a text cannot end itself"


def test_the_tokens_of_bert_are_those_of_transformers() -> None:
    """transformers does not fold all characters as tensorflow_text does, removes control characters, which are spaces
    there, and reads the names of special tokens in texts."""
    transformers = pytest.importorskip("transformers")
    texts = [CLEANINGS["casefold"](text) for text in TEXTS if "\x00" not in text]
    pieces = sorted({*"".join(texts)} - {" "} - {*PIECES})
    pieces = [*PIECES, *pieces, *(f"##{piece}" for piece in pieces)]
    other = transformers.BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, do_lower_case=True)
    ours = wordpiece_tokenizer(pieces, context=24)
    found = ours.encode(texts)
    for text, row, theirs in zip(texts, found.tokens.tolist(), other(texts)["input_ids"], strict=True):
        assert row == [*theirs[:-1], *[0] * 24][:24], text
    lengths = [len(row) - 1 for row in other(texts)["input_ids"]]
    assert found.cut == tuple(index for index, length in enumerate(lengths) if length > 24) and found.cut


BERT_TOKENS = {
    "A photo, of Bees.": "a photo , o ##f bee ##s .", "Straße ẞ": "s ##t ##r ##a ##s ##s ##e s ##s",
    "ΣΑΣ ς": "[UNK] \u03c3", "½ ﬁ ⅷ \uff41\uff42": "[UNK] f ##i v ##i ##i ##i a ##b", "a\x00b\x07c\u0600d": "a b c d",
    "a\u00adb\u200bc\ufeffd": "a ##b ##c ##d", "é e\u0301 Å İ": "e e a i",
    "[CLS] [PAD]": "[ c ##l ##s ] [ p ##a ##d ]", "日本 aあ": "日 本 a ##あ", "_a_": "_ a _",
    "a\u2028b a\u3000b": "[UNK] a b", "x" * 101: "[UNK]", "👩\u200d👧": "[UNK]", " \u200b\n": "",
    "x" * 100: "x " + "##x " * 99,
}  # fmt: skip
"""Tokens of `tensorflow_text.BertTokenizer` 2.21 with `lower_case=True` for the vocabulary `PIECES`."""


def test_the_tokens_of_bert_are_those_of_tensorflow_text() -> None:
    ours = pickle.loads(pickle.dumps(wordpiece_tokenizer(PIECES, context=101)))
    found = ours.encode([*BERT_TOKENS])
    for text, tokens, row in zip(BERT_TOKENS, BERT_TOKENS.values(), found.tokens.tolist(), strict=True):
        expected = ["[CLS]", *tokens.split()]
        assert [PIECES[number] for number in row] == expected + ["[PAD]"] * (101 - len(expected)), text
    assert found.cut == () and wordpiece_tokenizer(PIECES, context=100).encode(["x" * 100]).cut == (0,)
    assert json.loads(ours.content)["decoder"]["type"] == "WordPiece", "for other programs that read the file"


@pytest.mark.parametrize("pieces", [PIECES[1:], (*PIECES, "bee"), [piece for piece in PIECES if piece != "[CLS]"]])
def test_a_vocabulary_that_is_not_that_of_bert_is_refused(pieces: list[str]) -> None:
    with pytest.raises(BundleError, match="begins with"):
        wordpiece_tokenizer(pieces, context=12)


def test_a_tokenizer_that_cannot_be_read_or_has_tokens_beyond_its_table_is_refused(trained: TextTokenizer) -> None:
    pytest.importorskip("sentencepiece")
    for kind in ("tokenizers", "sentencepiece"):
        with pytest.raises(BundleError, match="tokenizer"):
            TextTokenizer(b"{}", kind, 8, end_token=1, padding=0)
    with pytest.raises(BundleError, match="end_token=49407"):
        TextTokenizer(trained.content, "tokenizers", 8, end_token=49407, padding=0)
    with pytest.raises(ConfigError, match="vocabulary=100"):
        train_tokenizer(CORPUS, vocabulary=100)
