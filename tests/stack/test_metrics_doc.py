"""docs/metrics.md and what runs log say the same."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.judge import Judge, serving
from tests.stack.conftest import ROOT

DOC = (ROOT / "docs" / "metrics.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted(Path(ROOT / "marl").rglob("*.py")))
PLACEHOLDERS = {"trained": "[^/]+(/[^/]+)?", "r": r"\d+", "source": ".+", "metric": ".+"}
"""All others stand for one word."""

KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.01")
CORRECTED = ("algorithm.rollout_correction.rollout_is=token",)
RUNS = (
    ("learner=grpo", "agents.alice.policy_by_round=[first,later]", *KL, *CORRECTED),
    ("learner=happo", "algorithm.use_kl_in_reward=true"),
    ("learner=qmix", "credit=team"),
)


@dataclass
class Row:
    name: str
    unit: str
    meaning: str
    condition: str

    def matches(self, metric: str) -> bool:
        parts = re.split(r"<(\w+)>", self.name)
        pattern = "".join(PLACEHOLDERS.get(p, "[^/]+") if i % 2 else re.escape(p) for i, p in enumerate(parts))
        return re.fullmatch(pattern, metric) is not None

    def is_in_the_code(self) -> bool:
        """Its last word stands there, as a string or as the end of one."""
        word = re.sub(r"<\w+>", "", self.name).rstrip("/").split("/")[-1]
        return re.search(rf'["/]{re.escape(word)}["/{{]', SOURCE) is not None


def read(doc):
    for line in doc.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                yield Row(name, *cells[1:])


ROWS = list(read(DOC))


def rows_of(metric):
    return [row.name for row in ROWS if row.matches(metric)]


@pytest.fixture
def logged(alone):
    """The names that each run logs: in a step, and in a validation."""
    with serving(Judge()) as address:
        endpoint = f"+policies.carol.endpoint={{base_url: '{address}', model: m-1}}"
        asking = ("agents.carol.trainable=false", "credit=own", endpoint)
        lives = [alone(*overrides) for overrides in (*RUNS, asking)]
        return [(set(live.step()), set(live.wait(live.trainer.validate()))) for live in lives]


@pytest.mark.slow
def test_every_metric_has_one_row_and_every_row_a_metric(logged):
    for steps, validated in logged:
        undocumented = {name: rows_of(name) for name in steps | validated if len(rows_of(name)) != 1}
        assert not undocumented
        assert all(rows_of(name.removeprefix("val/")) for name in validated)
        always = {row.name for row in ROWS if not row.condition}
        assert always <= {name for metric in steps for name in rows_of(metric)}
    seen = {name for steps, validated in logged for metric in steps | validated for name in rows_of(metric)}
    unknown = [row.name for row in ROWS if row.name not in seen and not row.is_in_the_code()]
    assert not unknown


def test_rows_have_a_unit_and_a_meaning():
    assert len(ROWS) > 80 and len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.unit and row.meaning for row in ROWS)


@pytest.mark.parametrize("metric", ["team/votes", "agent/alice/pg_los", "timing_s/values_", "critic/alice/bob/loss"])
def test_other_names_have_no_row(metric):
    assert not rows_of(metric)
