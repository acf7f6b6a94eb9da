"""Answers in OpenAI's format: the team's text, and the transcript beside it. Pure."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl.report.conversation import answering_turn
from marl.types import Episode, Turn


@dataclass(frozen=True)
class Head:
    """The fields that a completion and all its chunks share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string, which OpenAI's answers leave out."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def transcript(episode: Episode) -> list[dict[str, Any]]:
    """All turns, without predictions of peers' turns."""
    return [said(turn, episode) for turn in episode.turns if turn.foresees is None]


def said(turn: Turn, episode: Episode) -> dict[str, Any]:
    """One turn, as a reader of the debate wants it."""
    answer = episode.task.extract(turn.text) if turn.answers else None
    extra: dict[str, Any] = {"thought": turn.thought} if turn.thought is not None else {}
    extra |= {"kept": False} if not turn.kept else {}
    return heard(turn) | {"answer": answer} | extra


def heard(turn: Turn) -> dict[str, Any]:
    """A turn as it ends: the runner has not said yet what it is for."""
    known = {"agent": turn.agent, "round": turn.round, "text": turn.text, "policy": turn.policy}
    return known | {"tokens": len(turn.response_ids)}


def usage_of(episodes: Sequence[Episode]) -> dict[str, int]:
    """Tokens of all turns. What an endpoint counts without telling prompt from answer counts as prompt."""
    turns = [turn for episode in episodes for turn in episode.turns]
    prompt = sum(len(turn.prompt_ids) if turn.prompt_ids else turn.billed_tokens for turn in turns)
    answer = sum(len(turn.response_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def finish_reason(episode: Episode) -> str:
    return "length" if answering_turn(episode).truncated else "stop"


def message_of(episode: Episode, stops: Sequence[str]) -> dict[str, Any]:
    turn = answering_turn(episode)
    thought = {"reasoning_content": turn.thought} if turn.thought is not None else {}
    return {"role": "assistant", "content": until_stop(turn.text, stops), "refusal": None} | thought


def completion(head: Head, episodes: Sequence[Episode], stops: Sequence[str]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": message_of(episode, stops),
            "logprobs": None,
            "finish_reason": finish_reason(episode),
            "answer": episode.answer,
            "transcript": transcript(episode),
        }
        for index, episode in enumerate(episodes)
    ]
    return head.of("chat.completion") | {"choices": choices, "usage": usage_of(episodes)}


def chunk(head: Head, index: int, delta: dict[str, Any], finish: str | None = None, **extra: Any) -> str:
    """One event of a stream."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish} | extra
    return event(head.of("chat.completion.chunk") | {"choices": [choice]})


def event(body: Any) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"


def turn_chunk(head: Head, index: int, turn: dict[str, Any]) -> str:
    """A turn of the debate, which changes nothing of the answer."""
    return chunk(head, index, {}, turn=turn)


def final_chunks(head: Head, episodes: Sequence[Episode], stops: Sequence[str], include_usage: bool) -> Iterator[str]:
    """The answers, why each ended, and the usage where it was asked for."""
    for index, episode in enumerate(episodes):
        yield chunk(head, index, message_of(episode, stops))
        yield chunk(head, index, {}, finish_reason(episode), answer=episode.answer)
    if include_usage:
        yield event(head.of("chat.completion.chunk") | {"choices": [], "usage": usage_of(episodes)})
    yield DONE
