"""A mask is a band of lags: query i sees key j iff `lo <= i - j <= hi`, in global positions.

Full, causal and sliding-window attention are all bands; a prefix that everyone sees widens the band for its keys.
Packed documents are not masks but spans (`ringattn.layout`): two tokens of different documents never see each other,
whatever the band.
"""

from dataclasses import dataclass

OPEN = 1 << 62
"""A bound that no lag reaches: `hi=OPEN` sees all of the past, `lo=-OPEN` all of the future."""


@dataclass(frozen=True, slots=True)
class Band:
    """Query i sees key j iff `lo <= i - j <= hi`, or, for the first keys, `j < prefix and i - j <= hi`.

    Attributes:
        lo: smallest lag that is seen; 0 hides the future, -OPEN hides nothing of it.
        hi: largest lag that is seen; OPEN hides nothing of the past.
        prefix: keys before this position are seen from the past too.

    Raises:
        ValueError: lo > hi, which no pair satisfies, a negative prefix, or a value that is no int.

    Example:
        >>> Band(0, 2).sees(5, 3), Band(0, 2).sees(5, 2), Band(0, 2).sees(5, 6)
        (True, False, False)
    """

    lo: int = -OPEN
    hi: int = OPEN
    prefix: int = 0

    def __post_init__(self) -> None:
        for bound in (self.lo, self.hi, self.prefix):
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise ValueError(f"a band takes ints, got lo={self.lo!r}, hi={self.hi!r}, prefix={self.prefix!r}")
        if self.lo > self.hi:
            raise ValueError(f"band sees nothing: lo={self.lo} > hi={self.hi}")
        if self.prefix < 0:
            raise ValueError(f"prefix must be at least 0, got {self.prefix}")

    def sees(self, i: int, j: int) -> bool:
        """Whether the query at position i sees the key at position j."""
        return i - j <= self.hi and (self.lo <= i - j or j < self.prefix)

    def over_prefix(self) -> "Band":
        """The band that keys of the prefix are under."""
        return Band(-OPEN, self.hi)

    def localize(self, distance: int, step: int) -> tuple[int, int]:
        """The band, apart from its prefix, in local indices of two runs of positions with the same step.

        Args:
            distance: first query position minus first key position.
            step: distance between neighbouring positions in both runs.

        Returns:
            `(lo, hi)` such that local query a sees local key b iff `lo <= a - b <= hi`.
        """
        return -((distance - self.lo) // step), (self.hi - distance) // step

    def __str__(self) -> str:
        for name, band in MASKS.items():
            if band == self:
                return name
        lo = "-inf" if self.lo <= -OPEN else self.lo
        hi = "inf" if self.hi >= OPEN else self.hi
        return f"band({lo}, {hi}{f', prefix={self.prefix}' if self.prefix else ''})"


FULL = Band()
CAUSAL = Band(lo=0)

MASKS: dict[str, Band] = {"full": FULL, "causal": CAUSAL}
"""The masks that have a name."""


def window(left: int, right: int = 0) -> Band:
    """A sliding window: each query sees itself, `left` keys before it and `right` keys after it.

    Args:
        left: keys before the query; -1 sees all of them.
        right: keys after the query; 0 is causal, -1 sees all of them.

    Returns:
        The band `-right <= i - j <= left`. flash-attn's `window_size=(left, right)` means the same; a transformers
        `sliding_window` of W keys including the query itself is `window(W - 1)`.

    Raises:
        ValueError: a side below -1.

    Example:
        >>> window(4095) == Band(0, 4095)
        True
    """
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise ValueError(f"window {side} must be an int of at least -1 (-1 is open), got {value!r}")
    return Band(lo=-OPEN if right == -1 else -right, hi=OPEN if left == -1 else left)


def prefix_lm(length: int) -> Band:
    """The mask of a prefix language model: every query sees the first `length` keys, and beyond them the past.

    Source: Raffel et al., Exploring the limits of transfer learning, 2020 (arXiv 1910.10683), section 3.2.

    Example:
        >>> prefix_lm(2).sees(0, 1), prefix_lm(2).sees(2, 3)
        (True, False)
    """
    return Band(lo=0, prefix=length)


def as_band(mask: "Band | str") -> Band:
    """The band of a mask given as a `Band` or by name; raises ValueError with the choices for anything else."""
    if isinstance(mask, Band):
        return mask
    if isinstance(mask, str) and mask in MASKS:
        return MASKS[mask]
    raise ValueError(
        f"unknown mask {mask!r}; choose one of {', '.join(MASKS)}, or pass window(left, right), prefix_lm(length) or a "
        "Band"
    )
