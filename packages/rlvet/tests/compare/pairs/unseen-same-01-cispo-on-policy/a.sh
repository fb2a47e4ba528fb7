#!/bin/bash
set -e

trl grpo --num_processes 1 \
    --model_name_or_path Qwen/Qwen2.5-0.5B \
    --dataset_name gsm8k \
    --learning_rate 2e-6 \
    --lr_scheduler_type constant \
    --weight_decay 0.01 \
    --max_completion_length 12 \
    --num_generations 4 \
    --per_device_train_batch_size 16 \
    --num_train_epochs 3 \
    --loss_type cispo \
    --epsilon_high 2.0
