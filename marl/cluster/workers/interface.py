"""The network interface at which ranks meet through gloo, which GPUs use beside NCCL."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray
from torch.distributed import TCPStore
from verl.utils.distributed import create_tcp_store

from marl.config.errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


@contextmanager
def at_the_nodes_interface(ranks: int) -> Iterator[None]:
    """Let gloo use the interface of this node's address in Ray, unless ``GLOO_SOCKET_IFNAME`` names one: it would take the
    address of the host's name, which on many machines is the loopback's. Raises ConfigError where ranks fail to meet at
    another interface than the node's."""
    if not ray.is_initialized():
        yield
        return
    address = ray.util.get_node_ip_address()
    own = interface_of(address)
    used = os.environ.setdefault(VARIABLE, own) if own else os.environ.get(VARIABLE)
    try:
        yield
    except RuntimeError as error:
        if used == own:
            raise
        raise ConfigError(
            f"{VARIABLE}={used} on {socket.gethostname()}: the {ranks} ranks of a process group did not meet at this interface; expected "
            f"one that the other hosts reach, such as {own}, of the node's address {address}. Unset it where `ray start` is run, or "
            f"set it there ({first_line(error)})"
        ) from error


def loopback_store(rank: int, ranks: int) -> TCPStore | None:
    """The store in which the ranks of one machine meet; None where they meet at another address than its loopback, in torch's own
    store, which any host may connect to."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address != LOOPBACK:
        return None
    listens = socket.create_server((address, port)) if rank == 0 else None
    return create_tcp_store(address, port, listens, world_size=ranks, is_master=rank == 0)


def interface_of(address: str) -> str | None:
    """Name of this machine's interface with an address."""
    named = psutil.net_if_addrs().items()
    return next((name for name, own in named if address in {each.address for each in own}), None)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
