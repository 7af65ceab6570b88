"""Numerical checks of the paper's theory: the effect of eps, and Theorem 1.

``epsilon`` explains what eps does, ``bounds`` the theorem and the gap in its proof. ``study.run()`` measures
everything, ``figure.draw_to`` draws it, and docs/theory.md reports the results.
"""
