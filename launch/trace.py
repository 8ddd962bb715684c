"""`ringattn trace FOLDER`: what every rank did last, side by side, from the pages that a crashed run left."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ringattn.launch.watchdog import load_pages, table


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 if the folder holds no pages."""
    parser = argparse.ArgumentParser(prog="ringattn trace", description=__doc__)
    parser.add_argument("folder", type=Path, help="what `run(..., record=folder)` was given")
    parser.add_argument("--last", type=int, default=12, help="places of each rank to show (12)")
    arguments = parser.parse_args(argv)
    try:
        print(table(load_pages(arguments.folder), arguments.last))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
