"""Tests of vector quantisation: nearest codes, gradients, running means and restarts, against plain computations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tasks.books import make
from vitrail.processes.group import Processes
from vitrail.tasks.tokenizer import perplexity

ALONE = Processes()


def counted_of(*values: bool) -> Tensor:
    return torch.tensor(values)


def naive_nearest(vectors: Tensor, codes: Tensor) -> list[int]:
    """Return the first code with the smallest squared distance to each vector, in float64."""
    found = []
    for vector in vectors.double().tolist():
        distances = [sum((a - b) ** 2 for a, b in zip(vector, code, strict=True)) for code in codes.double().tolist()]
        found.append(distances.index(min(distances)))
    return found


@pytest.mark.parametrize(("size", "width", "count"), [(2, 1, 7), (13, 3, 40), (50, 8, 33)])
def test_the_nearest_code_is_found_and_ties_go_to_the_lowest_index(size: int, width: int, count: int) -> None:
    book = make(size, width, whole=True)
    vectors = torch.randint(-4, 5, (count, width)).float()
    assert book.nearest(vectors).tolist() == naive_nearest(vectors, book.codes)
    half = size // 2
    book.codes[half : 2 * half] = book.codes[:half].clone()  # codes that occur twice
    found = book.nearest(vectors[None])
    assert found.tolist() == [naive_nearest(vectors, book.codes)]
    assert not ((found >= half) & (found < 2 * half)).any()


def test_products_in_bfloat16_do_not_change_the_nearest_code() -> None:
    book, vectors = make(64, 8), torch.randn(200, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(book.nearest(vectors), book.nearest(vectors.double().float()))
    assert book.nearest(vectors).tolist() == naive_nearest(vectors, book.codes)


def test_gradients_pass_the_codebook_and_the_commitment_pulls_the_vectors() -> None:
    book, vectors = make(9, 4), torch.randn(3, 5, 4, requires_grad=True)
    found, commitment = book(vectors, counted_of(True, True, True))
    codes = book.codes[book.nearest(vectors)]
    torch.testing.assert_close(found, codes)
    factors = torch.randn(3, 5, 4)
    (gradient,) = torch.autograd.grad((found.sin() * factors).sum(), vectors, retain_graph=True)
    torch.testing.assert_close(gradient, factors * codes.cos())
    torch.testing.assert_close(commitment, (vectors - codes).square().mean(dim=(1, 2)))
    (gradient,) = torch.autograd.grad(commitment.sum(), vectors)
    torch.testing.assert_close(gradient, 2 * (vectors - codes).detach() / 20)
    assert not any(tensor.requires_grad for tensor in book.state_dict().values())


def test_codes_are_the_running_means_of_the_paper() -> None:
    """Appendix A.1 in float64, with the smoothed counts and the debiased means of the published code. One image is not
    counted."""
    decay, size = 0.9, 6
    book = make(size, 3)
    counts, sums = [0.0] * size, torch.zeros(size, 3, dtype=torch.float64)
    for step in range(5):
        torch.manual_seed(step)
        vectors, counted = torch.randn(4, 7, 3), counted_of(True, step != 2, True, True)
        tokens = book.nearest(vectors)
        book(vectors, counted)
        for code in range(size):
            members = [vectors[i, j] for i in range(4) for j in range(7) if counted[i] and tokens[i, j] == code]
            total = torch.stack(members).double().sum(0) if members else torch.zeros(3, dtype=torch.float64)
            counts[code] = decay * counts[code] + (1 - decay) * len(members)
            sums[code] = decay * sums[code] + (1 - decay) * total
        book.update(ALONE, decay=decay)
        means = [count / (1 - decay ** (step + 1)) for count in counts]
        smoothed = [(mean + 1e-5) / (sum(means) + size * 1e-5) * sum(means) for mean in means]
        expected = torch.stack([sums[code] / (1 - decay ** (step + 1)) / smoothed[code] for code in range(size)])
        torch.testing.assert_close(book.codes.double(), expected, rtol=1e-5, atol=1e-6)
        assert book.counts.tolist() == pytest.approx(counts, rel=1e-5)


def test_codes_begin_with_a_variance_of_one_over_their_width() -> None:
    codes = make(4000, 12).codes
    assert codes.abs().max() <= 0.5 and abs(codes.var() * 12 - 1) < 0.02


def test_parts_of_a_batch_add_up_and_forgotten_parts_do_not_count() -> None:
    whole, parts = make(5, 3), make(5, 3)
    vectors, counted = torch.randint(-4, 5, (6, 4, 3)).float(), counted_of(True, True, False, True, True, True)
    parts(torch.randn(2, 4, 3), counted_of(True, True))
    parts.offer(torch.randn(2, 3), torch.zeros(2, dtype=torch.float64))
    parts.begin_step()
    whole(vectors, counted)
    for first in (0, 2, 4):
        parts(vectors[first : first + 2], counted[first : first + 2])
    parts.eval()(torch.randn(2, 4, 3), counted_of(True, True))
    for book in (whole, parts):
        book.update(ALONE, decay=0.5, restart_below=0.1)
    for one, other in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("offers", [1, 2, 6])
def test_unused_codes_become_offered_vectors_in_their_order(offers: int) -> None:
    book = make(5, 2)
    book.counts.copy_(torch.tensor([4.0, 0.1, 9.0, 0.2, 0.3]))
    before, vectors = book.codes.clone(), torch.randn(offers + 1, 2)
    order = torch.cat([torch.linspace(0.9, 0.1, offers), torch.tensor([2.0])]).double()  # the last is not decoded
    for part in (slice(0, 1), slice(1, None)):
        book.offer(vectors[part], order[part])
    book.sums.copy_(book.codes * book.counts[:, None])
    book.update(ALONE, decay=0.5, restart_below=0.25)  # no vectors: all counts are halved
    mean = book.counts.mean().item()
    replaced = [1, 3, 4][:offers]
    for number, code in enumerate(replaced):
        assert torch.equal(book.codes[code], vectors[offers - 1 - number])
        assert torch.equal(book.sums[code], book.codes[code] * book.counts[code])
    assert len({book.counts[code].item() for code in replaced}) == 1
    assert pytest.approx(book.counts[1].item()) == (4.0 + 0.1 + 9.0 + 0.2 + 0.3) / 2 / 5 and mean > 0
    for code in {0, 1, 2, 3, 4} - set(replaced):
        torch.testing.assert_close(book.codes[code], before[code], rtol=1e-3, atol=1e-4)


def test_perplexity_counts_codes_that_are_used_equally() -> None:
    assert perplexity(torch.ones(12)).item() == pytest.approx(12)
    assert perplexity(torch.tensor([0.0, 7.0, 0.0])).item() == pytest.approx(1)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert perplexity(torch.tensor([1.0, 3.0, 0.0])).item() == pytest.approx(math.exp(entropy))
    assert perplexity(torch.zeros(4)).item() == 1
