"""Sweeps of runs (``marl train -m``): one after another in this process, or side by side as tasks of Ray. All are checked before
the first starts. Each run has its own folder in that of the sweep; the same command skips finished runs and continues the others.

Hydra's own Ray launcher (hydra-ray-launcher 1.2.2) needs boto3 and cloudpickle < 3, and calls its jobs inside Ray's workers, where
a run could not start a session of its own.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from marl.config.errors import ConfigError, explain
from marl.config.sweeps import FOLDER, names_its_folder, run_name, swept_keys
from marl.utils.secret_masking import masked, masked_text


@dataclass(frozen=True)
class Job:
    """A run of a sweep."""

    words: tuple[str, ...]
    """Its overrides, its folder among them."""
    folder: Path

    def ended(self, error: Exception | None = None) -> JobReturn:
        """Its result for Hydra, which raises the first error of a sweep at its end."""
        status = JobStatus.COMPLETED if error is None else JobStatus.FAILED
        return Result([masked_text(word) for word in self.words], status=status, _return_value=error)


class Result(JobReturn):
    """Hydra's, which prints a line of its own before it raises an error."""

    @property  # type: ignore[misc]  # read only
    def return_value(self) -> Any:
        if self.status is JobStatus.FAILED:
            raise self._return_value
        return self._return_value


class MaskedSweeper(BasicSweeper):
    """Hydra's own sweeper; its copy of the settings, ``multirun.yaml``, holds no secrets."""

    def sweep(self, arguments: list[str]) -> Any:
        self.whole = self.config
        self.config = OmegaConf.create(masked(OmegaConf.to_container(self.config)))
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The masked copy has been written by now."""
        self.config = self.whole
        super().validate_batch_is_legal(batch)


class SweepLauncher(BasicLauncher):
    """Skips finished runs, and says at the end how the others ended."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert self.config is not None
        sweep, overrides = Path(self.config.hydra.sweep.dir), list(self.config.hydra.overrides.task)
        swept = swept_keys(overrides, job_overrides)
        jobs = [self.job_of(sweep, words, swept) for words in job_overrides]
        must_be_apart(jobs)
        ended = {index: result for index, job in enumerate(jobs) if (result := self.ended_before(job)) is not None}
        if skipped := sum(result.status is JobStatus.COMPLETED for result in ended.values()):
            say(f"{skipped} of {len(jobs)} runs of {sweep} have already finished; skipping them")
        left = {index: job for index, job in enumerate(jobs) if index not in ended}
        self.check(left)
        results = ended | self.launch_all(left, initial_job_idx)
        failed = [jobs[index].folder.name for index, result in results.items() if result.status is JobStatus.FAILED]
        said = f", {len(failed)} failed: {'; '.join(failed)}" if failed else ""
        say(f"{len(jobs) - len(failed)} of {len(jobs)} runs have finished{said}. marl report {sweep}")
        return [results[index] for index in range(len(jobs))]

    def check(self, jobs: Mapping[int, Job]) -> None:
        """Raise ConfigError for jobs with a wrong configuration, before any starts."""
        wrong: dict[str, list[str]] = {}
        for job in jobs.values():
            try:
                self.check_job(job)
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                wrong.setdefault(explain(error), []).append(job.folder.name)
        if wrong:
            said = "\n".join(f"{'; '.join(names)}: {error}" for error, names in wrong.items())
            raise ConfigError(
                f"{sum(map(len, wrong.values()))} of the sweep's runs are refused, so none starts:\n{said}"
            )

    def check_job(self, job: Job) -> None:
        self.setup_of(job)

    def launch_all(self, jobs: dict[int, Job], first: int) -> dict[int, JobReturn]:
        """The results of jobs by their numbers in the batch, the first of which is the sweep's number ``first``."""
        raise NotImplementedError

    def job_of(self, sweep: Path, words: Sequence[str], swept: Sequence[str]) -> Job:
        """A run with its folder: one that the user names is composed, for it may hold ``${seed}``."""
        given = OmegaConf.select(self.composed(words), FOLDER) if names_its_folder(words) else None
        folder = sweep / run_name(words, swept) if given is None else Path(given)
        quoted = json.dumps(str(folder), ensure_ascii=False)  # Hydra reads no escaped letters
        return Job((*words, f"{FOLDER}={quoted}"), folder)

    def ended_before(self, job: Job) -> JobReturn | None:
        """The result of a run that has come to its end: an error where it had other settings."""
        from marl.preflight.unfinished import record_of_finished

        record = record_of_finished(job.folder)
        if record is None:
            return None
        try:
            self.must_be_the_same(job, record)
        except ConfigError as error:
            say(f"{job.folder.name}: {error}")
            return job.ended(error)
        return job.ended()

    def must_be_the_same(self, job: Job, record: Mapping[str, Any]) -> None:
        """Raise ConfigError for a run whose folder holds one with other settings."""
        from marl.config.identity import identity_of
        from marl.preflight.unfinished import other_results

        config = self.setup_of(job).config
        different = other_results(record, identity_of(config), tuple(config.trainer.resume_changes))
        if different:
            shown = "; ".join(f"{key}: {before} then, {now} now" for key, (before, now) in [*different.items()][:5])
            raise ConfigError(
                f"{job.folder} has finished with other settings ({shown}); expected the same ones: name another folder for the "
                "sweep (hydra.sweep.dir=…), or remove that one"
            )

    def composed(self, words: Sequence[str]) -> Any:
        """The configuration of a run."""
        from marl.main import composed_job

        assert self.hydra_context is not None and self.config is not None
        return composed_job(self.hydra_context.config_loader.load_sweep_config(self.config, list(words)))

    def setup_of(self, job: Job) -> Any:
        """A run that has been checked, with its toy model where it has one. Raises ConfigError."""
        from marl.preflight.prepare import prepare
        from marl.quickstart.assets import prepared

        return prepared(self.composed(job.words), prepare)


def must_be_apart(jobs: Sequence[Job]) -> None:
    """Raise ConfigError for runs that would share a folder."""
    for folder, count in Counter(job.folder for job in jobs).items():
        if count > 1:
            raise ConfigError(
                f"{FOLDER}={folder}: {count} runs of the sweep would share this folder; expected one for each: leave it out and name "
                "the sweep's (hydra.sweep.dir=…), or put a swept key into it ('runs/${seed}')"
            )


class LocalLauncher(SweepLauncher):
    """Trains one run after another in this process; a run that fails does not stop the others."""

    def launch_all(self, jobs: dict[int, Job], first: int) -> dict[int, JobReturn]:
        results = {}
        for index, job in jobs.items():
            say(f"run {first + index + 1}: {job.folder.name}")
            (result,) = BasicLauncher.launch(self, [job.words], first + index)
            results[index] = job.ended(result._return_value if result.status is JobStatus.FAILED else None)
        return results


class RayLauncher(SweepLauncher):
    """Trains runs side by side, as many as the machines of the Ray cluster have room for, each in a process of its own on one of
    them."""

    def __init__(self, num_cpus: float | None = None, num_gpus: float | None = None) -> None:
        """CPUs and GPUs of a run; None for as many as it has ranks."""
        super().__init__()
        self.num_cpus, self.num_gpus = num_cpus, num_gpus
        self.sizes: dict[Job, tuple[float, float]] = {}

    def check_job(self, job: Job) -> None:
        self.sizes[job] = self.resources_of(job)

    def launch_all(self, jobs: dict[int, Job], first: int) -> dict[int, JobReturn]:
        from marl.cluster.side_by_side import Task, run_tasks

        tasks = {index: Task(job.folder, list(job.words), *self.sizes[job]) for index, job in jobs.items()}
        return {index: jobs[index].ended(failure) for index, failure in run_tasks(tasks, sys.argv[1:], say)}

    def resources_of(self, job: Job) -> tuple[float, float]:
        """CPUs and GPUs of a run. Raises ConfigError for one with a wrong configuration, or of several machines."""
        setup = self.setup_of(job)
        nodes, ranks = setup.config.trainer.nnodes, sum(setup.ranks_by_pool.values())
        if nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={nodes}: hydra/launcher=marl_ray places a run on one machine; expected 1: leave the launcher out, and "
                "the runs get the whole cluster one after another"
            )
        cpus, gpus = (ranks, 0) if setup.config.trainer.device == "cpu" else (1, ranks)
        return cpus if self.num_cpus is None else self.num_cpus, gpus if self.num_gpus is None else self.num_gpus


def say(line: str) -> None:
    sys.stdout.write(masked_text(f"sweep: {line}\n"))
    sys.stdout.flush()
