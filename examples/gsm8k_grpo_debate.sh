#!/usr/bin/env bash
# GSM8K, two agents debate for two rounds. GRPO: each answer against the other samples of its agent and round (arXiv:2402.03300, 2510.11062), with a KL loss.
# One node of 8 GPUs, both policies on all of them. First: python -m marl.examples.data_preprocess.gsm8k --local_save_dir "$HOME/data/gsm8k"
# Anything can be changed behind the script's name: bash examples/gsm8k_grpo_debate.sh trainer.n_gpus_per_node=1
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}

python -m marl.main \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=256 data.max_prompt_length=2048 data.max_response_length=512 \
  actor_rollout_ref.model.path="$MODEL" \
  agents.agent_0.role="Solve it step by step." agents.agent_1.role="Solve it in another way and check every number." \
  runner=debate runner.num_rounds=2 \
  learner=grpo credit=influence \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  resources.placement=colocated \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.total_epochs=5 trainer.test_freq=5 trainer.save_freq=20 \
  trainer.experiment_name=gsm8k_grpo_debate trainer.logger=[console,file] \
  "$@"
