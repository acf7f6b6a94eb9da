"""A place in a pool for a server that needs no trainer beside it."""

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device


class SeatWorker(Worker):
    """Holds a rank's accelerator. It has no model, no optimizer and no process group; verl's replicas ask it where it is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def empty_cache(self) -> None:
        """Return to the accelerator what trainers of the same process have freed, and torch has kept."""
        get_torch_device().empty_cache()
