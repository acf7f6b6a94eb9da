"""One policy's side of generation: an observation becomes ids, a request to the policy's servers, and a turn."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError
from verl.workers.rollout.llm_server import LLMServerClient

from marl.cluster.failures import GroupHung, engine_is_dead, group_failed
from marl.config.deadlines import NONE, Deadline
from marl.controller.chat import ChatEncoder
from marl.rollout.decoding import end_ids
from marl.types import AgentId, ContextOverflow, Message, PolicyName, Task, Turn
from marl.utils.deadlines import HangsError, Watch, waiting_for_others

SEED = ("seed", 2**63 - 1)
"""Name of the seed parameter, and the bits that it holds."""
SEEDS = {"sglang": ("sampling_seed", 2**31 - 1)}
"""The same, of backends that have others."""

READS_NO_TEXT = frozenset({"sglang"})
"""Backends whose servers see only ids, as verl starts them (``skip_tokenizer_init``): they reject stop strings, or crash on them."""


LONG = 20_000
"""Characters and messages of an observation whose encoding takes some hundredths of a second or more."""


class BadAnswer(ValueError):
    """Raised when a server's output cannot be trained on."""


def check_answer(output: Any, who: str, vocabulary: int, longest: int) -> None:
    """Raise BadAnswer naming the field, what it holds and what was expected."""
    ids, log_probs = output.token_ids, output.log_probs
    hint = "see the server's log, or try another actor_rollout_ref.rollout.name"
    if not ids:
        raise BadAnswer(f"{who} with no token (token_ids={ids}); expected at least one; {hint}")
    # a million tokens a step pass here: loops in C
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocabulary] if isinstance(ids, list) else ids
        raise BadAnswer(
            f"{who} with token_ids that hold {str(wrong)[:80]}; expected whole numbers of 0 to {vocabulary - 1}, the "
            "model's vocabulary; do server and trainer have the same model.path?"
        )
    if len(ids) > longest:
        raise BadAnswer(f"{who} with {len(ids)} tokens; expected at most max_tokens={longest}; {hint}")
    if not isinstance(log_probs, list) or len(log_probs) != len(ids):
        got = len(log_probs) if isinstance(log_probs, list) else log_probs
        raise BadAnswer(f"{who} with {got} log_probs for {len(ids)} tokens; expected one a token; {hint}")
    plain = set(map(type, log_probs)) == {float} and all(map(math.isfinite, log_probs))
    if not plain and not all(isinstance(x, float | int) and math.isfinite(x) for x in log_probs):
        wrong = [x for x in log_probs if not isinstance(x, float | int) or not math.isfinite(x)]
        raise BadAnswer(
            f"{who} with log_probs that hold {str(wrong)[:80]}; expected finite numbers; are the weights finite? lower "
            "actor_rollout_ref.actor.optim.lr"
        )


class PolicyClient:
    def __init__(
        self,
        policy: PolicyName,
        rollout: Any,
        server: LLMServerClient,
        tokenizer: Any,
        encoder: ChatEncoder,
        vocabulary: int,
        ends: frozenset[int] | None = None,
        patience: Deadline = NONE,
        seeded: bool = True,
    ) -> None:
        """``vocabulary``: the model's; a tokenizer's may be smaller. ``ends``: ids that end an answer; None for the tokenizer's.
        ``patience``: maximum time without any answer from the servers. ``seeded``: requests carry the turn's seed."""
        self.watch, self.patience = Watch(patience.seconds), patience
        self.vocabulary, self.ends = vocabulary, end_ids(tokenizer) if ends is None else ends
        self.policy, self.rollout, self.server = policy, rollout, server
        self.seed_key, self.max_seed = SEEDS.get(rollout.name, SEED)
        self.seeded = seeded
        self.tokenizer, self.encoder = tokenizer, encoder

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
        """Generate one turn. Raises ContextOverflow for an observation longer than ``max_prompt_length`` tokens, BadAnswer for
        what is no turn."""
        prompt_ids = await self.encoded(agent, observation, round, previous, max_prompt_length)
        asked, stops = self.split_stops(prompt_ids, sampling)
        output = await self.request(session, prompt_ids, asked, seed)
        who = f"the server of policy {self.policy!r} answered agent {agent!r} in round {round}"
        check_answer(output, who, self.vocabulary, sampling["max_tokens"])
        turn = Turn(
            agent=agent,
            round=round,
            observation=list(observation),
            text="",
            policy=self.policy,
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            log_probs=output.log_probs,
            stop_reason=self.stop_reason(output, asked),
            version=version_of(output),
            seed=seed,
        )
        self.read_text(turn, stops)
        return turn

    def split_stops(
        self, prompt_ids: list[int], sampling: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Splits off the stop strings that are applied here, because a server would match them inside a thought too, or has no
        text to match them in."""
        stops = sampling.get("stop") or ()
        if not stops or not (self.rollout.name in READS_NO_TEXT or self.encoder.may_think(prompt_ids)):
            return sampling, ()
        return {key: value for key, value in sampling.items() if key != "stop"}, stops

    def read_text(self, turn: Turn, stops: Sequence[str], start: int = 0, end: int | None = None) -> None:
        """Tell the thought from the text in the response's tokens from ``start`` to ``end``. A stop string ends the response, as
        if the server had."""
        context, ids = [*turn.prompt_ids, *turn.response_ids[:start]], turn.response_ids[start:end]
        size = self.encoder.until_stop(context, ids, stops)
        if size is not None:
            turn.stop_reason, ids = "completed", ids[:size]
            for name in ("response_ids", "response_mask", "log_probs"):
                setattr(turn, name, getattr(turn, name)[: start + size])
        turn.thought, turn.text = self.encoder.read(context, ids)

    def stop_reason(self, output: Any, params: Mapping[str, Any]) -> str | None:
        """``length`` where the answer is full and nothing ended it, whatever the server calls that: verl's vLLM server says
        ``completed``. Else the server's word."""
        full = len(output.token_ids) >= params["max_tokens"] or output.stop_reason == "length"
        if full and not self._ended(output.token_ids, params):
            return "length"
        return "completed" if output.stop_reason == "length" else output.stop_reason

    def _ended(self, ids: list[int], params: Mapping[str, Any]) -> bool:
        """True if the last token ends an answer or completes a stop string."""
        if ids[-1] in self.ends or ids[-1] in (params.get("stop_token_ids") or ()):
            return True
        stops = params.get("stop") or ()
        if not stops:
            return False
        before, after = self.tokenizer.decode(ids[:-1]), self.tokenizer.decode(ids)
        return any(stop in after and stop not in before for stop in ([stops] if isinstance(stops, str) else stops))

    async def encoded(self, agent: AgentId, observation: list[Message], *further: Any) -> list[int]:
        """``encode``, in a thread where it takes long, so that others' turns, deadlines and cancellations go on."""
        if sum(len(message["content"]) for message in observation) + len(observation) < LONG:
            return self.encode(agent, observation, *further)
        return await asyncio.to_thread(self.encode, agent, observation, *further)

    def encode(
        self, agent: AgentId, observation: list[Message], round: int, previous: Turn | None, max_prompt_length: int
    ) -> list[int]:
        if previous is not None and previous.policy != self.policy:
            previous = None  # another policy's tokenizer: its ids are not ours
        prompt_ids = self.encoder.encode(observation, previous)
        if len(prompt_ids) > max_prompt_length:
            raise ContextOverflow(
                f"agent {agent!r} was shown {len(prompt_ids)} tokens in round {round}, data.max_prompt_length allows "
                f"{max_prompt_length}; raise it; runner.overflow shortens conversations, down to the task and the last exchange"
            )
        return prompt_ids

    async def request(self, session: str, prompt_ids: list[int], sampling: Mapping[str, Any], seed: int) -> Any:
        """Ask a server. Raises GroupFailed where it died, or no longer answers any request."""
        params = {**sampling, "logprobs": True}
        if self.seeded:
            params[self.seed_key] = seed & self.max_seed
        try:
            with waiting_for_others():
                return await self.watch.answer(
                    self.server.generate(request_id=session, prompt_ids=prompt_ids, sampling_params=params)
                )
        except HangsError:
            raise GroupHung(
                f"policy {self.policy!r} while generating: its servers have answered no request for "
                f"{self.patience.key}={self.patience.seconds:g} s; check their logs, and raise it if one answer takes longer"
            ) from None
        except RayError as error:
            refused = isinstance(error, RayTaskError) and not isinstance(error.cause, RayError)
            if refused and not engine_is_dead(error.cause):
                raise error.cause from None  # the server lives: it refused this one request
            raise group_failed(f"policy {self.policy!r}", "generating", error) from error


def version_of(output: Any) -> int:
    """The trainer's step whose weights a server answered with."""
    return (output.extra_fields or {}).get("global_steps") or 0
