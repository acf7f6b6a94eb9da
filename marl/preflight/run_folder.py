"""A run's folder: one run at a time writes into it, and only the run that it belongs to."""

import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.identity import identity_of, key_of, refused, settings_of
from marl.config.kinds import adapter_policies
from marl.config.placement import critic_pool, pool_of, size_of
from marl.config.policies import own_settings
from marl.config.rules.training import STATES
from marl.controller import ledger
from marl.preflight.unfinished import BEGUN, STAMPED, go_on_with, identity_in, mark_finished
from marl.report.runs import FINISHED, LOCK, RUN, must_be_plain, read_record
from marl.utils import folders
from marl.utils.manifest import MANIFEST, Damaged, facts_of, replace_text
from marl.utils.plain_files import opener
from marl.utils.secret_masking import masked_text

logger = logging.getLogger(__name__)

LATEST = "latest"
RESULTS = ("global_step_*", "metrics.jsonl", "summary.json", "rollouts/*", "validation/*")
"""Files that show that a run reached its first step or validation."""
SHOWN = 10
RESTARTED = "restarted"
OTHER_SETTINGS = "validated_with_other_settings"
"""True if the folder's ledger may hold turns and scores of a validation with other settings than the run's."""
FILES = dict(zip(STATES, ("model_world_size_*", "optim_world_size_*", "extra_state_world_size_*"), strict=True))
"""verl's files, by what they hold."""


@contextmanager
def claimed(config: Any) -> Iterator[Path]:
    """Hold ``trainer.default_local_dir`` for a run, or the folder of the unfinished run that it continues, and leave its
    ``run.json`` there.

    Raises ConfigError where another run writes into it, or where what lies there is of a run with other settings. Turns that the
    folder's last run recorded with other settings are removed.
    """
    new = identity_of(config)
    folder = go_on_with(config, Path(config.trainer.default_local_dir), new)
    with locked(folder):
        folders.clean(folder)
        new["config"] = settings_of(config)  # its folder may be another now
        origin = origin_of(config.trainer, folder)
        own = own_identity(folder)
        saved = (
            None
            if origin is None
            else own
            if origin == began_from(folder) and has_begun(folder)
            else read_identity(origin)
        )
        if origin is not None:
            must_be_the_same_run(saved, new, folder if saved is own else origin, tuple(config.trainer.resume_changes))
            must_have_as_many_ranks(config, origin)
            must_hold_all_states(config, origin)
        if own is not None and (own.get(OTHER_SETTINGS) or refused(own, plain(new), ())):
            ledger.forget_all(folder)
        write_identity(folder, new, origin, saved, own, bool(config.trainer.get("val_only")))
        point_latest_at(folder)
        yield folder
        if not config.trainer.get("val_only"):
            mark_finished(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    must_be_plain(folder)
    with open(folder / LOCK, "a+", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"trainer.default_local_dir={folder}: another run is writing into it ({file.read().strip() or 'unknown'}); "
                "wait for its end, or set trainer.default_local_dir to a folder of its own"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): nothing keeps a second run from writing into it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def origin_of(settings: Any, folder: Path) -> Path | None:
    """The checkpoint that a run goes on from, or the folder of a run that left none; None for a new run."""
    results = has_results(folder)
    if settings.resume_mode == "resume_path":
        return named_origin(Path(settings.resume_from_path).expanduser().resolve(), folder, results)
    if not results and not (settings.resume_mode == "auto" and (has_begun(folder) or began_from(folder))):
        return None
    if settings.resume_mode == "disable":
        raise ConfigError(
            f"trainer.default_local_dir={folder} holds the results of a run, and trainer.resume_mode=disable would write over "
            "them; set trainer.default_local_dir to a new folder, or trainer.resume_mode=auto to continue that run"
        )
    found, _ = to_resume(settings, folder)
    return found or folder


def has_results(folder: Path) -> bool:
    return any(path for pattern in RESULTS for path in folder.glob(pattern))


def has_begun(folder: Path) -> bool:
    """True if a run left results there, or turns."""
    return has_results(folder) or any(folder.glob(BEGUN))


def to_resume(settings: Any, folder: Path) -> tuple[Path | None, dict[str, str]]:
    """The checkpoint to continue from: the one that is named, or the folder's newest that is whole and of its run, or the one
    elsewhere that its run began from; and what is wrong with each newer one. Raises ConfigError where there are checkpoints, and
    none to continue from."""
    if settings.resume_mode == "disable":
        return None, {}
    if settings.resume_mode == "resume_path":
        named = Path(settings.resume_from_path).expanduser().resolve()
        must_be_whole(named)
        return named, {}
    found, refused = folders.newest_valid(folder, family_of(folder))
    if found is None and refused:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(
            f"trainer.resume_mode=auto: no checkpoint in {folder} can be resumed. {listed}. Restore one of them from a copy, or "
            "set trainer.default_local_dir to a new folder for a new run"
        )
    source = began_from(folder) if found is None else None
    if source is not None:
        try:
            folders.checked(source, family=None)  # run.json names it
        except (Damaged, OSError) as error:
            raise ConfigError(
                f"trainer.resume_mode=auto: the run in {folder} began from {source} and has no checkpoint of its own yet. {error}. "
                "Restore it from a copy, or set trainer.default_local_dir to a new folder for a new run"
            ) from None
    return found or source, refused


def began_from(folder: Path) -> Path | None:
    """The checkpoint elsewhere from which the folder's run began, as long as it has none of its own."""
    record = own_identity(folder) if not folders.named(folder) else None
    resumed = record.get("resumed") if record else None
    source = Path(resumed[-1]["from"]) if resumed else folder
    elsewhere = source.is_absolute() and source.parent.resolve() != folder.resolve()  # a named one was noted in full
    return source if elsewhere and folders.STEP.fullmatch(source.name) else None


def must_be_whole(source: Path) -> dict[str, Any]:
    try:
        folders.read_state(source)
        return folders.checked(source, family=None)
    except (FileNotFoundError, Damaged) as error:
        raise ConfigError(f"trainer.resume_from_path={source}: {error}; expected …/global_step_N, whole") from None


def family_of(folder: Path) -> str | None:
    """The family of a run's checkpoints: its own, and those of the runs that it continues."""
    identity = read_identity(folder)
    return None if identity is None else identity.get("family")


def named_origin(source: Path, folder: Path, results: bool) -> Path:
    step = must_be_whole(source)["step"]
    if source.parent != folder.resolve():
        if results and source != began_from(folder):
            raise ConfigError(
                f"trainer.default_local_dir={folder} holds the results of another run than trainer.resume_from_path={source}; "
                "set it to a new folder, or trainer.resume_mode=auto to continue the run that it holds"
            )
        return source
    later = [path.name for number, path in folders.numbered(folder) if number > step]
    if later:
        raise ConfigError(
            f"trainer.resume_from_path={source}: the run has later checkpoints, {', '.join(later)}, which a run from here "
            "would write over; set trainer.default_local_dir to a new folder to continue from here beside it, or "
            "trainer.resume_mode=auto to continue from the last one"
        )
    return source


def read_identity(origin: Path) -> dict[str, Any] | None:
    """``run.json`` of a checkpoint, or else of the run that it lies in. Raises ConfigError for one that cannot be read."""
    return next((read_record(path) for path in (origin / RUN, origin.parent / RUN) if path.is_file()), None)


def own_identity(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of the run that wrote into a folder last; None without one that can be read."""
    return identity_in(folder)


def must_be_the_same_run(
    saved: Mapping[str, Any] | None, new: Mapping[str, Any], origin: Path, changes: tuple[str, ...]
) -> None:
    if saved is None:
        logger.warning("%s holds no %s: whether it was saved with these settings is unknown", origin, RUN)
        return
    found = refused(saved, plain(new), changes)
    if not found:
        return
    listed = "; ".join(f"{key}: saved {before}, now {after}" for key, (before, after) in [*found.items()][:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    keys = ",".join(dict.fromkeys(key_of(difference) for difference in [*found][:SHOWN]))
    raise ConfigError(
        f"{origin} was saved by a run with other settings: {listed}{more}. Use the saved values, set "
        "trainer.default_local_dir to a new folder for a separate run, or, to continue with these settings, set "
        f"trainer.resume_changes=[{keys}]"
    )


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as it is read back from its file."""
    read: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return read


def write_identity(
    folder: Path,
    new: dict[str, Any],
    origin: Path | None,
    saved: Mapping[str, Any] | None,
    own: Mapping[str, Any] | None,
    only_validates: bool,
) -> None:
    """Write ``run.json``. ``saved``: that of ``origin``; ``own``: the folder's, which of the same run knows what came later.

    A validation keeps the run's own settings here, so that the command that started the run still continues it.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    same_run = bool(own and saved and own.get("family") == saved.get("family"))
    history = (own if same_run else saved) or {}
    kept = ("started", "resumed", "family", RESTARTED, *([FINISHED] if only_validates else []))
    earlier = {key: history[key] for key in kept if key in history}
    record = {"started": now, "resumed": [], "family": uuid.uuid4().hex} | earlier
    if origin is not None:
        record["resumed"] = [*record["resumed"], {"at": now, "from": str(origin)}]
    settings: Mapping[str, Any] = new
    if same_run and only_validates:
        settings = own or {}
        record[OTHER_SETTINGS] = bool(settings.get(OTHER_SETTINGS) or refused(settings, plain(new), ()))
    record |= {key: value for key, value in settings.items() if key not in record}
    replace_text(folder / RUN, json.dumps(record, indent=1, default=str) + "\n")


def note_restart(folder: Path, error: str, origin: str) -> None:
    """Note in ``run.json`` that a fault ended an attempt, and from where the run goes on."""
    record = json.loads((folder / RUN).read_text())
    fault = {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from": origin, "error": masked_text(error)}
    record[RESTARTED] = [*record.get(RESTARTED, []), fault]
    replace_text(folder / RUN, json.dumps(record, indent=1) + "\n")


def restarts_of(folder: Path) -> int:
    """Number of faults after which a run was built anew."""
    return len((read_identity(folder) or {}).get(RESTARTED, []))


def point_latest_at(folder: Path) -> None:
    """Point the link ``latest`` beside a time-stamped folder at it: the most recently started run, resumed ones included."""
    if STAMPED.fullmatch(folder.name) is None:
        return
    link, temporary = folder.parent / LATEST, folder.parent / f".{LATEST}.{os.getpid()}"
    with suppress(OSError):  # a convenience, which not every file system has
        temporary.symlink_to(folder.name)
        os.replace(temporary, link)


def saved_ranks(origin: Path) -> Mapping[str, int]:
    """The number of ranks that saved each part, as ``alice/actor``; none of a folder that is no checkpoint."""
    ranks: Mapping[str, int] = facts_of(origin).get("world_size", {}) if (origin / MANIFEST).is_file() else {}
    return ranks


def must_have_as_many_ranks(config: Any, origin: Path) -> None:
    """Raise ConfigError for a checkpoint whose shards are of another number of ranks than the run's; before models are loaded."""
    for part, ranks in saved_ranks(origin).items():
        name, kind = part.rsplit("/", 1)
        pool = critic_pool(config, name) if kind == "critic" else pool_of(config, name)
        check_ranks(origin, part, ranks, size_of(config, pool).ranks)


def must_hold_all_states(config: Any, origin: Path) -> None:
    """Raise ConfigError for a checkpoint without weights, optimizer or schedule of a part, and where the run would not read
    them: it would go on with those it began with. A validation needs the weights alone."""
    needed = STATES[:1] if config.trainer.get("val_only") else STATES
    for name, kind in (part.rsplit("/", 1) for part in saved_ranks(origin)):
        if kind != "critic" and name in adapter_policies(config):  # whose checkpoints always hold all
            continue
        settings = config.critic if kind == "critic" else own_settings(config, name).actor
        group = "critic.checkpoint" if kind == "critic" else "actor_rollout_ref.actor.checkpoint"
        key, contents = f"{group}.load_contents", settings.checkpoint.load_contents
        unread = [state for state in needed if state not in contents]
        if unread:
            raise ConfigError(
                f"{key}={contents}: {name}/{kind} of {origin} would go on without its {' and '.join(unread)}; expected "
                f"{', '.join(needed)}; or begin a new run from its weights (model.path=…/huggingface)"
            )
        absent = [state for state in STATES if state in contents and not any((origin / name / kind).glob(FILES[state]))]
        if absent:
            raise ConfigError(
                f"{origin} holds no {' and no '.join(absent)} of {name}/{kind}: {group}.save_contents left it out, and a run "
                "cannot go on from the rest; begin a new run from its weights (model.path=…/huggingface), or validate with "
                f"{key}=[model] trainer.resume_changes=[{key}]"
            )


def check_ranks(origin: Path, part: str, saved: int | None, ranks: int) -> None:
    """Raise ConfigError where a part of a checkpoint was saved by another number of ranks; None is known of none."""
    if saved not in (None, ranks):
        raise ConfigError(
            f"{origin}: {part} was saved by {saved} ranks, and this run has {ranks}; resume with as many (trainer.nnodes, "
            "trainer.n_gpus_per_node, resources.pools), or begin a new run from its weights (model.path=…/huggingface)"
        )
