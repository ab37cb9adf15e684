"""Tests of saved tokenizers: loading, altered files, and the images of a run as a tokenizer sees them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tasks.books import make, make_tokenizer
from tests.tasks.images import images_of
from tests.tasks.objectives import small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, DestinationError
from vitrail.models.variants import variant_config
from vitrail.processes.group import Processes
from vitrail.tasks.tokenizer import TokenizerTargets, check_grid, load_tokenizer, perplexity, tokenizer_facts
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import convert, load
from vitrail.weights.saved import TOKENIZER


def test_a_tokenizer_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    made = make_tokenizer()
    folder = made.save(tmp_path / "run" / "model")
    images = images_of(3)
    for place in (folder, tmp_path / "run"):
        read = load_tokenizer(place)
        assert read.sha256 == made.sha256 and read.preprocess == made.preprocess and read.provenance == made.provenance
        assert torch.equal(read.tokens(images), made.tokens(images)) and read.tokens(images).shape == (3, 12)
        restored = read.restored(read.tokens(images))
        assert restored.shape == images.shape and torch.equal(restored, made.restored(made.tokens(images)))
    plain = load(tmp_path / "run")
    assert plain.classes == () and weights_sha256(plain.network) == weights_sha256(made.network)
    assert torch.equal(plain.network.embed(images), made.network.embed(images))


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_a_converted_tokenizer_says_that_its_codebook_is_lost(tmp_path: Path, to: str) -> None:
    folder = make_tokenizer().save(tmp_path / "run" / "model")
    for number, place in enumerate((folder, tmp_path / "run")):
        notes = convert(place, tmp_path / f"{number}", to)
        assert any("not carried" in note and "codebook" in note for note in notes)
    assert not any("codebook" in note for note in convert(tmp_path / "0", tmp_path / "again", to))


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    one, other = make_tokenizer(), make_tokenizer(codes=9)
    folder = one.save(tmp_path / "model")
    with pytest.raises(DestinationError, match="exists already"):
        other.save(folder)
    with pytest.raises(ConfigError, match="stored='bfloat16': rounding the weights of a tokenizer would change its"):
        other.save(folder, overwrite=True, stored="bfloat16")
    other.save(folder, overwrite=True)
    assert load_tokenizer(folder).coder.config.codes == 9
    Bundle(one.network, (), one.preprocess).save(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]


def other_encoder(folder: Path) -> None:
    made = make_tokenizer()
    with torch.no_grad():
        next(made.network.parameters()).add_(1)
    content = (folder / TOKENIZER).read_bytes()
    Bundle(made.network, (), made.preprocess).save(folder, overwrite=True)
    (folder / TOKENIZER).write_bytes(content)


def other_width(folder: Path) -> None:
    network = small_network(width=24, heads=3)
    content = (folder / TOKENIZER).read_bytes()
    Bundle(network, (), Preprocess(image_size=(21, 28))).save(folder, overwrite=True)
    (folder / TOKENIZER).write_bytes(content)


def rewritten(folder: Path, **changes: object) -> None:
    tensors = load_file(folder / TOKENIZER)
    tensors["codebook.codes"][0, 0] += 1
    header = {"format": 1, "config": {}, **changes}
    save_file(tensors, folder / TOKENIZER, metadata={"tokenizer": json.dumps(header)})


def altered(folder: Path) -> None:
    content = bytearray((folder / TOKENIZER).read_bytes())
    content[-1] ^= 1
    (folder / TOKENIZER).write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda folder: (folder / TOKENIZER).unlink(), "is a model without a codebook"),
        (lambda folder: (folder / TOKENIZER).write_bytes(b"none"), "tokenizer.safetensors is damaged"),
        (lambda folder: save_file({}, folder / TOKENIZER), "has format None, but this version of Vitrail reads forma"),
        (lambda folder: rewritten(folder, format=2), "has format 2, but this version of Vitrail reads format 1"),
        (rewritten, "tokenizer.safetensors does not fit the encoder beside it"),
        (other_width, "tokenizer.safetensors does not fit the encoder beside it"),
        (other_encoder, "tokenizer.safetensors belongs to other weights of the encoder: a SHA-256 is not"),
        (altered, "tokenizer.safetensors was altered: a SHA-256 is not the one that its header states; copy the model"),
        (lambda folder: (folder / "model.json").unlink(), "model.safetensors holds the weights of a Vitrail network"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(break_: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = make_tokenizer().save(tmp_path / "model")
    break_(folder)
    with pytest.raises(BundleError, match=message):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"tokenizer='.*model' cannot be loaded: "):
        tokenizer_facts(str(folder))


def test_facts_are_those_of_the_newest_files(tmp_path: Path) -> None:
    made = make_tokenizer()
    folder = made.save(tmp_path / "model")
    facts = tokenizer_facts(str(folder))
    assert (facts.sha256, facts.coder.codes, facts.patches) == (made.sha256, 24, 12)
    assert tokenizer_facts(str(folder)) is facts
    make_tokenizer(codes=9).save(folder, overwrite=True)
    assert tokenizer_facts(str(folder)).coder.codes == 9


def test_a_network_with_as_many_patches_fits(tmp_path: Path) -> None:
    folder = str(make_tokenizer().save(tmp_path / "model"))
    for variant, size in (("ViT-Pico/7", (21, 28)), ("ViT-Pico/14", (42, 56)), ("ViT-Pico/16x8", (48, 32))):
        check_grid(folder, variant_config(variant, image_size=size))
    with pytest.raises(ConfigError, match=r"has tokens of 3 x 4 patches .* but the network has 4 x 3 patches"):
        check_grid(folder, variant_config("ViT-Pico/7", image_size=(28, 21)))


@pytest.mark.parametrize(("channels", "size"), [
    ((3, 3), (42, 56)), ((3, 1), (21, 28)), ((1, 3), (42, 56)), ((1, 1), (21, 28)),
])  # fmt: skip
def test_a_tokenizer_sees_images_with_its_own_preprocessing(
    channels: tuple[int, int], size: tuple[int, int], tmp_path: Path
) -> None:
    of_run, own = channels
    made = make_tokenizer(channels=own)
    targets = TokenizerTargets(str(made.save(tmp_path / "model")))
    preprocess = Preprocess(image_size=size, channels=of_run, mean=(0.5,), std=(0.25,))
    targets.begin(preprocess, torch.device("cpu"))
    pixels = torch.rand(2, of_run, *size)
    seen = pixels if of_run == own else pixels.repeat(1, 3, 1, 1)
    if (of_run, own) == (3, 1):
        seen = (0.299 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2])[:, None]
    if size != (21, 28):
        seen = F.interpolate(seen, (21, 28), mode="bilinear", antialias=True)
    expected = made.tokens((seen - 0.4) / 0.3)
    found = targets.tokens((pixels - 0.5) / 0.25)
    assert (found == expected).float().mean() > 0.95, "rounding may move a patch to another code"
    assert targets.restored(found).shape == (2, of_run, *size)
    assert not any(weight.requires_grad for weight in targets.tokenizer.coder.parameters())


# The codebook.


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
