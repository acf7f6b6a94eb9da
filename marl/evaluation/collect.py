"""Episodes that teams play to be learned from: each with its training's sampling, the best of them kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.config.errors import ConfigError
from marl.config.external import naming_modules
from marl.evaluation.evaluate import played
from marl.evaluation.source import Source
from marl.evaluation.statistics import columns_of, mean
from marl.evaluation.team import config_of, opened
from marl.methods.choice import best_episodes, question
from marl.report import dump
from marl.report.conversation import is_right
from marl.types import Episode

SAMPLES = "actor_rollout_ref.rollout.n"


@dataclass(frozen=True)
class Wanted:
    """Episodes that are kept."""

    samples: int | None = None
    """Samples of each task that are played; None for as many as in a step of the run's training."""
    min_score: float | None = None
    """Least score of the team's answer; None for any."""
    best_of: int | None = None
    """Number of each task's best episodes, of all teams together; None for all."""


@dataclass
class Collected:
    """The episodes of all teams."""

    episodes: list[Episode] = field(default_factory=list)
    played_by: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Label and step of the team that played an episode, by its ``id``."""
    samples: list[int] = field(default_factory=list)
    """Samples of each task, by team."""
    kept: list[Episode] = field(default_factory=list)

    def add(self, label: str, step: int, episodes: Sequence[Episode]) -> None:
        self.episodes += episodes
        self.played_by |= {id(episode): (label, step) for episode in episodes}

    def lines(self) -> list[dict[str, Any]]:
        """The kept episodes as a dump's lines, with a column ``team``."""
        found = []
        for episode in self.kept:
            label, step = self.played_by[id(episode)]
            numbers: list[Any] = [{**columns_of(turn), "team": label} for turn in episode.turns]
            found += dump.lines_of(episode, step, numbers)
        return found

    def counts(self) -> dict[str, Any]:
        """Numbers of episodes, tasks and turns that were played and kept."""
        turns = [turn for episode in self.kept for turn in episode.turns]
        return {
            "episodes played": len(self.episodes),
            "episodes kept": len(self.kept),
            "tasks played": len({question(episode) for episode in self.episodes}),
            "tasks kept": len({question(episode) for episode in self.kept}),
            "turns kept": len(turns),
            "turns kept with a thought": sum(turn.thought is not None for turn in turns),
            "episodes failed": sum(episode.failure is not None for episode in self.episodes),
            "accuracy of all": round(mean([is_right(episode) for episode in self.episodes]), 4),
            "accuracy of the kept": round(mean([is_right(episode) for episode in self.kept]), 4),
        }


def collect(
    sources: Sequence[Source],
    labels: Sequence[str],
    words: Sequence[str],
    wanted: Wanted,
    keep: Callable[[Collected], None] = lambda found: None,
) -> Collected:
    """Play the tasks with every team, one after another, and choose; ``keep`` is called with the choice among the teams so far. A
    failed episode is not kept, however many there are. Raises ConfigError where nothing is kept."""
    found = Collected(samples=[samples_of(source, words, wanted) for source in sources])
    must_suffice(found.samples, wanted)
    for source, label, samples in zip(sources, labels, found.samples, strict=True):
        with opened(source, ["controller.max_error_rate=1.0", *words]) as team:
            episodes, _ = played(team, team.controller, team.tasks(), samples, validate=False)
            found.add(label, team.step, episodes)
        found.kept = best_episodes(found.episodes, wanted.min_score, wanted.best_of)
        keep(found)
    if not found.kept:
        raise ConfigError(nothing_kept(found.episodes, wanted))
    return found


def samples_of(source: Source, words: Sequence[str], wanted: Wanted) -> int:
    """Samples of each task: as many as asked for, or as in a step of the run's training."""
    if wanted.samples is not None:
        return wanted.samples
    named = any(word.lstrip("+").startswith(f"{SAMPLES}=") for word in words)
    if named or source.saved is None:
        with naming_modules(source.modules):
            return int(config_of(source, words).actor_rollout_ref.rollout.n)
    return int(source.saved["actor_rollout_ref"]["rollout"]["n"])


def must_suffice(samples: Sequence[int], wanted: Wanted) -> None:
    """Raise ConfigError where more episodes of a task are to be kept than all teams play."""
    if wanted.best_of is not None and wanted.best_of > sum(samples):
        raise ConfigError(
            f"--best-of {wanted.best_of}: each task is played {sum(samples)} times; expected at most as many, raise n="
        )


def nothing_kept(episodes: Sequence[Episode], wanted: Wanted) -> str:
    whole = [episode.scored.value for episode in episodes if episode.failure is None]
    if not whole:
        first = episodes[0].failure if episodes else "there are no tasks"
        return f"none of {len(episodes)} episodes is kept: all of them failed, the first: {first}; nothing is written"
    return (
        f"--filter-reward {wanted.min_score}: none of {len(episodes)} episodes is kept, the best score is {max(whole):g}; nothing is "
        "written. Lower it, play more samples (n=), or let another team play"
    )
