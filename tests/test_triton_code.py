"""What the Triton compiler makes of the kernels, read without a GPU.

A hint that the compiler overlooks costs no test its result, only everybody their time; and what the dependent launch
relies on is an order of instructions.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aida.backends import kernels  # noqa: E402
from aida.backends.plans import APPLY_CHUNK, APPLY_WARPS, COLLECT_BLOCK, REDUCE_CHUNK, REDUCE_WARPS  # noqa: E402

#: Types of arguments that are not known when the kernels are compiled.
TYPES = {
    **dict.fromkeys(("addresses", "sizes", "lr_addresses", "lr_kinds"), "*i64"),
    **dict.fromkeys(("run_of", "tensor_of", "first_chunk", "arrivals", "finite"), "*i32"),
    **dict.fromkeys(("tensors", "chunks"), "i32"),
    **dict.fromkeys(("values", "coefficients", "sums", "squared", "squared_norm", "partial"), "*fp64"),
}
NAMES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}

VECTOR_LOAD = re.compile(r"ld\.global\S*\.v4\.b32")
VECTOR_STORE = re.compile(r"st\.global\S*\.v4\.b32")


@cache
def compiled(
    name: str,
    dtype: str = "fp32",
    *,
    aligned: bool = True,
    clips: bool = False,
    scales: bool = False,
    generation: int | str = 90,
) -> str:
    """Assembly of a kernel as a training with L2 weight decay launches it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    state = "fp64" if dtype == "fp64" else "fp32"
    types = dict(TYPES)
    if scales:
        types |= {"amp_scale": "*fp32", "found_inf": "*fp32"}
    given = getattr(triton.language, NAMES[dtype])
    known: dict[str, Any] = {
        **dict.fromkeys(("amp_scale", "found_inf")),
        **dict.fromkeys(("PARAM", "GRAD"), given),
        **dict.fromkeys(("HAS_AMP", "HAS_FOUND_INF"), scales),
        "STATE": getattr(triton.language, NAMES[state]),
        "ALIGNED": aligned,
        "HAS_L2": True,
        "CLIPS": clips,
        "NEW": not clips and state == "fp64",
        "EIGHT_BIT": False,
        "SINGLE": state == "fp32",
        "MERGED": not clips,
        "PDL": not clips and generation == 90,
        "BLOCK": COLLECT_BLOCK,
        "CHUNK": REDUCE_CHUNK if name == "reduce_kernel" else APPLY_CHUNK,
    }
    kernel = getattr(kernels, name)
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    constants = {(i,): known[arg] for i, arg in enumerate(kernel.arg_names) if arg not in types}
    options: dict[str, Any] = {"num_warps": {"reduce_kernel": REDUCE_WARPS, "apply_kernel": APPLY_WARPS}.get(name, 4)}
    if name == "apply_kernel" and known["PDL"]:
        options["launch_pdl"] = True
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    amd = isinstance(generation, str)
    target = GPUTarget("hip", generation, 64) if amd else GPUTarget("cuda", generation, 32)
    text: str = triton.compile(source, target=target, options=options).asm["amdgcn" if amd else "ptx"]
    return text


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
