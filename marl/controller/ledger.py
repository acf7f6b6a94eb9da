"""The ledger of a run: turns and scores, written as they end, so that a killed run goes on from the interrupted turn.

``<run>/ledger/step_N`` holds one file per process that generated, a record per line, its CRC-32 in front. A resumed run finds
there what it asks for again: a record is known by its seed, which names run, step, task, sample, agent and round, and by a digest
of all that decides it. What is not found is generated.
"""

import json
import logging
import math
import os
import shutil
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from marl.config.identity import code_fingerprint
from marl.types import Score, Turn
from marl.utils.plain_files import opener
from marl.utils.plain_json import encoded

logger = logging.getLogger(__name__)

FOLDER = "ledger"
SET_LATER = ("seed", "score", "compared", "foresees", "outcomes", "evidence")
PLAIN = [field.name for field in fields(Turn) if field.name not in SET_LATER]
"""Fields of a turn that a server decides; JSON holds them to the last bit."""
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
        self.close()
        if self.root is None:  # the disk was full
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / f"{socket.gethostname()}_{os.getpid()}.jsonl", "ab", 0, opener=opener)  # noqa: SIM115 - open for the whole step
            if self.file.tell():
                self.file.write(b"\n")  # what a killed process of this number was writing ends here
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; only then may a disk say that it is full."""
        if self.file is not None:
            try:
                os.fsync(self.file.fileno())
                self.file.close()
                self.file = None
            except OSError as error:
                self._give_up(error)

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
                raise OSError("No space left on device")
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
        score = content and content["score"]
        return content and Turn(**{**content, "score": score and Score(**score)}, seed=seed)

    def add_turn(self, turn: Turn, seed: int, of: str) -> None:
        content = {name: getattr(turn, name) for name in PLAIN}
        self.add("turn", seed, of, content | {"score": turn.score and score_content(turn.score)})

    def score(self, turn: Turn, of: str) -> Score | None:
        content = self.find("score", turn.seed, of)
        return None if content is None else Score(**content)

    def add_score(self, turn: Turn, score: Score, of: str) -> None:
        if score.failure is None:  # a failure may be the machine's: it is scored again
            self.add("score", turn.seed, of, score_content(score))


def score_content(score: Score) -> dict[str, Any]:
    """All but what the configuration adds."""
    fields = {name: getattr(score, name) for name in ("value", "answer", "penalty", "acc")}
    return fields | {"extra": dict(score.extra)}


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def read_step(folder: Path) -> dict[Key, Any]:
    """All records of a step, the latest of each; a line that was cut off, or that the disk damaged, is none."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().split(b"\n")]
    whole = [line[9:] for line in lines if line[:9] == b"%08x " % zlib.crc32(line[9:])]
    records = sorted(map(json.loads, whole), key=lambda record: record["at"])
    return {(record["kind"], record["name"], record["of"]): record["content"] for record in records}


def forget(root: Path, step: float, first: int = 0) -> None:
    """Remove the ledgers of the steps from ``first`` up to ``step``."""
    for folder in (root / FOLDER).glob("step_*"):
        if first <= int(folder.name.removeprefix("step_")) <= step:
            shutil.rmtree(folder, ignore_errors=True)  # on NFS, a folder with an open file stays


def forget_after_a_gap(root: Path, step: int) -> None:
    """Remove the ledgers of all steps after ``step`` if the next one's is missing: they are of other weights."""
    if not folder_of(root / FOLDER, step + 1).is_dir():
        forget(root, math.inf, first=step + 1)


def forget_all(root: Path) -> None:
    shutil.rmtree(root / FOLDER, ignore_errors=True)
