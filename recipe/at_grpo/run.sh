#!/usr/bin/env bash
# AT-GRPO: several answers of every agent at every level, compared agent by agent and level by level (arXiv:2510.11062).
# One node of 8 GPUs. First: python -m marl.examples.data_preprocess.gsm8k --local_save_dir "$HOME/data/gsm8k"
# Anything can be changed behind the script's name: bash recipe/at_grpo/run.sh trainer.n_gpus_per_node=1
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen3-1.7B}

python -m marl.main \
  "hydra.searchpath=[pkg://recipe]" +at_grpo=at_grpo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  agents.agent_0.role="Solve it step by step." \
  agents.agent_1.role="Look for mistakes and solve it." \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.rollout.n=1 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  resources.placement=colocated \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.total_epochs=3 trainer.test_freq=5 trainer.save_freq=20 \
  trainer.experiment_name=at_grpo "trainer.logger=[console,file]" \
  "$@"
