"""Tables as text."""

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in [head, ["---"] * len(head), *rows])


def escaped(cell: str) -> str:
    return cell.replace("|", r"\|").replace("\n", " ")
