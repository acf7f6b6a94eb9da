"""Writes a comparison: Markdown, JSON, and curves where matplotlib is installed."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marl.utils.manifest import replace_text


def write(result: Mapping[str, Any], text: str, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    for path, content in zip(paths, (text, json.dumps(result, indent=1, ensure_ascii=False) + "\n"), strict=True):
        replace_text(path, content)
    if find_spec("matplotlib") and any(any(group["curves"].values()) for group in result["groups"]):
        paths.append(plot(result, folder / f"{name}.png"))
    return paths


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """A panel for each metric: the median of a group's runs, and between which values they lie."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key in result["groups"][0]["last"] if any(group["curves"][key] for group in result["groups"])]
    figure, axes = pyplot.subplots(1, len(keys), figsize=(5.5 * len(keys), 4), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for group in result["groups"]:
            steps, values = list(group["curves"][key]), list(group["curves"][key].values())
            (line,) = axis.plot(steps, [value["median"] for value in values], marker=".", label=group["name"])
            low, high = [value["min"] for value in values], [value["max"] for value in values]
            axis.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axis.set(title=key, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
