"""Enough of an engine for one forward pass of a small model."""

from types import SimpleNamespace

from verl.utils.torch_functional import entropy_from_logits

from marl.platform.engine import CPUEngineWithLMHead

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0, "attn_implementation": "sdpa",
}  # fmt: skip


def engine_of(model):
    """Enough of an engine for one forward pass outside a process group."""
    engine = CPUEngineWithLMHead.__new__(CPUEngineWithLMHead)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length = model, False, None
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    return engine


def forward(cls, model, batch):
    engine = engine_of(model)
    inputs, args = cls.prepare_model_inputs(engine, batch)
    output = model(**inputs, use_cache=False)
    return cls.prepare_model_outputs(engine, output, args, batch, None)
