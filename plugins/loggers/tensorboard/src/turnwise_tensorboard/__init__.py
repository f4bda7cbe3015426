"""Hooks of turnwise-tensorboard: metrics for TensorBoard."""
