"""Command-line pieces that several commands share: options that describe a sequence, and parsers of their values."""

import argparse

import torch

from ringattn import Band, window
from ringattn.layout import ALIASES, LAYOUTS
from ringattn.mask import MASKS, as_band
from ringattn.schedule import SCHEDULES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASK_HELP = f"{', '.join(MASKS)}, window:LEFT or window:LEFT,RIGHT"


def make_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that refuses abbreviated and unknown options, described by the first line of a module's docstring."""
    summary = (doc or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=f"ringattn {command}", description=summary, allow_abbrev=False)


def add_sequence_options(parser: argparse.ArgumentParser, seq_len: int) -> None:
    """How a sequence is sharded, masked and passed around."""
    parser.add_argument(
        "--layout", choices=[*LAYOUTS, *ALIASES], default="zigzag", help="how the sequence is sharded (%(default)s)"
    )
    parser.add_argument("--mask", type=parse_mask, default="causal", metavar="MASK", help=f"{MASK_HELP} (%(default)s)")
    parser.add_argument(
        "--seq-len", type=parse_tokens, default=seq_len, metavar="TOKENS", help="such as 8192 or 1M (%(default)s)"
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="ring", help="how blocks travel (%(default)s)")


def parse_tokens(text: str) -> int:
    """A number of tokens, with k or M for 1024 and 1024 * 1024.

    Example:
        >>> parse_tokens("8192"), parse_tokens("64k"), parse_tokens("1M")
        (8192, 65536, 1048576)
    """
    unit = {"k": 1024, "M": 1024 * 1024}.get(text[-1:], 1)
    try:
        return int(text[:-1] if unit > 1 else text) * unit
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 8192, 64k or 1M") from error


def parse_mask(text: str) -> Band:
    """A mask's name, or `window:LEFT[,RIGHT]` as in `ringattn.window`.

    Example:
        >>> str(parse_mask("causal")), str(parse_mask("window:7"))
        ('causal', 'band(0, 7)')
    """
    name, colon, sides = text.partition(":")
    try:
        if name == "window" and colon:
            return window(*(int(side) for side in sides.split(",")))
        return as_band(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"unknown mask {text!r}; choose {MASK_HELP}") from error
