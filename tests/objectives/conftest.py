"""One thread, as the matrices here are tiny, and a way around the checking of types."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def types_unchecked() -> Iterator[None]:
    """Lets values of wrong types reach the package's own checks, as they do outside of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
