"""Several runs, some at once: a queue, processes that outlive a run, a GPU that they share."""
