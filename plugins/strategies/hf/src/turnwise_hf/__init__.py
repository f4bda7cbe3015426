"""Hooks of turnwise-hf: the model source and inference with Hugging Face transformers."""
