"""``VERL_USE_EXTERNAL_MODULES``: a user's own modules, which verl imports as soon as it is imported itself."""

import importlib.util
import os
import sys

VARIABLE = "VERL_USE_EXTERNAL_MODULES"


def find_own_modules() -> None:
    """Let the modules of the working folder be found, as ``python -m`` does, and end a run that names one that is not there."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    if VARIABLE not in os.environ:
        return
    from marl.config.errors import ConfigError  # imports Hydra, which a help need not wait for

    try:
        check_modules(os.environ[VARIABLE])
    except ConfigError as error:
        sys.stderr.write(f"configuration error: {error}\n")
        sys.exit(2)


def check_modules(names: str) -> None:
    """Raise ConfigError for the first module that cannot be found. Errors within a module propagate."""
    from marl.config.errors import ConfigError

    for name in names.split(",") if names else []:
        if not is_found(name):
            raise ConfigError(
                f"{VARIABLE}={names}: there is no module {name!r}; expected names as in an import statement, separated by "
                f"commas, of modules in {os.getcwd()} or on PYTHONPATH"
            )


def is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False  # a package that it would be in
        raise
    except (ValueError, ImportError):  # no name at all, or a relative one
        return False
