#!/usr/bin/env bash
# Multi-agent GRPO: four instruction variants of one model, whose answers to a task are one group.
# One node of 8 GPUs. First: python -m marl.examples.data_preprocess.gsm8k --local_save_dir "$HOME/data/gsm8k"
# Anything can be changed behind the script's name: bash recipe/multi_agent_grpo/run.sh trainer.n_gpus_per_node=1
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}

python -m marl.main \
  "hydra.searchpath=[pkg://recipe]" +multi_agent_grpo=variants \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.shuffle=true data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=256 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.n=2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  resources.placement=colocated \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.total_epochs=5 trainer.test_freq=5 trainer.save_freq=20 \
  trainer.experiment_name=multi_agent_grpo "trainer.logger=[console,file]" \
  "$@"
