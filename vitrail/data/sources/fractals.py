"""Pictures of fractals, drawn from a seed as they are asked for: classes to pre-train on without a photograph.

After "Pre-training without Natural Images" (Kataoka et al., ACCV 2020, 2101.08515). A class is an iterated function
system: 2 to 8 contractions of the plane, whose picture is the set that they map onto itself. It is kept if the picture
fills enough of its square. The samples of a class scale the parameters of the contractions, turn and flip the picture,
and draw its points with different patches of 3 x 3 pixels.

Four things differ from the paper. Contractions are drawn with the area that fills a picture, so that 58 % of the
systems are kept and none diverges. A sample scales all six parameters rather than one, which gives 15,625 variants
instead of 25. A picture has one patch for all of its points, which are addressed (see `dots_of`), not walked to; there
is a point for every four pixels. Points are white, not grey, so that averaging small pictures keeps more levels.

All numbers are made of hashes by additions, products, quotients and square roots, which IEEE 754 defines to the last
bit, so a picture is the same on every machine. Sines, matrix products and sums of long arrays would not be.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, UInt8

from vitrail.data.source import Sample
from vitrail.errors import DataError

__all__ = ["FractalSource", "FunctionSystem", "dots_of", "open_fractals", "system_of"]

MAX_SAMPLES = 2**31 - 1
"""Images of one source."""
MAX_SEED = 2**32 - 1
MAX_SIZE = 1024

SMALLEST_SIDE = 128
"""Smaller pictures are drawn at a multiple of their size and averaged; detail of one pixel would be noise."""
PATCH = 3
FACTORS = np.array([0.8, 0.9, 1.0, 1.1, 1.2])
"""By which a sample scales a parameter (the paper's list with steps of 0.1)."""

COUNTS = 2, 8
"""Contractions of a system, the fewest and the most."""
MAX_NORM = 0.775
"""Of a contraction. With its elements scaled by up to 1.2 it has at most 1 + 0.2 sqrt(2) times as much: below 1."""
AREAS = 1.0, 1.5
"""Between which the determinants of a system add up, before norms are cut. Below 1 the parts cannot cover the whole."""
SMALLEST_FILLING = 0.2
"""Share of the pixels of a square that points must fall on for a system to be kept (the paper's rate)."""
FILLING_SIDE = 128
"""Side of that square in pixels, the same for pictures of all sizes; it is drawn with one point for every pixel."""
ATTEMPTS = 64
"""Systems drawn for a class at most; the fullest of them is taken where none fills enough. Of one, 58 % do."""
DEPTH = 16
"""Contractions in the address of a point."""


@dataclass(frozen=True)
class FunctionSystem:
    """An iterated function system of n contractions of the plane."""

    maps: Float64[np.ndarray, "6 n"]
    """Columns a, b, c, d, e, f: (x, y) goes to (a x + b y + e, c x + d y + f)."""
    chances: Float64[np.ndarray, " n"]
    """How often each is taken, in proportion to the area that it leaves; they add up to 1."""


class FractalSource:
    """`classes` x `samples` grey pictures (size, size, 1), white on black, of which none is stored.

    Sample `index` is of class `index % classes`, so every class is in a prefix as often as any other, give or take
    one. A picture depends on the seed, its class and its number within the class, which begins with `first`, and on
    nothing else: more classes or samples add to the same pictures. Opening takes no time, whatever the numbers. Raises
    `DataError`.

    In a second of one core's time (AMD EPYC 9004, 2026-11) it draws about 1,600 pictures of 32 or of 224 pixels, and
    about 550 where each is the first of its class, whose system has to be found.
    """

    def __init__(self, classes: int, samples: int, seed: int = 0, *, size: int = 224, first: int = 0) -> None:
        for name, value, least, most in (
            ("classes", classes, 2, MAX_SAMPLES),
            ("samples", samples, 1, MAX_SAMPLES),
            ("seed", seed, 0, MAX_SEED),
            ("size", size, 1, MAX_SIZE),
            ("first", first, 0, MAX_SAMPLES),
        ):
            if not least <= value <= most:
                raise DataError(f"fractals: {name}={value} is not from {least} to {most:,}")
        if classes * samples > MAX_SAMPLES:
            raise DataError(
                f"fractals: classes={classes} x samples={samples} are {classes * samples:,} images; at most "
                f"{MAX_SAMPLES:,} can be numbered"
            )
        self.count, self.samples, self.seed, self.size, self.first = classes, samples, seed, size, first
        self.digits = max(4, len(str(classes - 1)))

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Named "fractal-0000" and so on, with as many digits as the last one needs: a million names take a second."""
        return tuple(map(self._name, range(self.count)))

    @property
    def identity(self) -> str:
        """What all samples follow from."""
        return f"fractals:{self.count}:{self.samples}:{self.seed}:{self.size}:{self.first}"

    def held_out(self, share: float) -> FractalSource:
        """Further pictures of the same classes: so many for each that they are about `share` of them and of these."""
        samples = max(1, round(self.samples * share / (1 - share)))
        return FractalSource(self.count, samples, self.seed, size=self.size, first=self.first + self.samples)

    def __len__(self) -> int:
        return self.count * self.samples

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), _picture(self.seed, *self._place(index), self.size), self.target(index))

    def key(self, index: int) -> str:
        number, sample = self._place(index)
        return f"{self._name(number)}/{sample}"

    def target(self, index: int) -> int:
        return self._place(index)[0]

    def _place(self, index: int) -> tuple[int, int]:
        """Class and number within it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample, number = divmod(index, self.count)
        return number, self.first + sample

    def _name(self, number: int) -> str:
        return f"fractal-{number:0{self.digits}}"


def open_fractals(spec: str) -> FractalSource:
    """The source that "fractals:CLASSES:SAMPLES[:SEED[:SIZE]]" describes; seed 0 and 224 pixels unless given.

    Raises `DataError` where a part is missing, is not a whole number, or is out of its range.
    """
    if re.fullmatch(r"fractals(:[0-9]{1,20}){2,4}", spec) is None:
        raise DataError(
            f"data {spec!r} is not fractals:CLASSES:SAMPLES[:SEED[:SIZE]] with whole numbers; for example, "
            "fractals:1000:100 is 100 pictures of each of 1,000 fractals"
        )
    classes, samples, *others = map(int, spec.split(":")[1:])
    seed, size = (*others, *(0, 224)[len(others) :])
    try:
        return FractalSource(classes, samples, seed, size=size)
    except DataError as error:
        raise DataError(f"data {spec!r}: {error} (for example, fractals:1000:100)") from error


@functools.lru_cache(maxsize=16_384)
def system_of(seed: int, number: int) -> FunctionSystem:
    """The system of class `number`: the first of those drawn for it that fills enough of its square."""
    fullest, best = -1.0, None
    for attempt in range(ATTEMPTS):
        key = f"{seed}/{number}/system {attempt}"
        system = _draw(_uniform(key, 2 + 9 * COUNTS[1]))
        filling = float(dots_of(system, FILLING_SIDE, FILLING_SIDE, key).mean())
        if filling > fullest:
            fullest, best = filling, system
        if filling >= SMALLEST_FILLING:
            break
    assert best is not None
    return best


def dots_of(system: FunctionSystem, side: int, parts: int, key: str) -> Bool[np.ndarray, "side side"]:
    """Where parts x parts points of the fractal fall on a square of pixels that it just fits into. `key` varies them.

    A number in [0, 1) is the address of a point: split into parts by the chances of the contractions, the interval
    names the outermost contraction, that part split again names the next, and so on. One address in each of `parts`
    equal intervals is followed to the end and gives a point. One more in each is followed until it has named a part
    as small as the interval, and gives the contraction onto that. The result is all points under all contractions.
    That is a few operations on arrays, where a walk takes one for every step. The last two rows and columns stay
    empty, for a patch.
    """
    within = (_uniform(key, 2 * parts).reshape(2, parts) + np.arange(parts)) / parts
    letters = _letters(system.chances, within.ravel(), np.repeat([1 / parts, 0.0], parts))
    coarse, fine = letters[:, :parts], letters[:, parts:]
    a, b, c, d, e, f = system.maps[:, 0]
    share = 1 / ((1 - a) * (1 - d) - b * c)
    x, y = ((1 - d) * e + b * f) * share, ((1 - a) * f + c * e) * share  # stays where it is, so it is of the fractal
    points = _follow(system.maps, fine, np.array([[x], [y]]))
    corners = _follow(system.maps, coarse, np.array([[[0.0], [1.0], [0.0]], [[0.0], [0.0], [1.0]]]))
    columns, rows = (_pixels(axis.astype(np.float32), points.astype(np.float32), side) for axis in corners)
    rows *= side
    rows += columns
    dots = np.zeros(side * side, bool)
    dots[rows.astype(np.intp).ravel()] = True
    return dots.reshape(side, side)


def _draw(numbers: Float64[np.ndarray, " 74"]) -> FunctionSystem:
    """A system from uniform numbers in [0, 1).

    A linear map is the sum of a rotation and a reflection, each scaled: the sum and the difference of their scales are
    its singular values. Reflections are larger where the determinant is negative.
    """
    count = COUNTS[0] + int((COUNTS[1] - COUNTS[0] + 1) * numbers[0])
    area = AREAS[0] + (AREAS[1] - AREAS[0]) * numbers[1]
    (p, q, r, s), (e, f), (long, ratio, mirrored) = np.split(numbers[2 : 2 + 9 * count].reshape(9, count), [4, 6])
    p, q, r, s, e, f = (2 * values - 1 for values in (p, q, r, s, e, f))
    long, ratio = 0.3 + 0.7 * long, 0.2 + 0.8 * ratio
    long = np.minimum(MAX_NORM, long * np.sqrt(area / sum((long * long * ratio).tolist())))
    half_sum, half_difference = long * (1 + ratio) / 2, long * (1 - ratio) / 2
    swapped = mirrored < 0.5
    turning = np.where(swapped, half_difference, half_sum) / np.sqrt(p * p + q * q)
    reflecting = np.where(swapped, half_sum, half_difference) / np.sqrt(r * r + s * s)
    p, q, r, s = p * turning, q * turning, r * reflecting, s * reflecting
    left = long * long * ratio
    return FunctionSystem(np.stack([p + r, s - q, q + s, p - r, e, f]), left / sum(left.tolist()))


def _letters(
    chances: Float64[np.ndarray, " n"], places: Float64[np.ndarray, " b"], ends: Float64[np.ndarray, " b"]
) -> Int[np.ndarray, "depth b"]:
    """The contractions that places in [0, 1) name, outermost first; n, for none, once parts are as small as `ends`."""
    count = len(chances)
    bounds = np.cumsum(chances)
    letters = np.empty((DEPTH, len(places)), np.intp)
    width = np.ones(len(places))
    for row in letters:
        named = np.minimum(np.searchsorted(bounds, places, side="right"), count - 1)  # rounding may leave 1 uncovered
        part = chances[named]
        places = (places - bounds[named]) / part + 1
        np.copyto(row, np.where(width > ends, named, count))
        width *= part
    return letters


def _follow(
    maps: Float64[np.ndarray, "6 n"], letters: Int[np.ndarray, "depth b"], start: Float64[np.ndarray, "2 *points 1"]
) -> Float64[np.ndarray, "2 *points b"]:
    """Where points go under each row of contractions that `letters` name, innermost first."""
    nothing = np.array([[1.0], [0.0], [0.0], [1.0], [0.0], [0.0]])
    table = np.concatenate([maps, nothing], axis=1).take(letters[::-1], axis=1)
    x, y = start
    for a, b, c, d, e, f in table.swapaxes(0, 1):
        x, y = a * x + b * y + e, c * x + d * y + f
    return np.stack([x, y])


def _pixels(
    corners: Float32[np.ndarray, "3 b"], points: Float32[np.ndarray, "2 m"], side: int
) -> Float32[np.ndarray, "b m"]:
    """One coordinate of all points under all maps, given by where (0, 0), (1, 0) and (0, 1) go, as whole pixels."""
    origin, right, up = corners[:, :, None]
    found = (right - origin) * points[0]
    found += (up - origin) * points[1]
    found += origin
    low, high = found.min(), found.max()
    found -= low
    found *= np.float32(side - PATCH) / (high - low)
    return np.floor(found, out=found)


def _picture(seed: int, number: int, sample: int, size: int) -> UInt8[np.ndarray, "size size 1"]:
    """Grey: the fractal has no colour, which the paper found to matter little, and one channel is a third of three."""
    key = f"{seed}/{number}/sample {sample}"
    numbers = _uniform(key + " is", 8)
    system = system_of(seed, number)
    factors = FACTORS[(len(FACTORS) * numbers[:6]).astype(int)]
    times = -(-SMALLEST_SIDE // size)
    varied = FunctionSystem(system.maps * factors[:, None], system.chances)
    dots = dots_of(varied, times * size, times * size // 2, key)
    stamped = _stamp(dots, 1 + int(511 * numbers[6]))
    if times == 1:
        grey = stamped * np.uint8(255)
    else:
        lit = stamped.reshape(size, times, size, times).sum((1, 3), dtype=np.uint32)
        grey = ((255 * lit + times * times // 2) // (times * times)).astype(np.uint8)
    turn = int(8 * numbers[7])
    grey = grey.T if turn & 4 else grey
    grey = grey[:: 1 - (turn & 2), :: 1 - 2 * (turn & 1)]
    return np.ascontiguousarray(grey)[:, :, None]


def _stamp(dots: Bool[np.ndarray, "side side"], pattern: int) -> Bool[np.ndarray, "side side"]:
    """A patch of 3 x 3 pixels at every dot, of those pixels whose bits in `pattern` are set."""
    side = len(dots)
    stamped = np.zeros_like(dots)
    for bit in range(PATCH * PATCH):
        if pattern >> bit & 1:
            down, right = divmod(bit, PATCH)
            stamped[down:, right:] |= dots[: side - down, : side - right]
    return stamped


def _uniform(key: str, count: int) -> Float64[np.ndarray, " {count}"]:
    """Numbers in [0, 1) of 53 bits each, from a hash of `key`."""
    data = hashlib.shake_128(key.encode()).digest(8 * count)
    return (np.frombuffer(data, "<u8") >> np.uint64(11)) * 2.0**-53
