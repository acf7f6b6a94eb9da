"""Check of endpoints before anything starts: each can be reached, gives access and has the model."""

import asyncio
import logging

from marl.config.endpoints import endpoint_of
from marl.config.errors import ConfigError
from marl.rollout.endpoint import EndpointFailed, EndpointServer
from marl.run_setup import Setup
from marl.utils.registry import did_you_mean

logger = logging.getLogger(__name__)


def check_endpoints(setup: Setup) -> None:
    """Raise ConfigError for an endpoint that is down or denies access; warn of one that lists other models. Must not run in an
    event loop. A method that plays nothing asks none."""
    asked = [] if setup.method.offline else setup.endpoints
    servers = {name: EndpointServer(name, endpoint_of(setup.config, name)) for name in asked}
    if servers:
        asyncio.run(check_all(servers))


async def check_all(servers: dict[str, EndpointServer]) -> None:
    try:
        found = await asyncio.gather(*(server.models() for server in servers.values()))
    except EndpointFailed as error:
        raise ConfigError(str(error)) from None
    for server, models in zip(servers.values(), found, strict=True):
        model = server.endpoint.model
        if models and model not in models:  # some servers answer by any name
            logger.warning(
                "%s.model=%s: the server lists %d other models.%s",
                server.key,
                model,
                len(models),
                did_you_mean(model, models),
            )
