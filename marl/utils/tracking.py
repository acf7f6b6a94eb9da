"""verl's trackers, for a whole configuration."""

from typing import Any

from omegaconf import OmegaConf
from verl.utils.tracking import Tracking


def tracking_of(config: Any) -> Tracking:
    """The trackers that ``trainer.logger`` names."""
    trainer = config.trainer
    return Tracking(
        project_name=trainer.project_name,
        experiment_name=trainer.experiment_name,
        default_backend=list(trainer.logger),
        config=OmegaConf.to_container(config, resolve=True, enum_to_str=True),
    )
