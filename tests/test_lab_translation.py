"""Multi30k's task: sentences side by side, smoothed labels, the summed loss, teacher-forced accuracy."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aida.catalog import catalog
from aida_lab.data import sets
from aida_lab.data.translation import PAD, Pairs, Sentences
from aida_lab.experiments.multi30k import EXPERIMENTS
from aida_lab.models.transformer import Transformer
from aida_lab.task import TaskContext
from aida_lab.tasks import translation
from aida_lab.tasks.translation import Corpus, Place, TranslationTask, first_fit, room, smoothed_loss
from lab_cases import one_thread_and_a_seed, tiny_transformer, words
from real_data import needs
from text_runs import assert_resumes_within_an_epoch, context, pairs, sgd, steps

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)


def tiny_task(where: TaskContext | None = None, dropout: float = 0.1, count: int = 50) -> TranslationTask:
    train, valid = pairs(count), pairs(23, seed=1)
    torch.manual_seed(4)
    return TranslationTask(where or context(batch=8), tiny_transformer(dropout), train, valid)


# -- packing -------------------------------------------------------------------------------------


def lengths_of(
    given: Sequence[tuple[int, int]], places: Sequence[Place], side: int
) -> dict[int, list[tuple[int, int]]]:
    """By row, where the sentences of a side begin and end."""
    found: dict[int, list[tuple[int, int]]] = {}
    for lengths, place in zip(given, places, strict=True):
        found.setdefault(place.row, []).append((place[1 + side], place[1 + side] + lengths[side]))
    return found


@given(st.lists(st.tuples(st.integers(1, 48), st.integers(1, 48)), min_size=1, max_size=60), st.integers(48, 80))
def test_packed_pairs_do_not_overlap(lengths: list[tuple[int, int]], width: int) -> None:
    places = first_fit(lengths, width)
    rows = {place.row for place in places}
    assert rows == set(range(len(rows)))
    for side in (0, 1):
        for sentences_of in lengths_of(lengths, places, side).values():
            ends = [0, *(end for _, end in sorted(sentences_of))]
            assert [start for start, _ in sorted(sentences_of)] == ends[:-1]
            assert ends[-1] <= width
    # no two rows could be one: the later would have fitted into the earlier
    filled = [[lengths_of(lengths, places, side)[row] for side in (0, 1)] for row in rows]
    for earlier, later in itertools.combinations(filled, 2):
        assert any(
            max(e for _, e in one) + max(e for _, e in two) > width for one, two in zip(earlier, later, strict=True)
        )


def test_every_place_reads_its_token_or_padding() -> None:
    corpus = Corpus(pairs(30), torch.device("cpu"))
    numbers = torch.tensor([7, 0, 29, 12, 3])
    source, target = corpus.pack(numbers)
    assert source.shape == target.shape == (2, 64)
    for side, grid, shown in ((0, corpus.source, source), (1, corpus.target, target)):
        read = Counter((grid.flatten()[shown]).flatten().tolist())
        wanted = Counter(int(word) for n in numbers for word in grid[n][: corpus.lengths[n, side]])
        assert read - wanted == Counter({PAD: 128 - wanted.total()})
        assert (shown // grid.size(1)).unique().tolist() == [0, 3, 7, 12, 29, 30]  # 30: no sentence
    assert ((source // corpus.source.size(1)).amax(1) == 30).all()


def test_packing_changes_neither_logits_nor_gradients() -> None:
    model = tiny_transformer().double()
    train = pairs(6)
    task = TranslationTask(context(batch=6), model, train, pairs(2, seed=1))
    sources, targets = train.source.padded(), train.target.padded()
    read, labels = targets[:, :-1], targets[:, 1:]
    real = labels != PAD
    padded = model(sources, read)[real]
    wanted = torch.autograd.grad(smoothed_loss(padded, labels[real]), list(model.parameters()))
    packed = task._train.pack(torch.arange(6))
    assert packed.size(1) < 6
    logits, row = task._predict(task._train, *packed)
    # the same words, wherever they stand now
    order = packed[1].flatten()[row != PAD].argsort()
    assert torch.equal(row[row != PAD][order], labels[real])
    torch.testing.assert_close(logits[row != PAD][order], padded, rtol=0, atol=1e-9)
    got = torch.autograd.grad(smoothed_loss(logits, row), list(model.parameters()))
    # the loss itself is taken in float32
    for name, a, b in zip(dict(model.named_parameters()), got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)


def test_a_batch_gets_enough_rows() -> None:
    assert room(200, 1) == room(200, 52) == 52
    assert (room(200, 53), room(200, 57)) == (56, 64)
    assert room(8, 1) == 3


def test_rows_are_as_wide_as_the_longest_sentence_needs() -> None:
    long = Sentences(torch.arange(4, 104).int(), torch.tensor([0, 100]))
    corpus = Corpus(Pairs(long, long), torch.device("cpu"))
    assert corpus.pack(torch.tensor([0])).shape == (2, 1, 104)


# -- the loss ------------------------------------------------------------------------------------


def literal_smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The public code's formula, word for word, in float64."""
    eps, classes = 0.1, logits.size(1)
    one_hot = torch.zeros_like(logits, dtype=torch.float64).scatter(1, labels.view(-1, 1), 1)
    one_hot = one_hot * (1 - eps) + (1 - one_hot) * eps / (classes - 1)
    log_probability = torch.log_softmax(logits.double(), dim=1)
    losses = -(one_hot * log_probability).sum(dim=1)
    return losses.masked_select(labels.ne(1)).sum()


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_smoothing_is_the_public_formula(scale: float) -> None:
    logits = (scale * torch.randn(40, 60)).requires_grad_()
    labels = words(40, vocabulary=60)
    labels[::5] = PAD
    loss, wanted = smoothed_loss(logits, labels), literal_smoothed_loss(logits, labels)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    (gradient,), (wanted_gradient,) = torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)


def test_smoothing_is_taken_in_float32_from_bfloat16_logits() -> None:
    logits, labels = torch.randn(40, 60, dtype=torch.bfloat16), words(40, vocabulary=60)
    loss = smoothed_loss(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), literal_smoothed_loss(logits, labels), rtol=1e-6, atol=0)


def test_a_step_descends_the_sum_and_returns_the_mean_over_words() -> None:
    task = tiny_task(dropout=0.0)
    model = copy.deepcopy(task.model)
    task.begin_epoch(0)
    returned = task.step(task.kind(0), task.batch(0), sgd(task, lr=1e-3))
    train, shown = pairs(50), task._batches[0]
    source, target = train.source.padded()[shown], train.target.padded()[shown]
    labels = target[:, 1:]
    loss = literal_smoothed_loss(model(source, target[:, :-1]).flatten(0, 1), labels.flatten())
    count = sum(int((row != PAD).sum()) for row in labels)
    assert returned.item() == pytest.approx(loss.item() / count, rel=1e-5)
    assert not returned.requires_grad
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for before, gradient, after in zip(model.parameters(), gradients, task.model.parameters(), strict=True):
        torch.testing.assert_close(after, before - 1e-3 * gradient, rtol=1e-4, atol=1e-6)


# -- batches -------------------------------------------------------------------------------------


def test_an_epoch_shows_every_pair_once_in_an_order_of_its_seed() -> None:
    def shown(seed: int, epoch: int) -> list[int]:
        task = tiny_task(context(batch=8, seed=seed))
        seen = []
        for index in range(task.begin_epoch(epoch)):
            source, target = task.batch(index)
            numbers = [
                side // grid.size(1) for side, grid in ((source, task._train.source), (target, task._train.target))
            ]
            assert set(numbers[0].unique().tolist()) == set(numbers[1].unique().tolist())
            assert (source.size(0), task.lr_factor(index)) == (int(task.kind(index)), 1.0)
            seen += [set(numbers[0].unique().tolist()) - {50}]
        assert [len(each) for each in seen] == [8] * 6 + [2]
        return [number for each in seen for number in sorted(each)]

    assert shown(0, 0) != list(range(50))
    assert sorted(shown(0, 0)) == list(range(50))
    assert shown(0, 0) == shown(0, 0)
    assert shown(0, 0) != shown(0, 1)
    assert shown(0, 0) != shown(1, 0)


def test_a_batch_with_more_rows_is_its_own_kind_with_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(room: float) -> tuple[set[str], list[float]]:
        monkeypatch.setattr(translation, "ROOM", room)
        monkeypatch.setattr(translation, "WIDTH", 24)
        monkeypatch.setattr(translation, "BLOCK", 1)
        task = tiny_task(dropout=0.0)
        count = task.begin_epoch(0) - 1
        return {task.kind(i) for i in range(count)}, [x.item() for x in steps(task, sgd(task, lr=1e-3), 0, count)]

    (one, wanted), (several, got) = losses(1), losses(0.1)
    assert one == {"8"}
    assert len(several) > 1
    assert got == pytest.approx(wanted, rel=1e-5)


def test_a_run_resumes_bitwise_within_an_epoch() -> None:
    assert_resumes_within_an_epoch(partial(tiny_task))


def test_bfloat16_trains_close_to_float32() -> None:
    def losses(precision: str) -> list[float]:
        task = tiny_task(context(batch=8, precision=precision), dropout=0.0)  # type: ignore[arg-type]
        task.begin_epoch(0)
        return [loss.item() for loss in steps(task, sgd(task, lr=1e-3), 0, 6)]

    half, wanted = losses("bf16"), losses("fp32")
    assert half != wanted
    assert half == pytest.approx(wanted, rel=2e-2)


@pytest.mark.slow
def test_compiling_changes_no_loss() -> None:
    def losses(compiled: bool) -> list[float]:
        task = tiny_task(context(batch=8, compiled=compiled), dropout=0.0)
        task.begin_epoch(0)
        return [loss.item() for loss in steps(task, sgd(task, lr=1e-3), 0, 3)]

    assert losses(True) == pytest.approx(losses(False), rel=1e-4)


# -- measuring -----------------------------------------------------------------------------------


def literal_measures(model: Transformer, valid: Pairs) -> dict[str, float]:
    """A sentence at a time, without padding."""
    model = model.eval()
    right, total, loss = 0, 0, 0.0
    for index in range(len(valid)):
        source, target = valid.source[index][None].long(), valid.target[index][None].long()
        logits, labels = model(source, target[:, :-1])[0], target[0, 1:]
        loss -= logits.log_softmax(-1).gather(1, labels[:, None]).double().sum().item()
        right += int((logits.argmax(-1) == labels).sum())
        total += len(labels)
    return {"accuracy": 100 * right / total, "valid_ppl": math.exp(loss / total)}


@pytest.mark.parametrize("at_once", [5, 512])
def test_metrics_equal_those_of_single_sentences_without_smoothing(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "AT_ONCE", at_once)
    task = tiny_task()
    task.begin_epoch(0)
    steps(task, sgd(task, lr=1e-3), 0, 6)
    with torch.no_grad():
        wanted = literal_measures(task.model, pairs(23, seed=1))
    assert 0 < wanted["accuracy"] < 100
    task.model.train()
    assert task.evaluate(False) == pytest.approx(wanted, rel=1e-5)
    assert task.model.training


def test_a_limit_applies_to_steps_and_to_evaluation() -> None:
    task = tiny_task(context(batch=8, limit=2))
    assert task.begin_epoch(0) == 2
    valid = pairs(23, seed=1)
    cut = Pairs(*(Sentences(side.numbers, side.starts[:17]) for side in (valid.source, valid.target)))
    with torch.no_grad():
        wanted = literal_measures(task.model, cut)
    assert task.evaluate(False) == pytest.approx(wanted, rel=1e-5)


# -- the experiment ------------------------------------------------------------------------------


def test_the_learning_rate_is_the_transformers_at_every_step() -> None:
    schedule = EXPERIMENTS[0].schedule
    for n in (1, 2, 1_000, 58_000):
        formula = 2 * 512**-0.5 * min(n**-0.5, n * 128_000**-1.5)
        assert 1e-3 * schedule.factor((n - 1) // 145, n - 1, 400) == pytest.approx(formula, rel=1e-12)
    assert 1e-3 * schedule.factor(399, 57_999, 400) == pytest.approx(1.12e-4, rel=5e-3)
    assert 1e-3 * schedule.factor(0, 0, 400) == pytest.approx(1.93e-9, rel=5e-3)


def test_the_declaration_is_the_papers() -> None:
    (experiment,) = EXPERIMENTS
    assert experiment.metrics["default"].key == "accuracy"
    assert (experiment.epochs, experiment.batch) == (400, 200)
    assert set(experiment.paper) == {"aida-k1", "aida-k2"} | (set(catalog()) & set(experiment.paper))
    assert len(experiment.paper) == 11
    assert all(figure.std is not None for figure in experiment.paper.values())
    assert max(experiment.paper, key=lambda method: experiment.paper[method].mean) == "aida-k2"


@needs(sets.MULTI30K, tokenised=True)
@pytest.mark.slow
def test_a_short_run_on_the_real_sentences() -> None:
    task = EXPERIMENTS[0].task(context(batch=20, limit=4))  # a tenth of the sentences: a CPU takes its time
    assert isinstance(task, TranslationTask)
    assert sum(p.numel() for p in task.model.parameters()) == EXPERIMENTS[0].parameters
    optimizers = {"model": torch.optim.Adam(task.model.parameters(), lr=1e-3, betas=(0.9, 0.98))}
    assert task.begin_epoch(0) == 4
    losses = [loss.item() for loss in steps(task, optimizers, 0, 4)]
    assert losses[0] == pytest.approx(math.log(9_521), abs=0.05), "an even guess"
    assert losses[-1] < losses[0] - 0.05
    measures = task.evaluate(True)
    assert measures["accuracy"] > 3, "it has learned a frequent word"
    assert measures["valid_ppl"] < 9_000


@needs(sets.MULTI30K, tokenised=True)
def test_nearly_all_batches_of_the_real_sentences_are_of_one_kind() -> None:
    from aida_lab.data.translation import multi30k

    real = multi30k()
    task = TranslationTask(context(batch=200), tiny_transformer(), real.train, real.valid)
    kinds = [task.kind(i) for epoch in range(5) for i in range(task.begin_epoch(epoch))]
    assert len(kinds) == 5 * 145
    assert set(kinds) == {"52"}
    assert task.batch(0)[0].shape == (52, 64)
    assert task._valid_words == 14_440
