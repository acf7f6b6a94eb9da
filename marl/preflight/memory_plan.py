"""Estimated memory of every rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from marl.config.engines import engine_settings
from marl.config.policies import longest_row
from marl.config.precision import compute_dtype, dtype_name
from marl.preflight.batch_plan import PolicyBatch
from marl.rollout.hf_settings import prefix_bytes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADAPTER_BYTES = BYTES["float32"]
"""Bytes of a number of an adapter under ``sharing=lora``, whatever its base is in."""


@dataclass(frozen=True)
class ModelSize:
    """Model dimensions from config.json that determine memory and work."""

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
class Training:
    """Training settings of a policy that determine memory."""

    ranks: int
    tokens: int
    """The most tokens of a micro-batch."""
    master_bytes: int = 4
    """Bytes of a weight between steps, of its gradient and of each of its two moments (``fsdp_config.model_dtype``)."""
    compute_bytes: int = 2
    """Bytes of a weight or an activation while computing (``fsdp_config.mixed_precision.param_dtype``)."""
    checkpointing: bool = True
    reshard: bool = True
    lora_rank: int = 0
    adapter_bytes: int | None = None
    """Bytes of an adapter's numbers, gradients and moments; None: those of the base's."""


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


Members = dict[str, list[tuple[str, Memory]]]
"""The policies and critics of each pool, each with the memory of one of its ranks."""


def training_memory(size: ModelSize, training: Training) -> Memory:
    """Peak memory of one rank of a trained model: P parameters, R ranks, b bytes per master number, c in computation.

    weights P b / R; gradients P b / R; two moments 2 P b / R (LoRA: of its own parameters alone, in their own precision);
    gathered: the embedding, the head and two layers of P c, and the gradient of one;
    activations, per token and layer: c hidden, and 8 c hidden + 3 c kv + 4 c intermediate for one layer if gradients are
    checkpointed, for every layer if not;
    logits: tokens x vocabulary x (2 c + 8): what the head gave and its gradient, and in full precision the softmax and one
    more copy of the entropy.
    """
    b, c, share = training.master_bytes, training.compute_bytes, 1 / training.ranks
    adapter = training.lora_rank * size.linear_width * (training.adapter_bytes or b)
    trained = adapter if training.lora_rank else size.parameters * b
    blocks = size.layers * size.largest_block
    root = max(size.parameters - blocks, size.embedding)
    gathered = root + (2 * size.largest_block if training.reshard else blocks)
    in_layer = c * (8 * size.hidden + 3 * size.kv_width + 4 * size.intermediate)
    kept_layers = 1 if training.checkpointing else size.layers
    return Memory(
        weights=(size.parameters * b + adapter) * share,
        gradients=trained * share,
        moments=2 * trained * share,
        gathered=(gathered + size.largest_block) * c,
        activations=training.tokens * (size.layers * size.hidden * c + kept_layers * in_layer),
        logits=training.tokens * size.vocabulary * (2 * c + 8),
    )


def reference_memory(size: ModelSize, training: Training) -> float:
    """A rank's share of a frozen copy; verl keeps it in host memory where there is an accelerator."""
    return size.parameters * training.master_bytes / training.ranks


def hf_server_memory(size: ModelSize, width: int, sequences: int, length: int) -> float:
    """The copy of the ``hf`` server in numbers of ``width`` bytes, the keys and values of its sequences, and their logits."""
    cache = sequences * length * token_bytes(size, width)
    return size.parameters * width + cache + sequences * size.vocabulary * 4 * 4


def token_bytes(size: ModelSize, width: int) -> int:
    """The keys and values of one token, of numbers of ``width`` bytes."""
    return size.layers * 2 * size.kv_width * width


def pool_memory(members: Sequence[Memory], asleep: bool) -> float:
    """The peak of one rank of a pool: all that is kept, the largest working set, and the servers, which may sleep meanwhile."""
    kept, working = sum(member.kept for member in members), max(member.working for member in members)
    server = sum(member.server for member in members)
    return kept + (max(working, server) if asleep else server + working)


def training_of(own: Any, batch: PolicyBatch, adapter_bytes: int | None = None) -> Training:
    return Training(
        ranks=batch.ranks,
        tokens=batch.tokens,
        master_bytes=BYTES[dtype_name(own.actor.fsdp_config.model_dtype)],
        compute_bytes=BYTES[compute_dtype(own.actor.fsdp_config)],
        checkpointing=own.model.enable_gradient_checkpointing,
        reshard=own.actor.fsdp_config.reshard_after_forward,
        lora_rank=own.model.lora_rank,
        adapter_bytes=adapter_bytes,
    )


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
    training, rollout = training_of(own, batch, adapter_bytes), own.rollout
    memory = training_memory(size, training)
    if reference:
        memory = replace(memory, reference=reference_memory(size, training))
    if rollout.name == "hf":
        length, width = longest_row(rollout), BYTES[dtype_name(rollout.dtype)]
        said = batch.turns * length * token_bytes(size, width) / max(batch.servers, 1)  # at most, in a step
        kept = min(prefix_bytes(rollout.get("custom")) * rollout.enable_prefix_caching, said)
        server = hf_server_memory(size, width, rollout.max_num_seqs, length) + kept
        return replace(memory, server=server * batch.servers / batch.ranks)
    return replace(memory, server=engine_memory(rollout, size, card))


def engine_memory(rollout: Any, size: ModelSize, card: float | None) -> float:
    """One rank of vLLM or SGLang: its share of the card, or its weights and a cache of a given size."""
    cache = engine_settings(rollout).get("kv_cache_memory_bytes")
    return rollout.gpu_memory_utilization * (card or 0.0) if cache is None else engine_weights(rollout, size) + cache


def engine_weights(rollout: Any, size: ModelSize) -> float:
    """Bytes of the weights in one rank of a server."""
    ranks = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    return size.parameters * BYTES[dtype_name(rollout.dtype)] / ranks


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
    training = Training(
        ranks=ranks,
        tokens=critic.ppo_max_token_len_per_gpu,
        master_bytes=BYTES[dtype_name(critic.fsdp.model_dtype)],
        compute_bytes=BYTES[compute_dtype(critic.fsdp)],
        checkpointing=critic.model.enable_gradient_checkpointing,
        reshard=critic.fsdp.reshard_after_forward,
        lora_rank=critic.model.lora_rank,
    )
    copy = reference_memory(size, training) if target else 0.0
    return replace(training_memory(size, training), logits=0.0, reference=copy)
