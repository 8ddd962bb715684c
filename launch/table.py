"""Print a table: with rich where it is installed, in plain columns otherwise; the same cells either way."""

import importlib.util
import sys
from collections.abc import Sequence


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], plain: bool | None = None) -> None:
    """Print rows of text under a header; numbers, that is all columns but the first, are aligned to the right.

    Args:
        title: a line above.
        header: names of the columns.
        rows: as many cells each.
        plain: without rich; by default where it is missing or the output is no terminal.

    Example:
        >>> print_table("errors", ("tensor", "ratio"), [("O", "1.00"), ("LSE", "0.98")], plain=True)
        errors
        tensor  ratio
        O        1.00
        LSE      0.98
    """
    if plain is None:
        plain = not sys.stdout.isatty() or importlib.util.find_spec("rich") is None
    if plain:
        print(title)
        for line in plain_lines([header, *rows]):
            print(line)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row, style="bold red" if "FAIL" in row else None)
    Console().print(table)


def plain_lines(rows: Sequence[Sequence[str]], numbers: bool = True) -> list[str]:
    """Rows of cells as lines of aligned columns: to the left the first one, and all if they are no numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index and numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
