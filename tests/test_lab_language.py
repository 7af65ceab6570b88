"""Penn Treebank's task: segments, loss, carried state and perplexities."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace
from functools import partial
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from aida.catalog import catalog
from aida_lab.data import sets
from aida_lab.data.text import batchify
from aida_lab.experiments.ptb import EXPERIMENTS
from aida_lab.models.lstm import AwdLstm, WeightDrop
from aida_lab.task import TaskContext, stream
from aida_lab.tasks import language, lstm_evaluation
from aida_lab.tasks.language import LanguageTask, segments
from lab_cases import one_thread_and_a_seed, words
from real_data import needs
from text_runs import assert_resumes_within_an_epoch, context, sgd, steps

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)

VOCABULARY = 60
NOTHING_DROPPED = {f"dropout_{place}": 0.0 for place in ("words", "input", "between", "output", "recurrent")}


def text(length: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return words(length, vocabulary=VOCABULARY)


def tiny_model(weight_drop: WeightDrop = "correct", **rates: float) -> AwdLstm:
    return AwdLstm(2, VOCABULARY, weight_drop, embedding=16, hidden=24, **rates)


def tiny_task(where: TaskContext | None = None, model: AwdLstm | None = None, length: int = 4 * 900) -> LanguageTask:
    measured = {"valid_ppl": batchify(text(700, 1), 10), "test_ppl": batchify(text(310, 2), 1)}
    return LanguageTask(where or context(batch=4), model or tiny_model(), text(length), measured)


# -- segments -----------------------------------------------------------------------------------


def literal_segments(length: int, drawn: list[int]) -> list[tuple[int, int]]:
    """The loop of the public code: starts and lengths, the last cut off at the end of the text."""
    found, i = [], 0
    while i < length - 1 - 1:
        seq_len = drawn[len(found)]
        found.append((i, min(seq_len, length - 1 - i)))
        i += seq_len
    return found


@pytest.mark.parametrize("length", [3, 4, 40, 71, 72, 73, 500, 46_479])
def test_segments_follow_each_other_to_the_end_of_the_text(length: int) -> None:
    for epoch in range(20):
        found = segments(length, stream(0, epoch, "bptt"))
        assert [each[:2] for each in found] == literal_segments(length, [each.drawn for each in found])
        assert all(each.length >= 2 for each in found), "a single word has no temporal penalty"


def test_segment_lengths_have_the_public_distribution() -> None:
    ours = [each.drawn for epoch in range(60) for each in segments(46_479, stream(1, epoch, "bptt"))[:-1]]
    draw = random.Random(0)
    theirs = [max(5, int(draw.gauss(70 if draw.random() < 0.95 else 35, 5))) for _ in range(len(ours))]
    assert len(ours) > 40_000
    for group in (lambda n: n < 52, lambda n: n >= 52):
        mine, public = [n for n in ours if group(n)], [n for n in theirs if group(n)]
        error = stdev(public) / math.sqrt(len(public))
        assert mean(mine) == pytest.approx(mean(public), abs=6 * error)
        assert stdev(mine) == pytest.approx(stdev(public), rel=0.08)
        assert len(mine) == pytest.approx(len(public), abs=6 * math.sqrt(0.05 * 0.95 * len(ours)))


def test_a_segment_is_never_drawn_shorter_than_five_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "BPTT", 8)
    assert min(each.drawn for each in segments(20_000, stream(0, 0, "bptt"))) == 5


def test_segments_depend_on_seed_and_epoch_alone() -> None:
    def kinds(seed: int, epoch: int) -> list[str]:
        task = tiny_task(context(batch=4, seed=seed))
        return [task.kind(i) for i in range(task.begin_epoch(epoch))]

    assert kinds(0, 1) == kinds(0, 1)
    assert kinds(0, 1) != kinds(0, 2)
    assert kinds(0, 1) != kinds(1, 1)


def test_a_batch_is_the_words_of_its_segment_and_those_that_follow_them() -> None:
    task, columns = tiny_task(), batchify(text(3600), 4)
    read = 0
    for index in range(task.begin_epoch(0)):
        inputs, targets = task.batch(index)
        assert inputs.shape == targets.shape == (int(task.kind(index)), 4)
        assert torch.equal(inputs, columns[read : read + len(inputs)])
        assert torch.equal(targets, columns[read + 1 : read + 1 + len(inputs)])
        read += len(inputs)
    assert read >= len(columns) - 2


def test_the_learning_rate_of_a_step_is_in_proportion_to_its_drawn_length() -> None:
    task = tiny_task(length=4 * 230)
    last = task.begin_epoch(0) - 1
    assert [task.lr_factor(i) for i in range(last)] == [int(task.kind(i)) / 70 for i in range(last)]
    # the end of the text cuts the last one short, and its learning rate stays that of its draw
    assert task.lr_factor(last) > int(task.kind(last)) / 70


# -- a step --------------------------------------------------------------------------------------


def test_a_step_descends_cross_entropy_with_both_penalties_and_returns_cross_entropy() -> None:
    task = tiny_task()
    with torch.no_grad():
        task.model.embedding.weight.mul_(8)  # gradients long enough to be clipped
    model = copy.deepcopy(task.model)
    optimizers = sgd(task, lr=0.5)
    task.begin_epoch(0)
    inputs, targets = task.batch(0)

    torch.manual_seed(11)
    returned = task.step(task.kind(0), (inputs, targets), optimizers)

    torch.manual_seed(11)  # the same words, weights and units are dropped
    out = model(inputs, model.initial_state(4))
    count = targets.numel()
    raw = sum(
        out.logits[t, b].exp().sum().log() - out.logits[t, b, targets[t, b]]
        for t in range(len(inputs))
        for b in range(4)
    )
    entropy = raw / count
    activation = (out.dropped**2).sum() / out.dropped.numel()
    slow = sum(((out.raw[t + 1] - out.raw[t]) ** 2).sum() for t in range(len(inputs) - 1))
    loss = entropy + 2 * activation + 1 * slow / out.raw[1:].numel()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients))
    assert norm > 0.3, "else the clip is not seen"
    torch.testing.assert_close(returned, entropy.detach())
    assert loss.item() > entropy.item() + 1e-4
    for before, gradient, after in zip(model.parameters(), gradients, task.model.parameters(), strict=True):
        torch.testing.assert_close(after, before - 0.5 * gradient * 0.25 / norm, rtol=1e-4, atol=1e-6)


def test_the_state_is_carried_from_segment_to_segment() -> None:
    model = tiny_model(**NOTHING_DROPPED)
    task = tiny_task(model=model)
    task.begin_epoch(0)
    losses = steps(task, sgd(task, lr=0.0), 0, 4)
    whole = torch.cat([task.batch(i)[0] for i in range(4)])
    logits = model(whole, model.initial_state(4)).logits
    read = 0
    for index, loss in enumerate(losses):
        _, targets = task.batch(index)
        part = logits[read : read + len(targets)].flatten(0, 1)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(part, targets.flatten()).detach())
        read += len(targets)


def test_an_epoch_starts_from_a_zero_state_in_the_same_tensors() -> None:
    task = tiny_task(model=tiny_model(**NOTHING_DROPPED))
    optimizers = sgd(task, lr=0.0)
    before = [part.data_ptr() for layer in task._state for part in layer]
    task.begin_epoch(0)
    first = steps(task, optimizers, 0, 3)
    assert all(part.any() for layer in task._state for part in layer)
    task.begin_epoch(1)
    assert not any(part.any() for layer in task._state for part in layer)
    assert [part.data_ptr() for layer in task._state for part in layer] == before, "a graph writes into these"
    task.begin_epoch(0)
    assert steps(task, optimizers, 0, 3) == first


def test_the_state_is_detached_between_steps() -> None:
    task = tiny_task()
    task.begin_epoch(0)
    steps(task, sgd(task), 0, 2)
    assert not any(part.requires_grad for layer in task._state for part in layer)


@pytest.mark.parametrize("weight_drop", ["correct", "faithful"])
def test_a_run_resumes_bitwise_within_an_epoch(weight_drop: WeightDrop) -> None:
    assert_resumes_within_an_epoch(partial(lambda: tiny_task(model=tiny_model(weight_drop))))


@pytest.mark.parametrize(("weight_drop", "learns"), [("correct", True), ("faithful", False)])
def test_only_the_correct_variant_trains_recurrent_weights(weight_drop: WeightDrop, learns: bool) -> None:
    task = tiny_task(model=tiny_model(weight_drop))
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    task.begin_epoch(0)
    steps(task, sgd(task), 0, 3)
    for name, p in task.model.named_parameters():
        assert torch.equal(p, before[name]) == (name.endswith("weight_hh") and not learns), name


@pytest.mark.parametrize(("precision", "parameters"), [("bf16", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bfloat16_keeps_the_recurrence_and_its_state_in_float32(precision: str, parameters: torch.dtype) -> None:
    def run(precision: str) -> tuple[LanguageTask, list[float]]:
        torch.manual_seed(0)
        task = tiny_task(context(batch=4, precision=precision))  # type: ignore[arg-type]
        task.begin_epoch(0)
        torch.manual_seed(1)
        return task, [loss.item() for loss in steps(task, sgd(task), 0, 4)]

    half, losses = run(precision)
    _, wanted = run("fp32")
    assert {p.dtype for p in half.model.parameters()} == {parameters}
    assert {part.dtype for layer in half._state for part in layer} == {torch.float32}
    assert losses != wanted, "nothing was computed in bfloat16"
    assert losses == pytest.approx(wanted, rel=5e-3)


def test_compiling_raises_an_error() -> None:
    with pytest.raises(ValueError, match=r"compiled=True.*compiled=False"):
        tiny_task(context(batch=4, compiled=True))


# -- measuring -----------------------------------------------------------------------------------


def literal_perplexity(model: AwdLstm, columns: Tensor) -> float:
    """A word at a time."""
    model = model.eval()
    state, total = model.initial_state(columns.shape[1]), 0.0
    for now, following in itertools.pairwise(columns):
        out = model(now[None], state)
        total -= out.logits[0].log_softmax(-1).gather(1, following[:, None]).double().sum().item()
        state = out.state
    return math.exp(total / columns[1:].numel())


@pytest.mark.parametrize(("at_once", "piece"), [(1, 1024), (30, 1024), (33, 20), (8192, 7), (8192, 1)])
def test_perplexity_equals_sequential_reading(at_once: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_evaluation, "AT_ONCE", at_once)
    monkeypatch.setattr(lstm_evaluation, "CHUNK", piece)
    task = tiny_task()
    with torch.no_grad():
        task.model.embedding.weight.mul_(8)  # else it guesses evenly, whatever it reads
        wanted = {
            "valid_ppl": literal_perplexity(task.model, batchify(text(700, 1), 10)),
            "test_ppl": literal_perplexity(task.model, batchify(text(310, 2), 1)),
        }
    task.model.train()
    assert task.evaluate(False) == pytest.approx(wanted, rel=1e-5)
    assert task.model.training


def widths_read(model: AwdLstm) -> list[int]:
    """Grows by the number of columns of every text that the model reads from now on."""
    widths: list[int] = []
    model.embedding.register_forward_hook(lambda _, given, out: widths.append(given[0].shape[1]))
    return widths


@pytest.mark.parametrize(("forget_bias", "rounds"), [(0.0, range(2, 4)), (30.0, range(10, 11))])
def test_chunks_are_read_until_no_initial_state_changes(
    forget_bias: float, rounds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lstm_evaluation, "CHUNK", 30)
    columns, model = batchify(text(310, 2), 1), tiny_model().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(8)
        for layer in model.layers:  # a forget gate of one remembers for ever; torch's second quarter is its bias
            layer.bias_ih.view(4, -1)[1] += forget_bias
        wanted = literal_perplexity(model, columns)
        calls = widths_read(model)
        assert math.exp(lstm_evaluation.mean_loss(model, columns).item()) == pytest.approx(wanted, rel=1e-5)
    *read, rest = calls
    assert set(read) == {10}, "ten pieces side by side"
    assert len(read) in rounds
    assert rest == 1


def test_a_model_with_nan_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_evaluation, "CHUNK", 30)
    model = tiny_model().eval()
    calls = widths_read(model)
    with torch.no_grad():
        model.layers[0].bias_ih.fill_(math.nan)
        assert math.isnan(lstm_evaluation.mean_loss(model, batchify(text(301, 2), 1)).item())
    assert calls == [10]


def test_evaluation_does_not_change_training() -> None:
    def losses(measured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        task = tiny_task()
        optimizers = sgd(task)
        task.begin_epoch(0)
        torch.manual_seed(1)
        first = steps(task, optimizers, 0, 2)
        if measured:
            task.evaluate(False)
        return first + steps(task, optimizers, 2, 4)

    assert losses(True) == losses(False)


def test_a_limit_applies_to_steps_and_to_evaluation() -> None:
    task = tiny_task(context(batch=4, limit=3))
    assert task.begin_epoch(0) == 3
    columns = batchify(text(310, 2), 1)
    with torch.no_grad():
        task.model.embedding.weight.mul_(8)
        wanted = literal_perplexity(task.model, columns[: 3 * 70 + 1])
        assert literal_perplexity(task.model, columns) != pytest.approx(wanted, rel=1e-4)
    assert task.evaluate(False)["test_ppl"] == pytest.approx(wanted, rel=1e-5)


# -- the experiments -----------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_the_declaration_is_the_papers(experiment) -> None:
    assert experiment.variants == ("correct", "faithful", "faithful-asgd")
    assert experiment.paper_variant == "faithful"
    assert [metric.key for metric in experiment.metrics.values()] == ["valid_ppl", "test_ppl", "test_ppl"]
    assert (experiment.epochs, experiment.batch) == (200, 20)
    factors = [experiment.schedule.factor(epoch, 0, 200) for epoch in range(200)]
    assert factors == pytest.approx([1.0] * 100 + [0.1] * 45 + [0.01] * 55)
    assert set(experiment.paper) == {"aida-k1", "aida-k2"} | (set(catalog()) & set(experiment.paper))
    assert len(experiment.paper) == 11
    best = min(experiment.paper, key=lambda method: experiment.paper[method].mean)
    assert best == "aida-k2"
    layers = int(experiment.name[4])
    assert sum(p.numel() for p in AwdLstm(layers, 10_000).parameters()) == experiment.parameters


def test_papers_adabelief_figures_are_the_minima_of_its_public_test_curves() -> None:
    assert [each.paper["adabelief"].mean for each in EXPERIMENTS] == [84.21, 66.29, 61.23]


@needs(sets.PTB)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["correct", "faithful", "faithful-asgd"])
def test_a_short_run_on_the_real_text(variant: str) -> None:
    task = EXPERIMENTS[0].task(context(batch=20, limit=6, variant=variant))
    assert isinstance(task, LanguageTask)
    assert sum(p.numel() for p in task.model.parameters()) == 5_293_200
    assert [len(task._measured[name][0]) for name in ("valid_ppl", "test_ppl")] == [
        10,
        10 if variant == "correct" else 1,
    ]
    before = task.evaluate(False)
    assert all(value == pytest.approx(10_000, rel=0.05) for value in before.values()), "an even guess"
    optimizers = {"model": torch.optim.Adam(task.model.parameters(), lr=0.01)}
    assert task.begin_epoch(0) == 6
    losses = [loss.item() for loss in steps(task, optimizers, 0, 6)]
    assert losses[0] == pytest.approx(math.log(10_000), abs=0.05)
    assert losses[-1] < losses[0] - 0.3
    after = task.evaluate(True)
    assert all(after[name] < 0.8 * before[name] for name in before)


@needs(sets.PTB)
def test_an_epoch_of_the_real_text_has_its_steps() -> None:
    where = context(batch=20, variant="correct")
    task = EXPERIMENTS[0].task(replace(where, spec=replace(where.spec, limit=None)))
    assert isinstance(task, LanguageTask)
    assert task._train.shape == (46_479, 20)
    assert {name: tuple(columns.shape) for name, columns in task._measured.items()} == {
        "valid_ppl": (7_376, 10),
        "test_ppl": (8_243, 10),
    }
    assert 670 < task.begin_epoch(0) < 705
