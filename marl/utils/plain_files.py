"""Files of a run's folder, which may be somebody else's: a link there leads what is written elsewhere, and a pipe is waited for."""

import errno
import os
import re
import stat
from pathlib import Path

OURS = re.compile(
    r"\.(lock|.+\.tmp|(tmp|old|gone)_.+)|run\.json|metrics\.jsonl|summary\.json|README\.md|(report|comparison)\..+|\w+\.png"
    r"|latest_checkpointed_iteration\.txt|evaluations|export|ledger|rollouts|validation|global_step_\d+"
)
"""Names in a run's folder that are read and written; trackers keep folders of their own there, with links."""


class NotPlain(OSError):
    """A link, a pipe or a device where a file or a folder belongs."""

    def __init__(self, path: str | Path) -> None:
        what = "a link" if os.path.islink(path) else "neither a file nor a folder"
        super().__init__(
            f"{path} is {what}; a run's folder holds files and folders alone: put there what it leads to, or remove it"
        )


def opener(path: str, flags: int) -> int:
    """For ``open(…, opener=opener)``: opens a file, and neither follows a link nor waits for the other end of a pipe. Raises
    NotPlain."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(path)
    return descriptor


def must_be_plain(root: Path) -> None:
    """Raise NotPlain for the first of our entries in a run's folder, or below one, that is no file and no folder."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if OURS.fullmatch(path.name):
            for entry in (path, *path.rglob("*")):
                if not is_plain(entry):
                    raise NotPlain(entry)


def is_plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
