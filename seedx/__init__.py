"""seedx: a JAX/TPU-first reinforcement-learning runtime."""
