"""Progress of a run: a line for every step, with the time left, tokens a second and the accuracy. Fed by the step's metrics."""

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from marl.types import Metrics

WINDOW = 20
"""Steps over which a step's duration is averaged."""


class Pace:
    """Time left, from the durations of the last steps, validation and saving included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ends: deque[float] = deque(maxlen=WINDOW + 1)

    def left(self, step: int, total: int, metrics: Metrics) -> float | None:
        """Seconds until the last step; None where nothing tells how long a step takes."""
        self.ends.append(self.clock())
        durations = len(self.ends) - 1
        seconds = (self.ends[-1] - self.ends[0]) / durations if durations else metrics.get("timing_s/step")
        return None if seconds is None else seconds * max(total - step, 0)


def tokens_per_second(metrics: Metrics) -> float | None:
    """Generated tokens over the whole step's duration; None where no agent's tokens are known."""
    agents = [key.removesuffix("/response_length") for key in metrics if key.endswith("/response_length")]
    seconds, episodes = metrics.get("timing_s/step"), metrics.get("team/episodes", 0.0)
    if not agents or not seconds:
        return None
    return episodes * sum(metrics[f"{agent}/response_length"] * metrics[f"{agent}/turns"] for agent in agents) / seconds


def shown_numbers(metrics: Metrics) -> dict[str, float]:
    """The numbers of a line: the team's accuracy, by round where there are several, and its score where that is another; the
    losses of a run that plays nothing."""
    rounds = {key: value for key, value in metrics.items() if key.startswith("team/accuracy/round_")}
    keys = ["team/vote", *(sorted(rounds, key=lambda key: int(key.rsplit("_", 1)[1])) if len(rounds) > 1 else [])]
    keys += ["team/score"] if metrics.get("team/score") != metrics.get("team/vote") else []
    keys += ["val/team/vote"]
    found = {key.replace("team/", "").replace("accuracy/", ""): metrics[key] for key in keys if key in metrics}
    return found or {
        key.removeprefix("agent/").replace("/", " "): metrics[key] for key in metrics if key.endswith("/loss")
    }


def line(step: int, total: int, metrics: Metrics, left: float | None) -> str:
    rate = tokens_per_second(metrics)
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [] if left is None else [f"{duration(left)} left"]
    parts += [] if rate is None else [f"{rate:,.0f} tokens/s"]
    parts += [f"{name.replace('_', ' ')} {value:.3f}" for name, value in shown_numbers(metrics).items()]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03 or 0:42."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Lines:
    """Prints a line for every step; without colours where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.pace = Pace()

    def __call__(self, step: int, total: int, metrics: Metrics) -> None:
        """Called after every step."""
        text = Text(line(step, total, metrics, self.pace.left(step, total, metrics)))
        text.highlight_regex(r"^step +\d+/\d+", "bold")
        self.console.print(text, soft_wrap=True)
