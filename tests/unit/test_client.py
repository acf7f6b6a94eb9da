"""A server's answer becomes a turn: when it was cut off, whatever the server says."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from transformers import GenerationConfig, LlamaConfig
from verl.experimental.agent_loop import AgentLoopOutput

from marl.cluster.failures import GroupFailed, GroupLost, group_failed
from marl.controller.agent_loop import LoopClient
from marl.controller.chat import ChatEncoder
from marl.controller.client import PolicyClient
from marl.rollout.decoding import end_ids
from marl.types import Task, Turn

TASK = Task("train/7", [], "4", "x", lambda text: None)
QUESTION = [{"role": "user", "content": "2+2?"}]


class Server:
    """Answers with these ids; remembers what it was asked."""

    def __init__(self, token_ids: list[int], stop_reason: str | None) -> None:
        self.token_ids, self.stop_reason = token_ids, stop_reason
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **request: Any) -> Any:
        self.asked.append(request)
        ids = self.token_ids
        return SimpleNamespace(
            token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason=self.stop_reason, extra_fields={"global_steps": 3}
        )


def act(
    tokenizer: Any, ids: list[int], reason: str | None, ends: frozenset[int] | None = None, **sampling: Any
) -> Turn:
    client = PolicyClient(
        "p",
        SimpleNamespace(name="vllm", response_length=64),
        Server(ids, reason),  # type: ignore[arg-type]
        tokenizer,
        ChatEncoder(tokenizer),
        len(tokenizer),
        ends,
    )
    return ask(client, **sampling)


def ask(client: PolicyClient, **sampling: Any) -> Turn:
    sampling = {"temperature": 1.0, "max_tokens": 64} | sampling
    return asyncio.run(
        client.act("a", QUESTION, 1, None, task=TASK, session="s", seed=1, sampling=sampling, max_prompt_length=1000)
    )


@pytest.mark.parametrize("name,asked", [("vllm", True), ("hf", True), ("sglang", False)])
def test_a_server_without_a_tokenizer_is_asked_for_no_stop_string(bpe_tokenizer, name, asked):
    """verl starts SGLang with skip_tokenizer_init: the answer is cut here, where the server would have ended it."""
    rollout, server = SimpleNamespace(name=name, response_length=64), Server(bpe_tokenizer.encode("4. no, 5"), "length")
    client = PolicyClient(
        "p",
        rollout,
        server,
        bpe_tokenizer,
        ChatEncoder(bpe_tokenizer),
        len(bpe_tokenizer),  # type: ignore[arg-type]
    )
    turn = ask(client, stop=["."], max_tokens=8)
    assert ("stop" in server.asked[0]["sampling_params"]) is asked
    if not asked:
        assert turn.text == "4." and turn.stop_reason == "completed" and not turn.truncated
        assert len(turn.response_ids) == len(turn.response_mask) == len(turn.log_probs) == 2
        assert ask(client, stop=["!"], max_tokens=8).truncated, "nothing ended it"


@pytest.mark.parametrize("said", ["completed", "length", "stop", None])
@pytest.mark.parametrize(
    ("text", "ended", "sampling", "truncated"),
    [
        ("four", False, {"max_tokens": 4}, True),
        ("fou", True, {"max_tokens": 4}, False),
        ("fou.", False, {"max_tokens": 4, "stop": ["."]}, False),
        ("f.ur", False, {"max_tokens": 4, "stop": ["."]}, True),
        ("four", False, {"max_tokens": 4, "stop_token_ids": [ord("r")]}, False),
        ("four", True, {"max_tokens": 64}, False),
    ],
)
def test_a_turn_is_truncated_where_it_is_full_and_nothing_ended_it(
    bpe_tokenizer, said, text, ended, sampling, truncated
):
    ids = bpe_tokenizer.encode(text) + [bpe_tokenizer.eos_token_id] * ended
    if "stop_token_ids" in sampling:
        sampling = sampling | {"stop_token_ids": bpe_tokenizer.encode("r")}
    turn = act(bpe_tokenizer, ids, said, **sampling)
    assert turn.truncated is truncated and turn.response_ids == ids
    assert turn.stop_reason == ("length" if truncated else {"length": "completed"}.get(said, said))


def test_a_server_that_gave_up_early_is_believed(bpe_tokenizer):
    """A model's own limit comes before ``max_tokens``."""
    assert act(bpe_tokenizer, bpe_tokenizer.encode("fo"), "length").truncated
    assert act(bpe_tokenizer, bpe_tokenizer.encode("fo"), "aborted").stop_reason == "aborted"


def test_every_end_token_of_the_model_ends_an_answer(bpe_tokenizer):
    ids, pad = bpe_tokenizer.encode("fou"), bpe_tokenizer.pad_token_id
    ends = end_ids(bpe_tokenizer, LlamaConfig(eos_token_id=7), GenerationConfig(eos_token_id=[pad, 9]))
    assert ends == {bpe_tokenizer.eos_token_id, 7, 9, pad}
    assert end_ids(bpe_tokenizer, LlamaConfig(eos_token_id=None)) == {bpe_tokenizer.eos_token_id}
    assert not act(bpe_tokenizer, [*ids, pad], "completed", ends, max_tokens=4).truncated
    assert act(bpe_tokenizer, [*ids, pad], "completed", max_tokens=4).truncated


class Loop:
    """Asks once, then hands over what ``change`` makes of the answer."""

    def __init__(self, server: Any, change: Any) -> None:
        self.server, self.change = server, change

    async def run(self, params: dict[str, Any], **_: Any) -> AgentLoopOutput:
        output = await self.server.generate("r", prompt_ids=[1, 2], sampling_params=params)
        ids = output.token_ids
        fields = {"response_ids": ids, "response_mask": [1] * len(ids), "response_logprobs": output.log_probs}
        return AgentLoopOutput(prompt_ids=[1, 2], num_turns=2, metrics={}, **self.change(fields))


def whole(fields: dict[str, list]) -> dict[str, list]:
    return fields


def cut_in_the_answer(fields: dict[str, list]) -> dict[str, list]:
    return {key: values[:6] for key, values in fields.items()}


def cut_in_what_a_tool_said(fields: dict[str, list]) -> dict[str, list]:
    said = {"response_ids": [5] * 9, "response_mask": [0] * 9, "response_logprobs": [0.0] * 9}
    return cut_in_the_answer({key: values + said[key] for key, values in fields.items()})


@pytest.mark.parametrize(
    ("text", "ended", "max_tokens", "change", "truncated"),
    [
        ("four", False, 4, whole, True),
        ("fou", True, 4, whole, False),
        ("four", True, 6, whole, False),
        ("it is ", False, 6, whole, True),
        ("it is", True, 6, whole, False),
        ("it is four", True, 64, cut_in_the_answer, True),
        ("so", True, 64, cut_in_what_a_tool_said, True),
    ],
)
def test_a_turn_of_an_agent_loop_is_truncated_where_its_last_answer_is(
    bpe_tokenizer, text, ended, max_tokens, change, truncated
):
    """``data.max_response_length`` is 6 here; the server calls everything completed."""
    ids = bpe_tokenizer.encode(text) + [bpe_tokenizer.eos_token_id] * ended
    loops = SimpleNamespace(loops={"a": "mine"}, make=lambda agent, server: Loop(server, change))
    client = LoopClient(
        "p", SimpleNamespace(name="vllm", response_length=6), Server(ids, "completed"), bpe_tokenizer,
        ChatEncoder(bpe_tokenizer), len(bpe_tokenizer), loops=loops,
    )  # fmt: skip
    turn = ask(client, max_tokens=max_tokens)
    assert turn.truncated is truncated and turn.stop_reason == ("length" if truncated else "completed")


class EngineDeadError(Exception):
    """vLLM's, which this process may not be able to import."""


class FailsWith:
    def __init__(self, cause):
        self.cause = cause

    async def generate(self, **_):
        raise RayTaskError(
            "generate", f"ray::RunServer.generate() (pid=7, ip={HERE})\n{type(self.cause).__name__}", self.cause
        )


HERE = "10.0.0.1"


@pytest.fixture
def engine_log(monkeypatch, tmp_path):
    """The log of the process 7, a server on this machine; its engine writes there too."""
    log = tmp_path / "worker-abc-7.out"
    log.write_text(
        "INFO started\n(EngineCore_DP0 pid=9) ERROR [core.py:1] RuntimeError: out of KV blocks\n"
        "(EngineCore_DP0 pid=9) ERROR [core.py:2] RuntimeError: out of KV blocks\n"
    )
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: HERE)


def request(tokenizer, cause):
    client = PolicyClient(
        "p", SimpleNamespace(name="vllm", response_length=64), FailsWith(cause), tokenizer, ChatEncoder(tokenizer), 300
    )
    return ask(client)


def test_a_dead_engine_ends_the_run_and_says_what_it_said(bpe_tokenizer, engine_log):
    """vLLM's own message is 'See stack trace (above)', with none above."""
    with pytest.raises(GroupFailed, match="policy 'p' failed while generating: EngineDeadError") as failed:
        request(bpe_tokenizer, EngineDeadError("See stack trace (above)"))
    assert str(failed.value).splitlines()[1:] == ["    RuntimeError: out of KV blocks"]


def test_an_engine_that_does_not_start_says_why(engine_log):
    """vLLM's own message is 'See root cause above', with none above."""
    cause = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    error = RayTaskError(
        "launch_server", f"ray::RunServer.launch_server() (pid=7, ip={HERE})\nRuntimeError: {cause}", cause
    )
    failed = group_failed("policy 'p'", "starting its servers", error)
    assert not isinstance(failed, GroupLost), "the next engine would fail for the same reason"
    assert str(failed).splitlines()[1:] == ["    RuntimeError: out of KV blocks"]


def test_a_request_that_a_server_refuses_fails_alone(bpe_tokenizer, engine_log):
    with pytest.raises(ValueError, match="too long"):
        request(bpe_tokenizer, ValueError("too long"))
