"""Training: objectives (the paper's equations), one loop, checkpoints. Public calls: `namm.train_map`, `namm.finetune_map`."""
