"""The batches of a step and the memory of a rank, estimated before anything is loaded. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marl.config.engines import engine_settings
from marl.config.placement import ranks_of
from marl.config.policies import hosted_policies, longest_row, own_settings, policies_by_agent, ranks_per_server
from marl.config.precision import compute_dtype, dtype_name
from marl.rollout.hf_settings import prefix_bytes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADAPTER_BYTES = BYTES["float32"]
"""Bytes of a number of an adapter under ``sharing=lora``, whatever its base is in."""


@dataclass(frozen=True)
class PolicyBatch:
    """A policy's share of a step."""

    policy: str
    agents: tuple[str, ...]
    turns: int
    """The most turns that its servers answer, trained or not."""
    rows: int
    mini_batches: int
    tokens: int
    """Upper bound of a micro-batch."""
    updates: int
    ranks: int
    servers: int

    @property
    def rows_per_mini_batch(self) -> int:
        return self.rows // self.mini_batches


@dataclass(frozen=True)
class Batch:
    """A step's arithmetic: tasks x samples = episodes, x turns of every agent."""

    tasks: int
    samples: int
    turns_by_agent: Mapping[str, int]
    policies: tuple[PolicyBatch, ...]

    @property
    def episodes(self) -> int:
        return self.tasks * self.samples

    @property
    def turns(self) -> int:
        return self.episodes * sum(self.turns_by_agent.values())


def batch_of(config: Any, turns_by_agent: Mapping[str, int]) -> Batch:
    """The arithmetic of a resolved configuration. ``turns_by_agent``: the most of an episode."""
    policies = tuple(policy_batch(config, name, turns_by_agent) for name in hosted_policies(config))
    return Batch(config.data.train_batch_size, config.actor_rollout_ref.rollout.n, turns_by_agent, policies)


def policy_batch(config: Any, name: str, turns_by_agent: Mapping[str, int]) -> PolicyBatch:
    own, ranks = own_settings(config, name), ranks_of(config, name)
    episodes = config.data.train_batch_size * own.rollout.n
    answered, trained = turns_of(config, name, turns_by_agent)
    rows, mini_batches = episodes * trained, config.data.train_batch_size // own.actor.ppo_mini_batch_size
    rows_per_rank = max(1, -(-rows // (mini_batches * ranks)))
    return PolicyBatch(
        policy=name,
        agents=tuple(agent for agent, names in policies_by_agent(config.agents).items() if name in names),
        turns=episodes * answered,
        rows=rows,
        mini_batches=mini_batches,
        tokens=min(own.actor.ppo_max_token_len_per_gpu, rows_per_rank * longest_row(own.rollout)),
        updates=mini_batches * own.actor.ppo_epochs if rows else 0,
        ranks=ranks,
        servers=ranks // ranks_per_server(own.rollout),
    )


def turns_of(config: Any, policy: str, turns_by_agent: Mapping[str, int]) -> tuple[int, int]:
    """The most turns of an episode that agents take with a policy, and how many of these train it."""
    answered = trained = 0
    taught = config.learner.get("train_rounds")
    for agent, names in policies_by_agent(config.agents).items():
        turns = sum(names[min(r, len(names)) - 1] == policy for r in range(1, turns_by_agent[agent] + 1))
        answered += turns
        if config.agents[agent].trainable:
            trained += turns if taught is None else min(turns, len(taught))
    return answered, trained


@dataclass(frozen=True)
class ModelSize:
    """Model dimensions from config.json that determine memory."""

    parameters: int
    embedding: int
    """Parameters of the embedding, which FSDP keeps gathered with the head."""
    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    """Numbers that a token leaves in a layer's key cache, and as many in its value cache."""
    vocabulary: int
    largest_block: int
    """Parameters of the largest layer, which FSDP gathers at a time."""
    linear_width: int = 0
    """Inputs and outputs of all linear layers but the head: LoRA adds ``rank`` parameters for each."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float = 0
    gradients: float = 0
    moments: float = 0
    reference: float = 0
    gathered: float = 0
    activations: float = 0
    logits: float = 0
    server: float = 0

    @property
    def kept(self) -> float:
        """Memory held between phases; a server's share depends on the phase."""
        return self.weights + self.gradients + self.moments + self.reference

    @property
    def working(self) -> float:
        return self.gathered + self.activations + self.logits


def training_memory(
    size: ModelSize, model: Any, engine: Any, ranks: int, tokens: int, adapter_bytes: int | None = None
) -> Memory:
    """Peak memory of one rank of a trained model: P parameters, R ranks, b bytes per master number, c in computation.

    weights P b / R; gradients P b / R; two moments 2 P b / R (LoRA: of its own parameters alone, in their own precision);
    gathered: the embedding, the head and two layers of P c, and the gradient of one;
    activations, per token and layer: c hidden, and 8 c hidden + 3 c kv + 4 c intermediate for one layer if gradients are
    checkpointed, for every layer if not;
    logits: tokens x vocabulary x (2 c + 8): what the head gave and its gradient, and in full precision the softmax and one
    more copy of the entropy.

    ``model``, ``engine``: the model and FSDP settings of an actor or a critic; ``tokens``: the most of a micro-batch;
    ``adapter_bytes``: of an adapter's numbers, gradients and moments each, None for those of the base's.
    """
    b, c, share = BYTES[dtype_name(engine.model_dtype)], BYTES[compute_dtype(engine)], 1 / ranks
    adapter = model.lora_rank * size.linear_width * (adapter_bytes or b)
    trained = adapter if model.lora_rank else size.parameters * b
    blocks = size.layers * size.largest_block
    root = max(size.parameters - blocks, size.embedding)
    gathered = root + (2 * size.largest_block if engine.reshard_after_forward else blocks)
    in_layer = c * (8 * size.hidden + 3 * size.kv_width + 4 * size.intermediate)
    kept_layers = 1 if model.enable_gradient_checkpointing else size.layers
    return Memory(
        weights=(size.parameters * b + adapter) * share,
        gradients=trained * share,
        moments=2 * trained * share,
        gathered=(gathered + size.largest_block) * c,
        activations=tokens * (size.layers * size.hidden * c + kept_layers * in_layer),
        logits=tokens * size.vocabulary * (2 * c + 8),
    )


def frozen_memory(size: ModelSize, engine: Any, ranks: int) -> float:
    """Bytes of one rank of a frozen copy of the weights."""
    return size.parameters * BYTES[dtype_name(engine.model_dtype)] / ranks


def policy_memory(
    own: Any,
    batch: PolicyBatch,
    size: ModelSize,
    card: float | None,
    reference: bool = False,
    adapter_bytes: int | None = None,
) -> Memory:
    """Memory of one rank of a policy: its trainer, its reference and its share of a server. ``card``: an accelerator's
    bytes, where known."""
    engine, hf = own.actor.fsdp_config, own.rollout.name == "hf"
    server = hf_server_memory(own.rollout, batch, size) if hf else engine_memory(own.rollout, size, card)
    used = training_memory(size, own.model, engine, batch.ranks, batch.tokens, adapter_bytes)
    return replace(used, reference=frozen_memory(size, engine, batch.ranks) if reference else 0.0, server=server)


def hf_server_memory(rollout: Any, batch: PolicyBatch, size: ModelSize) -> float:
    """A rank's share of its servers' copies of the model, the keys and values of their sequences and of conversations that they
    keep, and of the logits."""
    length, width = longest_row(rollout), BYTES[dtype_name(rollout.dtype)]
    token = size.layers * 2 * size.kv_width * width  # bytes of its keys and values
    of_a_step = batch.turns * length * token / max(batch.servers, 1)
    kept = min(prefix_bytes(rollout.get("custom")) * rollout.enable_prefix_caching, of_a_step)
    logits = rollout.max_num_seqs * size.vocabulary * 4 * 4
    server = size.parameters * width + rollout.max_num_seqs * length * token + logits + kept
    return float(server * batch.servers / batch.ranks)


def engine_memory(rollout: Any, size: ModelSize, card: float | None) -> float:
    """One rank of vLLM or SGLang: its share of the card, or its weights and a cache of a given size."""
    cache = engine_settings(rollout).get("kv_cache_memory_bytes")
    return rollout.gpu_memory_utilization * (card or 0.0) if cache is None else engine_weights(rollout, size) + cache


def engine_weights(rollout: Any, size: ModelSize) -> float:
    """Bytes of the weights in one rank of a server."""
    ranks = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    return float(size.parameters * BYTES[dtype_name(rollout.dtype)] / ranks)


def adapter_memory(whole: Memory, own: Any, batch: PolicyBatch, size: ModelSize) -> Memory:
    """Memory of a policy that is one more adapter on a base and server that are counted already. An engine's share of a GPU
    holds its slots too."""
    numbers, rollout = own.model.lora_rank * size.linear_width / batch.ranks, own.rollout
    trained = numbers * ADAPTER_BYTES
    in_share = rollout.name != "hf" and "kv_cache_memory_bytes" not in engine_settings(rollout)
    server = 0.0 if in_share else numbers * BYTES[dtype_name(rollout.dtype)] * batch.servers
    return replace(whole, weights=trained, gradients=trained, moments=2 * trained, server=server)


def critic_memory(critic: Any, ranks: int, size: ModelSize, target: bool = False) -> Memory:
    """Memory of one rank of a critic: a value per token in place of logits; ``target``: plus a copy of its weights."""
    used = training_memory(size, critic.model, critic.fsdp, ranks, critic.ppo_max_token_len_per_gpu)
    return replace(used, logits=0.0, reference=frozen_memory(size, critic.fsdp, ranks) if target else 0.0)


def pool_memory(members: Sequence[Memory], asleep: bool) -> float:
    """The peak of one rank of a pool: all that is kept, the largest working set, and the servers, which may sleep meanwhile."""
    kept, working = sum(member.kept for member in members), max(member.working for member in members)
    server = sum(member.server for member in members)
    return kept + (max(working, server) if asleep else server + working)
