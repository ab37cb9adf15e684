"""A small model in which every weight matters."""

from __future__ import annotations

import pytest

from tests.make import make_bundle
from tests.words import model_with_words
from vitrail.weights.bundle import Bundle


@pytest.fixture
def bundle() -> Bundle:
    return make_bundle()


@pytest.fixture(params=[None, -3.0], ids=["clip", "siglip"])
def model(request: pytest.FixtureRequest) -> Bundle:
    """A small model with a text tower that learned by a softmax, or by a sigmoid."""
    return model_with_words(bias=request.param)
