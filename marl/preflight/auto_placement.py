"""``resources.placement=auto``: pools for a run's policies and critics, found from the memory of their models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
from omegaconf import DictConfig, open_dict

from marl.config.engines import engine_settings
from marl.config.errors import ConfigError
from marl.config.placement import SHARED, PoolSize, Unplaceable, holds_servers, machines_of
from marl.config.policies import own_settings, ranks_per_server
from marl.config.rules import check
from marl.config.schema import Placement, PoolConfig
from marl.preflight import batch_plan
from marl.preflight.checks import CheckedSetup
from marl.preflight.cluster_plan import Cluster
from marl.preflight.compatibility import check_facts
from marl.preflight.memory_plan import Memory, ModelSize, Room, pool_memory, remedy_for_weights, weights_of_rank
from marl.preflight.plan_report import batch_of, card_bytes, critic_memory, critic_size, member_memory
from marl.preflight.shared_gpus import MOST, keeps_own_share, need, reserves, shares_that_fit
from marl.run_setup import Setup


@dataclass(frozen=True)
class Engine:
    """A server that takes a share of a GPU when it starts."""

    rollout: Any
    weights: float
    """Bytes of a rank's weights; 0 if its cache has a size of its own, beside which they need no share."""
    need: float
    """The weight of its claim where several servers share a GPU."""
    share: float
    """Its own share of a GPU, or the total that all servers on that GPU divide."""


@dataclass(frozen=True)
class Member:
    """A policy or a critic."""

    name: str
    is_critic: bool
    memory: Callable[[int], Memory]
    """Memory of one rank, by the number of ranks."""
    work: float
    """Parameters times rows of a step."""
    most_ranks: int
    """Rows of a mini-batch: a further rank would have none."""
    per_server: int = 1
    """Ranks of one of its servers."""
    sleeps: bool = True
    """Its servers free their memory while it is trained."""
    shares: bool = False
    """Its server's memory is that of all servers of a GPU which share it."""
    engine: Engine | None = None
    """Its server, if that reserves a share of its GPUs."""


class Group(tuple[Member, ...]):
    """Members that share a pool."""

    @property
    def work(self) -> float:
        return sum(member.work for member in self)

    def peak(self, ranks: int) -> float:
        policies = [member for member in self if not member.is_critic]
        asleep = bool(policies) and all(member.sleeps for member in policies)
        sharing = max(1, sum(member.shares for member in self))
        memories = [(member.memory(ranks), sharing if member.shares else 1) for member in self]
        return pool_memory([replace(memory, server=memory.server / among) for memory, among in memories], asleep)

    def starved(self, card: float) -> Iterator[tuple[Member, Room]]:
        """Members whose weights do not fit into their server's share of a GPU, as ``shared_gpus`` divides it."""
        engines = [(member, member.engine) for member in self if member.engine is not None]
        fixed = sum(engine.share for member, engine in engines if not member.shares) if len(engines) > 1 else 0.0
        whole = sum(engine.need for member, engine in engines if member.shares)
        for member, engine in engines:
            part = max(0.0, engine.share - fixed) * engine.need / whole if member.shares else engine.share
            if engine.weights > part * card:
                yield member, Room(engine.weights, part * card)

    def sizes(self, cluster: Cluster) -> Iterator[PoolSize]:
        """Sizes whose ranks divide into servers and whose memory suffices, the smallest first."""
        if any(self.starved(cluster.card)):
            return
        most = min(cluster.machines * cluster.gpus, max(member.most_ranks for member in self))
        for ranks in range(1, most + 1):
            nodes = -(-ranks // cluster.gpus)
            size = PoolSize(ranks // nodes, nodes)
            whole = size.ranks == ranks and all(holds_servers(size, member.per_server) for member in self)
            if whole and self.peak(ranks) <= cluster.card:
                yield size


def place(setup: CheckedSetup, cluster: Cluster | None = None) -> CheckedSetup:
    """The run with the pools that were found, in its configuration too. ``cluster``: the run's own where it is None. Raises
    ConfigError where no pools fit."""
    config = setup.config
    cluster = cluster or cluster_of(config)
    groups, sizes = found(members_of(setup, cluster.card), cluster)
    names = names_of(groups)
    with open_dict(config):
        config.resources.placement = Placement.separate
        config.resources.pools = {
            name: PoolConfig(
                size.gpus,
                size.nodes,
                [member.name for member in group if not member.is_critic],
                [member.name for member in group if member.is_critic],
            )
            for name, group, size in zip(names, groups, sizes, strict=True)
        }
    check(config)
    again = Setup.of(config)
    check_facts(again)
    return CheckedSetup(**(vars(setup) | vars(again)))


def cluster_of(config: DictConfig) -> Cluster:
    """The machines of ``trainer.nnodes`` and ``trainer.n_gpus_per_node``, each like this one."""
    trainer = config.trainer
    if trainer.device == "cpu":
        card: float | None = psutil.virtual_memory().total / trainer.n_gpus_per_node
    else:
        card = card_bytes(trainer.device)
    if card is None:
        raise ConfigError(
            f"resources.placement=auto needs to know a GPU's memory, and this machine has no {trainer.device} device; describe the "
            "cluster (marl plan --cluster 2x8x80GB key=value ...), and give the run the resources.pools that this prints"
        )
    return Cluster(trainer.nnodes, trainer.n_gpus_per_node, card)


def members_of(setup: CheckedSetup, card: float) -> list[Member]:
    """The run's policies and critics, each as if it had a pool of its own."""
    config, members, rows = setup.config, [], 0
    for batch in batch_of(setup).policies:
        own, name = own_settings(config, batch.policy), batch.policy
        members.append(
            Member(
                name,
                False,
                partial(_policy_memory, setup, own, batch, card),
                setup.sizes[name].parameters * max(1, batch.rows),
                max(batch.rows_per_mini_batch, ranks_per_server(own.rollout)),
                ranks_per_server(own.rollout),
                own.rollout.free_cache_engine,
                reserves(own.rollout) and not keeps_own_share(config, name),
                engine_of(setup.sizes[name], own.rollout) if reserves(own.rollout) else None,
            )
        )
        rows += batch.rows
    for name in setup.pool_by_critic:
        size = critic_size(config)
        memory = partial(critic_memory, setup, size)
        members.append(Member(name, True, memory, size.parameters * rows, max(1, rows)))
    return members


def engine_of(size: ModelSize, rollout: Any) -> Engine:
    has_own_cache = "kv_cache_memory_bytes" in engine_settings(rollout)
    weights = 0.0 if has_own_cache else weights_of_rank(rollout, size)
    return Engine(rollout, weights, need(size, rollout), float(rollout.gpu_memory_utilization))


def _policy_memory(
    setup: CheckedSetup, own: DictConfig, batch: batch_plan.PolicyBatch, card: float, ranks: int
) -> Memory:
    return member_memory(setup, own, batch_plan.at_ranks(batch, own, ranks), card)


def found(members: Sequence[Member], cluster: Cluster) -> tuple[list[Group], list[PoolSize]]:
    """Begin with a pool for each, and let the two with the least work share one until all have a place; then GPUs that are
    left go to the pool with the most work a rank."""
    groups = [Group([member]) for member in members]
    while True:
        sizes = [next(group.sizes(cluster), None) for group in groups]
        known = [size for size in sizes if size is not None]
        if len(known) == len(groups) and fit(known, cluster):
            return groups, widened(groups, known, cluster)
        if len(groups) == 1 or len(known) < len(groups):
            raise no_place(groups, sizes, cluster)
        first, second = sorted(groups, key=lambda group: group.work)[:2]
        groups = [Group([*first, *second]) if group is first else group for group in groups if group is not second]


def fit(sizes: Sequence[PoolSize], cluster: Cluster) -> bool:
    try:
        machines_of({str(index): size for index, size in enumerate(sizes)}, [cluster.gpus] * cluster.machines)
    except Unplaceable:
        return False
    return True


def widened(groups: Sequence[Group], sizes: Sequence[PoolSize], cluster: Cluster) -> list[PoolSize]:
    """Give the pool with the most work a rank its next size, as long as that has a place."""
    now = list(sizes)
    while True:
        slowest = max(range(len(groups)), key=lambda index: groups[index].work / now[index].ranks)
        wider = next((size for size in groups[slowest].sizes(cluster) if size.ranks > now[slowest].ranks), None)
        if wider is None or not fit([*now[:slowest], wider, *now[slowest + 1 :]], cluster):
            return now
        now[slowest] = wider


def names_of(groups: Sequence[Group]) -> list[str]:
    """A pool is named after its only member."""
    names, shared = [], 0
    for group in groups:
        shared += len(group) > 1
        alone = f"{group[0].name}_critic" if group[0].is_critic else group[0].name
        name = alone if len(group) == 1 else f"{SHARED}_{shared}" if len(groups) > 1 else SHARED
        while name in names:
            name += "_pool"
        names.append(name)
    return names


def no_place(groups: Sequence[Group], sizes: Sequence[PoolSize | None], cluster: Cluster) -> ConfigError:
    """An error that names the members without a place, and the memory they need on all of the cluster's ranks."""
    group = (
        next(group for group, size in zip(groups, sizes, strict=True) if size is None) if None in sizes else groups[0]
    )
    for member, room in group.starved(cluster.card):
        return too_little(group, member, room, cluster)
    ranks, members = cluster.machines * cluster.gpus, ", ".join(member.name for member in group)
    return ConfigError(
        f"resources.placement=auto: {members} need {group.peak(ranks) / 1e9:.1f} GB a rank on all {ranks} ranks, each has "
        f"{cluster.card / 1e9:.1f} GB; expected a size whose ranks divide into servers and fit. Lower "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu or rollout.gpu_memory_utilization, use a smaller model or more GPUs"
    )


def too_little(group: Group, member: Member, room: Room, cluster: Cluster) -> ConfigError:
    """An error that names the server whose share of a GPU does not hold its weights, and settings with which it would."""
    assert member.engine is not None
    engines = {each.name: each.engine.weights for each in group if each.engine is not None}
    if not room.share:
        return ConfigError(
            f"resources.placement=auto: {', '.join(engines)} must share a GPU, and a rollout.gpu_memory_utilization of a policy's own "
            f"leaves nothing for {member.name}'s server; lower or unset it, or use a larger cluster"
        )
    if len(engines) > 1:
        among, shares = f", as {len(engines)} share it,", shares_that_fit(engines, cluster.card)
        remedy = "use a larger cluster" + (f", or give each a share of its own: {shares}" if shares else "")
    else:
        among, gpus, key = "", cluster.machines * cluster.gpus, f"policies.{member.name}"
        remedy = remedy_for_weights(room, member.engine.rollout, cluster.card, MOST, gpus, key)
    return ConfigError(
        f"resources.placement=auto: the weights of {member.name}'s server need {room.needed / 1e9:.1f} GB a rank, but its share of a "
        f"GPU{among} is {room.share / 1e9:.1f} of {cluster.card / 1e9:.1f} GB; {remedy}"
    )
