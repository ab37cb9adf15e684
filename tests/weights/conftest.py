"""A small model in which every weight matters."""

from __future__ import annotations

import pytest

from tests.make import make_bundle
from vitrail.weights.bundle import Bundle


@pytest.fixture
def bundle() -> Bundle:
    return make_bundle()
