"""Pictures of fractals, drawn on request from a seed: a data set for pre-training that needs no photographs.

The method follows "Pre-training without Natural Images" (Kataoka et al., ACCV 2020, arXiv 2101.08515). A class is an
iterated function system: 2 to 8 contractions of the plane. Its picture is the set that these contractions map onto
itself. A system is kept if its picture fills enough of its square. The samples of a class scale the parameters of the
contractions, rotate and flip the picture, and draw its points with different patches of 3 x 3 pixels.

The method differs from the paper in four ways. Contractions are drawn so that their areas fill a picture; 58 % of the
systems are kept, and none diverges. A sample scales all six parameters instead of one, which gives 15,625 variants
instead of 25. A picture uses one patch for all of its points, and the points are computed from addresses (see
`dots_of`) instead of by a random walk; there is one point per four pixels. Points are white instead of grey, so small
pictures keep more grey levels when they are averaged.

Pictures can also be in colour, for networks that will see photographs: the fractal and its background then have random
colours, which vary smoothly over the picture, as in "Improving Fractal Pre-training" (Anderson and Farrell, WACV 2022,
arXiv 2110.03091). The clouds of colour are this module's own.

All numbers are computed from hashes by additions, products, quotients and square roots. IEEE 754 defines these to the
last bit, so a picture is the same on every machine. Sines, matrix products and sums of long arrays would differ.
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

MAX_SAMPLES = 2**31 - 1
"""Maximum number of images of one source."""
MAX_SEED = 2**32 - 1
MAX_SIZE = 1024

SMALLEST_SIDE = 128
"""Smallest side in pixels that is drawn directly. Smaller pictures are drawn at a multiple of their size and averaged,
because details of one pixel would be noise."""
PATCH = 3
FACTORS = np.array([0.8, 0.9, 1.0, 1.1, 1.2])
"""Factors by which a sample scales a parameter (the paper's list with steps of 0.1)."""

COUNTS = 2, 8
"""Smallest and largest number of contractions of a system."""
MAX_NORM = 0.775
"""Maximum norm of a contraction. Scaling the elements by up to 1.2 multiplies the norm by at most 1 + 0.2 sqrt(2), so
that the norm stays below 1."""
AREAS = 1.0, 1.5
"""Range of the sum of a system's determinants, before the norms are limited. If the sum is below 1, the images of the
picture under the contractions cannot cover the picture."""
SMALLEST_FILLING = 0.2
"""Smallest fraction of a square's pixels that the points of a system must reach (the paper's rate). Other systems are
rejected."""
FILLING_SIDE = 128
"""Side in pixels of the square for `SMALLEST_FILLING`, for all picture sizes. The number of points equals the
number of pixels."""
ATTEMPTS = 64
"""Maximum number of systems that are drawn for a class. If no system fills enough of the square, the fullest one is
used."""
DEPTH = 16
"""Number of contractions in the address of a point."""

COLOUR = "colour"
"""Last part of a spec whose pictures are in colour."""
CLOUDS = {2: 0.2, 4: 0.15, 8: 0.1}
"""Largest change of a colour by each layer of a cloud, by the number of cells along a side of the picture."""
SATURATION = 0.5
"""Part of that change which differs between red, green and blue."""
VARIATION = 0.35
"""Largest difference between the colours of a sample and the mean colours of its class, in each of red, green and
blue."""
LEAST_CONTRAST = 0.75
"""Smallest sum of the differences in red, green and blue between a fractal's colour and that of its background, before
both vary. Each difference is at most 1."""


@dataclass(frozen=True)
class FunctionSystem:
    """An iterated function system of n contractions of the plane."""

    maps: Float64[np.ndarray, "6 n"]
    """Parameters a, b, c, d, e, f of each contraction, which maps (x, y) to (a x + b y + e, c x + d y + f)."""
    probabilities: Float64[np.ndarray, " n"]
    """Probability of each contraction, proportional to the area of its image. The sum is 1."""


class FractalSource:
    """`classes` x `samples` pictures, drawn on request and never stored: grey (size, size, 1), white on black, or with
    `colour` (size, size, 3), in random colours on a background of other colours.

    Sample `index` has the class `index % classes`, so the numbers of samples of two classes differ by at most one in
    any prefix. A picture depends only on the seed, its class and its number within the class, which starts at `first`.
    Both kinds of pictures show the same fractals.
    Larger values of `classes` or `samples` therefore add pictures and keep the existing ones. docs/data.md has the
    measured speed. Raises `DataError`.
    """

    def __init__(
        self, classes: int, samples: int, seed: int = 0, *, size: int = 224, first: int = 0, colour: bool = False
    ) -> None:
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
                f"fractals: classes={classes} x samples={samples} makes {classes * samples:,} images; the maximum is "
                f"{MAX_SAMPLES:,}"
            )
        self.count, self.samples, self.seed, self.size, self.first = classes, samples, seed, size, first
        self.colour = colour
        self.digits = max(4, len(str(classes - 1)))

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The names "fractal-0000", "fractal-0001" and so on. All names have the same number of digits."""
        return tuple(map(self._name, range(self.count)))

    @property
    def identity(self) -> str:
        """The settings that determine all samples."""
        settings = f"fractals:{self.count}:{self.samples}:{self.seed}:{self.size}:{self.first}"
        return f"{settings}:{COLOUR}" if self.colour else settings

    def held_out(self, fraction: float) -> FractalSource:
        """Return a source with more pictures of the same classes. It holds about `fraction` of the pictures of both
        sources."""
        samples = max(1, round(self.samples * fraction / (1 - fraction)))
        first = self.first + self.samples
        return FractalSource(self.count, samples, self.seed, size=self.size, first=first, colour=self.colour)

    def __len__(self) -> int:
        return self.count * self.samples

    def __getitem__(self, index: int) -> Sample:
        place = self._place(index)
        image = _picture(self.seed, *place, self.size)
        if self.colour:
            image = _coloured(image, self.seed, *place)
        return Sample(self.key(index), image, self.target(index))

    def key(self, index: int) -> str:
        number, sample = self._place(index)
        return f"{self._name(number)}/{sample}"

    def target(self, index: int) -> int:
        return self._place(index)[0]

    def origin(self, index: int) -> str:
        """Return the numbers that determine the picture."""
        number, sample = self._place(index)
        return f"fractal {self.seed} {self.size} {number} {sample}" + (f" {COLOUR}" if self.colour else "")

    def _place(self, index: int) -> tuple[int, int]:
        """Return the class of a sample and its number within the class."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample, number = divmod(index, self.count)
        return number, self.first + sample

    def _name(self, number: int) -> str:
        return f"fractal-{number:0{self.digits}}"


def open_fractals(spec: str) -> FractalSource:
    """Return the source that "fractals:CLASSES:SAMPLES[:SEED[:SIZE[:colour]]]" describes. Defaults: seed 0, 224 pixels
    and grey pictures.

    Raises `DataError` if a part is missing, is not a whole number, or is out of its range.
    """
    number = ":[0-9]{1,20}"
    if re.fullmatch(rf"fractals(({number}){{2,4}}|({number}){{4}}:{COLOUR})", spec) is None:
        raise DataError(
            f"data {spec!r} is not fractals:CLASSES:SAMPLES[:SEED[:SIZE[:{COLOUR}]]] with whole numbers; for example, "
            "fractals:1000:100 makes 100 pictures of each of 1,000 fractals"
        )
    colour = spec.endswith(COLOUR)
    classes, samples, *others = map(int, spec.removesuffix(f":{COLOUR}").split(":")[1:])
    seed, size = (*others, *(0, 224)[len(others) :])
    try:
        return FractalSource(classes, samples, seed, size=size, colour=colour)
    except DataError as error:
        raise DataError(f"data {spec!r}: {error} (for example, fractals:1000:100)") from error


@functools.lru_cache(maxsize=16_384)
def system_of(seed: int, number: int) -> FunctionSystem:
    """Return the system of class `number`: the first system drawn for the class that fills enough of its square."""
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
    """Draw `parts` x `parts` points of the fractal, and return a square mask of the pixels with a point. `key` seeds
    the points.

    The fractal is scaled to fit the square exactly. A number in [0, 1) is the address of a point. The probabilities of
    the contractions divide the interval into parts, and the part with the address selects the outermost contraction.
    That part is divided again and selects the next contraction, and so on. [0, 1) is also divided into `parts` equal
    intervals, and two addresses are drawn in each. All contractions of the first address are applied, and give a
    point. The contractions of the second address are applied only until its part of the interval is no larger than
    1 / `parts`, and give a composed contraction. The result contains every point under every composed contraction.
    This takes a few array operations, whereas a random walk takes one operation per step. The last two rows and
    columns stay empty, to leave room for a patch.
    """
    within = (_uniform(key, 2 * parts).reshape(2, parts) + np.arange(parts)) / parts
    letters = _letters(system.probabilities, within.ravel(), np.repeat([1 / parts, 0.0], parts))
    coarse, fine = letters[:, :parts], letters[:, parts:]
    a, b, c, d, e, f = system.maps[:, 0]
    inverse = 1 / ((1 - a) * (1 - d) - b * c)
    x, y = ((1 - d) * e + b * f) * inverse, ((1 - a) * f + c * e) * inverse  # a fixed point, so part of the fractal
    points = _follow(system.maps, fine, np.array([[x], [y]]))
    corners = _follow(system.maps, coarse, np.array([[[0.0], [1.0], [0.0]], [[0.0], [0.0], [1.0]]]))
    columns, rows = (_pixels(axis.astype(np.float32), points.astype(np.float32), side) for axis in corners)
    rows *= side
    rows += columns
    dots = np.zeros(side * side, bool)
    dots[rows.astype(np.intp).ravel()] = True
    return dots.reshape(side, side)


def _draw(numbers: Float64[np.ndarray, " 74"]) -> FunctionSystem:
    """Return a system made from uniform numbers in [0, 1).

    A linear map is the sum of a scaled rotation and a scaled reflection. The sum and the difference of the two scales
    are its singular values. If the determinant is negative, the reflection has the larger scale.
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
    probabilities: Float64[np.ndarray, " n"], places: Float64[np.ndarray, " b"], ends: Float64[np.ndarray, " b"]
) -> Int[np.ndarray, "depth b"]:
    """Return the contractions that addresses in [0, 1) select, outermost first.

    Once the part of an address is as small as its entry in `ends`, the rest of its column is n, for no contraction.
    """
    count = len(probabilities)
    bounds = np.cumsum(probabilities)
    letters = np.empty((DEPTH, len(places)), np.intp)
    width = np.ones(len(places))
    for row in letters:
        named = np.minimum(np.searchsorted(bounds, places, side="right"), count - 1)  # the last bound may be below 1
        part = probabilities[named]
        places = (places - bounds[named]) / part + 1
        np.copyto(row, np.where(width > ends, named, count))
        width *= part
    return letters


def _follow(
    maps: Float64[np.ndarray, "6 n"], letters: Int[np.ndarray, "depth b"], start: Float64[np.ndarray, "2 *points 1"]
) -> Float64[np.ndarray, "2 *points b"]:
    """Return the images of the points under each column of contractions in `letters`, applied innermost first."""
    identity = np.array([[1.0], [0.0], [0.0], [1.0], [0.0], [0.0]])
    table = np.concatenate([maps, identity], axis=1).take(letters[::-1], axis=1)
    x, y = start
    for a, b, c, d, e, f in table.swapaxes(0, 1):
        x, y = a * x + b * y + e, c * x + d * y + f
    return np.stack([x, y])


def _pixels(
    corners: Float32[np.ndarray, "3 b"], points: Float32[np.ndarray, "2 m"], side: int
) -> Float32[np.ndarray, "b m"]:
    """Return one coordinate of all points under all maps, in whole pixels.

    `corners` holds the images of (0, 0), (1, 0) and (0, 1) under each map.
    """
    origin, right, up = corners[:, :, None]
    found = (right - origin) * points[0]
    found += (up - origin) * points[1]
    found += origin
    low, high = found.min(), found.max()
    found -= low
    found *= np.float32(side - PATCH) / (high - low)
    return np.floor(found, out=found)


def _picture(seed: int, number: int, sample: int, size: int) -> UInt8[np.ndarray, "size size 1"]:
    """Return the picture of a sample. It is grey, because the paper found that colour matters little."""
    key = f"{seed}/{number}/sample {sample}"
    numbers = _uniform(key + " is", 8)
    system = system_of(seed, number)
    factors = FACTORS[(len(FACTORS) * numbers[:6]).astype(int)]
    times = -(-SMALLEST_SIDE // size)
    varied = FunctionSystem(system.maps * factors[:, None], system.probabilities)
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


def _coloured(
    grey: UInt8[np.ndarray, "size size 1"], seed: int, number: int, sample: int
) -> UInt8[np.ndarray, "size size 3"]:
    """Return the picture of a sample with the fractal in one cloud of colours, and its background in another."""
    size = len(grey)
    drawn = sum((cells + 1) ** 2 for cells in CLOUDS)
    numbers = _uniform(f"{seed}/{number}/sample {sample} in colour", 6 + 8 * drawn)
    back, front = np.clip(_colours(seed, number) + VARIATION * (2 * numbers[:6] - 1), 0.0, 1.0).reshape(2, 3)
    if sum(np.abs(front - back).tolist()) < LEAST_CONTRAST:
        front = (back + 0.5) % 1.0
    clouds = _clouds(numbers[6:].reshape(drawn, 2, 4), size)
    behind, before = clouds[:, :, 0] + back, clouds[:, :, 1] + front
    mixed = behind + (before - behind) * (grey / 255.0)
    return (255 * np.clip(mixed, 0.0, 1.0) + 0.5).astype(np.uint8)


@functools.lru_cache(maxsize=16_384)
def _colours(seed: int, number: int) -> Float64[np.ndarray, " 6"]:
    """Return the mean colours of the background and of the fractal in the pictures of a class."""
    return _uniform(f"{seed}/{number}/colours", 6)


def _clouds(numbers: Float64[np.ndarray, "n 2 4"], size: int) -> Float64[np.ndarray, "size size 2 3"]:
    """Return the smooth random changes of red, green and blue in two clouds. They are sums of grids of random numbers,
    one of grey and one of each colour at every corner of a cell, which are interpolated between the corners."""
    numbers = 2 * numbers - 1
    changes = (1 - SATURATION) * numbers[:, :, :1] + SATURATION * numbers[:, :, 1:]
    found = np.zeros((size, size, 2, 3))
    for cells, amount in CLOUDS.items():
        corners, changes = np.split(changes, [(cells + 1) ** 2])
        levels = amount * corners.reshape(cells + 1, cells + 1, 2, 3)
        low, part = _cells(size, cells)
        rows = levels[low] + (levels[low + 1] - levels[low]) * part[:, None, None, None]
        found += rows[:, low] + (rows[:, low + 1] - rows[:, low]) * part[:, None, None]
    return found


@functools.lru_cache(maxsize=64)
def _cells(size: int, cells: int) -> tuple[Int[np.ndarray, " size"], Float64[np.ndarray, " size"]]:
    """Return for each of `size` pixels along a side its cell, and the position of its centre in the cell from 0 to
    1."""
    places = (np.arange(size) + 0.5) * cells / size
    low = places.astype(np.intp)
    return low, places - low


def _stamp(dots: Bool[np.ndarray, "side side"], pattern: int) -> Bool[np.ndarray, "side side"]:
    """Return the dots drawn as patches of 3 x 3 pixels, with the pixels whose bits are set in `pattern`."""
    side = len(dots)
    stamped = np.zeros_like(dots)
    for bit in range(PATCH * PATCH):
        if pattern >> bit & 1:
            down, right = divmod(bit, PATCH)
            stamped[down:, right:] |= dots[: side - down, : side - right]
    return stamped


def _uniform(key: str, count: int) -> Float64[np.ndarray, " {count}"]:
    """Return numbers in [0, 1) with 53 bits each, made from a hash of `key`."""
    data = hashlib.shake_128(key.encode()).digest(8 * count)
    return (np.frombuffer(data, "<u8") >> np.uint64(11)) * 2.0**-53
