"""Keeps the output of the libraries below off the terminal: their notes, warnings and progress bars.

Errors and tracebacks pass, and so does every line that our code or the user's prints, logs or warns of.
"""

import builtins
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARIES = ("verl", "ray", "torch", "torchdata", "tensordict", "transformers", "datasets", "huggingface_hub")
ASKED_FOR = ("verl.utils.logger", "verl.utils.tracking")
"""The trackers of ``trainer.logger``: their prints are what the user asked for."""
PRINTS_FOR_OTHERS = "ray.experimental.tqdm_ray"
"""Ray puts its own ``print`` in the builtin one's place; who called it is one frame further up."""
BEFORE_IMPORTS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Read when the libraries are imported; what is set already stays."""


def is_library(module: str) -> bool:
    """True if a module, by its full name, belongs to one of the libraries."""
    return module.split(".")[0] in LIBRARIES


def quiet_imports(arguments: list[str]) -> None:
    """Set the environment that libraries read on import, unless the command line says ``verbose=true``."""
    if "verbose=true" not in arguments:
        for key, value in BEFORE_IMPORTS.items():
            os.environ.setdefault(key, value)
        ignore_warnings()


def ignore_warnings() -> None:
    """Ignore warnings that are raised in a library, by the module they are raised in."""
    warnings.filterwarnings("ignore", module=rf"({'|'.join(LIBRARIES)})(\.|$)")


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Drop the libraries' prints, warnings and log records below an error, in this process; ``verbose`` shows them all."""
    if verbose:
        yield
        return
    shown = True

    def print_ours(*values: Any, **options: Any) -> None:
        module = "" if shown else caller()
        if not is_library(module) or module.startswith(ASKED_FOR):
            printed(*values, **options)

    def handle_ours(self: logging.Logger, record: logging.LogRecord) -> None:
        if shown or record.levelno >= logging.ERROR or not is_library(module_of(record.pathname)):
            handled(self, record)

    printed, handled = builtins.print, logging.Logger.handle
    builtins.print, logging.Logger.handle, shown = print_ours, handle_ours, False  # type: ignore[assignment,method-assign]
    try:
        with warnings.catch_warnings():
            ignore_warnings()
            yield
    finally:
        shown = True  # somebody may have kept ours: it prints everything from here on
        logging.Logger.handle = handled  # type: ignore[method-assign]
        if builtins.print is print_ours:
            builtins.print = printed


def caller() -> str:
    """The module that called ``print``."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == PRINTS_FOR_OTHERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


def module_of(path: str) -> str:
    """The module of an installed file: verl names its loggers by their files, so that a record's name does not tell."""
    parts = os.path.splitext(path)[0].split(os.sep)
    return ".".join(parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else ""
