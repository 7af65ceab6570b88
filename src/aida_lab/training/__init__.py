"""Train one run: the loop, its steps, its optimizers and its environment."""
