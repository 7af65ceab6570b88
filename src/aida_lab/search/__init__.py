"""The paper's search: measure every configuration of a search set once, then repeat the best with other seeds.

Needs Optuna (the extra ``search``). No other part of the lab imports it.
"""
