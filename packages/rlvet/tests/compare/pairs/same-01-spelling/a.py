from datasets import load_dataset
from my_rewards import correct
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="out",
    learning_rate=2e-06,
    lr_scheduler_type="constant",
    weight_decay=0.01,
    max_completion_length=12,
    num_generations=4,
    per_device_train_batch_size=16,
    num_train_epochs=3,
    loss_type="dapo",
    temperature=1.0,
    epsilon=0.2,
    num_iterations=1,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=args,
    reward_funcs=correct,
    train_dataset=load_dataset("gsm8k", split="train"),
)
trainer.train()
