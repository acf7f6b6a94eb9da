"""The figures, and the systems that each one needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.ratios import KEYS, Step, paired, paired_rates, require_same_work, require_training
from benchmarks.work import REAL, Load

PLAYED = ("samples", "prompt_tokens", "response_tokens")
Reports = Mapping[str, Sequence[Step]]
"""Measured steps of every system."""


@dataclass(frozen=True)
class System:
    """A child process: ``python -m benchmarks.systems.<module> LOAD words…``."""

    case: str
    """Systems of one case are interleaved with one another."""
    module: str
    load: Load
    words: tuple[str, ...] = ()
    peer: str | None = None
    """The package that it needs, of the peers' environment; None for ours."""


@dataclass(frozen=True)
class Figure:
    """A number of every round."""

    goal: str
    needs: tuple[str, ...]
    of: Callable[[Reports], list[float]]


def ratio(goal: str, ours: str, theirs: str, clock: str = "cpu", keys: Sequence[str] = KEYS, **left_out: int) -> Figure:
    """Seconds of ours / theirs on equal work."""

    def of(reports: Reports) -> list[float]:
        own, other = reports[ours], reports[theirs]
        require_same_work((ours, own), (theirs, other), keys, left_out)
        require_training(ours, own)
        require_training(theirs, other)
        return paired(own, other, clock)

    return Figure(goal, (ours, theirs), of)


def count(goal: str, system: str, tokens: str) -> Figure:
    """Tokens that a system processed / the fewest that do."""
    return Figure(
        goal, (system,), lambda reports: [step[tokens] / step[f"fewest_{tokens}"] for step in reports[system]]
    )


def rate(goal: str, ours: str, theirs: str, clock: str = "cpu") -> Figure:
    """Response tokens a second, ours / theirs; as many prompts, other lengths of answers."""

    def of(reports: Reports) -> list[float]:
        own, other = reports[ours], reports[theirs]
        require_same_work((ours, own), (theirs, other), PLAYED[:2])
        return paired_rates(own, other, clock)

    return Figure(goal, (ours, theirs), of)


def growth(goal: str, many: str, few: str) -> Figure:
    """Seconds of a large step / those of a small one."""
    return Figure(goal, (many, few), lambda reports: paired(reports[many], reports[few]))


TINY = Load()
SMALL = Load(size="small", questions=2, samples=4, bf16=True)
REAL_MODEL = Load(size=REAL, questions=2, samples=4, response=16)
TWO = Load(questions=4, samples=4, agents=2)
DEBATE = Load(questions=2, samples=4, response=32, agents=3, rounds=3, shared=True, micro_batch_tokens=4096)
FEW = Load(response=16)
RAGGED = Load(ragged=True)
JUDGED = Load(ragged=True, judged=True)
THROUGH_RAY = ("resources.one_process=false",)

SYSTEMS = {
    "floor_tiny": System("tiny", "floor", TINY),
    "trl_tiny": System("tiny", "trl_grpo", TINY, peer="trl"),
    "ours_tiny": System("tiny", "ours", TINY),
    "ours_tiny_ray": System("tiny", "ours", TINY, THROUGH_RAY),
    "floor_small": System("small", "floor", SMALL),
    "trl_small": System("small", "trl_grpo", SMALL, peer="trl"),
    "ours_small": System("small", "ours", SMALL),
    "trl_real": System("real", "trl_grpo", REAL_MODEL, peer="trl"),
    "ours_real": System("real", "ours", REAL_MODEL),
    "floor_two": System("two", "floor", TWO),
    "comlrl_two": System("two", "comlrl_magrpo", TWO, peer="comlrl"),
    "ours_two": System("two", "ours", TWO),
    "optimum_debate": System("debate", "debate", DEBATE, ("optimum",)),
    "hf_in_turn": System("debate", "debate", DEBATE, ("in_turn",)),
    "hf_together": System("debate", "debate", DEBATE, ("together",)),
    "hf_per_question": System("debate", "debate", DEBATE, ("per_question",)),
    "ours_debate": System("debate", "ours", DEBATE),
    "ours_64": System("growth", "ours", FEW),
    "ours_1024": System("growth", "ours", replace(FEW, questions=128)),
    "ours_ragged": System("ragged", "ours", RAGGED),
    "ours_equal": System("ragged", "ours", Load(response=33)),
    "ours_judged": System("judged", "ours", JUDGED, THROUGH_RAY),
    "ours_serial": System("judged", "ours", replace(JUDGED, serial=True), THROUGH_RAY),
}
"""33 tokens are what answers of 1 to 64 have, on average."""

RATIOS = {
    "trl_tiny": ratio("<= .95", "ours_tiny", "trl_tiny"),
    "trl_tiny_ray": ratio("<= 1.10", "ours_tiny_ray", "trl_tiny"),
    "floor_tiny": ratio("<= 1.15", "ours_tiny", "floor_tiny"),
    "trl_bf16_small": ratio("<= .80", "ours_small", "trl_small"),
    # its logits and targets are shifted once too often: the last token of an answer is neither read nor trained
    "comlrl_two": ratio("<= .40", "ours_two", "comlrl_two", forwarded_tokens=1, trained_tokens=1),
    "debate_best_hf": ratio("<= .50", "ours_debate", "hf_in_turn", "rollout", PLAYED),
    "debate_per_question": ratio("<= .33", "ours_debate", "hf_per_question", "rollout", PLAYED),
    "prefilled": count("<= 1.10", "ours_debate", "prefilled"),
    "forwarded": count("<= 1.05", "ours_debate", "forwarded"),
    "episodes_1024_over_64": growth("<= 16.5", "ours_1024", "ours_64"),
}
"""Ours / theirs: CPU seconds, or tokens. Below 1 is better than theirs."""

EXTRA = {
    "floor_small": ratio("", "ours_small", "floor_small"),
    "trl_real": ratio("<= .95", "ours_real", "trl_real"),
    "floor_two": ratio("", "ours_two", "floor_two"),
    "floor_two_over_comlrl": ratio("", "floor_two", "comlrl_two", forwarded_tokens=1, trained_tokens=1),
    "floor_debate": ratio("", "ours_debate", "optimum_debate", "rollout", PLAYED),
    "trl_over_floor": ratio("", "trl_tiny", "floor_tiny"),
    "debate_hf_together": ratio("", "ours_debate", "hf_together", "rollout", PLAYED),
    "ragged": rate(">= .8", "ours_ragged", "ours_equal"),
    "ragged_rollout": rate(">= .8", "ours_ragged", "ours_equal", "rollout"),
    "overlap": ratio("< 1", "ours_judged", "ours_serial", "wall"),
}
"""Further figures of the same kind; of ``ragged`` more is better."""

FIGURES = RATIOS | EXTRA
QUICK_START = "quick_start_seconds"
"""Wall seconds of the quick start, alone: no ratio, and measured once."""


@dataclass
class Selection:
    """The figures that are wanted, with the systems that they need, by case."""

    names: Sequence[str]
    systems: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.names) - {*FIGURES, QUICK_START})
        if unknown:
            known = ", ".join([*FIGURES, QUICK_START])
            raise ValueError(
                f"ONLY={','.join(self.names)}: there is no figure {unknown[0]!r}; expected some of {known}"
            )
        wanted = {system for name in self.names if name in FIGURES for system in FIGURES[name].needs}
        for name, system in SYSTEMS.items():
            if name in wanted:
                self.systems.setdefault(system.case, []).append(name)


def smaller(load: Load) -> Load:
    """A load that is done at once: to see that everything runs."""
    return replace(load, size="tiny", questions=max(2, load.questions // 16), samples=2, response=8)
