"""Enough of an engine for one forward pass of a small model, and for a step."""

from types import SimpleNamespace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits

from marl.cluster.workers.policy_worker import of_responses
from marl.platform.engine import CPUEngineWithLMHead, SelectiveEngine
from marl.utils.ragged import jagged

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0, "attn_implementation": "sdpa",
}  # fmt: skip


def engine_of(model, cls=CPUEngineWithLMHead):
    """Enough of an engine for one forward pass outside a process group."""
    engine = cls.__new__(cls)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length = model, False, None
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.model_config = SimpleNamespace(enable_activation_offload=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    return engine


def forward(cls, model, batch):
    engine = engine_of(model, cls if issubclass(cls, SelectiveEngine) else CPUEngineWithLMHead)
    inputs, args = cls.prepare_model_inputs(engine, batch)
    output = model(**inputs, use_cache=False)
    return cls.prepare_model_outputs(engine, output, args, batch, None)


def micro_batch(packed, mask=((1, 1, 0, 0, 1), (1, 1, 1), (0, 0)), prompt_sizes=(7, 4, 3)):
    """Rows with text between two answers, and a silent one."""
    torch.manual_seed(1)
    prompts = [torch.randint(300, (size,)).tolist() for size in prompt_sizes]
    responses = [torch.randint(300, (len(row),)).tolist() for row in mask]
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    rows = {"prompts": prompts, "responses": responses, "input_ids": whole, "loss_mask": mask}
    rows["position_ids"] = [range(len(row)) for row in whole]
    columns = {key: jagged(value, torch.long) for key, value in rows.items()}
    batch = TensorDict({**columns, "temperature": torch.tensor([0.7, 1.0, 1.6])}, batch_size=[3])
    tu.assign_non_tensor(batch, use_remove_padding=packed, calculate_entropy=True)
    return batch


def a_step(cls, model, batch):
    """Log-probs and entropies that count, all gradients, and all parameters after a step."""
    outputs = forward(cls, model, batch)
    mask = batch["loss_mask"].values().bool()
    log_probs, entropy = (of_responses(outputs[key], batch).values()[mask] for key in ("log_probs", "entropy"))
    loss = (torch.linspace(-1, 1, len(log_probs)) * log_probs).mean() - 0.1 * entropy.mean()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in parameters])
    torch.optim.SGD(parameters, lr=0.1).step()
    return log_probs, entropy, gradients, torch.cat([p.detach().flatten() for p in parameters])
