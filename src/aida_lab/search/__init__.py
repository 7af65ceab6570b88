"""The paper's protocol: every configuration of a search set once, then repetitions at the best.

Needs Optuna, the extra ``search``; no other part of the lab knows of it.
"""
