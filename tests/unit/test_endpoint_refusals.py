"""Refusals of an OpenAI-compatible server: what is tried again, what loses an episode, and what ends the run."""

import pytest

from marl.cluster.failures import GroupFailed
from marl.rollout.endpoint import EndpointError, TryAgain
from marl.types import ContextOverflow
from tests.asking import act, client_of, many, one, serve
from tests.judge import Judge, completion


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def error(text, **fields):
    return {"error": {"message": text} | fields}


RATE_LIMITS = [
    "Rate limit reached for m-1 on requests per min (RPM): Limit 3, Used 3. Please try again in 20s. You can increase your "
    "rate limit by adding a payment method to your account at https://platform.openai.com/account/billing.",
    "You exceeded your current quota, please check your plan and billing details. Please retry in 37 s.",
]


@pytest.mark.parametrize("text", RATE_LIMITS)
def test_a_rate_limit_that_mentions_billing_is_tried_again(text):
    limited = (429, error(text), {"Retry-After": "0.2"})
    judge = Judge(lambda number, _: limited if number == 1 else completion("at last"))
    assert one(judge).text == "at last" and judge.at[1] - judge.at[0] >= 0.2


def test_further_attempts_at_a_turn_are_counted_as_retries():
    judge = Judge(lambda number, _: completion() if number in (1, 4) else (503, "busy"))

    async def twice(client):
        return [[await act(client), client.server.usage.take()][1] for _ in range(2)]

    first, second = serve(judge, twice)
    assert (first["requests"], first["retries"]) == (1, 0) and (second["requests"], second["retries"]) == (3, 2)


@pytest.mark.parametrize(
    "body",
    [
        error("You exceeded your current quota, please check your billing details.", code="insufficient_quota"),
        error("Your credit balance is too low to access the API. Please go to Plans & Billing."),
    ],
)
def test_an_account_without_credit_ends_the_run(body):
    judge = Judge(lambda *_: (429, body))
    with pytest.raises(GroupFailed, match="HTTP 429.*check its account"):
        one(judge)
    assert len(judge.bodies) == 1


TOO_LONG = {
    "OpenAI": error("This model's maximum context length is 8192 tokens.", code="context_length_exceeded"),
    "a window": error("Your input exceeds the context window of this model."),
    "vLLM": error("The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
    "an older vLLM": error("The engine prompt length 5000 exceeds the max_model_len 4096. Please reduce prompt."),
    "SGLang": error("The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
    "llama.cpp": error("the request exceeds the available context size, try increasing it"),
    "Anthropic": error("prompt is too long: 210000 tokens > 200000 maximum"),
    "Anthropic's sum": error("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"),
    "Gemini": error("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    "Cohere": error("too many tokens: size limit exceeded by 120 tokens"),
}


@pytest.mark.parametrize("server", TOO_LONG)
def test_a_conversation_that_is_too_long_is_an_overflow(server):
    with pytest.raises(ContextOverflow, match="agent 'critic' in round 2"):
        one(Judge(lambda *_: (400, TOO_LONG[server])))


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens for m-1",
        "Invalid 'user': string too long. Expected a string with maximum length 64, but got a string with length 81.",
        "Invalid 'input[0].name': string too long. Expected a string with maximum length 64.",
    ],
)
def test_a_field_that_is_too_large_is_an_error_and_no_outcome(text):
    """An overflow is an outcome, and would be trained on."""
    with pytest.raises(EndpointError, match="extra_body"):
        one(Judge(lambda *_: (400, error(text))))


@pytest.mark.parametrize("at_once", ["0", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_requests_that_may_return_at_once_do_not_return_together(at_once):
    judge = Judge(lambda number, _: (429, "slow down", {"Retry-After": at_once}) if number <= 6 else completion())
    serve(judge, many(6), backoff_s=0.6)
    waits = [at - judge.at[5] for at in judge.at[6:]]
    assert len(waits) == 6 and min(waits) >= 0.1 and max(waits) - min(waits) >= 0.02, waits


@pytest.mark.parametrize("after", [0.0, 7.0])
def test_a_servers_wait_is_spread_by_a_second_however_often_it_was_asked(after):
    server = client_of("http://127.0.0.1:1/v1", backoff_s=1.0).server
    waits = {server._wait(6, TryAgain("slow down", after)) for _ in range(32)}
    assert len(waits) == 32 and all(after + 0.5 <= wait <= after + 1.5 for wait in waits)
    assert 16 <= server._wait(6, TryAgain("broken")) <= 48, "2 ** 5 s, and the spread"


def test_denied_access_to_one_request_loses_its_episode_and_names_the_accounts_rights():
    """Some vendors deny a single text so."""
    judge = Judge(lambda *_: (403, error("not allowed")))
    with pytest.raises(EndpointError, match="HTTP 403: .*not allowed.*may this account use model m-1") as caught:
        one(judge)
    assert len(judge.bodies) == 1 and "extra_body" not in str(caught.value)
