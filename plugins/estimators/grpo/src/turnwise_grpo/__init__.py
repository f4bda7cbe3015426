"""Hooks of turnwise-grpo: group-relative and REINFORCE-family advantage estimators."""
