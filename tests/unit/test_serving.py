"""``marl serve``: the endpoint over HTTP, with a team that a script speaks for."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from jinja2 import TemplateError

from marl.cluster.failures import GroupFailed
from marl.commands.serve import answerable, listening, parsed
from marl.config.endpoints import Endpoint
from marl.config.errors import ConfigError
from marl.config.schema import AgentConfig, ControllerConfig
from marl.controller.client import LONG, PolicyClient
from marl.controller.controller import Controller
from marl.data.rows import check_files, rows_of
from marl.evaluation.source import Source
from marl.rewards import Reward
from marl.rollout.chat_completion import request_body
from marl.rollout.endpoint import EndpointServer
from marl.runners import Overflow
from marl.serving import listener as listening_by
from marl.serving.app import make_app
from marl.serving.chat_request import read_request
from marl.serving.host import hosted
from marl.serving.listener import Listener, settings
from marl.serving.player import Player
from marl.serving.refusals import TOO_LONG, Refused
from marl.serving.service import Limits, Service
from marl.types import ContextOverflow, Turn
from tests.builders import build_runner

HTTP = httpx.Client(verify=False, timeout=20)
"""Made once: each makes a TLS context."""
ASK = [{"role": "user", "content": "2 + 2?"}]


class Speaks:
    """A policy that says what ``says`` makes of agent, round, observation and seed."""

    def __init__(self, says):
        self.says, self.asked, self.cancelled, self.sessions = says, [], 0, []
        kwargs = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "do_sample": True}
        self.rollout = SimpleNamespace(val_kwargs=kwargs | {}, response_length=6)
        self.rollout.val_kwargs = type("V", (dict,), {"__getattr__": dict.__getitem__})(kwargs)

    async def act(self, agent, observation, round, previous, *, seed, sampling, session, **_):
        self.sessions.append(session)
        self.asked.append((agent, round, observation, seed, dict(sampling)))
        try:
            said = self.says(agent, round, observation, seed)
            text = await said if asyncio.iscoroutine(said) else said
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = list(range(len(text)))
        return Turn(
            agent, round, observation, text, policy=agent, prompt_ids=[1] * 7, response_ids=ids,
            response_mask=[1] * len(ids), log_probs=[-0.5] * len(ids), stop_reason="completed", seed=seed,
        )  # fmt: skip


@contextmanager
def served(says, compose_config, runner="debate", limits=None, api_key=None, hosts=(), **options):
    """A real server in this process: its address, the policy behind it, and the service."""
    config = compose_config("data.max_response_length=6")
    client, agents = Speaks(says), {"alice": AgentConfig(stop=["###stop"]), "carol": AgentConfig()}
    controller = Controller(
        build_runner(runner, overflow=Overflow.refuse, **options), agents, dict.fromkeys(agents, client),
        Reward(lambda **_: 0.0), seed=0, max_prompt_length=99, settings=ControllerConfig(),
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    team = SimpleNamespace(controller=controller, setup=SimpleNamespace(config=config), step=4)
    with hosted(loop) as host:
        service = Service(Player(team, "openai/gsm8k"), host, limits or Limits())
        app = make_app(service, api_key, hosts)
        server = uvicorn.Server(settings(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}", client, service
        finally:
            server.should_exit = True
            thread.join(10)
    loop.close()


def debates(agent, round, observation, seed):
    """carol convinces alice in round 2."""
    return "so #### 5" if agent == "alice" and round == 1 else "yes #### 4"


def post(url, model="team", messages=ASK, **fields):
    body = {"model": model, "messages": messages} | fields
    return HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=20)


def events_of(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_team_answers_with_its_transcript_and_its_usage(compose_config):
    with served(debates, compose_config) as (url, client, _):
        answer = post(url, seed=3).json()
        assert answer["object"] == "chat.completion" and answer["model"] == "team"
        (choice,) = answer["choices"]
        assert (
            choice["message"]["content"] == "yes #### 4"
            and choice["answer"] == "4"
            and choice["finish_reason"] == "stop"
        )
        said = [(turn["agent"], turn["round"], turn["text"], turn["answer"]) for turn in choice["transcript"]]
        assert said == [
            ("alice", 1, "so #### 5", "5"), ("carol", 1, "yes #### 4", "4"),
            ("alice", 2, "yes #### 4", "4"), ("carol", 2, "yes #### 4", "4"),
        ]  # fmt: skip
        assert answer["usage"] == {"prompt_tokens": 28, "completion_tokens": 9 + 3 * 10, "total_tokens": 28 + 39}
        assert "so #### 5" in client.asked[-1][2][-1]["content"] or "yes #### 4" in client.asked[-1][2][-1]["content"]


def test_a_prediction_is_nobodys_answer(compose_config):
    """Neither in the transcript nor in the stream, from which a chat is shown, too; its tokens were used."""

    def foresees(agent, round, observation, seed):
        return (
            "a guess" if observation[-1]["content"].endswith("say next?") else debates(agent, round, observation, seed)
        )

    with served(foresees, compose_config, foresee=True) as (url, client, _):
        answer = post(url, seed=3).json()
        streamed = [
            choice["turn"]
            for event in events_of(post(url, seed=3, stream=True))
            for choice in event["choices"]
            if "turn" in choice
        ]
    texts = ["so #### 5", *["yes #### 4"] * 3]
    assert len(client.asked) == 16 and answer["usage"]["completion_tokens"] == 39 + 4 * len("a guess")
    assert [turn["text"] for turn in answer["choices"][0]["transcript"]] == texts
    assert sorted(turn["text"] for turn in streamed) == texts


def test_the_text_is_the_winners_and_not_the_last_speakers(compose_config):
    with served(lambda agent, *_: f"{agent} #### {len(agent)}" + "5" * (agent == "carol"), compose_config) as (url, *_):
        choices = post(url, n=8, seed=1).json()["choices"]  # a tie, which each episode's seed breaks
        said = {(choice["answer"], choice["message"]["content"]) for choice in choices}
        assert said == {("5", "alice #### 5"), ("55", "carol #### 55")}


def test_a_team_without_an_answer_says_its_last_words(compose_config):
    with served(lambda agent, round, *_: f"{agent} {round}", compose_config) as (url, *_):
        (choice,) = post(url).json()["choices"]
        assert choice["answer"] is None and choice["message"]["content"] == "carol 2"


def test_our_own_endpoint_client_reads_it(compose_config):
    async def ask(url):
        endpoint = Endpoint(base_url=f"{url}/v1", model="team")
        return await EndpointServer("p", endpoint).complete(
            request_body(endpoint, ASK, {"temperature": 0.5, "top_p": 1.0, "max_tokens": 4, "stop": ["!"]}, seed=2**40)
        )

    with served(debates, compose_config) as (url, client, _):
        reply = asyncio.run(ask(url))
        assert (reply.text, reply.truncated, reply.tokens) == ("yes #### 4", False, 67)
        assert {sampling["temperature"] for *_, sampling in client.asked} == {0.5}
        assert {sampling["max_tokens"] for *_, sampling in client.asked} == {4}
        stops = {agent: sampling["stop"] for agent, _, _, _, sampling in client.asked}
        assert stops == {"carol": ["!"], "alice": ["###stop", "!"]}, "an agent's own stop strings stay"


def test_a_seed_decides_and_samples_differ(compose_config):
    with served(lambda agent, round, observation, seed: f"#### {seed % 10**6}", compose_config) as (url, *_):
        first, again, other, drawn = (
            post(url, n=2, **seed).json() for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {})
        )
        texts = [
            [choice["message"]["content"] for choice in answer["choices"]] for answer in (first, again, other, drawn)
        ]
        assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1] and texts[3] not in texts[:3]


def test_requests_with_one_seed_have_sessions_of_their_own(compose_config):
    """Servers keep prefixes, and forget them, by session."""
    with served(debates, compose_config) as (url, client, _):
        for _ in range(2):
            post(url, model="team/alice", n=2, seed=1)
        assert len(set(client.sessions)) == 4


def test_every_message_reaches_every_agent_and_one_agent_answers_alone(compose_config):
    talk = [{"role": "developer", "content": "Be brief."}, ASK[0], {"role": "assistant", "content": "5"}]
    talk.append({"role": "user", "content": [{"type": "text", "text": "Sure"}, {"type": "text", "text": "?"}]})
    with served(debates, compose_config) as (url, client, _):
        alone = post(url, model="team/alice", messages=talk).json()
        assert alone["choices"][0]["message"]["content"] == "so #### 5" and len(alone["choices"][0]["transcript"]) == 1
        ((agent, round, observation, *_),) = client.asked
        assert (agent, round) == ("alice", 1)
        assert [(m["role"], m["content"]) for m in observation] == [
            ("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "5"), ("user", "Sure?"),
        ]  # fmt: skip


def test_a_stream_holds_each_turn_then_the_answer_and_the_usage(compose_config):
    with served(debates, compose_config) as (url, *_):
        events = events_of(post(url, stream=True, stream_options={"include_usage": True}, n=2, seed=0))
        turns = [event["choices"][0]["turn"] for event in events if event["choices"] and "turn" in event["choices"][0]]
        assert sorted((turn["agent"], turn["round"]) for turn in turns) == sorted(
            2 * [(agent, round) for agent in ("alice", "carol") for round in (1, 2)]
        )
        said = {}
        for event in events:
            for choice in event["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["delta"].get("content", "")
        assert said == {0: "yes #### 4", 1: "yes #### 4"}
        assert [choice["finish_reason"] for event in events for choice in event["choices"]].count("stop") == 2
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2 * 39
        assert len({event["id"] for event in events}) == 1 and all("usage" not in event for event in events[:-1])


def test_a_stop_string_ends_the_text_before_it(compose_config):
    with served(lambda *_: "#### 4 END of it", compose_config) as (url, *_):
        assert post(url, stop="END").json()["choices"][0]["message"]["content"] == "#### 4 "


def test_models_health_and_metrics(compose_config):
    with served(debates, compose_config) as (url, *_):
        models = HTTP.get(f"{url}/v1/models").json()["data"]
        assert [(model["id"], model["agents"], model["max_tokens"]) for model in models] == [
            ("team", ["alice", "carol"], 6), ("team/alice", ["alice"], 6), ("team/carol", ["carol"], 6),
        ]  # fmt: skip
        assert HTTP.get(f"{url}/v1/models/team/carol").json()["id"] == "team/carol"
        assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
        post(url), post(url, model="nobody")
        text = HTTP.get(f"{url}/metrics").text
        assert 'marl_requests_total{model="team",status="200"} 1.0' in text
        assert 'marl_requests_total{model="(none)",status="404"} 1.0' in text
        assert 'marl_tokens_total{kind="completion"} 39.0' in text and 'marl_turns_total{agent="carol"} 2.0' in text
        assert "marl_episodes_playing 0.0" in text and "marl_episodes_waiting 0.0" in text


def slow_to(seconds):
    async def say(*_):
        await asyncio.sleep(seconds)
        return "#### 4"

    return say


def test_more_than_plays_and_waits_is_429_and_too_slow_is_504(compose_config):
    async def three(url):
        async with httpx.AsyncClient(verify=False, timeout=20) as client:
            body = {"model": "team/alice", "messages": ASK}
            asked = [client.post(f"{url}/v1/chat/completions", json=body) for _ in range(3)]
            return await asyncio.gather(*asked)

    with served(slow_to(0.15), compose_config, limits=Limits(concurrent=1, queue=1)) as (url, client, service):
        answers = asyncio.run(three(url))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
        (full,) = [answer for answer in answers if answer.status_code == 429]
        assert full.json()["error"]["code"] == "queue_full" and full.headers["retry-after"] == "1"
        assert post(url, n=3).status_code == 400, "it could never be played"
    limits = Limits(concurrent=1, queue=1, timeout_s=0.45)
    with served(slow_to(30), compose_config, limits=limits) as (url, client, service):
        late = post(url)
        assert late.status_code == 504 and "0.45 s" in late.json()["error"]["message"]
        assert post(url, stream=True).status_code == 504, "nothing was streamed yet"
        until(lambda: client.cancelled == 4 and service.gate.admitted == service.gate.playing == 0)


def until(happened):
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place(compose_config, stream):
    body = json.dumps({"model": "team", "messages": ASK, "stream": stream})
    with served(slow_to(30), compose_config) as (url, client, service):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            until(lambda: len(client.asked) == 2)  # both are speaking, and a stream has been sent nothing yet
            assert service.gate.admitted == 1 and client.cancelled == 0
        until(lambda: service.gate.admitted == 0 and client.cancelled == 2)


def test_an_access_key_is_asked_for(compose_config):
    with served(debates, compose_config, api_key="correct-horse") as (url, *_):
        body, url_of = {"model": "team", "messages": ASK}, f"{url}/v1/chat/completions"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct-horse"}):
            refused = HTTP.post(url_of, json=body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
            assert HTTP.get(f"{url}/v1/models", headers=headers).status_code == 401
            assert HTTP.get(f"{url}/metrics", headers=headers).status_code == 401
        assert HTTP.post(url_of, json=body, headers={"Authorization": "Bearer correct-horse"}).status_code == 200
        assert HTTP.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "localhost:8000"}, True),
        ({"Host": "[::1]:8000", "Origin": "http://127.0.0.1:3000"}, True),
        ({"Host": "team.lan"}, True),
        ({"Host": "rebound.example:8000"}, False),
        ({"Host": "127.0.0.1.rebound.example"}, False),
        ({"Host": "localhost@rebound.example"}, False),
        ({"Host": "[::1"}, False),
        ({"Host": ""}, False),
        ({"Origin": "https://rebound.example"}, False),
        ({"Origin": "null"}, False),
    ],
)
def test_a_page_of_the_web_is_not_answered_without_a_key(compose_config, headers, allowed):
    """Also not one whose name leads to this machine; a key makes names free."""
    body = {"model": "team/alice", "messages": ASK}
    with served(debates, compose_config, hosts=["team.lan"]) as (url, client, _):
        answers = [HTTP.get(f"{url}/{path}", headers=headers) for path in ("health", "metrics", "v1/models")]
        answers.append(HTTP.post(f"{url}/v1/chat/completions", json=body, headers=headers))
        assert {answer.status_code for answer in answers} == {200 if allowed else 403} and bool(client.asked) == allowed
        assert allowed or "--allow-host NAME" in answers[0].json()["error"]["message"]
    with served(debates, compose_config, api_key="correct-horse") as (url, *_):
        assert HTTP.get(f"{url}/v1/models", headers=headers | {"Authorization": "Bearer correct-horse"}).is_success


def half_sent(url, text):
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(text)
    return connection


HALVES = {
    "nothing": b"",
    "header": b"GET /health HTTP/1.1\r\nHost: loc",
    "body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    "next": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_a_request_that_is_never_sent_whole_is_ended(compose_config, monkeypatch):
    """However slowly its bytes drip in. An answer may take longer than a request."""
    monkeypatch.setattr(listening_by, "REQUEST_S", 1.0)
    with served(slow_to(1.2), compose_config) as (url, *_):
        halves = {what: half_sent(url, text) for what, text in HALVES.items()}
        assert b"200 OK" in halves["next"].recv(4096)
        for _ in range(3):
            for what in ("header", "body", "next"):
                with suppress(OSError):  # ended by now
                    halves[what].sendall(b"h" if what != "body" else b" ")
            time.sleep(0.05)
        assert post(url, "team/alice").status_code == 200
        for what, connection in halves.items():
            with connection, suppress(ConnectionResetError):
                rest = b"".join(iter(lambda: connection.recv(4096), b""))  # noqa: B023 - ends here, or times out
                assert what == "next" or not rest, what


def test_half_sent_requests_shut_nobody_out(compose_config, monkeypatch):
    monkeypatch.setattr(listening_by, "MOST_CONNECTIONS", 8)
    with served(slow_to(0.5), compose_config) as (url, client, _):
        playing = threading.Thread(target=lambda: post(url, "team/alice"))
        playing.start()
        until(lambda: client.asked)
        halves = [half_sent(url, HALVES["header"]) for _ in range(30)]
        assert HTTP.get(f"{url}/health").status_code == 200
        until(lambda: len(select.select(halves, [], [], 0)[0]) >= 30 - 8)  # the oldest, which were ended
        assert client.cancelled == 0, "what is answered is not ended for it"
        for connection in halves:
            connection.close()
        playing.join(10)


LETTER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"messages": [LETTER] * 100_000}, 400, TOO_LONG),
        ({"messages": [{"role": "user", "content": "a" * 2_000_000}]}, 400, TOO_LONG),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 90_000}]}, 400, TOO_LONG),
        ({"model": "a" * 7_000_000}, 404, "model_not_found"),
        ({"a" * 7_000_000: 1}, 400, "unknown_parameter"),
        ({"messages": [{"role": "a" * 7_000_000, "content": "b"}]}, 400, "invalid_value"),
        ({"stop": ["a" * 7_000_000]}, 400, "invalid_value"),
        ({"seed": "a" * 7_000_000}, 400, "invalid_value"),
    ],
)
def test_a_giant_request_is_refused_at_once_and_not_repeated(compose_config, fields, status, code):
    """By lengths and counts, before anything is compared or encoded."""
    with served(debates, compose_config) as (url, client, _):
        began = time.process_time()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, url, **fields)
            assert HTTP.get(f"{url}/health").status_code == 200, "meanwhile"
        refused = asked.result()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (status, code) and len(refused.content) < 3000
        assert not client.asked and time.process_time() - began < 3


def test_health_answers_while_a_long_prompt_is_encoded():
    """In a thread, of a client as it is, with an encoder that takes its time."""
    encoder = SimpleNamespace(encode=lambda observation, previous: time.sleep(0.3) or [1] * 500)
    client = PolicyClient("alice", SimpleNamespace(name="hf"), None, None, encoder, 9, frozenset())
    ticks = []

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def play():
        beside = asyncio.create_task(tick())
        long = [{"role": "user", "content": "a" * LONG}]
        with pytest.raises(ContextOverflow):
            await client.encoded("alice", long, 1, None, 99)
        beside.cancel()

    asyncio.run(play())
    assert len(ticks) > 5


def test_a_failure_is_an_error_of_its_kind(compose_config):
    def fails(agent, round, observation, seed):
        said = observation[0]["content"]
        if said == "long":
            raise ContextOverflow("agent 'alice' was shown 120 tokens, data.max_prompt_length allows 99")
        if said == "broken":
            raise ValueError("no such token")
        if said == "dead":
            raise GroupFailed("policy 'alice' while generating: gone")
        return "#### 4"

    with served(fails, compose_config) as (url, *_):
        said = {word: post(url, messages=[{"role": "user", "content": word}]) for word in ("long", "broken")}
        assert said["long"].status_code == 400 and said["long"].json()["error"]["code"] == "context_length_exceeded"
        assert "allows 99" in said["long"].json()["error"]["message"]
        assert said["broken"].status_code == 500 and "no such token" in said["broken"].json()["error"]["message"]
        assert post(url).status_code == 200 and HTTP.get(f"{url}/health").status_code == 200
        assert post(url, messages=[{"role": "user", "content": "dead"}]).status_code == 503
        assert HTTP.get(f"{url}/health").status_code == 503 and post(url).status_code == 503


def test_scores_that_nobody_can_give_are_refused_by_name(compose_config):
    with served(debates, compose_config, runner="tree", num_levels=1) as (url, *_):
        refused = post(url)
        assert refused.status_code == 400 and "runner.keep=majority" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields,status,said",
    [
        ({"model": "teem"}, 404, "Did you mean 'team'?"),
        ({"model": None}, 404, "expected one of team"),
        ({"max_tokens": 7}, 400, "max_tokens=7: expected a whole number of 1 to 6"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens=0"),
        ({"temperature": 3}, 400, "temperature=3: expected a finite number at least 0 and at most 2"),
        ({"temperature": float("nan")}, 400, "temperature=nan"),
        ({"n": 0}, 400, "n=0: expected a whole number at least 1"),
        ({"seed": 1.5}, 400, "seed=1.5"),
        ({"stop": [""]}, 400, "stop=['']"),
        ({"stop": [str(i) for i in range(17)]}, 400, "a list of at most 16"),
        ({"stream": "yes"}, 400, "stream='yes': expected true or false"),
        ({"logprobs": True}, 400, "logprobs: a team of agents does not support it"),
        ({"tools": [{"type": "function"}]}, 400, "tools: a team"),
        ({"temprature": 1}, 400, "temprature: unknown field; Did you mean 'temperature'?"),
        ({"messages": []}, 400, "messages=[]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role='tool'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages[-1].role='assistant': expected user"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages[-1].content=' ': expected a question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "the agents read text"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content=5"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages[0].role=['user']"),
    ],
)
def test_a_field_is_honoured_or_refused_by_name(fields, status, said):
    with pytest.raises(Refused, match=re.escape(said).replace("\\ Did", "\\ +Did")) as refused:
        read_request({"model": "team", "messages": ASK} | fields, {"team": 6})
    assert refused.value.status == status and refused.value.body()["error"]["message"] == str(refused.value)


def test_messages_that_a_chat_template_refuses_are_the_clients_fault():
    """Templates of Llama 2, Mistral and Gemma want user and assistant to alternate."""
    refused = Service.refusal(SimpleNamespace(), TemplateError("Conversation roles must alternate user/assistant"))
    assert (refused.status, refused.code, refused.body()["error"]["param"]) == (400, "invalid_value", "messages")
    assert "roles must alternate" in str(refused)


def test_fields_that_ask_for_nothing_pass():
    idle = {
        "logprobs": False,
        "tools": [],
        "frequency_penalty": 0,
        "user": "me",
        "top_logprobs": None,
        "logit_bias": {},
    }
    request = read_request({"model": "team", "messages": ASK} | idle, {"team": 6})
    assert (request.n, request.seed, request.sampling, request.stream) == (1, None, {}, False)


def test_a_body_that_is_none_is_an_error_in_their_format(compose_config):
    with served(debates, compose_config) as (url, *_):
        for body, status in (
            (b"{", 400),
            (b"[]", 400),
            (b"\xff\xfe", 400),
            (b"[" * 200_000, 400),
            (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
            (b'{"\\ud83d": 1}', 400),
            (b" " * ((8 << 20) + 1), 413),
        ):
            refused = HTTP.post(f"{url}/v1/chat/completions", content=body)
            assert refused.status_code == status and set(refused.json()["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }
        for refused in (HTTP.get(f"{url}/v1/nothing"), HTTP.get(f"{url}/v1/chat/completions")):
            assert refused.status_code in (404, 405) and "expected POST /v1/chat" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "words,said",
    [
        (["--port", "70000"], "--port 70000"),
        (["--max-concurrent", "0"], "--max-concurrent 0"),
        (["--timeout", "0"], "--timeout 0.0"),
        (["--host", "0.0.0.0"], "set MARL_API_KEY"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "this variable is not set"),
    ],
)
def test_options_are_checked(words, said, monkeypatch):
    monkeypatch.delenv("MARL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=re.escape(said)):
        parsed(["run", *words])


def test_a_port_that_is_taken_is_named():
    options, _ = parsed(["run", "--port", "0"])
    with listening(options) as place:
        again, _ = parsed(["run", "--port", str(place.getsockname()[1])])
        with pytest.raises(ConfigError, match="cannot be listened on"), listening(again):
            pass


def test_a_rule_that_nobody_named_is_warned_of(tmp_path, caplog):
    gone = Source(tmp_path, 1, {"data": {"val_files": [str(tmp_path / "gone.parquet")]}})
    for words, warned in ((["run"], True), (["run", "--data-source", "openai/gsm8k"], False)):
        caplog.clear()
        with answerable(gone, *parsed(words)):
            assert ("--data-source" in caplog.text) is warned


def test_a_run_whose_data_are_elsewhere_is_served_without_them(tmp_path):
    """Its own words stay; prompts are checked on a question of ours, which ends with the server."""
    options, words = parsed(["run", "--data-source", "openai/gsm8k", "seed=1"])
    gone = Source(tmp_path, 1, {"data": {"val_files": [str(tmp_path / "gone.parquet")]}})
    with answerable(gone, options, words) as asked:
        assert asked[0] == "seed=1" and asked[1].startswith("data.val_files=")
        path = asked[1].partition("=")[2]
        assert check_files(path, "prompt", ["alice"]) == ["hello"]
        assert next(rows_of(path, "prompt"))["data_source"] == "openai/gsm8k"
    assert not Path(path).exists()
    (tmp_path / "gone.parquet").touch()
    with answerable(gone, options, words) as asked:
        assert asked == ["seed=1"]


@pytest.mark.parametrize(("source", "replaced"), [("rows", True), ("episodes", True), ("play", False)])
def test_a_run_whose_files_hold_examples_is_served_without_them(tmp_path, source, replaced):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}')
    options, words = parsed(["run"])
    saved = {"data": {"val_files": [str(tmp_path / "rows.jsonl")]}, "method": {"name": "sft", "source": source}}
    with answerable(Source(tmp_path, 1, saved), options, words) as asked:
        assert [word.partition("=")[0] for word in asked] == ["data.val_files"] * replaced


@pytest.fixture
def listener_of(monkeypatch):
    """Make a server that listens to signals, whose answers have little time at its end; signals are as before after the test."""
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}

    def made(service, ignored=False):
        if ignored:  # as of a job that a script's shell starts in the background
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        listener = Listener(make_app(service, None))
        listener.config.timeout_graceful_shutdown = 0.1
        listener.listen_to_signals()
        return listener

    yield made
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(
    ("signals", "ended"),
    [
        ([signal.SIGTERM], nullcontext()),
        ([signal.SIGINT], pytest.raises(KeyboardInterrupt)),
        ([signal.SIGINT] * 2, pytest.raises(KeyboardInterrupt)),
    ],
)
def test_a_signal_ends_the_server_without_a_traceback(compose_config, listener_of, capfd, signals, ended, ignored):
    """Also amid an answer, which is cut off, and a second Ctrl-C does not wait for it."""
    asked = threading.Event()

    def never(agent, round, observation, seed):
        asked.set()
        return asyncio.sleep(60, "#### 4")

    with served(never, compose_config) as (_, _, service), socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        place.listen(5)
        listener, url = listener_of(service, ignored), f"http://127.0.0.1:{place.getsockname()[1]}"

        def ask():
            with suppress(httpx.HTTPError):
                post(url)

        def end():
            asked.wait(10)
            for which in signals:
                os.kill(os.getpid(), which)
                time.sleep(0.05)

        threads = [threading.Thread(target=work, daemon=True) for work in (ask, end)]
        for thread in threads:
            thread.start()
        with ended:
            listener.run(sockets=[place])
        for thread in threads:
            thread.join(10)
    said = capfd.readouterr().err
    assert asked.is_set() and "Traceback" not in said and len(said.splitlines()) <= 1, said


@pytest.mark.parametrize(("which", "interrupted"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_before_the_server_listens_is_not_lost(compose_config, listener_of, which, interrupted):
    with served(debates, compose_config) as (_, _, service), socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        listener = listener_of(service)
        os.kill(os.getpid(), which)
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            listener.run(sockets=[place])


def test_ctrl_c_ends_a_process_again_whose_server_failed(monkeypatch, listener_of):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        listener_of(None).run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
