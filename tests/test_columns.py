"""The tables of the fused kernels: C and Triton number rows and columns as ``columns.py`` lists them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch.nn import Parameter

import aida.backends
from aida import Aida
from aida._step.hyper import from_group
from aida._step.storage import Precision, Rounding, Storage, Stream
from aida.backends import Batch, Origin
from aida.backends.columns import COEFFICIENT_COLUMNS, POINTER_ROWS, PRODUCT_COLUMNS, SCALE_ROWS, VALUE_COLUMNS
from aida.backends.cpu import STORAGE
from aida.backends.library import Job
from aida.backends.tables import value_rows
from aida.rounding import BLOCK
from aida.rule import CLIP_GUARD

FOLDER = Path(aida.backends.__file__).parent
KERNELS, SCALARS, LOW_KERNELS, ROUNDING = (
    (FOLDER / name).read_text() for name in ("kernels.py", "kernel_scalars.py", "low_kernels.py", "kernel_rounding.py")
)


def enums(header: str) -> list[list[str]]:
    text = (FOLDER / header).read_text()
    return [re.findall(r"\w+", body) for body in re.findall(r"enum \{([^}]*)\}", text)]


def constants(text: str = SCALARS) -> dict[str, float]:
    """The lines ``NAME = tl.constexpr(number)`` of the Triton kernels; read as text, for machines without Triton."""
    found = re.findall(r"^(\w+) = tl\.constexpr\((0x\w+|[\d.e-]+)\)", text, re.M)
    return {name: int(number, 16) if number.startswith("0x") else float(number) for name, number in found}


def upper(*names: str) -> list[str]:
    return [name.upper() for name in names]


def test_c_numbers_rows_columns_and_dtypes_in_the_order_of_the_lists() -> None:
    rows, scales, values, storages, states, roundings, streams = enums("_cpu_job.h")
    assert rows == upper(*POINTER_ROWS, "rows")
    assert scales == upper(SCALE_ROWS[0], "rows", *SCALE_ROWS[1:], "scaled_rows")  # the first one is number ROWS
    assert states == [f"{precision.upper()}_STATE" for precision in get_args(Precision)]
    assert roundings == upper(*get_args(Rounding))
    assert streams == upper(*Stream._fields, "stream")
    assert values == upper(*VALUE_COLUMNS, "columns")
    assert storages == upper(*(str(dtype).removeprefix("torch.") for dtype in STORAGE), "storages")
    assert list(STORAGE.values()) == list(range(len(STORAGE)))
    assert enums("_cpu_rule.h") == [upper(*PRODUCT_COLUMNS, "sums")]


def test_triton_numbers_columns_in_the_order_of_the_lists() -> None:
    expected = upper(*VALUE_COLUMNS, "values"), upper(*COEFFICIENT_COLUMNS, "coefficients")
    found = constants()
    for names in expected:
        assert [found[name] for name in names] == list(range(len(names)))
    assert set(found) == {*expected[0], *expected[1], "CLIP_GUARD", "LARGEST"}
    assert found["CLIP_GUARD"] == CLIP_GUARD
    assert found["LARGEST"] == torch.finfo(torch.float32).max


def test_triton_reads_the_rows_of_the_pointer_table_under_their_numbers() -> None:
    letters = {"param": "p", "grad": "g", "exp_avg": "m", "exp_avg_var": "v"}
    scales = dict(zip(aida.backends.columns.SCALE_ROWS, "ab", strict=True))
    rows = (*POINTER_ROWS, *scales)
    for text, names in ((KERNELS, letters), (LOW_KERNELS, letters | scales | {"step": "step"})):
        read = re.findall(r"^    +(\w+) = _pointer\(addresses, (\d),", text, re.MULTILINE)
        assert set(read) == {(names[row], str(rows.index(row))) for row in names}
    compensations = re.findall(r"c = _pointer\(addresses, (\d) if tl.uint8 == STATE else (\d),", LOW_KERNELS)
    assert set(compensations) == {(str(len(rows)), str(len(POINTER_ROWS)))}
    counters = re.findall(
        r"(\w+)_pointer = tl.load\(addresses \+ (\d) \* tensors", (FOLDER / "kernel_scalars.py").read_text()
    )
    assert counters == [(row, str(POINTER_ROWS.index(row))) for row in ("step", "skipped")]


def test_triton_stores_the_inner_products_under_their_numbers() -> None:
    for text in (KERNELS, LOW_KERNELS):
        stored = re.findall(r"tl\.store\(partial \+ (?:(\d) \* )?(chunks \+ )?chunk, (\w\w)\)", text)
        numbers = {product: int(factor) if factor else int(bool(chunks)) for factor, chunks, product in stored}
        assert numbers == {product: number for number, product in enumerate(PRODUCT_COLUMNS)}


def test_triton_has_the_fields_of_a_stream_and_the_constants_of_the_random_words() -> None:
    fields = upper(*aida._step.storage.Stream._fields, "stream")
    assert constants(LOW_KERNELS) == {name: number for number, name in enumerate(fields)}
    found = constants(ROUNDING)
    names = ("ROUNDS", "MULTIPLIER", "WEYL", "STEP", "SHARED", "WORD")
    assert [found[name] for name in names] == [getattr(aida.rounding, f"_{name}") for name in names]
    assert found["SHARE"] == aida.rounding.BLOCK


def test_the_value_table_holds_each_value_in_its_column() -> None:
    group = Aida(
        [Parameter(torch.zeros(1))], lr=0.5, betas=(0.25, 0.75), eps=1e-3, projections=3, xi=1e-7
    ).param_groups[0]
    hyper = replace(from_group(group), clip_norm=4.0, weight_decay=0.125, maximize=True)
    row = dict(zip(VALUE_COLUMNS, value_rows([hyper]), strict=True))
    assert row == {
        "lr": 0.5, "beta1": 0.25, "beta2": 0.75, "eps": 1e-3, "l2": 0.0, "decay": 0.125, "xi": 1e-7,
        "projections": 3.0, "clip_norm": 4.0, "sign": -1.0, "skip": 1.0,
    }  # fmt: skip
    coupled = replace(hyper, decoupled_weight_decay=False)
    row = dict(zip(VALUE_COLUMNS, value_rows([coupled]), strict=True))
    assert (row["l2"], row["decay"]) == (0.125, 0.0)


def test_a_batch_lists_its_tensors_in_the_order_of_the_pointer_table() -> None:
    batch = Batch(*([torch.full((), float(row))] for row in range(len(POINTER_ROWS))))
    assert [float(tensors[0]) for tensors in batch.tensor_lists()] == list(range(len(POINTER_ROWS)))
    assert [batch.params, batch.grads, batch.exp_avgs, batch.exp_avg_vars, batch.steps, batch.skipped] == list(
        batch.tensor_lists()
    )


def test_the_rows_of_scales_and_compensations_follow_if_the_storage_has_them() -> None:
    compensation = "compensation"
    for storage, added in (
        (Storage(), ()),
        (Storage("bfloat16", "stochastic"), ()),
        (Storage("fp8"), SCALE_ROWS),
        (Storage("bfloat16", "kahan"), (compensation,)),
        (Storage("fp8", "kahan"), (*SCALE_ROWS, compensation)),
    ):
        always = [[torch.full((), float(row))] for row in range(len(POINTER_ROWS))]
        more = [[torch.tensor(6.0 + i) if row in added else None] for i, row in enumerate((*SCALE_ROWS, compensation))]
        batch = Batch(*always, *more, origins=[Origin(torch.zeros(()), storage=storage)])
        found = [float(tensors[0]) for tensors in batch.tensor_lists()]
        assert found == [*range(6), *(6.0 + (*SCALE_ROWS, compensation).index(row) for row in added)]


def test_c_has_the_block_of_the_scales() -> None:
    assert re.findall(r"#define BLOCK (\d+)", (FOLDER / "_cpu_job.h").read_text()) == [str(BLOCK)]


def test_the_job_has_the_fields_of_the_c_struct_in_their_order() -> None:
    text = (FOLDER / "_cpu_job.h").read_text()
    (body,) = re.findall(r"struct job \{(.*?)\n\};", text, re.DOTALL)
    declared = re.findall(r"^    (?:const )?(\w+) (\*?)(\w+);", body, re.MULTILINE)
    plain = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    assert [(name, ctypes.c_void_p if star else plain[kind]) for kind, star, name in declared] == list(Job._fields_)
