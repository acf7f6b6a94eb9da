"""Hydra's plugins for sweeps of marl (``marl train -m``): Hydra looks for them in this package alone."""

from hydra.core.config_store import ConfigStore

from marl.sweep import LocalLauncher as _Local, MaskedSweeper as _Sweeper, RayLauncher as _Ray


class MaskedSweeper(_Sweeper):
    """``hydra/sweeper=marl``."""


class LocalLauncher(_Local):
    """``hydra/launcher=marl_local``."""


class RayLauncher(_Ray):
    """``hydra/launcher=marl_ray``."""


def _store(group: str, name: str, plugin: type, **settings: object) -> None:
    node = {"_target_": f"{__name__}.{plugin.__name__}", **settings}
    ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node, provider="marl")


_store("sweeper", "marl", MaskedSweeper, max_batch_size=None, params=None)
_store("launcher", "marl_local", LocalLauncher)
_store("launcher", "marl_ray", RayLauncher, num_cpus=None, num_gpus=None)
