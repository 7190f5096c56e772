"""Training: the objectives (the paper's equations), one loop, checkpoints.

The public calls are `namm.train_map`, `namm.finetune_map` and `namm.train_model`.
"""
