"""Tables and transcripts of sample episodes in a run's trackers (``trainer.log_val_generations``)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from marl.report.sample_episodes import EPISODE_COLUMNS, TURN_COLUMNS, Sample, samples_of
from marl.types import Episode
from marl.utils.numbers import is_due

logger = logging.getLogger(__name__)


class EpisodeTables(ValidationGenerationsLogger):
    """Shows episodes as two tables, of episodes and of their turns, and as transcripts, where a tracker can: wandb, MLflow,
    trackio and TensorBoard. verl's other trackers get what verl gives them: input, output and score of each episode."""

    OWN = frozenset({"wandb", "mlflow", "trackio", "tensorboard"})

    def __init__(self, settings: Any) -> None:
        """``settings``: ``trainer``."""
        super().__init__(settings.project_name, settings.experiment_name)
        self.number, self.freq = settings.log_val_generations, settings.log_generations_freq
        self.place = "val"
        self.writer: Any = None

    def show(self, tracking: Tracking, episodes: Sequence[Episode], step: int, place: str = "val") -> None:
        """Show some of these episodes below ``place``; none with ``trainer.log_val_generations=0``."""
        if self.number == 0:
            return
        loggers = tracking.logger
        self.place, self.writer = place, getattr(loggers.get("tensorboard"), "writer", None)
        # verl's own logger calls whatever it is given a validation
        names = set(loggers) if place == "val" else self.OWN.intersection(loggers)
        self.log(names, samples_of(episodes, self.number), step)

    def show_training(self, tracking: Tracking, episodes: Sequence[Episode], step: int) -> None:
        """Show some of a training step's episodes, every ``trainer.log_generations_freq`` steps."""
        if is_due(self.freq, step):
            self.show(tracking, episodes, step, "train")

    def log_generations_to_wandb(self, samples: Sequence[Sample], step: int) -> None:
        import wandb

        wandb.log(
            {f"{self.place}/{name}": wandb.Table(columns, rows) for name, columns, rows in tables(samples, step)},
            step=step,
        )

    def log_generations_to_trackio(self, samples: Sequence[Sample], step: int) -> None:
        import trackio

        shown: dict[str, Any] = {
            f"{self.place}/{name}": trackio.Table(columns, rows) for name, columns, rows in tables(samples, step)
        }
        shown[f"{self.place}/generations"] = [trackio.Trace(*conversation(sample)) for sample in samples]
        trackio.log(shown, step=step)

    def log_generations_to_mlflow(self, samples: Sequence[Sample], step: int) -> None:
        """A file for each step. A server that does not take them costs a warning, as with verl's metrics."""
        import mlflow

        try:
            for name, columns, rows in tables(samples, step):
                by_column = {
                    column: list(values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)
                }
                mlflow.log_table(by_column, f"{self.place}/{name}/step_{step}.json")
            mlflow.log_text("\n\n".join(map(page, samples)), f"{self.place}/transcripts/step_{step}.md")
        except (mlflow.exceptions.MlflowException, OSError) as error:
            logger.warning("mlflow lacks the episodes of step %d: %s", step, error)

    def log_generations_to_tensorboard(self, samples: Sequence[Sample], step: int) -> None:
        """A text for each episode: of a validation's, the same task at each of its steps."""
        for number, sample in enumerate(samples, start=1):
            self.writer.add_text(f"{self.place}/episode_{number}", page(sample), step)
        self.writer.flush()


def tables(samples: Sequence[Sample], step: int) -> list[tuple[str, list[Any], list[list[Any]]]]:
    """Name, columns and rows of every table that has rows."""
    turns = [row for sample in samples for row in sample.turn_rows(step)]
    found = [
        ("episodes", list(EPISODE_COLUMNS), [sample.row(step) for sample in samples]),
        ("turns", list(TURN_COLUMNS), turns),
    ]
    return [(name, columns, rows) for name, columns, rows in found if rows]


def page(sample: Sample) -> str:
    """An episode in Markdown."""
    prompt, spoken, score = sample
    row = dict(zip(EPISODE_COLUMNS, sample.row(0), strict=True))
    head = f"### Task {row['task']}, sample {row['sample']}\n\n{prompt}"
    return (
        f"{head}\n\n{spoken}\n\nAnswer: {row['answer'] or '-'}; truth: {row['truth']}; score {score:g} {row['failure']}"
    )


def conversation(sample: Sample) -> tuple[list[dict[str, str]], Mapping[str, Any]]:
    """The messages and the facts of an episode, for a viewer of conversations."""
    rows = [dict(zip(TURN_COLUMNS, row, strict=True)) for row in sample.turn_rows(0)]
    said = [
        {"role": "assistant", "name": row["agent"], "content": f"{row['agent']}, round {row['round']}: {row['output']}"}
        for row in rows
    ]
    facts = dict(zip(EPISODE_COLUMNS, sample.row(0), strict=True))
    kept = {key: facts[key] for key in ("task", "sample", "answer", "truth", "score", "failure")}
    return [{"role": "user", "content": sample[0]}, *said], kept
