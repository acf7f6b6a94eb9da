"""Sources of the examples that a method trains on."""

from enum import Enum
from typing import Any


class Source(Enum):
    """``method.source``: source of the examples that a method trains on."""

    rows = "rows"
    """Rows of ``data.train_files``."""
    episodes = "episodes"
    """Episodes that another run dumped into ``data.train_files``."""
    play = "play"
    """This run's own episodes."""

    @classmethod
    def of(cls, config: Any) -> "Source":
        return cls(config.method.source)
