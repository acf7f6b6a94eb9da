"""An evaluation for a reader: ``result.json``, ``README.md`` and ``accuracy.png``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marl.utils.intervals import share
from marl.utils.tables import markdown_table

Result = Mapping[str, Any]


def write(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(markdown(result))
    plot(result, folder / "accuracy.png")


def markdown(result: Result) -> str:
    task = result["task"]
    head = [
        f"# {result['name']}",
        f"{task['tasks']} tasks of {', '.join(task['files'])}, {result['samples']} sample{'s' * (result['samples'] > 1)} of each, seed {result['seed']}.",
        f"This command gives these numbers again:\n\n```bash\n{result['command']}\n```",
    ]
    return "\n\n".join([*head, *sections(result)]) + "\n"


def sections(result: Result) -> Iterator[str]:
    teams, tasks = result["teams"], result["task"]["tasks"]
    costs = ["tokens per answer", "tokens sampled", "tokens read", "seconds"]
    rows = [
        [t["label"], str(tasks), share(t["accuracy"]), interval(t["interval"]), str(t["failed"]), *cost(t["cost"])]
        for t in teams
    ]
    yield markdown_table(["team", "tasks", "accuracy", "95 %", "failed", *costs], rows)
    if result["comparisons"]:
        yield "## Differences on the same tasks"
        rows = [[f"{c['of']} over {c['over']}", *difference(c)] for c in result["comparisons"]]
        yield markdown_table(["", "difference", "95 %, paired", "p"], rows)
    for team in teams:
        yield f"## {team['label']}"
        yield from of_team(team, tasks)


def of_team(team: Result, tasks: int) -> Iterator[str]:
    """Every share with its 95 % interval over the tasks."""
    ks = list(team["pass@k"])
    yield markdown_table(
        ["k", *ks], [[key, *(share(team[key][k], tasks) for k in ks)] for key in ("pass@k", "majority@k")]
    )
    rounds = list(team["by_round"])
    if rounds:
        rows = [["all agents", *(share(team["by_round"][r], tasks) for r in rounds), ""]]
        rows += [
            [name, *(share(numbers["by_round"].get(r), tasks) for r in rounds), share(numbers["final"], tasks)]
            for name, numbers in team["by_agent"].items()
        ]
        yield markdown_table(["accuracy", *(f"round {r}" for r in rounds), "last answer"], rows)
    rows = list(baseline_rows(team))
    if rows:
        head = ["baseline", "accuracy", "95 %", "gain of the team", "95 %, paired", "p", "tokens per answer"]
        yield markdown_table(head, rows)
    if team["vote_without"]:
        rows = [[agent, share(accuracy, tasks)] for agent, accuracy in team["vote_without"].items()]
        yield markdown_table(["the same votes without", "accuracy"], rows)
    if "similarity" in team:
        yield f"Similarity of the answers to the truth: {team['similarity']:.3f}"
    if "perplexity" in team:
        yield "Perplexity of the agents' own words: " + ", ".join(
            f"{a} {share(p)}" for a, p in team["perplexity"].items()
        )


def baseline_rows(team: Result) -> Iterator[list[str]]:
    labels = {
        "solo": "{} alone",
        "vote": "vote of {}'s answers, as many as the team's",
        "tokens": "vote of {}'s answers, as many tokens as the team's",
        "leave_one_out": "the team without {}",
    }
    for key, label in labels.items():
        for agent, numbers in team.get(key, {}).items():
            if "reason" in numbers:
                yield [label.format(agent), "-", numbers["reason"], "", "", "", ""]
                continue
            accuracy, tokens = share(numbers["accuracy"]), f"{numbers['cost']['sampled_tokens_per_episode']:.1f}"
            gain = difference(numbers["gain_of_team"])
            yield [label.format(agent), accuracy, interval(numbers["interval"]), *gain, tokens]


def cost(numbers: Mapping[str, float]) -> list[str]:
    each = f"{numbers['sampled_tokens_per_episode']:.1f}"
    return [each, f"{numbers['sampled_tokens']:.0f}", f"{numbers['read_tokens']:.0f}", f"{numbers['seconds']:.1f}"]


def difference(gain: Result) -> list[str]:
    return [f"{gain['difference']:+.3f}", interval(gain["interval"]), f"{gain['p']:.4f}"]


def interval(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}"


def plot(result: Result, path: Path) -> None:
    """Accuracy with its interval, and by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    teams = result["teams"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for at, team in enumerate(teams):
        low, high = team["interval"]
        errors = [[max(0.0, team["accuracy"] - low)], [max(0.0, high - team["accuracy"])]]
        axes[0].bar([at], [team["accuracy"]], yerr=errors, capsize=4)
        axes[1].plot(list(map(int, team["by_round"])), list(team["by_round"].values()), marker="o", label=team["label"])
    axes[0].set_xticks(range(len(teams)), [team["label"] for team in teams], rotation=15)
    axes[0].set(title="accuracy of the team, 95 % over tasks", ylim=(0, 1))
    axes[1].set(title="accuracy of the agents' answers", xlabel="round", ylim=(0, 1))
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
