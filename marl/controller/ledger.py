"""The ledger of a run: turns and scores, written as they end, so that a killed run goes on from the interrupted turn.

``<run>/ledger/step_N`` holds one file per process that generated, a record per line, its CRC-32 in front. A resumed run finds
there what it asks for again: a record is known by its seed, which names run, step, task, sample, agent and round, and by a digest
of all that decides it. What is not found is generated.
"""

import errno
import json
import logging
import math
import os
import shutil
import socket
import time
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from marl.config.identity import code_fingerprint
from marl.types import Score, Turn
from marl.utils.plain_files import opener
from marl.utils.plain_json import encoded

logger = logging.getLogger(__name__)

FOLDER = "ledger"
PLAIN = ("text", "thought", "policy", "stop_reason", "version", "branch", "kept", "answers", "trained", "billed_tokens")
"""Fields of a turn that JSON holds as they are."""
ARRAYS = {"prompt_ids": "i", "response_ids": "i", "response_mask": "b", "log_probs": "d"}
"""Fields that are lists of numbers, with the type of each number."""
Key = tuple[str, int, str]
"""Kind of the record, its seed, and the digest of what decides it."""


class Ledger:
    """One process's view: it reads what earlier processes of the run wrote, and appends what is new.

    It never returns what this process wrote: an episode that is played again after an error is played, not read.
    """

    def __init__(self, root: Path | None) -> None:
        """``root``: the run's folder; None keeps no ledger."""
        self.root = root and root / FOLDER
        self.step, self.last = -1, 0.0
        self.file: BinaryIO | None = None
        self.known: dict[Key, Any] = {}

    def open(self, step: int) -> None:
        """Read what is known of a step, and append to it from now on."""
        if self.root is None or step == self.step:
            return
        folder = folder_of(self.root, step)
        self.known, self.step = read_step(folder), step
        try:
            self._close_file()
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / f"{socket.gethostname()}_{os.getpid()}.jsonl", "ab", 0, opener=opener)  # noqa: SIM115 - open for the whole step
            if self.file.tell():
                self.file.write(b"\n")  # what a killed process of this number was writing ends here
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            self._close_file()
        except OSError as error:
            self._give_up(error)

    def _close_file(self) -> None:
        """Close the file; it may be only now that a disk tells that it is full."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def digest(self, *deciding: Any) -> str:
        """Digest of all that decides a record, all source files included; it has to be the same when it is read."""
        return "" if self.root is None else self.digest_of([code_fingerprint(), *deciding])

    @staticmethod
    def digest_of(deciding: Sequence[Any]) -> str:
        return blake2b(encoded(list(deciding), sort_keys=True, default=str), digest_size=8).hexdigest()

    def find(self, kind: str, name: int, of: str) -> Any:
        """The content of a record, or None."""
        return self.known.get((kind, name, of))

    def add(self, kind: str, name: int, of: str, content: Any) -> None:
        """Append a record. One whose content JSON cannot hold is left out, and made again by a resumed run; where the disk is
        full, the run goes on without a ledger."""
        if self.file is None:
            return
        self.last = max(time.time(), math.nextafter(self.last, math.inf))  # in order, whatever the clock does
        try:
            text = encoded({"kind": kind, "name": name, "of": of, "at": self.last, "content": content})
        except (TypeError, ValueError) as error:
            logger.debug("a %s is not in the ledger: %s", kind, error)
            return
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on without a ledger."""
        logger.warning("no more turns are recorded in %s: %s", self.root, error)
        self.file, self.root = None, None

    def weights(self, step: int) -> dict[str, Any] | None:
        """Digests of the weights with which the step's turns were generated, by policy; None where nobody read them."""
        digests: dict[str, Any] | None = self.find("weights", step, "")
        return digests

    def begin(self, step: int, digests: Mapping[str, Any]) -> None:
        """Open a step, and record the weights it generates with. Warns if the turns already recorded for it came from other weights."""
        self.open(step)
        before = self.weights(step)
        if digests and before is not None and before != json.loads(encoded(dict(digests))):
            logger.warning(
                "step %d: the turns recorded before the run was interrupted came from other weights than the present ones, and are "
                "used nevertheless: repeating the earlier steps did not reproduce the weights, as on a device with non-deterministic "
                "operations",
                step,
            )
        if digests:
            self.add("weights", step, "", dict(digests))

    def turn(self, seed: int, of: str) -> Turn | None:
        content = self.find("turn", seed, of)
        return None if content is None else turn_of(content, seed)

    def add_turn(self, turn: Turn, seed: int, of: str) -> None:
        self.add("turn", seed, of, turn_content(turn))

    def score(self, turn: Turn, of: str) -> Score | None:
        content = self.find("score", turn.seed, of)
        return None if content is None else Score(**content)

    def add_score(self, turn: Turn, score: Score, of: str) -> None:
        if score.failure is None:  # a failure may be the machine's: it is scored again
            self.add("score", turn.seed, of, score_content(score))


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def turn_content(turn: Turn) -> dict[str, Any]:
    arrays = {name: packed(kind, getattr(turn, name)) for name, kind in ARRAYS.items()}
    score = None if turn.score is None else score_content(turn.score)
    plain = {name: getattr(turn, name) for name in PLAIN}
    return {
        "agent": turn.agent,
        "round": turn.round,
        "observation": turn.observation,
        **plain,
        **arrays,
        "score": score,
    }


def turn_of(content: Mapping[str, Any], seed: int) -> Turn:
    arrays = {name: unpacked(kind, content[name]) for name, kind in ARRAYS.items()}
    score = None if content["score"] is None else Score(**content["score"])
    return Turn(**{**content, **arrays, "score": score}, seed=seed)


def score_content(score: Score) -> dict[str, Any]:
    """All but what the configuration adds."""
    fields = {name: getattr(score, name) for name in ("value", "answer", "penalty", "acc")}
    return fields | {"extra": dict(score.extra)}


def packed(kind: str, numbers: Sequence[float]) -> str:
    """Numbers in full precision."""
    return b64encode(array(kind, numbers).tobytes()).decode()


def unpacked(kind: str, text: str) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(b64decode(text))
    return numbers.tolist()


def read_step(folder: Path) -> dict[Key, Any]:
    """All records of a step, the latest of each; a line that was cut off, or that the disk damaged, is none."""
    records = [record for path in sorted(folder.glob("*.jsonl")) for record in read_file(path)]
    records.sort(key=lambda record: record["at"])
    return {(record["kind"], record["name"], record["of"]): record["content"] for record in records}


def read_file(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line[9:]) for line in lines if is_whole(line)]


def is_whole(line: bytes) -> bool:
    return line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(line[9:])


def forget(root: Path, step: int) -> None:
    """Remove the ledgers of all steps up to ``step``."""
    remove(folder for number, folder in numbered(root) if number <= step)


def forget_after_a_gap(root: Path, step: int) -> None:
    """Remove the ledgers of all steps after ``step`` if the next one's is missing: they are of other weights."""
    if not folder_of(root / FOLDER, step + 1).is_dir():
        remove(folder for number, folder in numbered(root) if number > step)


def numbered(root: Path) -> list[tuple[int, Path]]:
    """The ledgers of a run with their steps."""
    names = {folder: folder.name.removeprefix("step_") for folder in (root / FOLDER).glob("step_*")}
    return [(int(number), folder) for folder, number in names.items() if number.isdecimal()]


def remove(found: Iterable[Path]) -> None:
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)  # on NFS, a folder with an open file stays


def forget_all(root: Path) -> None:
    shutil.rmtree(root / FOLDER, ignore_errors=True)
