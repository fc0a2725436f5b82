"""Text environments: tasks, their prompts and rewards, and the loop that turns prompts into scored groups."""
