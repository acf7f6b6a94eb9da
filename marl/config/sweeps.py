"""Folders of sweeps and of their runs, by what the command line varies: the same command finds them again."""

import hashlib
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from marl.config.overrides import VERL

MULTIRUN = frozenset({"--multirun", "-m", "hydra.mode=MULTIRUN"})
ROOT = "outputs/sweeps"
LONGEST = 120
"""Letters of a folder's name; a longer one ends in a digest."""
FOLDER = "trainer.default_local_dir"
UNSAFE = re.compile(r"[^\w.,=+-]+")


def sweep_words(words: Sequence[str], launcher: str | None = None) -> list[str]:
    """A sweep's command line with its folder and our plugins; that of a single run as it is. Whatever the user sets stays."""
    if not MULTIRUN.intersection(words):
        return list(words)
    wanted = {"hydra/sweeper": "marl", "hydra/launcher": launcher, "hydra.sweep.dir": f"{ROOT}/{sweep_name(words)}"}
    given = {word.partition("=")[0] for word in words}
    added = [f"{key}={value}" for key, value in wanted.items() if value is not None and key not in given]
    # beside the other overrides: argparse takes them in one piece
    overrides = [index for index, word in enumerate(words) if "=" in word and not word.startswith("-")]
    place = max(overrides, default=len(words) - 1) + 1
    return [*words[:place], *added, *words[place:]]


def sweep_name(words: Sequence[str]) -> str:
    """Configuration, swept keys and a digest of all that is not swept: more values continue the same sweep."""
    config, swept, fixed = "marl", [], []
    flags = iter(words)
    for word in flags:
        if word in ("--config-name", "-cn"):
            config = next(flags, config)
        elif word.startswith("--config-name="):
            config = word.partition("=")[2]
        elif is_swept(word):
            swept.append(word.partition("=")[0])
        elif word not in MULTIRUN and not word.startswith("hydra"):
            fixed.append(word)
    digest = hashlib.sha256(repr((config, sorted(swept), sorted(fixed))).encode()).hexdigest()[:8]
    return safe("-".join([config, *(key.rsplit(".", 1)[-1] for key in swept), digest]))


def is_swept(word: str) -> bool:
    """True for an override with several values. What Hydra cannot parse it refuses by itself."""
    if word.startswith("-") or "=" not in word or word.startswith("hydra"):
        return False
    try:
        return bool(OverridesParser.create().parse_override(word).is_sweep_override())
    except HydraException:
        return False


def swept_keys(overrides: Sequence[str], jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys that a sweep's ``overrides`` vary, or else, as where a sweeper chooses the values, those in which jobs differ."""
    swept = [override.partition("=")[0] for override in overrides if is_swept(override)]
    others = [word.partition("=")[0] for job in jobs for word in job if any(word not in other for other in jobs)]
    return list(dict.fromkeys(swept or others))


def run_name(job: Sequence[str], swept: Sequence[str]) -> str:
    """The name of a run's folder: its values of the swept keys, or all its overrides where nothing is swept."""
    values = dict(word.partition("=")[::2] for word in job)
    return safe(",".join(f"{key.lstrip('+')}={values[key]}" for key in swept or values if key in values) or "run")


def safe(name: str) -> str:
    short = UNSAFE.sub("_", name)
    if short == name and len(name) <= LONGEST:
        return name
    return f"{short[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def names_its_folder(job: Sequence[str]) -> bool:
    """True where the command line gives a run a folder of the user's."""
    return any(word.lstrip("+").partition("=")[0] == FOLDER for word in job)


def run_words(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The command line of one run of a sweep in a process of its own: the flags of the sweep's, and the run's overrides."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in MULTIRUN:
            continue
        if word.startswith("-"):
            kept += [word] if "=" in word else [word, next(rest, "")]
        elif word.startswith("hydra.searchpath=") and word != f"hydra.searchpath=[{VERL}]":
            kept.append(word)
    return [*kept, *overrides]
