"""Words about a run that cannot learn."""

import logging

import pytest

from marl.report.alarms import DegenerateGroups


def warnings_of(caplog, steps, *shares):
    alarm = DegenerateGroups(steps)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, share in enumerate(shares, start=1):
            alarm.look(share, step)
    return [record.getMessage() for record in caplog.records]


def test_only_degenerate_groups_for_some_steps_raise_a_warning_with_likely_causes(caplog):
    (said,) = warnings_of(caplog, 3, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert "the last 3 steps, to step 4" in said
    for cause in ("same score", "controller.extractors", "extract(text)", "too easy", "temperature"):
        assert cause in said


@pytest.mark.parametrize(
    "steps,shares,count",
    [
        (3, [1.0, 1.0, 0.99, 1.0, 1.0], 0),
        (2, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0], 2),
        (1, [1.0], 1),
        (None, [1.0] * 9, 0),
    ],
)
def test_one_informative_group_resets_the_count(caplog, steps, shares, count):
    assert len(warnings_of(caplog, steps, *shares)) == count
