"""torchtitan's container and trainer with Aida, as docs/scaling.md says, under FSDP2 on two CPU processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from aida import Aida
from processes import Refused, together

pytest.importorskip("torchtitan.components.optimizer", reason="needs torchtitan")
pytestmark = pytest.mark.integrations

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def container(model: torch.nn.Module) -> Any:
    """What torchtitan's trainer builds from its configuration."""
    scaling = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(from aida.integrations.*?)```", scaling, flags=re.DOTALL)
    printed, ours = "lr=3e-4, eps=1e-12, clip_norm=1.0", f"lr={tiny.LR}, clip_norm=0.3"
    assert printed in snippet
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet.replace(printed, ours), "docs/scaling.md", "exec"), names)
    return names["optimizer"].build(model_parts=[model])


def by_hand(steps: int = 2 * tiny.STEPS) -> list[Tensor]:
    model = tiny.net()
    optimizer = Aida(model.parameters(), lr=tiny.LR, clip_norm=0.3)
    for _ in range(steps // tiny.STEPS):
        weights = tiny.train(model, [optimizer])
    return weights


def resumed() -> tuple[list[Tensor], float]:
    """Save before the first step, train, save, and go on with another container."""
    from torch.distributed.fsdp import fully_shard

    model = tiny.net()
    fully_shard(model)
    first = container(model)
    steps = [float(value) for key, value in first.state_dict().items() if key.endswith(".step")]
    tiny.train(model, [first])
    saved = first.state_dict()
    first.zero_grad()  # torchtitan loads nothing while a gradient is set
    second = container(model)
    second.load_state_dict(saved)
    tiny.train(model, [second])
    return [p.full_tensor().detach() for p in model.parameters()], max(steps)  # type: ignore[attr-defined]


def test_the_container_of_the_documents_trains_and_resumes_as_one_process() -> None:
    (outcomes,) = together(resumed)
    for outcome in outcomes:
        assert not isinstance(outcome, Refused), outcome
        weights, step = outcome
        assert step == 0  # a checkpoint before the first step does not advance it
        assert tiny.gap(weights, by_hand()) < 1e-6  # torch adds the gradients in another order


STEPS, SAVE_EVERY = 10, 5


def write_texts(folder: Path) -> None:
    """A byte-level tokenizer, and the documents of this project as texts to train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    (folder / "texts").mkdir()
    texts = [json.dumps({"text": path.read_text()}) for path in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "texts" / "train.json").write_text("\n".join(texts))


def losses(folder: Path) -> dict[int, str]:
    """Train on two ranks, from the last checkpoint in the folder if there is one. The loss of each step, as printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(HERE / "titan_on_cpu.py"), "--module=titan_on_cpu", "--config=debugmodel"),
            *(f"--training.steps={STEPS}", "--training.seq_len=64", "--training.local_batch_size=2"),
            *("--training.disable_cuda_graphs", "--comm.trace_buf_size=0", "--debug.seed=1"),
            *("--checkpoint.enable", f"--checkpoint.interval={SAVE_EVERY}", f"--dump_folder={folder / 'out'}"),
            # the default needs a newer torch than 2.13
            *("--parallelism.spmd_backend=full_dtensor", "--metrics.disable_color_printing"),
            *(f"--hf_assets_path={folder}", f"--dataloader.dataset_path={folder / 'texts'}"),
        ],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return {int(step): loss for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", done.stdout)}


@pytest.mark.slow
def test_the_trainer_trains_its_debug_model_and_resumes_with_the_losses_of_the_unbroken_run(tmp_path: Path) -> None:
    write_texts(tmp_path)
    unbroken = losses(tmp_path)
    assert sorted(unbroken) == list(range(1, STEPS + 1))
    assert float(unbroken[STEPS]) < 0.75 * float(unbroken[1])
    shutil.rmtree(tmp_path / "out" / "checkpoint" / f"step-{STEPS}")
    assert losses(tmp_path) == {step: loss for step, loss in unbroken.items() if step > SAVE_EVERY}
