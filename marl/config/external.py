"""``VERL_USE_EXTERNAL_MODULES``: a user's own modules, which verl imports as soon as it is imported itself."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLATFORM = "marl.platform.cpu"
"""Named for workers by the runs themselves."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders that are searched for modules anyway."""


def find_own_modules() -> None:
    """Let the modules of the working folder be found, as ``python -m`` does, and end a run that names one that is not there."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path[:0] = working_folder()
    if VARIABLE not in os.environ:
        return
    from marl.config.errors import ConfigError  # imports Hydra, which a help need not wait for

    try:
        check_modules(os.environ[VARIABLE])
    except ConfigError as error:
        sys.stderr.write(f"configuration error: {error}\n")
        sys.exit(2)


def working_folder() -> list[str]:
    """The working folder, whose modules are found; not that of a run, which may be somebody else's."""
    return [] if Path("run.json").exists() or Path("trainer.json").exists() else [os.getcwd()]


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


def source_roots() -> list[Path]:
    """The file of each module that the variable names, or the folder of the package that it is in."""
    roots = (source_root(name) for name in sorted(named()) if is_found(name))
    return list(dict.fromkeys(root for root in roots if root is not None))


def source_root(name: str) -> Path | None:
    """Source of a module that is there: its file, or its package's folder. None for a built-in, and for a mere folder."""
    package, module = (importlib.util.find_spec(part) for part in (name.partition(".")[0], name))
    if package and package.origin and package.submodule_search_locations:
        return Path(package.origin).parent
    return Path(module.origin) if module and module.has_location and module.origin else None


@contextmanager
def naming_modules(modules: Any) -> Iterator[None]:
    """Add to an error about a saved run the modules that it imported and this process did not, as its ``run.json`` has them: they are
    code, and nothing that a run names is executed unless the user names it."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from marl.config.errors import ConfigError, explain

    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        given = own_modules()
        saved = modules.items() if isinstance(modules, Mapping) else ()
        missing = {name: folder for name, folder in saved if isinstance(folder, str) and name not in given}
        if not missing:
            raise
        raise ConfigError(
            f"{explain(error)}\nThe run imported modules of its own; this command imports them only if you name them: "
            f"{naming_own(given | missing)}marl …"
        ) from None


def naming_own(modules: Mapping[str, str]) -> str:
    """The words before a command that import modules of one's own, in any folder."""
    if not modules:
        return ""
    folders = dict.fromkeys(folder for folder in modules.values() if Path(folder).name not in INSTALLED)
    path = "".join(f"{shlex.quote(folder)}:" for folder in folders)
    return f"{f'PYTHONPATH={path}$PYTHONPATH ' if path else ''}{VARIABLE}={shlex.quote(','.join(modules))} "


def is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False  # a package that it would be in
        raise
    except (ValueError, ImportError):  # no name at all, or a relative one
        return False
