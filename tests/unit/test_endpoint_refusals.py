"""Refusals of an OpenAI-compatible server: what is tried again, what loses an episode, and what ends the run."""

import pytest

from marl.cluster.failures import GroupFailed
from tests.asking import one
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
