"""``python -m benchmarks.check [--accept]``: compare ratios to a floor with the committed ones, and fail where one got worse."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path("outputs/bench.json")
COMMITTED = Path(__file__).parent / "figures.json"
CHECKED = ("floor_tiny", "floor_small", "floor_two", "floor_debate", "prefilled", "forwarded")
"""Ratios to the bare loop and to the fewest tokens: no other framework's version moves them, and no machine's speed."""
LIMIT = 0.10
"""Share by which a ratio may be worse."""
SECTIONS = ("ratios", "extra")
Figures = Mapping[str, float | None]


def complaints(measured: Figures, committed: Figures) -> list[str]:
    """One line for every checked ratio that was not measured, or is worse than the committed one by more than ``LIMIT``."""
    found = []
    for name in CHECKED:
        new, old = measured.get(name), committed[name]
        if old is None:
            continue
        if new is None:
            found.append(f"{name}: not measured; expected a ratio, run `make bench` with it in ONLY, or without ONLY")
        elif new > old * (1 + LIMIT):
            found.append(
                f"{name}: {new:.3f} is {new / old - 1:.1%} worse than the committed {old:.3f}; expected at most {LIMIT:.0%}. "
                "Find the cause, or accept it by `python -m benchmarks.check --accept`"
            )
    return found


def figures_of(result: Mapping[str, Figures]) -> Figures:
    return {name: ratio for section in SECTIONS for name, ratio in result[section].items()}


def read(path: Path) -> dict[str, Any]:
    """A run's result. Raises ValueError for one that says nothing."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; run `make bench` first")
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("smoke"):
        raise ValueError(f"{path}: was written by a smoke run, which measures nothing; run `make bench` without SMOKE")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--committed", type=Path, default=COMMITTED)
    parser.add_argument("--accept", action="store_true", help="make the measured ratios the committed ones")
    options = parser.parse_args(argv)
    try:
        measured = figures_of(read(options.measured))
        committed = read(options.committed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.accept:
        accepted = {
            section: {
                name: old if measured.get(name) is None else measured[name] for name, old in committed[section].items()
            }
            for section in SECTIONS
        }
        options.committed.write_text(json.dumps(accepted, indent=1) + "\n")
        return 0
    found = complaints(measured, figures_of(committed))
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{', '.join(CHECKED)}: none is more than {LIMIT:.0%} worse than {options.committed.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
