"""The part of a traceback that is in files of the user's."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
)


def own_traceback(error: BaseException) -> str | None:
    """The traceback from the first frame in a file of the user's on, of the innermost error that has one; None where none has."""
    for inner in reversed([*chain(error)]):
        said = traceback.format_exception_only(inner)
        frames = traceback.extract_tb(inner.__traceback__)
        first = next((at for at, frame in enumerate(frames) if is_own(frame.filename)), None)
        if isinstance(inner, SyntaxError) and is_own(inner.filename or ""):
            return "".join(said)  # it names the file and the line by itself
        if first is not None:
            return "".join(["Traceback, from your code on:\n", *traceback.format_list(frames[first:]), *said])
    return None


def place_in_own(error: BaseException) -> str:
    """The last line of the user's that an error passed, as ``, in reward.py, line 3``; nothing where none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f", in {own[-1].filename}, line {own[-1].lineno}" if own else ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_own(file: str) -> bool:
    return os.path.isabs(file) and not any(Path(file).is_relative_to(folder) for folder in LIBRARIES)
