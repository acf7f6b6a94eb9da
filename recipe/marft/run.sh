#!/usr/bin/env bash
# MARFT: a reasoner hands over to an actor; GAE along the chain, one policy updated after another (arXiv:2504.16129).
# One node of 8 GPUs. First: python -m marl.examples.data_preprocess.gsm8k --local_save_dir "$HOME/data/gsm8k"
# Anything can be changed behind the script's name: bash recipe/marft/run.sh trainer.n_gpus_per_node=1
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-3B-Instruct}

python -m marl.main \
  "hydra.searchpath=[pkg://recipe]" +marft=marft \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=512 \
  actor_rollout_ref.model.path="$MODEL" \
  agents.agent_0.role="You are the reasoner: plan the solution and do not state the answer." \
  agents.agent_1.role="You are the actor: carry the plan out." \
  actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16 \
  actor_rollout_ref.rollout.load_format=safetensors \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_epochs=2 \
  critic.optim.lr=1e-5 critic.ppo_mini_batch_size=64 trainer.critic_warmup=10 \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  resources.placement=colocated \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.total_epochs=3 trainer.test_freq=5 trainer.save_freq=20 \
  trainer.experiment_name=marft "trainer.logger=[console,file]" \
  "$@"
