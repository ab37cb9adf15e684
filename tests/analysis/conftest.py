"""Images that the tests of summaries share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make import make_colour_folder


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders blue, green and red of nine images each."""
    return make_colour_folder(tmp_path_factory.mktemp("data") / "colours", images=9)
