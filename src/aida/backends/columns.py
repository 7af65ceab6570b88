"""Rows and columns of the tables that the fused kernels read: one list for Python, C and Triton.

C (``_cpu_job.h``, ``_cpu_rule.h``) and Triton (``kernel_scalars.py``) number them with constants of the same
names. ``tests/test_columns.py`` checks those constants against these lists.
"""

from __future__ import annotations

from aida.rule import Gram

#: Rows of the pointer table, with one column per tensor.
POINTER_ROWS = ("param", "grad", "exp_avg", "exp_avg_var", "step", "skipped")

#: The rows that follow with 8-bit state. With Kahan sums the last row is the compensation.
SCALE_ROWS = ("exp_avg_scales", "exp_avg_var_scales")

#: Columns of the value table, with one row per run of the batch.
VALUE_COLUMNS = (
    "lr", "beta1", "beta2", "eps", "l2", "decay", "xi", "projections", "clip_norm", "sign", "skip",
)  # fmt: skip

#: Inner products per tensor. Without clipping only the first three are needed.
PRODUCT_COLUMNS = Gram._fields

#: Columns of the coefficients that the Triton kernels compute per tensor.
COEFFICIENT_COLUMNS = ("change", "grad_scale", "residual_m", "residual_g", "stepsize", "shrink")
