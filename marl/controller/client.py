"""One policy's side of generation: an observation becomes ids, a request to the policy's servers, and a turn."""

from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from verl.workers.rollout.llm_server import LLMServerClient

from marl.controller.chat import ChatEncoder
from marl.controller.failures import group_failed
from marl.types import AgentId, Message, PolicyName, Turn

SEED_KEYS = {"sglang": "sampling_seed"}
"""Where a backend does not call it ``seed``."""


class PolicyClient:
    def __init__(
        self, policy: PolicyName, rollout: Any, server: LLMServerClient, tokenizer: Any, encoder: ChatEncoder
    ) -> None:
        self.policy, self.rollout, self.server = policy, rollout, server
        self.seed_key = SEED_KEYS.get(rollout.name) or "seed"
        self.tokenizer, self.encoder = tokenizer, encoder

    async def act(
        self,
        agent: AgentId,
        observation: list[Message],
        round: int,
        previous: Turn | None,
        *,
        session: str,
        seed: int,
        sampling: Mapping[str, Any],
        max_prompt_length: int,
    ) -> Turn:
        """Generate one turn. Raises ValueError for an observation longer than ``max_prompt_length`` tokens."""
        if previous is not None and previous.policy != self.policy:
            previous = None  # another policy's tokenizer: its ids are not ours
        prompt_ids = self.encoder.encode(observation, previous)
        if len(prompt_ids) > max_prompt_length:
            raise ValueError(
                f"agent {agent!r} was shown {len(prompt_ids)} tokens in round {round}, data.max_prompt_length allows "
                f"{max_prompt_length}; raise it, or shorten the conversation"
            )
        params = {**sampling, self.seed_key: seed, "logprobs": True}
        try:
            output = await self.server.generate(request_id=session, prompt_ids=prompt_ids, sampling_params=params)
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
                raise error.cause from None  # the server lives: it refused this one request
            raise group_failed(f"policy {self.policy!r}", "generating", error) from error
        if not output.token_ids:
            raise ValueError(f"the server of policy {self.policy!r} answered agent {agent!r} with no token")
        return Turn(
            agent=agent,
            round=round,
            observation=list(observation),
            text=self.tokenizer.decode(output.token_ids, skip_special_tokens=True),
            policy=self.policy,
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            log_probs=output.log_probs or [],
            stop_reason=output.stop_reason,
            version=output.extra_fields.get("global_steps") or 0,
            seed=seed,
        )
