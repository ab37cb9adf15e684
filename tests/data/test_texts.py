"""Tests of texts as targets: formats, checks, packing and refusals. Tokens are those of the original tokenizers."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make import encode, mix_in, write_tar
from tests.words import PIECES
from vitrail.cli import main
from vitrail.data.check.report import check_data
from vitrail.data.formats.pack import pack
from vitrail.data.source import Source, fingerprint, mixed, samples_of, subset, target_kind
from vitrail.data.sources import open_data, open_whole
from vitrail.data.splits import Splits
from vitrail.data.targets import Targets
from vitrail.data.texts import CLEANINGS, TextTokenizer, clip_tokenizer, train_tokenizer, wordpiece_tokenizer
from vitrail.errors import BundleError, ConfigError, DataError
from vitrail.testing import check_source

RED, BLUE = "a red bird, à gauche", 'a "blue" 鸟'


def picture(colour: int) -> bytes:
    return encode(np.full((9, 11, 3), colour, np.uint8), "PNG")


def images(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(40 * number))
    return folder


def texts_of(source: Source) -> list[tuple[str, object]]:
    return [(source.key(row), source.target(row)) for row in range(len(source))]


EXPECTED = [("a.png", (RED, "red")), ("b.png", (BLUE,)), ("c.png", None)]


def write_csv(folder: Path) -> Path:
    rows = [("a.png", RED), ("b.png", BLUE), ("a.png", " red "), ("c.png", "")]
    quoted = ['"' + text.replace('"', '""') + '"' for _, text in rows]
    lines = ["filepath,title", *(f"{name},{text}" for (name, _), text in zip(rows, quoted, strict=True))]
    (folder / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "pairs.csv"


def write_jsonl(folder: Path) -> Path:
    rows = [("a.png", [RED, "red", " "]), ("b.png", BLUE), ("c.png", None)]
    lines = [json.dumps({"file_name": name, "caption": text}) for name, text in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def write_coco(folder: Path) -> Path:
    (folder / "annotations").mkdir()
    listed = [{"id": 10 * number, "file_name": name} for number, name in enumerate(("a.png", "b.png", "c.png"))]
    captions = [(0, RED), (10, BLUE), (0, "red"), (0, "red"), (20, "")]
    found = [{"id": number, "image_id": image, "caption": text} for number, (image, text) in enumerate(captions)]
    values = {"images": listed, "annotations": found}
    (folder / "annotations" / "captions_train2017.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_coco])
def test_files_beside_images_hold_texts(write: Callable[[Path], Path], tmp_path: Path) -> None:
    location = write(images(tmp_path, "a.png", "b.png", "c.png"))
    opened = open_data(str(location), validation_share=0.0)
    assert texts_of(opened.train) == EXPECTED
    assert (target_kind(opened.train), opened.classes) == ("texts", ())
    assert any("empty and not used" in note for note in opened.notes)
    check_source(opened.train)


def test_tar_shards_hold_texts_in_text_files_or_json(tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    files = [
        *((f"{name}.png", picture(number)) for number, name in enumerate("abc")),
        ("a.json", json.dumps({"caption": "not used", "url": "x"}).encode()), ("a.txt", RED.encode()),
        ("b.json", json.dumps({"captions": [BLUE, 7, "b"], "label": 3}).encode()), ("c.txt", b"\xff\xfe broken"),
    ]  # fmt: skip
    write_tar(path, files)
    for _ in range(2):  # the second time from the saved index
        opened = open_whole(str(path), texts=True).splits(validation_share=0.0)
        assert texts_of(opened.train) == [("a", (RED,)), ("b", (BLUE, "b")), ("c", None)]
        assert any("2 texts are broken" in note for note in opened.notes)
        assert any("1 image with another label or text in the .json" in note for note in opened.notes)


def test_parquet_holds_texts_and_lists_of_texts(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": picture(number), "path": None} for number in range(3)]
    for column, values in (("caption", [RED, BLUE, None]), ("sentences", [[RED, "red"], [BLUE], []])):
        table = arrow.table({"image": cells, "label": [0, 1, 0], column: values})
        parquet.write_table(table, tmp_path / "p.parquet")
        assert target_kind(open_data(str(tmp_path / "p.parquet"), validation_share=0.0).train) == "class"
        opened = open_data(f"{tmp_path / 'p.parquet'}?text={column}", validation_share=0.0)
        expected = values if column == "sentences" else [value and [value] for value in values]
        assert [target for _, target in texts_of(opened.train)] == [tuple(one) if one else None for one in expected]


def test_labels_come_first_unless_texts_are_wanted(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png")
    table = tmp_path / "t.csv"
    table.write_text("path,label,text,other\na.png,x,one,1\nb.png,y,two,2\n")
    assert open_data(str(table), validation_share=0.0).classes == ("x", "y")
    found = open_whole(str(table), texts=True).splits(validation_share=0.0).train
    assert texts_of(found) == [("a.png", ("one",)), ("b.png", ("two",))]
    found = open_data(f"{table}?text=other", validation_share=0.0).train
    assert texts_of(found) == [("a.png", ("1",)), ("b.png", ("2",))]


def test_columns_of_flags_come_before_a_column_of_texts(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png")
    table = tmp_path / "t.csv"
    table.write_text("path,title,cat,dog\na.png,one,1,0\nb.png,two,1,1\n")
    opened = open_data(str(table), validation_share=0.0)
    assert (target_kind(opened.train), opened.classes) == ("classes", ("cat", "dog"))
    assert texts_of(open_data(f"{table}?text=title", validation_share=0.0).train) == [
        ("a.png", ("one",)), ("b.png", ("two",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "held_out"),
    [
        (("path,caption", "a.png,red"), [("a.png", ("red",))]),
        (("path,sentence", "a.png,red"), [("a.png", ("red",))]),
        (("path,label", "a.png,red"), None),
        (("path,caption", "a.png,"), None),
    ],
)
@pytest.mark.parametrize("unlabelled", [False, True])
def test_tables_named_after_splits_have_texts(
    tmp_path: Path, lines: tuple[str, ...], held_out: list[tuple[str, object]] | None, unlabelled: bool
) -> None:
    root = images(tmp_path, "a.png", "b.png", "c.png")
    (root / "train.csv").write_text('path,caption\nb.png,"two\nlines"\nc.png,blue\n')
    (root / "test.csv").write_text("\n".join(lines))
    splits = open_data(str(root), validation_share=0.0, unlabelled=unlabelled)
    assert texts_of(splits.train) == [("b.png", ("two\nlines",)), ("c.png", ("blue",))]
    if held_out is None and not unlabelled:
        assert splits.test is None and "none of its images has a text" in splits.notes[-1]
    else:
        assert splits.test is not None and texts_of(splits.test) == (held_out or [("a.png", None)])


def test_texts_of_a_held_out_table_are_no_labels(tmp_path: Path) -> None:
    root = images(tmp_path, "a.png", "b.png", "c.png")
    (root / "train.csv").write_text("path,label\nb.png,red\nc.png,blue\n")
    (root / "test.csv").write_text("path,caption\na.png,red\n")
    splits = open_data(str(root), validation_share=0.0)
    assert splits.classes == ("blue", "red") and splits.test is None
    assert "none of its images has a label" in splits.notes[-1]


def test_what_captions_leave_out_is_named(tmp_path: Path) -> None:
    folder = write_coco(images(tmp_path, "a.png", "b.png", "c.png"))
    boxes = {"images": [{"id": 0, "file_name": "a.png", "height": 4, "width": 4}], "annotations": [], "categories": []}
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(boxes))
    opened = open_whole(str(folder), texts=True).splits(validation_share=0.0)
    assert texts_of(opened.train) == EXPECTED
    assert any("instances_train2017.json" in note for note in opened.notes)


@pytest.mark.parametrize("number", [[10], 11, None])
def test_captions_of_images_that_are_not_listed_are_refused(number: object, tmp_path: Path) -> None:
    folder = write_coco(images(tmp_path, "a.png", "b.png", "c.png"))
    path = folder / "annotations" / "captions_train2017.json"
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps(values | {"annotations": [*values["annotations"], {"image_id": number, "caption": "x"}]})
    )
    with pytest.raises(DataError, match=re.escape(f"not listed: image_id {number}")):
        open_whole(str(folder), texts=True)


def test_shards_with_labels_and_texts(tmp_path: Path) -> None:
    for split, endings in (("train", ("txt", "cls")), ("val", ("cls",))):
        texts = [(f"{name}.{ending}", b"%d" % number) for number, name in enumerate("ab") for ending in endings]
        write_tar(tmp_path / f"{split}.tar", [("a.png", picture(0)), ("b.png", picture(1)), *texts])
    opened = open_whole(str(tmp_path), texts=True).splits(validation_share=0.0)
    assert len(opened.train) == 2 and opened.validation is None
    assert any("labels are not used" in note for note in opened.notes)
    assert any("the validation split is skipped" in note for note in opened.notes)


@pytest.mark.parametrize(
    ("lines", "choice", "message"),
    [
        ("path,label\na.png,x\nb.png,y", "", r"has no column of texts: its columns are path, label.*\?text="),
        ("path,label\na.png,x\nb.png,y", "?text=sayings", "has no column 'sayings'"),
        ("path,text\na.png,\nb.png,nan", "", "no image has a text"),
    ],
)
def test_tables_without_texts_are_refused(tmp_path: Path, lines: str, choice: str, message: str) -> None:
    images(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text(lines)
    with pytest.raises(DataError, match=message):
        open_whole(f"{tmp_path / 't.csv'}{choice}", texts=True)


def test_packed_texts_are_the_same(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    opened = open_data(str(write_csv(tmp_path)), validation_share=0.0)
    pack(opened, tmp_path / "shards")
    again = open_data(str(tmp_path / "shards"), validation_share=0.0)
    assert texts_of(again.train) == EXPECTED
    assert fingerprint(again.train) == fingerprint(opened.train)


def test_texts_are_stored_once(tmp_path: Path) -> None:
    targets = Targets.of([("one", "two"), None, ("two",), ("three",)], "texts", ())
    assert len(targets.texts) == 3
    chosen = targets.rows(np.array([2, 0, 2, 1]))
    assert chosen.texts is targets.texts
    assert [chosen[row] for row in range(4)] == [("two",), ("one", "two"), ("two",), None]
    assert chosen.known.tolist() == [True, True, True, False]
    joined = Targets.joined([chosen, Targets.of([("four",)], "texts", ())])
    assert [joined[row] for row in (3, 4)] == [None, ("four",)]


def test_sources_of_the_user_and_mixtures_hold_texts(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    source = samples_of(open_data(str(write_csv(tmp_path)), validation_share=0.0).train)

    class Own:
        classes = ()
        __len__ = source.__len__
        __getitem__ = source.__getitem__
        key = source.key
        target = source.target

    assert target_kind(Own()) == "texts"
    both = mixed([Own(), subset(source, [1])], [0.5, 0.5])
    assert [both.target(row) for row in (0, 3)] == [(RED, "red"), (BLUE,)]


def test_check_counts_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path, "a.png", "b.png", "c.png", "d.png")
    (tmp_path / "t.csv").write_text(f"path,text\na.png,same here\nb.png,same here\nc.png,{'long ' * 61}\nd.png,\n")
    opened = open_data(str(tmp_path / "t.csv"), validation_share=0.0)
    report = check_data(opened)
    assert (report.texts.texts, report.texts.different, report.texts.words) == (3, 2, (2, 31, 61))
    assert report.texts.common[0] == ("same here", 2)
    assert {"repeated-texts", "long-texts", "unlabelled"} <= {finding.kind for finding in report.findings}
    options = ["--validation-share", "0.5", "--page", str(tmp_path / "page.html")]
    assert main(["data", "check", str(tmp_path / "t.csv"), *options]) == 0
    assert "most frequent:" in " ".join(capsys.readouterr().out.split())


def test_classification_of_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    write_csv(tmp_path)
    options = ["--validation-share", "0.5", "--run", str(tmp_path / "run")]
    assert main(["train", "--data", str(tmp_path / "pairs.csv"), *options]) == 2
    assert "has texts, and classification needs one class" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(DataError, match=r"mix .* different kinds"):
        splits = Splits(samples_of(open_data("bundled", validation_share=0.0).train), None, None)
        mix_in(splits, (f"0.5:{tmp_path / 'pairs.csv'}",))


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
