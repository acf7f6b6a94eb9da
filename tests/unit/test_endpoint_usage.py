"""Tokens, requests and shares of a budget, counted by hand."""

from marl.rollout.endpoint import Usage, usage_metrics


def test_counts_are_those_since_they_were_taken():
    usage = Usage()
    usage.asked(0.5, retries=False)
    usage.asked(1.5, retries=True)
    usage.answered(7)
    taken = usage.take()
    assert taken == {"requests": 2, "retries": 1, "tokens": 7, "seconds": 2.0}
    assert usage_metrics("judge", taken) == {
        "endpoint/judge/requests": 2.0, "endpoint/judge/retries": 1.0, "endpoint/judge/tokens": 7.0,
        "endpoint/judge/seconds": 1.0,
    }  # fmt: skip
    assert not any(usage_metrics("judge", usage.take()).values())
    assert usage.spent == 7 and not usage.is_spent, "there is no budget"


def test_two_processes_share_what_is_left():
    driver, worker = Usage(100, 2), Usage(100, 2)
    worker.answered(49)
    assert not worker.is_spent
    worker.answered(1)
    assert worker.is_spent and worker.spent == 50, "half of 100"
    driver.add(worker.take())
    assert driver.spent == 50 and driver.take()["tokens"] == 50
    for _ in range(2):  # with every message of a step
        worker.go_on_from(driver.spent)
    assert not worker.is_spent
    worker.answered(24)
    worker.go_on_from(driver.spent)
    assert worker.spent == 74 and not worker.is_spent
    worker.answered(1)
    assert worker.is_spent, "half of the 50 that were left"
    driver.answered(24)
    assert not driver.is_spent
    driver.add(worker.take())
    assert driver.spent == 99 and not driver.is_spent
    driver.answered(1)
    assert driver.is_spent


def test_a_process_that_was_told_of_a_spent_budget_asks_nothing():
    usage = Usage(100, 4)
    usage.go_on_from(100)
    assert usage.is_spent and usage.spent == 100
