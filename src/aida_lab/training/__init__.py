"""Training one run: the loop, its steps, its optimizers and the environment it runs in."""
