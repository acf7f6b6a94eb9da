"""``python -m benchmarks.run [--only NAMES] [--rounds N] [--peers PYTHON] [--out FILE] [--smoke]``: measure and report."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import EXTRA, FIGURES, QUICK_START, RATIOS, SYSTEMS, Figure, Selection, System, smaller
from benchmarks.interleave import ONE_THREAD, WARM_UP, Child, SystemFailed, interleave
from benchmarks.ratios import Spread, WorkDiffers, seconds
from benchmarks.work import make_assets

PACKAGES = ("torch", "transformers")
PEERS = ("trl", "comlrl")
OURS = (*PACKAGES, "verl", "ray", "marl")
PATIENCE_S = 600.0
QUICK_START_PATIENCE_S = 3600.0
BUSY = 1.3
"""Wall over CPU seconds of a system of one thread, above which the machine had other work."""
NO_BF16 = "this CPU has no fast kernels for bf16, without which a step takes over a minute; name the figure in ONLY to measure it"
START = "start_over_trl"
"""CPU seconds from the start of the process to the end of its first step, ours / TRL's."""


@dataclass
class Outcome:
    """Everything that a run has measured."""

    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    """CPU seconds of every system to the end of its first step."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons why a system was not measured, by its name."""
    errors: list[str] = field(default_factory=list)
    spreads: dict[str, Spread] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Reasons, by figure."""


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.outcome = options, Outcome()
        self.folder = options.out.parent / "bench"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps_file = self.folder / "steps.jsonl"
        self.steps_file.write_text("")
        self.peers = versions_in(options.peers, (*PACKAGES, *PEERS))
        self.selection = Selection(options.only)

    def run(self) -> Outcome:
        make_assets({SYSTEMS[name].load.size for names in self.selection.systems.values() for name in names})
        for case, names in self.selection.systems.items():
            self.run_case(case, names)
        self.derive()
        return self.outcome

    def run_case(self, case: str, names: Sequence[str]) -> None:
        """Start the systems of a case one after another, and let them step in turn."""
        print(f"{case}: {', '.join(names)}", flush=True)
        children: dict[str, Child] = {}
        try:
            for name in names:
                child = self.start(name)
                if child:
                    children[name] = child
            for round, name, report in interleave(children, self.options.rounds, self.lose):
                self.keep(round, name, report)
        finally:
            for child in children.values():
                child.stop()

    def start(self, name: str) -> Child | None:
        """A system that is up; None, with the reason noted, where there is none."""
        system = SYSTEMS[name]
        if system.peer and system.peer not in self.peers:
            self.outcome.missing[name] = f"{system.peer} is not installed in {self.options.peers}"
            return None
        if system.load.bf16 and not (self.options.named or self.options.smoke or has_fast_bf16()):
            self.outcome.missing[name] = NO_BF16
            return None
        child = Child(name, self.command(system), self.folder, PATIENCE_S)
        try:
            child.wait_ready()
        except SystemFailed as error:
            child.stop()
            self.lose(name, error)
            return None
        print(f"  {name} is up after {child.start['cpu']:.1f} CPU s", flush=True)
        self.outcome.starts[name] = child.start["cpu"]
        return child

    def command(self, system: System) -> list[str]:
        python = self.options.peers if system.peer else sys.executable
        load = smaller(system.load) if self.options.smoke else system.load
        return [str(python), "-m", f"benchmarks.systems.{system.module}", load.dumps(), *system.words]

    def lose(self, name: str, error: SystemFailed) -> None:
        self.outcome.missing[name] = str(error)
        self.outcome.errors.append(str(error))
        print(f"  {error}", flush=True)

    def keep(self, round: int, name: str, report: dict[str, Any]) -> None:
        """Write the report down at once: a run that is ended early loses nothing."""
        with self.steps_file.open("a") as file:
            print(json.dumps({"system": name, "round": round, **report}), file=file)
        print(f"  round {round} {name:18s} {report['cpu']:8.3f} CPU s {report['wall']:8.3f} s", flush=True)
        if round == WARM_UP:
            self.outcome.starts[name] += report["cpu"]
        else:
            self.outcome.reports.setdefault(name, []).append(report)

    def derive(self) -> None:
        """Compute the figures of what was measured."""
        for name, figure in FIGURES.items():
            reason = self.reason(name, figure)
            if reason:
                self.outcome.not_measured[name] = reason
                continue
            try:
                self.outcome.spreads[name] = Spread.of(figure.of(self.outcome.reports))
            except WorkDiffers as error:
                self.outcome.not_measured[name] = str(error)
                self.outcome.errors.append(f"{name}: {error}")

    def reason(self, name: str, figure: Figure) -> str:
        """The reason why a figure cannot be computed; empty where it can."""
        if name not in self.selection.names:
            return "not selected"
        return next((self.outcome.missing[system] for system in figure.needs if system in self.outcome.missing), "")


def versions_in(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that another Python has; empty where there is no such Python."""
    code = "import importlib.metadata as m, json, sys\nhave = {d.name.lower(): d.version for d in m.distributions()}\n"
    code += "print(json.dumps({name: have[name] for name in sys.argv[1:] if name in have}))"
    try:
        told = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, str] = json.loads(told.stdout)
    return found


def has_fast_bf16() -> bool:
    """True if oneDNN multiplies bf16 matrices on this CPU, and where PyTorch is built without oneDNN."""
    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def quick_start() -> float:
    """Wall seconds of the quick start with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"trainer.default_local_dir={folder}/run", "seed=0"]
        environment = os.environ | ONE_THREAD | {"MARL_CACHE": f"{folder}/cache"}
        started = time.perf_counter()
        command = [sys.executable, "-m", "marl.quickstart", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=QUICK_START_PATIENCE_S)
        return time.perf_counter() - started


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []  # fmt: skip
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


def system_numbers(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Medians of every system, with the work of its last step."""
    return {
        name: {
            **{clock: statistics.median(seconds(step, clock) for step in steps) for clock in ("cpu", "wall")},
            "parts": {part: statistics.median(step["parts"][part] for step in steps) for part in steps[-1]["parts"]},
            "first_step_cpu": outcome.starts[name],
            "work": steps[-1]["work"],
            "processes": steps[-1]["processes"],
        }
        for name, steps in outcome.reports.items()
    }


def extra_figures(outcome: Outcome) -> dict[str, float | None]:
    extra: dict[str, float | None] = medians(outcome, EXTRA)
    starts = outcome.starts
    extra[START] = (
        starts["ours_tiny"] / starts["trl_tiny"] if {"ours_tiny", "trl_tiny"} <= set(outcome.reports) else None
    )
    return extra


def medians(outcome: Outcome, names: Mapping[str, Figure]) -> dict[str, float | None]:
    return {name: outcome.spreads[name].median if name in outcome.spreads else None for name in names}


def busy(outcome: Outcome) -> bool:
    """True if the machine had other work: wall seconds then say nothing, and CPU seconds less."""
    alone = [steps for steps in outcome.reports.values() if steps[-1]["processes"] == 1]
    return any(statistics.median(step["wall"] / step["cpu"] for step in steps) > BUSY for steps in alone)


def as_json(bench: Bench, loads: Sequence[float], quick: float | None) -> dict[str, Any]:
    outcome = bench.outcome
    return {
        "ratios": medians(outcome, RATIOS),
        "extra": extra_figures(outcome) | {QUICK_START: quick},
        "spread": {name: asdict(spread) for name, spread in outcome.spreads.items()},
        "not_measured": outcome.not_measured,
        "systems": system_numbers(outcome),
        "rounds": bench.options.rounds,
        "smoke": bench.options.smoke,
        "busy": busy(outcome),
        "machine": machine() | {"load_before_and_after": loads},
        "versions": {"ours": {name: version(name) for name in OURS}, "peers": bench.peers},
        "commit": commit(),
    }


def table(result: Mapping[str, Any]) -> str:
    """The figures, one a line."""
    lines = [f"{'ours / theirs':24s} {'median':>8s}  {'lowest':>8s} {'highest':>8s}  goal"]
    for name, figure in FIGURES.items():
        if name in result["spread"]:
            spread = result["spread"][name]
            numbers = f"{spread['median']:8.2f}  {spread['lowest']:8.2f} {spread['highest']:8.2f}  {figure.goal}"
            lines.append(f"{name:24s} {numbers}")
        elif result["not_measured"][name] != "not selected":
            lines.append(f"{name:24s} not measured: {result['not_measured'][name]}")
    for name in (START, QUICK_START):
        if result["extra"][name] is not None:
            lines.append(f"{name:24s} {result['extra'][name]:8.2f}")
    if result["busy"]:
        lines.append("the machine had other work: rely on a quieter one, and never on wall seconds of this run")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--only", default="", help="figures, separated by commas; all of them by default")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of every system")
    parser.add_argument("--peers", type=Path, default=Path(".venv-bench/bin/python"), help="Python that has the peers")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.json"))
    parser.add_argument("--smoke", action="store_true", help="hardly any work: shows that everything runs")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    named = [name for name in options.only.split(",") if name]
    options.named, options.only = bool(named), named or [*FIGURES, QUICK_START]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        bench = Bench(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    before = os.getloadavg()[0]
    outcome = bench.run()
    quick = quick_start() if QUICK_START in options.only and not options.smoke else None
    result = as_json(bench, [before, os.getloadavg()[0]], quick)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"written to {options.out}")
    sys.stderr.writelines(f"{line}\n" for line in outcome.errors)
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main())
