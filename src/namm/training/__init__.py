"""Training: the objectives (the paper's equations), one loop, checkpoints.

The public calls are `namm.train_map` and `namm.finetune_map`.
"""
