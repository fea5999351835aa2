"""Distributed training of DGL models: change one flag, keep the model and the loop."""
