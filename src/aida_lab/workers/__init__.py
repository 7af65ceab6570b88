"""Train a queue of runs, in this process or in a pool of worker processes that share a GPU."""
