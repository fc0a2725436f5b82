"""Queues and replay between acting and learning."""
