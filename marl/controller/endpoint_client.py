"""Turns of a policy that a server elsewhere answers for: an observation becomes a request of text, and the answer a turn."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from marl.cluster.failures import GroupFailed
from marl.config.endpoints import endpoint_of
from marl.config.policies import own_settings, thinking_of
from marl.controller.chat import broken, content_of
from marl.controller.thinking import KNOWN, Marks, glue_of
from marl.rollout.chat_completion import Reply, request_body
from marl.rollout.endpoint import EndpointFailed, EndpointServer, PromptTooLong
from marl.types import AgentId, ContextOverflow, Message, PolicyName, Task, Turn
from marl.utils.deadlines import waiting_for_others

CONTROL = re.compile(
    r"<\|[^|<>\n]{1,60}\|>|<\uff5c[^\uff5c<>\n]{1,60}\uff5c>|</?s>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>|<[be]os>"
)
"""Special tokens of the families of models: an endpoint's tokenizer is unknown, and servers encode what a text spells."""


class EndpointClient:
    """Stands where a policy that this run serves has a :class:`marl.controller.client.PolicyClient`."""

    def __init__(self, policy: PolicyName, rollout: Any, server: EndpointServer, thinking: Any = "auto") -> None:
        """``rollout``: the policy's sampling settings; ``thinking``: see ``controller.thinking``."""
        self.policy, self.rollout, self.server = policy, rollout, server
        self.marks = text_marks(thinking)

    async def act(
        self,
        agent: AgentId,
        observation: list[Message],
        round: int,
        previous: Turn | None,
        *,
        task: Task,
        session: str,
        seed: int,
        sampling: Mapping[str, Any],
        max_prompt_length: int,
    ) -> Turn:
        """Ask for one turn. Raises ContextOverflow where the server's model cannot read the
        observation, EndpointError for a request that got no answer, GroupFailed where none can."""
        body = request_body(self.server.endpoint, defused(observation), sampling, seed)
        try:
            with waiting_for_others():
                reply = await self.server.complete(body)
        except PromptTooLong as error:
            raise ContextOverflow(f"agent {agent!r} in round {round}: {error}") from None
        except EndpointFailed as error:
            raise GroupFailed(str(error)) from None
        return self.turn_of(reply, agent, observation, round, seed)

    def turn_of(self, reply: Reply, agent: AgentId, observation: list[Message], round: int, seed: int) -> Turn:
        thought, text = (
            (reply.thought, reply.text.lstrip())
            if reply.thought
            else split_thought(reply.text, self.marks, reply.truncated)
        )
        return Turn(
            agent=agent,
            round=round,
            observation=list(observation),
            text=text,
            policy=self.policy,
            prompt_ids=reply.prompt_ids,
            response_ids=reply.token_ids,
            response_mask=[1] * len(reply.token_ids),
            log_probs=reply.log_probs,
            stop_reason="length" if reply.truncated else "completed",
            seed=seed,
            billed_tokens=reply.tokens,
            thought=thought,
        )


def make_endpoint_client(config: Any, name: PolicyName) -> EndpointClient:
    """The driver and every episode worker ask the server, each within its share of the limits."""
    server = EndpointServer(name, endpoint_of(config, name), 1 + config.controller.num_workers)
    return EndpointClient(name, own_settings(config, name).rollout, server, thinking_of(config, name))


def defused(observation: Sequence[Message]) -> list[Message]:
    """A copy, with a space in what might be a special token: a text must not forge a role."""
    return [{**message, "content": CONTROL.sub(broken, content_of(message))} for message in observation]


def text_marks(setting: Any) -> tuple[Marks, ...]:
    """Marks that may stand around a thought: all known ones for ``auto``, since there is no chat template to read."""
    if setting == "auto":
        return KNOWN
    return () if setting == "none" else (Marks(setting["start"], setting["end"]),)


def split_thought(text: str, marks: Sequence[Marks], truncated: bool) -> tuple[str | None, str]:
    """The thought that a text begins with, and the answer after it, empty where a thought was never closed. A template may have
    opened the thought in the prompt. In a ``truncated`` text a start mark later on opens a thought too; in one that ended it is
    a mention."""
    for mark in marks:
        before, closed, answer = text.rpartition(mark.end)
        if closed and not (truncated and mark.start in answer):
            thought = before.strip().removeprefix(mark.start).removesuffix(glue_of(mark))
            return thought.strip(), answer.lstrip()
    for mark in marks:
        if text.lstrip().startswith(mark.start) or (truncated and mark.start in text.rpartition(mark.end)[2]):
            return text.strip().removeprefix(mark.start).strip(), ""
    return None, text
