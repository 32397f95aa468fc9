"""Reinforcement-learning post-training of mixture-of-experts language models on Ray, megatron-core and vLLM."""

__version__ = "0.1.0"
