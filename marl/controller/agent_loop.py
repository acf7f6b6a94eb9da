"""Turns that verl's agent loops make: tools are called inside a turn, and what they say is masked out.

A loop is an ``AgentLoopBase`` of verl or of a user, made for every turn as verl's AgentLoopWorker makes it. It asks the
policy's own servers, with seeds of the turn. What it returns is a turn only if every token that it wants to train was
generated in this turn, with the log-prob that it says.
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.utils import normalize_token_ids
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.tokenizer import continuous_token_wiring

from marl.cluster.failures import GroupFailed
from marl.config.targets import trusted_modules
from marl.controller.client import BadAnswer, PolicyClient, check_answer, version_of
from marl.controller.loop_registry import find_loop, tools_of
from marl.types import AgentId, ContextOverflow, Message, Score, Task, Turn
from marl.utils.seeding import derive_seed

LIMITS = ("max_tokens", "max_new_tokens")
"""Sampling parameters by which a loop may limit the length of one request."""


class LoopFailed(RuntimeError):
    """A loop raised; its turn is lost, and the episode."""


class Loops:
    """Makes the loops of a policy's agents, one a turn."""

    def __init__(self, config: DictConfig, loops: Mapping[AgentId, str], tokenizer: Any, model_type: str) -> None:
        """``config``: the whole configuration with this policy's ``actor_rollout_ref``."""
        self.config, self.model_type = config, model_type
        rollout = config.actor_rollout_ref.rollout
        trusted = trusted_modules(config)
        self.loops = {
            agent: find_loop(rollout, name, f"agents.{agent}.agent_loop", trusted) for agent, name in loops.items()
        }
        # loops encode in threads; our chat encoder meanwhile turns special tokens off, which is a switch of the tokenizer
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tools = tools_of(rollout)
        self.dataset_cls = get_dataset_class(config.data)

    def make(self, agent: AgentId, server: "LoopServer") -> AgentLoopBase:
        loop = hydra.utils.instantiate(
            config=self.loops[agent],
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=server,
            tokenizer=self.tokenizer,
            processor=None,  # of images; rows hold text
            hf_model_type=self.model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        # verl would cut off what exceeds the limit, from the front: the tools first
        loop._cap_text_prompt_length = server.fitting
        return loop


class LoopServer:
    """Stands in for verl's server manager. Requests go to the policy's servers, all of a turn to the same one; no
    two have the same seed. The tokens that come back are remembered with their log-probs."""

    def __init__(
        self, client: PolicyClient, who: str, session: str, seed: int, max_tokens: int, plain: list[int], limit: int
    ) -> None:
        """``plain``: what the agent would be asked without a loop. ``limit``: ``data.max_prompt_length``."""
        self.client, self.who, self.session, self.seed, self.max_tokens = client, who, session, seed, max_tokens
        self.plain, self.limit = plain, limit
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.sampled: Counter[tuple[int, Any]] = Counter()
        self.versions: list[int] = []
        self.stop_reasons: dict[tuple[int, Any], str | None] = {}
        """By the last token of each answer and its log-prob, in the order in which they came."""
        self.overflow: ContextOverflow | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any], **further: Any
    ) -> Any:
        """verl's contract: tokens in, tokens out. Raises ContextOverflow for what has no room left, ValueError for what is
        not text."""
        media = [key for key in ("image_data", "video_data", "audio_data") if further.get(key)]
        if media:
            raise ValueError(
                f"the loop sends {media[0]}: images, video and audio are not part of this version; send text"
            )
        ids = normalize_token_ids(prompt_ids)
        longest = self.limit + self.client.rollout.response_length
        if len(ids) >= longest:
            raise self._overflow(
                f"the loop asks with {len(ids)} tokens, data.max_prompt_length + data.max_response_length = {longest}; raise "
                "them, or end the loop earlier"
            )
        params = {key: value for key, value in sampling_params.items() if key not in LIMITS}
        given = [sampling_params[key] for key in LIMITS if key in sampling_params]
        limit = min([*given, self.max_tokens, longest - len(ids)])
        params["max_tokens"] = limit
        output = await self.client.request(self.session, ids, params, self._seed(tuple(ids)))
        check_answer(output, f"the server answered {self.who}", self.client.vocabulary, limit)
        self._remember(output, self.client.stop_reason(output, params))
        return output

    def fitting(self, prompt_ids: list[int]) -> list[int]:
        """The prompt. Raises ContextOverflow where it is too long."""
        if len(prompt_ids) > self.limit:
            raise self._overflow(
                f"the prompt of {self.who} has {len(prompt_ids)} tokens, its tools included; data.max_prompt_length allows "
                f"{self.limit}; raise it; runner.overflow shortens conversations, down to the task and the last exchange"
            )
        return prompt_ids

    def _overflow(self, message: str) -> ContextOverflow:
        """Remembered, for a loop may put an error of its own in its place."""
        self.overflow = ContextOverflow(message)
        return self.overflow

    def _seed(self, prompt: tuple[int, ...]) -> int:
        """A request's own, whatever the order in which a loop asks; the turn's for what would be asked without a loop."""
        times = self.asked[prompt]
        self.asked[prompt] += 1
        return self.seed if list(prompt) == self.plain and not times else derive_seed(self.seed, prompt, times)

    def _remember(self, output: Any, stop_reason: str | None) -> None:
        tokens = list(zip(output.token_ids, map(np.float32, output.log_probs), strict=True))
        self.sampled.update(tokens)
        self.stop_reasons[tokens[-1]] = stop_reason
        self.versions.append(version_of(output))


class LoopClient(PolicyClient):
    """A policy's client, some of whose agents act by a loop; the others act as ever."""

    def __init__(self, *parts: Any, loops: Loops, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.loops = loops

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
        """Let the loop make one turn. Raises LoopFailed where it raises, and what PolicyClient raises.

        The loop encodes the whole observation anew: of earlier turns it holds what the agent finally said, without tools.
        """
        if agent not in self.loops.loops:
            shared: dict[str, Any] = {"task": task, "session": session, "seed": seed, "sampling": sampling}
            return await super().act(agent, observation, round, previous, max_prompt_length=max_prompt_length, **shared)
        who = f"the agent loop of agent {agent!r} in round {round}"
        plain = await self.encoded(agent, observation, round, None, max_prompt_length)
        server = LoopServer(self, who, session, seed, sampling["max_tokens"], plain, max_prompt_length)
        asked, stops = self.split_stops(plain, sampling)
        params = {key: value for key, value in asked.items() if key != "max_tokens"}
        try:
            loop = self.loops.make(agent, server)
            output = await loop.run(
                params | {"repetition_penalty": 1.0, "logprobs": True},
                **row_of(task, self.encoder.defused(observation)),
            )
        except (GroupFailed, ContextOverflow):
            raise
        except Exception as error:
            if server.overflow is not None:
                raise server.overflow from error
            raise LoopFailed(f"{who} failed: {type(error).__name__}: {error}") from error
        check_output(output, f"{who} returned", self.vocabulary, max_prompt_length, self.rollout.response_length)
        check_sampled(output, f"{who} returned", server.sampled)
        turn = Turn(agent, round, list(observation), "", self.policy, seed=seed)
        return self._fill(turn, output, server, task, stops)

    def _fill(self, turn: Turn, output: AgentLoopOutput, server: LoopServer, task: Task, stops: Sequence[str]) -> Turn:
        turn.prompt_ids, turn.response_ids = output.prompt_ids, output.response_ids
        turn.response_mask = output.response_mask
        turn.log_probs = [p if on else 0.0 for p, on in zip(output.response_logprobs, turn.response_mask, strict=True)]
        turn.stop_reason = self._stop_reason_of(turn, server)
        self.read_text(turn, stops, *last_said(turn.response_mask))
        turn.version = min(server.versions)
        if output.reward_score is not None:  # as in verl, instead of the reward function's
            turn.score = Score(value=output.reward_score, answer=task.extract(turn.text))
        return turn

    def _stop_reason_of(self, turn: Turn, server: LoopServer) -> str | None:
        """The stop reason of the answer that ends the turn. verl's loops cut a response that has grown too long, wherever it is."""
        last = (turn.response_ids[-1], np.float32(turn.log_probs[-1]))
        if turn.response_mask[-1] and last in server.stop_reasons:
            return server.stop_reasons[last]
        full = len(turn.response_ids) == self.rollout.response_length
        return "length" if full else list(server.stop_reasons.values())[-1]


def row_of(task: Task, observation: list[Message]) -> dict[str, Any]:
    """A task as verl's dataset row for a loop. Copied: a tool may write into it, and episodes share the task."""
    extra = copy.deepcopy(dict(task.extra))
    own = {"index": 0, "tools_kwargs": {}, "interaction_kwargs": {}}
    return {
        "raw_prompt": observation,
        "data_source": task.data_source,
        "reward_model": {"ground_truth": copy.deepcopy(task.ground_truth)},
        "extra_info": extra,
        "uid": task.id,
        **{key: default if extra.get(key) is None else extra[key] for key, default in own.items()},
    }


def last_said(mask: Sequence[int]) -> tuple[int, int]:
    """Start and end of the last unbroken stretch of the agent's own tokens: its final words, after whatever tools said."""
    end = max(i for i, on in enumerate(mask) if on) + 1
    start = max((i for i in range(end) if not mask[i]), default=-1) + 1
    return start, end


def check_output(output: Any, who: str, vocabulary: int, longest_prompt: int, longest: int) -> None:
    """Raise BadAnswer naming the field, what it holds and what was expected."""
    if not isinstance(output, AgentLoopOutput):
        raise BadAnswer(f"{who} a {type(output).__name__}; expected one AgentLoopOutput, for one turn")
    if output.multi_modal_data and any(output.multi_modal_data.values()):
        raise BadAnswer(f"{who} multi_modal_data, which is not part of this version; expected text alone")
    for name, limit in {"prompt_ids": longest_prompt, "response_ids": longest}.items():
        ids = getattr(output, name)
        if not 1 <= len(ids) <= limit:
            kind = name.removesuffix("_ids")
            raise BadAnswer(
                f"{who} {len(ids)} {name}; expected at least one, and at most data.max_{kind}_length={limit}"
            )
        wrong = [i for i in ids if not 0 <= i < vocabulary]
        if wrong:
            raise BadAnswer(f"{who} {name} that hold {str(wrong)[:80]}; expected numbers of 0 to {vocabulary - 1}")
    check_tokens(output, who)
    if output.reward_score is not None and not math.isfinite(output.reward_score):
        raise BadAnswer(f"{who} reward_score={output.reward_score}; expected a finite number, or None")


def check_tokens(output: AgentLoopOutput, who: str) -> None:
    size, mask, log_probs = len(output.response_ids), output.response_mask, output.response_logprobs
    if log_probs is None:
        raise BadAnswer(
            f"{who} no response_logprobs; expected one a token: give AgentLoopOutput the log_probs of what "
            "server_manager.generate returned, and 0.0 for what tools said"
        )
    for name, values in {"response_mask": mask, "response_logprobs": log_probs}.items():
        if len(values) != size:
            raise BadAnswer(f"{who} {len(values)} {name} for {size} response_ids; expected one a token")
    if not set(mask) <= {0, 1} or 1 not in mask:
        raise BadAnswer(
            f"{who} response_mask={str(mask)[:80]}; expected 1 on tokens that the agent generated, at least one, and 0 on "
            "all others"
        )
    wrong = [p for p, on in zip(log_probs, mask, strict=True) if on and not math.isfinite(p)]
    if wrong:
        raise BadAnswer(
            f"{who} response_logprobs that hold {str(wrong)[:80]}; expected finite numbers where the mask is 1"
        )


def check_sampled(output: AgentLoopOutput, who: str, sampled: Counter[tuple[int, Any]]) -> None:
    """Raise BadAnswer where a token to be trained is none that the servers gave in this turn, with this log-prob."""
    tokens = zip(output.response_ids, output.response_mask, map(np.float32, output.response_logprobs), strict=True)
    missing = Counter((token, p) for token, on, p in tokens if on) - sampled
    if missing:
        (token, p), count = next(iter(missing)), missing.total()
        raise BadAnswer(
            f"{who} {count} tokens with response_mask=1 that its requests did not give, such as id {token} with log-prob {p:g}; "
            "expected response_mask=0 on what tools and templates add, and ids and log-probs as server_manager.generate "
            "returned them"
        )


class Once(logging.Filter):
    """Lets every message pass once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        known = len(self.seen)
        self.seen.add(record.getMessage())
        return len(self.seen) > known


continuous_token_wiring.logger.addFilter(Once())  # it warns of a model type for every loop that is made
