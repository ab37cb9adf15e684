"""Fixtures of several subpackages: small real data sets, and a config that trains in one or two seconds."""

from __future__ import annotations

import base64
import gc
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings
from PIL import Image

from tests.checking import begin_test, check_signatures_quickly

gc.disable()  # until all modules are imported and all tests are collected, because none of that becomes garbage
check_signatures_quickly()  # before the package is imported

from tests.make import make_colour_folder, make_idx_folder, tiny_config  # noqa: E402
from vitrail.data.pixels.decode import LIMIT_VARIABLE  # noqa: E402
from vitrail.models.linear.float32 import VARIABLE  # noqa: E402
from vitrail.training.config import TrainConfig  # noqa: E402

settings.register_profile("vitrail", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("vitrail")


def pytest_collection_finish() -> None:
    """Exempt the imported modules and the collected tests from garbage collection."""
    gc.freeze()
    gc.set_threshold(20_000)  # a training step makes thousands of objects, and few of them refer to each other
    gc.enable()


def pytest_runtest_setup() -> None:
    os.environ.pop(LIMIT_VARIABLE, None)  # a command of the test before can have set it for its process
    begin_test()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices of tests are tiny: they gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def usual_signals() -> None:
    """Gives the tests, and the processes that they start, the signals of a terminal.

    `nohup` ignores SIGHUP and a shell's `&` ignores SIGINT, and every process inherits what is ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def one_library() -> Iterator[None]:
    """Computes float32 products by one library, so that counted operations do not depend on the processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "mkl")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Leaves written files in the system's cache, because files of tests need not survive a power failure. A training
    run flushes thirty files. A descriptor that is not open stays an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps downloads and cached features of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def types_unchecked() -> Iterator[None]:
    """Lets values of wrong types reach the package's own checks, as they do outside of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed in its turn, no attribute is there twice, and nothing is fetched."""

    VOID = frozenset({"meta", "img", "br", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.continues = False
        self.feed(text)
        self.close()
        assert self.open == []
        without_pictures = re.sub(r'base64,[^"]*', "", text)
        assert not [word for word in ("http", "url(", "@import") if word in without_pictures]

    @property
    def names(self) -> list[str]:
        """Of all tags."""
        return [tag for tag, _ in self.tags]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len({*names}) == len(names)
        assert tag not in ("link", "script", "iframe", "object") and not {"href", "xlink:href", "srcset"} & {*names}
        assert not any(name.startswith("on") for name in names)
        self.tags.append((tag, dict(attrs)))
        self.continues = tag == "wbr"  # a place within a name where a line may break
        if tag == "img":
            head, data = str(dict(attrs)["src"]).split(",")
            assert head == "data:image/jpeg;base64" and dict(attrs)["alt"]
            with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
                assert max(picture.size) <= 96 and min(picture.size) >= 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.continues:
            self.text[-1] += data
        else:
            self.text.append(data)
        self.continues = False


@pytest.fixture(scope="session")
def read_page() -> type[Page]:
    """Reads HTML that must be whole and need no other file; names in it are the text that they are."""
    return Page


@pytest.fixture
def colour_folder(tmp_path: Path) -> Path:
    """Class folders blue, green, red of 12 PNG files each, of uneven sizes, whose colour tells the class."""
    return make_colour_folder(tmp_path / "colours")


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes configs of a tiny network on 200 of the bundled images, in float32 on the CPU; fields can be replaced."""
    data = tmp_path / "data"

    def make(**fields: object) -> TrainConfig:
        if "data" not in fields:
            make_idx_folder(data)
        return tiny_config(**{"data": data, "run": tmp_path / "run", **fields})

    return make
