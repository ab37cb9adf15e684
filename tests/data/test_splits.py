"""Names of splits, and files sorted by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.splits import SPLITS, by_split, split_of
from vitrail.errors import DataError


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train", "train"), ("train-00000.tar", "train"), ("data/Train-00000-of-00004.parquet", "train"),
        ("val/0.tar", "validation"), ("VALID_3.csv", "validation"), ("validation.csv", "validation"),
        ("test.tsv", "test"), ("a/test/b/0000.parquet", "test"), ("train/test.csv", "test"), ("train2.csv", "train"),
        ("training.csv", None), ("images/0.tar", None), ("testing", None), ("latest.csv", None), ("value.csv", None),
    ],
)  # fmt: skip
def test_the_split_of_a_path(path: str, split: str | None) -> None:
    assert split_of(path) == split


@given(
    st.sampled_from([name for names in SPLITS.values() for name in names]),
    st.from_regex(r"[-_. 0-9][^/]*", fullmatch=True),
)
def test_any_name_that_goes_on_with_no_letter_is_of_the_split(name: str, rest: str) -> None:
    assert name in SPLITS[split_of(f"{name}{rest}")]


def test_files_are_sorted_into_splits() -> None:
    assert by_split("here", ["val-1.tar", "train-1.tar", "train-0.tar"]) == {
        "train": ["train-0.tar", "train-1.tar"], "validation": ["val-1.tar"],
    }  # fmt: skip
    assert by_split("here", ["b.tar", "a.tar"]) == {"train": ["a.tar", "b.tar"]}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            ["train-0.tar", "more.tar"],
            "here has files that name their split, like train-0.tar, and more.tar, which names",
        ),
        (["val.tar", "test.tar"], "here has validation, test but no training data; name it train"),
    ],
)
def test_files_that_leave_a_doubt_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        by_split("here", paths)
