"""The trainer: one step is the paper's algorithm box, one verb per line. It names no algorithm and no protocol.

``method.step(trainer, tasks)`` says what a step is: :meth:`MARLTrainer.step` for the default, ``rl``; of other methods
:meth:`MARLTrainer.play` and :meth:`MARLTrainer.learn`.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from marl import checkpoint
from marl.batch.build import joint_batch
from marl.batch.joint import JointBatch
from marl.batch.packing import packed_policies
from marl.cluster.critic_group import Critics
from marl.cluster.log_probs import OldLogProbs, References
from marl.cluster.policy_group import PolicyGroup
from marl.cluster.weight_arrival import WeightSync
from marl.cluster.worker_group import WorkerGroup, check_alive, throughput
from marl.config.deadlines import Phase, deadline_of
from marl.config.identity import settings_of
from marl.config.policies import longest_row, own_settings
from marl.controller.alternative_rollouts import AlternativeRollouts
from marl.controller.collection import Collection, with_turns
from marl.controller.controller import Controller
from marl.controller.method_data import speakers_of
from marl.controller.policy_map import PolicyMap
from marl.controller.tasks import TaskStream
from marl.learners import Learner
from marl.methods import Method
from marl.methods.examples import Example, encoded, policy_rows, without_long_turns
from marl.preflight.run_folder import restarts_of
from marl.report import conversation, dump, summary
from marl.report.alarms import Collapse, DegenerateGroups, LazyAgents, warn_of_gaps
from marl.report.dump_writer import DumpWriter
from marl.report.step_metrics import (
    count_metrics,
    credit_shares,
    critic_metrics,
    episode_metrics,
    policy_metrics,
    share_metrics,
    token_metrics,
)
from marl.report.transcripts import Transcripts
from marl.types import AgentId, CriticName, Episode, Metrics, PolicyName, Task, Turn
from marl.utils.background import Background
from marl.utils.best import add_metrics
from marl.utils.metrics import PhaseTimer, RunningMean, must_be_finite, prefixed
from marl.utils.numbers import is_due
from marl.utils.process_time import process_seconds
from marl.utils.spans import Span
from marl.utils.tracking import Tracking, tracking_of

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Metrics], None]
"""Callback for every step: the step, the last step, its metrics."""


@dataclass(frozen=True)
class Played:
    """The episodes of a step's tasks."""

    collection: Collection
    scored: list[Episode]
    episodes: list[Episode]
    """Those with turns to train on."""

    def counts(self, unread: int = 0) -> Metrics:
        """``unread``: episodes that are too long for a critic."""
        trained = len(self.scored) - unread
        return count_metrics(self.collection.started, trained, self.collection.refused, self.collection.retried)


class MARLTrainer:
    restarts = 0
    """Faults after which the run was built anew, so far."""

    def __init__(
        self,
        config: Any,
        policies: Mapping[PolicyName, PolicyGroup],
        controller: Controller,
        learner: Learner,
        critics: Critics,
        loader: StatefulDataLoader,
        validation: Sequence[Task],
        total_steps: int,
        progress: Progress | None = None,
        *,
        method: Method,
        encoders: Mapping[PolicyName, Any],
        held_out: Sequence[Example] = (),
    ) -> None:
        """``encoders``: each policy's, for a method that trains on examples. ``held_out``: examples in place of ``validation``,
        where nothing is played."""
        self.method, self.encoders, self.held_out = method, encoders, held_out
        self.speakers = speakers_of(config)
        self.limits = {name: longest_row(own_settings(config, name).rollout) for name in encoders}
        self.config, self.policies, self.controller, self.learner = config, policies, controller, learner
        self.critics, self.packed = critics, packed_policies(config, learner.critics)
        self.references, self.weights = References(config, policies), WeightSync(config, policies, controller.clients)
        self.old_log_probs = OldLogProbs(config, policies, controller.sampling, learner.needs_exact_log_probs)
        self.loader, self.validation, self.total_steps = loader, validation, total_steps
        self.tasks: Any = TaskStream(loader, reads_ahead=not config.resources.one_process)
        self.validation_id = (
            fingerprint_of(held_out)
            if method.offline
            else checkpoint.fingerprint(validation, checkpoint.validation_sampling(config, controller.sampling))
        )
        self.progress = progress or (lambda step, total, metrics: None)
        self.folder, patience = Path(config.trainer.default_local_dir), deadline_of(config.resources, Phase.save)
        self.dumps = DumpWriter(config.trainer.rollout_data_dir, *patience)
        self.step_number, self.sampled_tokens, self.log_prob_gap_max, self.earlier_seconds = 0, 0, 0.0, 0.0
        self.answers_per_episode, self.last_metrics = RunningMean(), Metrics()
        self.tracking, self.transcripts = Tracking(None, None, []), Transcripts(config.trainer)
        self.saving = Background("a checkpoint", lambda: check_alive(self.groups), *patience)
        self.degenerate_alarm = DegenerateGroups(config.controller.degenerate_steps)
        self.lazy_agents = LazyAgents(config.controller.lazy_agent_share)
        self.unsettled: dict[PolicyName, int] | None = None
        """Tokens spent at endpoints before a validation that has not ended: repeated on resume, it counts the turns of its ledger."""
        self.histories: dict[str, dict[int, Metrics]] = {}
        """Team metrics of each validation, by the data that was validated on and by step."""
        self.trained_agents = [name for name, agent in config.agents.items() if agent.trainable]
        self.collapse_alarm = Collapse(self.trained_agents)

    @property
    def history(self) -> dict[int, Metrics]:
        """Team metrics of each validation of the present data, by step."""
        return self.histories.setdefault(self.validation_id, {})

    @property
    def report_folder(self) -> Path:
        """Folder of the summary: a run continued on other validation data leaves the first summary in place."""
        return self.folder / self._of_other_data()

    def _of_other_data(self) -> str:
        """Name of a folder for what is of other validation data than the run began with; empty for the first."""
        first = next(iter(self.histories), self.validation_id)
        return "" if first == self.validation_id else f"validation_{self.validation_id}"

    @property
    def groups(self) -> list[WorkerGroup]:
        return [*self.policies.values(), *self.critics.groups.values()]

    @property
    def policy_map(self) -> PolicyMap:
        return self.controller.policy_map.at(self.step_number)

    @property
    def temperatures(self) -> dict[AgentId, float]:
        """Sampling temperature of every trained agent."""
        policies = {agent: self.policy_map.policy(agent, 1) for agent in self.trained_agents}
        return {agent: self.controller.sampling(agent, own, False)["temperature"] for agent, own in policies.items()}

    async def fit(self, token_budget: int | None = None) -> None:
        """Train to the last step, or until ``token_budget`` tokens are sampled; validate and save where that is due."""
        trainer = self.config.trainer
        await self.resume()
        self.tracking = tracking_of(trainer, settings_of(self.config), self.step_number)
        finished = 0 < self.step_number >= self.total_steps and not trainer.val_only
        if finished and self.step_number in self.history:
            at = f"step {self.step_number} of {self.total_steps}"
            logger.warning("nothing to do: already at %s; raise trainer.total_training_steps to continue", at)
            return self.summarise()
        await self.sync_weights()
        if trainer.val_only or finished or self.validates_first():
            self.tracking.log(metrics := await self.validate(), self.step_number)
            if not trainer.val_only:
                add_metrics(self.folder / f"global_step_{self.step_number}", metrics)
        async with self.saving, self.dumps:
            while not trainer.val_only and not self.is_over(token_budget):
                self.step_number += 1
                metrics = await self.method.step(self, await self.tasks.next())
                await self.keep(metrics, last=self.is_over(token_budget))
                self.progress(self.step_number, self.total_steps, metrics)
        self.controller.ledger.close()
        checkpoint.Kept.of(self.config).forget_ledgers(self.folder, self.step_number)
        self.summarise()

    def validates_first(self) -> bool:
        """True before the first step, and where the validation of the step that a run goes on from is missing."""
        if self.step_number > 0 and is_due(self.config.trainer.test_freq, self.step_number):
            return self.step_number not in self.history
        return self.config.trainer.val_before_train and not self.history

    async def keep(self, metrics: Metrics, last: bool) -> None:
        """Validate, log and save where this step is one for it: the weights even where their validation or a tracker fails, and
        after the log, so that a run killed between the two repeats the step."""
        trainer = self.config.trainer
        self.collapse_alarm.look(metrics, self.step_number)
        self.unsettled = self.controller.spent() if self.controller.ledger.root else None
        try:
            if last or is_due(trainer.test_freq, self.step_number):
                metrics |= await self.validate()
            self.unsettled = None
        finally:
            self.last_metrics = metrics
            try:
                self.tracking.log(metrics, self.step_number)
            finally:
                if is_due(trainer.save_freq, self.step_number) or (last and trainer.save_final):
                    await self.save(wait=last or not trainer.save_in_background)
                elif last:
                    logger.warning(
                        "the weights of step %d, the last, are lost: trainer.save_final=false", self.step_number
                    )

    def is_over(self, token_budget: int | None) -> bool:
        """True if the last step is done, or the budget is spent."""
        spent = token_budget is not None and self.sampled_tokens >= token_budget
        return spent or self.step_number >= self.total_steps

    async def step(self, tasks: Sequence[Task]) -> Metrics:
        """Play the tasks, assign credit, update policies and critics, and give the servers the new weights."""
        phase, started = PhaseTimer(), time.monotonic()
        played = await self.play(tasks, phase)
        gathered = await self.gather(played.episodes, phase)
        await self.free_servers()
        episodes, batch = self.readable(played.episodes)
        unread = len(played.episodes) - len(episodes)
        token_numbers, distances = await self.read(episodes, batch, phase)
        fits = await phase.of("values", self.fit_critics(batch)) if self.learner.fits_first else {}
        with phase("credit"):
            credited = self.assign_credit(batch)
        updating = asyncio.gather(self.update(batch), self.beside_update(played.scored))
        (updates, late_fits), episode_numbers = await phase.of("update", updating)
        gathered |= await phase.of("sync_weights", self.sync_weights())
        ended = time.monotonic()
        await self.dumps.write(episodes, self.step_number, batch, self.learner.credit.of)
        labels = self.policy_map.labels(self.trained_agents)
        return (
            credited
            | token_numbers
            | policy_metrics(distances, labels)
            | episode_numbers
            | played.counts(unread)
            | policy_metrics(updates, labels)
            | (critic_metrics(fits | late_fits, unread) if self.critics.groups else {})
            | gathered
            | self.controller.metrics()
            | phase.metrics()
            | self.effort(float(batch.spoken_ERA.sum()), (started, ended))
        )

    def effort(self, turns: float, step: Span) -> Metrics:
        """Time of a step of any kind, the share of it that was computed, and the faults so far."""
        return throughput(self.groups, turns, step) | {"perf/restarts": float(self.restarts)}

    def _count(self, episodes: Sequence[Episode]) -> None:
        """Update the agents' accuracies, the tokens sampled so far and the number of answers per episode."""
        self.controller.accuracy.update(episodes)
        self.sampled_tokens += sum(sum(turn.response_mask) for episode in episodes for turn in episode.turns)
        for episode in episodes:
            self.answers_per_episode.add(len(conversation.team_turns(episode, self.trained_agents)))

    async def play(self, tasks: Sequence[Task], phase: PhaseTimer) -> Played:
        """Play and score the tasks, and show the episodes to the trackers."""
        collection = await phase.of("collect", self.collect(tasks))
        scored = await phase.of("score", self.controller.score(collection.episodes, self.step_number))
        episodes = with_turns(scored, self.step_number)
        self._count(episodes)
        return Played(collection, scored, episodes)

    def begin_step(self) -> None:
        """Forget when workers and servers computed in the step before."""
        for group in self.groups:
            group.busy.clear()

    async def free_servers(self) -> None:
        """Release the memory of servers that share an accelerator with the trainers; the next sync wakes them, and wants them asleep."""
        await asyncio.gather(*(group.free_servers() for group in self.policies.values()))

    async def collect(self, tasks: Sequence[Task]) -> Collection:
        """Play every task ``rollout.n`` times with the current weights."""
        self.begin_step()
        self.controller.ledger.begin(self.step_number, self.weights.proven)
        return await self.controller.collect(tasks, self.config.actor_rollout_ref.rollout.n, self.step_number)

    async def gather(self, episodes: Sequence[Episode], phase: PhaseTimer) -> Metrics:
        """Let the credit scheme run further rollouts with the same weights, if it needs evidence beyond the episodes."""
        rollouts = AlternativeRollouts(self.controller, self.step_number, self._trains)
        plays = self.learner.credit.gather(episodes, rollouts)
        if plays is None:
            return {}
        with phase("replay"):
            gathered = await plays
        self.sampled_tokens += gathered.sampled_tokens
        return gathered.metrics

    def _trains(self, turn: Turn) -> bool:
        rounds = self.learner.config.train_rounds
        return turn.agent in self.trained_agents and (rounds is None or turn.round in rounds)

    def batch_of(self, episodes: Sequence[Episode]) -> JointBatch:
        rounds, judging = self.learner.config.train_rounds, self.config.judge
        batch = joint_batch(episodes, list(self.config.agents), self.temperatures, rounds, self.packed)
        self.learner.credit.add_evidence(batch, episodes, judging.no_answer_score or 0.0)
        return batch

    def readable(self, episodes: Sequence[Episode]) -> tuple[list[Episode], JointBatch]:
        """The batch without the episodes that are too long for a critic; these count as failed."""
        batch = self.batch_of(episodes)
        self.critics.read(episodes, batch)
        errors = self.critics.too_long(batch)
        if not errors:
            return list(episodes), batch
        outcomes = [errors.get(index, episode) for index, episode in enumerate(episodes)]
        self.controller.failures_of(outcomes, "reading for the critics", self.step_number)
        kept = [episode for index, episode in enumerate(episodes) if index not in errors]
        batch = self.batch_of(kept)
        self.critics.read(kept, batch)
        return kept, batch

    async def log_probs(self, batch: JointBatch) -> Metrics:
        """``old_log_probs`` of every row; the gap between the trainer's forward pass and the servers is measured."""
        read, outputs, metrics = await self.old_log_probs.write(batch, self.step_number)
        gaps, numbers = token_metrics(read, outputs, batch.agents, self.policy_map.label)
        self.log_prob_gap_max = max([self.log_prob_gap_max, *gaps.values()])
        warn_of_gaps(gaps, self.step_number, {name: self.policies[name].gap_alarm for name in gaps})
        return metrics | numbers

    async def read(
        self, episodes: Sequence[Episode], batch: JointBatch, phase: PhaseTimer
    ) -> tuple[Metrics, dict[PolicyName, Metrics]]:
        """Let policies, references and critics read the rows. Critics, whose pool may be another, read beside the others, except where
        rollout correction drops rows first; ``values`` times what is left of it then."""

        async def by_policies() -> tuple[Metrics, dict[PolicyName, Metrics]]:
            numbers = await phase.of("log_probs", self.log_probs(batch))
            return numbers, await phase.of("ref_log_probs", self.references.compare(batch))

        if self.references.corrects:
            read = await by_policies()
            await phase.of("values", self.critics.value(episodes, batch))
        else:
            read, _ = await phase.rest_of("values", asyncio.gather(by_policies(), self.critics.value(episodes, batch)))
        return read

    def assign_credit(self, batch: JointBatch) -> Metrics:
        """Let the learner write the advantages; warn where groups or agents have nothing to learn from."""
        metrics = self.learner.assign_credit(batch)
        self.degenerate_alarm.look(self.learner.degenerate_share(metrics), self.step_number)
        shares = credit_shares(batch, self.trained_agents)
        self.lazy_agents.look(shares, self.step_number)
        return metrics | share_metrics(shares)

    async def update(self, batch: JointBatch) -> tuple[dict[PolicyName, Metrics], dict[CriticName, Metrics]]:
        """Policies and critics together, critics alone before ``trainer.critic_warmup``; then references that are due."""
        warm = self.step_number >= self.config.trainer.critic_warmup
        work = [self.learner.update(batch, self.policies if warm else {})]
        work += [] if self.learner.fits_first else [self.fit_critics(batch)]
        updates, *fits = await asyncio.gather(*work)
        must_be_finite("policy", updates, self.step_number)
        await self.references.renew(self.step_number)
        return updates, fits[0] if fits else {}

    async def beside_update(self, scored: Sequence[Episode] = ()) -> Metrics:
        """Do the work that nothing in the step waits for, while this process would wait for the workers; returns metrics of the
        episodes."""
        spans = (group.record_server_spans() for group in self.policies.values())
        await asyncio.gather(self.tasks.read_ahead(), *spans)
        # last: by now the workers have their rows
        return episode_metrics(scored, self.config.agents) if scored else {}

    async def fit_critics(self, batch: JointBatch) -> dict[CriticName, Metrics]:
        fits = await self.learner.update_critics(batch, self.critics.groups)
        must_be_finite("critic", fits, self.step_number)
        return fits

    async def sync_weights(self) -> Metrics:
        """Give every policy's weights to its servers, and prove that they have arrived."""
        return await self.method.sync_weights(self)

    def encoded(self, examples: Sequence[Example]) -> tuple[list[Example], int]:
        """Examples with token ids, and the number of turns that are left out because their policy cannot read as many."""
        return without_long_turns([encoded(example, self.encoders) for example in examples], self.limits)

    async def learn(self, examples: Sequence[Example], phase: PhaseTimer, scored: Sequence[Episode] = ()) -> Metrics:
        """Update every policy on its rows of the examples, and references that are due. Without an example nothing is updated.
        ``scored``: the step's episodes, of which metrics are returned too."""
        update = self.method.update(policy_rows(examples, self.packed), self.policies)
        updates, numbers = await phase.of("update", asyncio.gather(update, self.beside_update(scored)))
        must_be_finite("policy", updates, self.step_number)
        await self.references.renew(self.step_number)
        labels = self.policy_map.labels(self.trained_agents)
        return numbers | policy_metrics(updates, labels) | {"method/examples": float(len(examples))}

    async def validate(self) -> Metrics:
        return await self.method.validate(self)

    async def validate_held_out(self) -> Metrics:
        """Each policy's loss on the examples that were held out."""
        losses = await self.method.evaluate(policy_rows(self.held_out, self.packed), self.policies)
        metrics = policy_metrics(losses, self.policy_map.labels(self.trained_agents))
        self.history[self.step_number] = metrics
        return prefixed(self._of_other_data() or "val", metrics)

    async def validate_by_play(self) -> Metrics:
        """Play the validation tasks; the episodes are dumped, the team's numbers are kept for the summary."""
        samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
        episodes = await self.controller.measure(self.validation, samples, self.step_number)
        self.history[self.step_number] = conversation.team_metrics(episodes)
        place = self._of_other_data() or "val"
        if self.config.trainer.validation_data_dir:
            folder = Path(self.config.trainer.validation_data_dir) / self._of_other_data()
            dump.write(episodes, self.step_number, folder)
        self.transcripts.show(self.tracking, episodes, self.step_number)
        return prefixed(f"{place}/team", self.history[self.step_number])

    @property
    def saved(self) -> checkpoint.Trained:
        parts = self.policies, self.critics.groups, self.references, self.learner, self.tasks
        return checkpoint.Trained(self.config, self.folder, *parts)

    async def save(self, wait: bool = True) -> None:
        try:
            await self.dumps.flush()
        finally:
            await checkpoint.save(self.saved, self.state_dict(), self.last_metrics, self.saving)
        if wait:
            await self.saving.flush()

    async def resume(self) -> None:
        """Continue from a checkpoint, where there is one to continue from."""
        self.restarts = restarts_of(self.folder)
        state = await checkpoint.resume(self.saved)
        if state is not None:
            self.load_state_dict(state)

    @property
    def seconds(self) -> float:
        """Seconds up to the checkpoint that the run goes on from, and since then; of a new run, the driver's start-up included."""
        return self.earlier_seconds + process_seconds()

    def state_dict(self) -> dict[str, Any]:
        """The run's numbers between two steps."""
        return {
            "step": self.step_number,
            "seconds": self.seconds,
            "sampled_tokens": self.sampled_tokens,
            "answers_per_episode": [self.answers_per_episode.total, self.answers_per_episode.count],
            "running_means": {name: [mean.total, mean.count] for name, mean in self.learner.running_means.items()},
            "accuracy": self.controller.accuracy.state_dict(),
            "spent_at_endpoints": self.controller.spent() if self.unsettled is None else self.unsettled,
            "log_prob_gap_max": self.log_prob_gap_max,
            "old_log_probs": self.old_log_probs.state_dict(),
            "histories": {data: list(history.items()) for data, history in self.histories.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_number, self.log_prob_gap_max = state["step"], state["log_prob_gap_max"]
        self.earlier_seconds = state["seconds"] - process_seconds()
        self.sampled_tokens = state["sampled_tokens"]
        self.answers_per_episode = RunningMean(*state["answers_per_episode"])
        self.learner.running_means = {name: RunningMean(*mean) for name, mean in state["running_means"].items()}
        self.controller.accuracy.load_state_dict(state["accuracy"])
        self.controller.go_on_from(state["spent_at_endpoints"])
        self.old_log_probs.load_state_dict(state["old_log_probs"])
        self.histories = {data: dict(history) for data, history in state["histories"].items()}

    def summarise(self, baselines: Mapping[str, Metrics] | None = None) -> None:
        """Leave ``summary.json``, with these baselines, and ``curves.png``; where nothing was played, the first and the last
        validation alone."""
        counts = {"steps": self.step_number, "seed": self.config.seed, "restarts": self.restarts}
        history = self.history
        if self.method.offline:
            ends = (
                {"before": history[min(history)], "after": history[max(history)]} if self.held_out and history else {}
            )
            return self._write_summary({"seconds": round(self.seconds, 2)} | counts | ends)
        if not history:
            return
        content = summary.summarise(
            history,
            problems=len(self.validation),
            seconds=self.seconds,
            log_prob_gap_max=self.log_prob_gap_max,
            sampled_tokens=self.sampled_tokens,
            learner=self.learner.summary(),
            baselines=baselines or {},
            **counts,
        )
        self._write_summary(content)
        summary.plot(history, self.report_folder / "curves.png")

    def _write_summary(self, content: Mapping[str, Any]) -> None:
        self.report_folder.mkdir(parents=True, exist_ok=True)
        summary.write_json(content, self.report_folder / "summary.json")


def fingerprint_of(examples: Sequence[Example]) -> str:
    texts = repr([[(turn.observation, turn.text) for side in e.sides for turn in side] for e in examples])
    return hashlib.sha256(texts.encode()).hexdigest()[:12]
