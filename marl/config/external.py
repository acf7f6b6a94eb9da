"""``VERL_USE_EXTERNAL_MODULES``: a user's own modules, which verl imports as soon as it is imported itself."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLATFORM = "marl.platform.cpu"
"""Named for workers by the runs themselves."""


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


def named() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name not in ("", PLATFORM)]


def own_modules() -> dict[str, str]:
    """The modules that the variable names, and the folder that each is imported from."""
    found = {}
    for name in filter(is_found, named()):
        origin = Path(getattr(importlib.util.find_spec(name), "origin", None) or name).absolute()
        found[name] = str(origin.parents[name.count(".") + (origin.name == "__init__.py")])
    return found


@contextmanager
def naming_modules(*runs: Mapping[str, str]) -> Iterator[None]:
    """Let an error about saved runs name the modules that they imported and this process did not: they are code, and what a run
    names is not executed by itself."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from marl.config.errors import ConfigError, explain

    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        given = own_modules()
        missing = {name: folder for run in runs for name, folder in run.items() if name not in given}
        if not missing:
            raise
        raise ConfigError(
            f"{explain(error)}\nThe run imported modules of its own, which this command imports only where you name them: "
            f"{naming_own(given | missing)}marl …"
        ) from None


def naming_own(modules: Mapping[str, str]) -> str:
    """What goes before a command, in any folder, to import modules of one's own."""
    if not modules:
        return ""
    folders = dict.fromkeys(folder for folder in modules.values() if not folder.startswith(sys.prefix))
    path = "".join(f"{shlex.quote(folder)}:" for folder in folders)
    return f"{f'PYTHONPATH={path}$PYTHONPATH ' if path else ''}{VARIABLE}={','.join(modules)} "


def is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False  # a package that it would be in
        raise
    except (ValueError, ImportError):  # no name at all, or a relative one
        return False
