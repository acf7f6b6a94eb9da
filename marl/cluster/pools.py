"""Resource pools whose allocation has a deadline."""

import uuid
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool
from verl.single_controller.ray.base import sort_placement_group_by_node_ip


class PlacementTimeout(TimeoutError):
    pass


class Pool(RayResourcePool):
    """verl's pool; where verl waits for its placement groups without a limit, this one names itself and gives up."""

    def __init__(self, *args: Any, timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout = timeout
        self.pgs: list | None = None

    def release(self) -> None:
        """Return the pool's resources to the cluster; its processes end."""
        for group in self.pgs or []:
            remove_placement_group(group)

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list:
        if self.pgs is None:
            bundle = {"CPU": self.max_colocate_count}
            if self.use_gpu:
                bundle[get_platform().ray_resource_name()] = 1
            groups = [
                placement_group(
                    [bundle] * ranks, strategy=strategy, name=f"{self.name_prefix}:{node}:{uuid.uuid4().hex[:8]}"
                )
                for node, ranks in enumerate(self.store)
            ]
            self.pgs = groups  # so that a release finds them, placed or not
            _, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=self.timeout)
            if waiting:
                raise PlacementTimeout(
                    f"pool {self.name_prefix!r} asks for {self.store} ranks by node, each {bundle}; the cluster did not "
                    f"give them within {self.timeout:g} s (free now: {ray.available_resources()}). End what uses them, "
                    "or raise resources.placement_timeout_s"
                )
            self.pgs = sort_placement_group_by_node_ip(groups)
        return self.pgs
