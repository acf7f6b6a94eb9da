"""A run's ledger, read and never written, so that its steps are played again without servers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marl.controller.controller import UNSCORED
from marl.controller.ledger import FOLDER, Key, Ledger, folder_of, read_step
from marl.types import Score, Turn

Kept = Callable[[int, int, Mapping[str, Any]], bool]
"""Step, seed and content of a recorded turn -> whether it is replayed."""


class RecordedLedger(Ledger):
    """Unlike a resumed run, a replay may have other sampling settings and other source files of marl: a turn is known by its
    seed, its policy and what the agent was shown, a score by the turn's seed and text."""

    def __init__(self, run: Path, scores: bool = True, keeps: Kept = lambda *turn: True) -> None:
        """``scores=False`` leaves the recorded scores out. ``keeps``: turns that it rejects are left out."""
        super().__init__(run)
        self.scores, self.keeps = scores, keeps
        self.texts: dict[int, str] = {}
        self.scored: dict[int, dict[str, Any]] = {}

    def open(self, step: int) -> None:
        if step != self.step:
            assert self.root is not None
            self.step, self.known = step, {}
            self.texts, self.scored = {}, {}
            for (kind, name, of), content in read_step(folder_of(self.root, step)).items():
                self._take(kind, name, of, content)

    def _take(self, kind: str, name: int, of: str, content: dict[str, Any]) -> None:
        if kind == "turn":
            if self.keeps(self.step, name, content):
                self.known[self._key(name, content)] = content
                self.texts[name] = content["text"]
        elif kind == "score":
            self.scored[name] = content
        elif kind == UNSCORED and not self.scores:  # the reward is asked again
            return
        elif "known_by" in content and kind != "lost":
            self.known[kind, name, self.digest(*content["known_by"])] = content
        else:
            self.known[kind, name, of] = content

    def _key(self, seed: int, content: Mapping[str, Any]) -> Key:
        return "turn", seed, self.digest(content["policy"], content["observation"])

    def digest(self, *deciding: Any) -> str:
        """Digest of a request's policy and observation, its first two parts, as they are read back."""
        return self.digest_of(json.loads(json.dumps(deciding[:2], default=str)))

    def find(self, kind: str, name: int, of: str) -> Any:
        return self._lost() if kind == "lost" else super().find(kind, name, of)

    def _lost(self) -> dict[str, Any] | None:
        """The plays that training lost: a replay validates nothing."""
        lost = [content for (kind, *_), content in self.known.items() if kind == "lost"]
        return next((record for record in lost if of_training(record)), None)

    def score(self, turn: Turn, of: str) -> Score | None:
        known = self.scores and self.texts.get(turn.seed) == turn.text and turn.seed in self.scored
        return Score(**self.scored[turn.seed]) if known else None


def of_training(lost: Mapping[str, Any]) -> bool:
    return not lost["known_by"][1]  # whether it validates


def has_step(run: Path, step: int) -> bool:
    """True if the run kept its turns of a step."""
    return any(kind == "turn" for kind, *_ in read_step(folder_of(run / FOLDER, step)))
