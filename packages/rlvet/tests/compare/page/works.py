from datasets import load_dataset
from my_rewards import correct
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out",
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    num_generations=8,
    per_device_train_batch_size=16,
    steps_per_generation=8,
    gradient_accumulation_steps=2,
    max_completion_length=2048,
    epsilon_high=0.28,
    beta=0.001,
    temperature=0.9,
    loss_type="grpo",
    use_vllm=True,
    bf16=True,
)
trainer = GRPOTrainer("Qwen/Qwen2.5-7B", correct, args, load_dataset("openai/gsm8k", "main", split="train"))
trainer.train()
