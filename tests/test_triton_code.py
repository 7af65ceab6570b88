"""What the Triton compiler makes of the kernels, read without a GPU.

A hint that the compiler overlooks costs no test its result, only everybody their time; and what the dependent launch
relies on is an order of instructions.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aida.backends import kernels, low_kernels  # noqa: E402
from aida.backends.plans import (  # noqa: E402
    APPLY_CHUNK,
    APPLY_WARPS,
    COLLECT_BLOCK,
    LOW_APPLY_CHUNK,
    LOW_APPLY_TILE,
    LOW_APPLY_WARPS,
    LOW_REDUCE_CHUNK,
    LOW_REDUCE_TILE,
    LOW_REDUCE_WARPS,
    REDUCE_CHUNK,
    REDUCE_WARPS,
    width,
)

#: Types of arguments that are not known when the kernels are compiled.
TYPES = {
    **dict.fromkeys(("addresses", "sizes", "lr_addresses", "lr_kinds", "streams"), "*i64"),
    **dict.fromkeys(("run_of", "tensor_of", "first_chunk", "arrivals", "finite"), "*i32"),
    **dict.fromkeys(("tensors", "chunks"), "i32"),
    **dict.fromkeys(("values", "coefficients", "sums", "squared", "squared_norm", "partial"), "*fp64"),
}
NAMES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}
WARPS = {
    "reduce_kernel": REDUCE_WARPS, "apply_kernel": APPLY_WARPS,
    "low_reduce_kernel": LOW_REDUCE_WARPS, "low_apply_kernel": LOW_APPLY_WARPS,
}  # fmt: skip
CHUNKS = {
    "reduce_kernel": REDUCE_CHUNK, "apply_kernel": APPLY_CHUNK,
    "low_reduce_kernel": LOW_REDUCE_CHUNK, "low_apply_kernel": LOW_APPLY_CHUNK,
}  # fmt: skip
STORED = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp8": "uint8"}

VECTOR_LOAD = re.compile(r"ld\.global\S*\.v4\.b32")
VECTOR_STORE = re.compile(r"st\.global\S*\.v4\.b32")


def compiled(*args: Any, **options: Any) -> str:
    """Assembly of a kernel."""
    return binary(*args, **options)["amdgcn" if isinstance(options.get("generation"), str) else "ptx"]  # type: ignore[no-any-return]


@cache
def binary(
    name: str,
    dtype: str = "fp32",
    *,
    aligned: bool = True,
    clips: bool = False,
    scales: bool = False,
    generation: int | str = 90,
    state: str = "",
    rounding: str = "nearest",
    strided: bool = False,
    wide: bool = False,
) -> Any:
    """A kernel as a training with L2 weight decay launches it, in every stage of the compiler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    state = state or ("fp64" if dtype == "fp64" else "fp32")
    types = dict(TYPES)
    if scales:
        types |= {"amp_scale": "*fp32", "found_inf": "*fp32"}
    given = getattr(triton.language, NAMES[dtype])
    known: dict[str, Any] = {
        **dict.fromkeys(("amp_scale", "found_inf")),
        **dict.fromkeys(("PARAM", "GRAD"), given),
        **dict.fromkeys(("HAS_AMP", "HAS_FOUND_INF"), scales),
        "STATE": getattr(triton.language, STORED[state]),
        "ALIGNED": aligned,
        "WIDTH": width([getattr(torch, NAMES[dtype]), getattr(torch, STORED[state])]) if aligned else 1,
        "ROUNDING": rounding,
        "KAHAN": rounding == "kahan",
        "STRIDED": strided,
        "WIDE": wide,
        "NATIVE": generation == 90,
        "HAS_L2": True,
        "CLIPS": clips,
        "NEW": not clips and state == "fp64",
        "EIGHT_BIT": state == "fp8",
        "SINGLE": state == "fp32",
        "MERGED": not clips,
        "PDL": not clips and generation == 90,
        "BLOCK": COLLECT_BLOCK,
        "CHUNK": CHUNKS.get(name),
        "TILE": LOW_REDUCE_TILE if name == "low_reduce_kernel" else LOW_APPLY_TILE,
    }
    kernel = getattr(low_kernels if name.startswith("low") else kernels, name)
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    constants = {(i,): known[arg] for i, arg in enumerate(kernel.arg_names) if arg not in types}
    options: dict[str, Any] = {"num_warps": WARPS.get(name, 4)}
    if name.endswith("apply_kernel") and known["PDL"]:
        options["launch_pdl"] = True
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    amd = isinstance(generation, str)
    target = GPUTarget("hip", generation, 64) if amd else GPUTarget("cuda", generation, 32)
    return triton.compile(source, target=target, options=options).asm


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90, "gfx942"])
@pytest.mark.parametrize("scales", [False, True], ids=["", "amp"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("dtype", NAMES)
def test_every_kernel_compiles_for_every_kind_of_batch(
    dtype: str, clips: bool, scales: bool, generation: int | str
) -> None:
    names = ["reduce_kernel", "apply_kernel", *(["collect_kernel", "coefficients_kernel"] if clips else [])]
    for name in names:
        assert name in compiled(name, dtype, clips=clips, scales=scales, generation=generation)


def test_whole_chunks_are_moved_16_bytes_at_a_time() -> None:
    per_thread = REDUCE_CHUNK // (32 * REDUCE_WARPS) // 4
    assert len(VECTOR_LOAD.findall(compiled("reduce_kernel"))) == 3 * per_thread, "m, g and p"
    per_thread = APPLY_CHUNK // (32 * APPLY_WARPS) // 4
    assert len(VECTOR_LOAD.findall(compiled("apply_kernel"))) == 4 * per_thread, "g, m, p and v"
    assert len(VECTOR_STORE.findall(compiled("apply_kernel"))) == 3 * per_thread, "p, m and v"


@pytest.mark.parametrize("name", ["reduce_kernel", "apply_kernel"])
def test_tensors_that_lie_anywhere_are_moved_element_by_element(name: str) -> None:
    assert ".v4." not in compiled(name, aligned=False)
    assert ".v2." not in compiled(name, aligned=False)


def test_what_apply_reads_before_the_reduction_ended_passes_the_first_cache_by() -> None:
    """That it was emptied since others wrote is promised only behind the wait."""
    text = compiled("apply_kernel")
    before, *behind = text.split("griddepcontrol.wait")
    assert len(behind) == 2, "whole chunks, and a tensor's last"
    assert "st.global" not in before
    assert set(re.findall(r"ld\.global\.(?!cg)\S+", before)) == set()
    # coefficients and values are float64; all 32-bit words are of tensors and maps
    assert set(re.findall(r"ld\.global\S*", "".join(behind))) == {"ld.global.b64", "ld.global.cg.b32"}


# -- state in fewer bits, and parameters rounded otherwise -----------------------------------------------

LOW_BATCHES: list[dict[str, Any]] = [
    {"state": "fp8", "dtype": "bf16", "rounding": "stochastic"},
    {"state": "fp8", "dtype": "fp32"},
    {"state": "bf16", "dtype": "bf16", "rounding": "kahan"},
    {"state": "fp32", "dtype": "fp16", "rounding": "stochastic"},
]
EACH_LOW_BATCH = pytest.mark.parametrize("batch", LOW_BATCHES, ids=lambda batch: "-".join(batch.values()))


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, "gfx942"])
@pytest.mark.parametrize("batch", [LOW_BATCHES[0], LOW_BATCHES[2]], ids=["fp8-bf16-stochastic", "bf16-bf16-kahan"])
def test_the_low_kernels_compile_for_other_devices(batch: dict[str, Any], generation: int | str) -> None:
    for name in ("low_reduce_kernel", "low_apply_kernel"):
        assert name in compiled(name, **batch, strided=True, wide=True, clips=True, generation=generation)


@EACH_LOW_BATCH
def test_whole_chunks_of_low_tensors_are_moved_in_wide_accesses(batch: dict[str, Any]) -> None:
    """The widest dtype 16 bytes at a time, and the same number of elements of the others."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    p, state = sizes[batch["dtype"]], sizes[batch["state"]]
    added = [p] if batch.get("rounding") == "kahan" else []
    elements = 16 // max(p, state)
    for name, loads, stores, per_thread in (
        ("low_reduce_kernel", [p, p, state, *added], [], LOW_REDUCE_TILE // (32 * LOW_REDUCE_WARPS)),
        (
            "low_apply_kernel",
            [p, p, state, state, *added],
            [p, state, state, *added],
            LOW_APPLY_TILE // (32 * LOW_APPLY_WARPS),
        ),
    ):
        text = compiled(name, **batch)
        for kind, moved in (("ld", loads), ("st", stores)):
            for words in {elements * size // 4 for size in moved} - {1}:  # single words are also counters and maps
                found = re.findall(rf"\b{kind}\.global\S*\.v{words}\.b32", text)
                wanted = sum(elements * size // 4 == words for size in moved)
                assert len(found) == wanted * per_thread // elements, (name, kind, words)


@EACH_LOW_BATCH
def test_the_low_kernels_keep_all_values_in_registers(batch: dict[str, Any], tmp_path: Path) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    for name in ("low_reduce_kernel", "low_apply_kernel"):
        file = tmp_path / f"{name}.cubin"
        file.write_bytes(binary(name, **batch)["cubin"])
        usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage
        assert "LOCAL:0 " in usage
    # elements stay with their thread: only the few scales pass through shared memory
    assert compiled("low_apply_kernel", **batch).count("st.shared") <= 4


def test_low_apply_moves_nothing_before_the_reduction_ended() -> None:
    before, *behind = compiled("low_apply_kernel", **LOW_BATCHES[0]).split("griddepcontrol.wait")
    assert len(behind) == 1
    assert not re.findall(r"\b(?:ld|st)\.global", before)
