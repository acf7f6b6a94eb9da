"""Ledger records of what a step lost after its episodes were played, so that a resumed run loses the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from marl.controller.collection import EpisodeLost, described
from marl.controller.ledger import Ledger
from marl.types import Episode, Task

UNSCORED = "unscored"
"""Kind of the record of an episode that could not be scored."""
LOST_ALTERNATIVES = "lost_alternatives"
"""Kind of the record of alternatives that a step lost."""


def content_of(task: Task) -> list[Any]:
    """Content of a task. Its id alone is ambiguous: rows of two files may share one."""
    return [task.id, task.messages, task.ground_truth, dict(task.extra)]


def unscored_before(ledger: Ledger, episode: Episode) -> EpisodeLost | None:
    """The error of an episode that the same step dropped before the run was killed."""
    content = ledger.find(UNSCORED, episode.seed, ledger.digest(*_names(episode)))
    return None if content is None else EpisodeLost(content["error"])


def add_unscored(ledger: Ledger, episodes: Sequence[Episode], results: Sequence[Any]) -> None:
    """Record the episodes whose result is an error: the step goes on without them."""
    for episode, result in zip(episodes, results, strict=True):
        if isinstance(result, Exception):
            names = _names(episode)
            ledger.add(UNSCORED, episode.seed, ledger.digest(*names), {"known_by": names, "error": described(result)})


def _names(episode: Episode) -> tuple[str, list[Any]]:
    """Identifies an episode by its task's content and by the seeds and texts of its turns."""
    return Ledger.digest_of(content_of(episode.task)), [[turn.seed, turn.text] for turn in episode.turns]


class LostAlternatives:
    """The alternatives that a step loses, among those that it tries."""

    def __init__(self, ledger: Ledger, step: int, tried: Sequence[Any], settings: Sequence[int]) -> None:
        """``tried`` and ``settings`` are JSON values; together they identify this call within the step."""
        self.ledger, self.step, self.known_by = ledger, step, (list(tried), list(settings))
        self.of = ledger.digest(*self.known_by)
        self.record: Mapping[str, Any] | None = ledger.find(LOST_ALTERNATIVES, step, self.of)
        errors = self.record["errors"] if self.record else {}
        self.errors = {int(at): EpisodeLost(error) for at, error in errors.items()}
        """Errors of those that were lost before the run was killed, by their place in ``tried``."""

    def add(self, results: Sequence[Any], spent: Mapping[str, int]) -> None:
        """Record what was lost, and the tokens that the run has used of its endpoints by now."""
        errors = {at: described(result) for at, result in enumerate(results) if isinstance(result, Exception)}
        if errors and self.record is None:
            content = {"known_by": self.known_by, "errors": errors, "spent": dict(spent)}
            self.ledger.add(LOST_ALTERNATIVES, self.step, self.of, content)
