"""Tables on a console, whole."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDEST = Console(width=1000)


def show_table(table: Table) -> None:
    """Print a table with no column cut: a narrow terminal breaks its lines, which loses nothing."""
    own = Console(highlight=False)
    Console(highlight=False, width=max(own.width, _WIDEST.measure(table).maximum)).print(table)
