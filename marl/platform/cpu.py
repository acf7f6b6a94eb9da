"""verl on a CPU, by verl's own plugin point: a platform whose device is ``cpu`` and whose backend is gloo.

Registered last, so verl picks it only where it finds no accelerator, or where ``VERL_PLATFORM=cpu`` asks for it.
verl imports this module at its start (``VERL_USE_EXTERNAL_MODULES`` or the ``verl.plugins`` entry point), therefore it
imports nothing of verl but the registry.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from marl.platform.determinism import follow_environment

follow_environment()  # imported first in every process of a run


def _peak_rss_bytes(*_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _total_memory_bytes(*_: Any) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any) -> int:
    return 0


class _CPUDevice(ModuleType):
    """``torch.cpu``, and the calls of ``torch.cuda`` that verl makes on its device module."""

    empty_cache = ipc_collect = set_device = reset_peak_memory_stats = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(_zero)
    max_memory_allocated = max_memory_reserved = staticmethod(_peak_rss_bytes)
    mem_get_info = staticmethod(_total_memory_bytes)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUDevice("marl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # not the index 0: `tensor.to(0)` means accelerator 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "MARL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


@PlatformRegistry.register(platform="cpu_engines")
class PlatformCPUEngines(PlatformCPU):
    """A CPU with verl's vLLM servers, which are placed by Ray's GPUs: here a number of ranks, and no device.

    Chosen by ``VERL_PLATFORM`` alone; :mod:`marl.cluster.session` sets it where a policy is served so.
    """

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def rollout_env_vars(self) -> dict[str, str]:
        """Variables of servers alone: engines would otherwise all bind the same cores."""
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
