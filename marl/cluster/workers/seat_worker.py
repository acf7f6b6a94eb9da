"""A place in a pool for a server that needs no trainer beside it."""

from verl.single_controller.base import Worker


class SeatWorker(Worker):
    """Holds a rank's accelerator. It has no model, no optimizer and no process group; verl's replicas ask it where it is."""
