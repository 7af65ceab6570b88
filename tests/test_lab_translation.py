"""Multi30k's task: leaving the padding out, smoothed labels, the summed loss, teacher-forced accuracy."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from aida.catalog import catalog
from aida.lab.data import sets
from aida.lab.data.translation import BEGIN, END, PAD, Pairs, Sentences
from aida.lab.experiments.multi30k import EXPERIMENTS
from aida.lab.models.layout import packed, whole
from aida.lab.models.transformer import Transformer
from aida.lab.task import Setting
from aida.lab.tasks import translation
from aida.lab.tasks.translation import TranslationTask, capacity, grid, smoothed_loss
from lab_cases import one_thread_and_a_seed, tiny_transformer, words
from text_runs import assert_resumes_within_an_epoch, needs, setting, sgd, steps

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)

VOCABULARY = 50


def sentences(count: int, seed: int, longest: int = 20) -> Sentences:
    torch.manual_seed(seed)
    lengths = torch.randint(1, longest - 1, (count,)).tolist()
    rows = [torch.tensor([BEGIN, *words(n, vocabulary=VOCABULARY).tolist(), END]) for n in lengths]
    starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return Sentences(torch.cat(rows).int(), starts)


def pairs(count: int, seed: int = 0) -> Pairs:
    return Pairs(sentences(count, 2 * seed), sentences(count, 2 * seed + 1, longest=17))


def tiny_task(where: Setting | None = None, dropout: float = 0.1, count: int = 50) -> TranslationTask:
    train, valid = pairs(count), pairs(23, seed=1)
    torch.manual_seed(4)
    return TranslationTask(where or setting(batch=8), tiny_transformer(dropout), train, valid)


# -- layouts -------------------------------------------------------------------------------------


def some_words() -> Tensor:
    return torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()


def test_packing_puts_the_words_in_one_row_and_back() -> None:
    layout = packed(some_words(), 8)
    cells = torch.arange(12.0).view(3, 4, 1).repeat(1, 1, 2)
    row = layout.row(cells)
    assert row[:6, 0].tolist() == [0, 1, 2, 4, 8, 9]
    assert torch.equal(layout.grid(row)[some_words()], cells[some_words()])
    assert layout.positions()[:6].tolist() == [0, 1, 2, 0, 0, 1]
    assert not some_words().flatten()[layout.cells[6:]].any()  # type: ignore[index]
    assert (layout.rows[~some_words().flatten()] == 7).all()  # type: ignore[index]


def test_a_whole_layout_moves_nothing() -> None:
    layout, cells = whole(some_words()), torch.randn(3, 4, 5)
    assert torch.equal(layout.row(cells), cells.flatten(0, 1))
    assert torch.equal(layout.grid(layout.row(cells)), cells)
    assert layout.positions().tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moving_words_sends_their_gradient_the_same_way(dtype: torch.dtype) -> None:
    layout = packed(some_words(), 8)
    row = torch.randn(8, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 4, 4, dtype=dtype) * some_words()[..., None]  # what is not a word has no gradient
    (gradient,) = torch.autograd.grad((layout.grid(row) * weight).sum(), row)
    assert torch.equal(gradient[:6], weight[some_words()])
    assert not gradient[6:].any()


def test_leaving_the_padding_out_changes_neither_logits_nor_gradients() -> None:
    model = tiny_transformer().double()
    sources, targets = grid(sentences(6, 1)), grid(sentences(6, 2))
    read, labels = targets[:, :-1], targets[:, 1:]
    real = labels != PAD
    padded = model(sources, read)[real]
    wanted = torch.autograd.grad(smoothed_loss(padded, labels[real]), list(model.parameters()))
    counts = int((sources != PAD).sum()), int(real.sum())
    for spare in (1, 40):
        there, here = packed(sources != PAD, counts[0] + spare), packed(real, counts[1] + spare)
        logits = model.logits(sources, there, read, here)
        torch.testing.assert_close(logits[: counts[1]], padded, rtol=0, atol=1e-9)
        row = here.row(labels)
        assert (row[counts[1] :] == PAD).all()
        got = torch.autograd.grad(smoothed_loss(logits, row), list(model.parameters()))
        # the loss itself is taken in float32
        for name, a, b in zip(dict(model.named_parameters()), got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("longest", [7, 8, 9])
def test_every_row_of_the_grid_ends_in_padding(longest: int) -> None:
    rows = [torch.arange(4, 4 + longest), torch.arange(4, 6)]
    rows_of = grid(Sentences(torch.cat(rows).int(), torch.tensor([0, longest, longest + 2])))
    assert rows_of.shape == (2, 8 if longest < 8 else 16)
    assert (rows_of[:, -1] == PAD).all()
    assert rows_of[0, :longest].tolist() == rows[0].tolist()


def test_there_is_room_for_every_word_and_one_more() -> None:
    for sentence_count in (1, 3, 200):
        for count in range(2, 7000, 7):
            room = capacity(sentence_count, count)
            assert room > count
            assert room == 16 * sentence_count or (room % 128 == 0 and room <= count + 128)
    assert capacity(200, 2_890) == capacity(200, 3_100) == 3_200


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
    source, target = task.batch(0)
    returned = task.step(task.kind(0), (source, target), sgd(task, lr=1e-3))
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
    def shown(seed: int, epoch: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        task = tiny_task(setting(batch=8, seed=seed))
        batches = [task.batch(i) for i in range(task.begin_epoch(epoch))]
        assert [len(source) for source, _ in batches] == [8] * 6 + [2]
        return [
            (tuple(s.tolist()), tuple(t.tolist()))
            for source, target in batches
            for s, t in zip(source, target, strict=True)
        ]

    train = pairs(50)
    everything = [
        (tuple(s.tolist()), tuple(t.tolist())) for s, t in zip(grid(train.source), grid(train.target, 1), strict=True)
    ]
    assert shown(0, 0) != everything
    assert sorted(shown(0, 0)) == sorted(everything)
    assert shown(0, 0) == shown(0, 0)
    assert shown(0, 0) != shown(0, 1)
    assert shown(0, 0) != shown(1, 0)


def test_a_kind_says_the_shapes_of_its_step_and_has_room_for_its_words() -> None:
    task = tiny_task()
    for index in range(task.begin_epoch(0)):
        source, target = task.batch(index)
        count, source_rows, target_rows = map(int, task.kind(index).split("x"))
        assert count == len(source) == len(target)
        assert source_rows == capacity(count, int((source != PAD).sum()))
        assert target_rows == capacity(count, int((target[:, 1:] != PAD).sum()))
        assert task.lr_factor(index) == 1.0


def test_a_fuller_batch_becomes_a_kind_of_its_own_with_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(room: int) -> tuple[set[str], list[float]]:
        monkeypatch.setattr(translation, "ROOM", room)
        monkeypatch.setattr(translation, "BLOCK", 16)
        task = tiny_task(dropout=0.0)
        count = task.begin_epoch(0) - 1
        return {task.kind(i) for i in range(count)}, [x.item() for x in steps(task, sgd(task, lr=1e-3), 0, count)]

    (one, wanted), (several, got) = losses(20), losses(1)
    assert one == {"8x160x160"}
    assert len(several) > 1
    assert got == pytest.approx(wanted, rel=1e-5)


def test_a_run_goes_on_bitwise_within_an_epoch() -> None:
    assert_resumes_within_an_epoch(partial(tiny_task))


def test_bfloat16_trains_close_to_float32() -> None:
    def losses(precision: str) -> list[float]:
        task = tiny_task(setting(batch=8, precision=precision), dropout=0.0)  # type: ignore[arg-type]
        task.begin_epoch(0)
        return [loss.item() for loss in steps(task, sgd(task, lr=1e-3), 0, 6)]

    half, wanted = losses("bf16"), losses("fp32")
    assert half != wanted
    assert half == pytest.approx(wanted, rel=2e-2)


@pytest.mark.slow
def test_compiling_changes_no_loss() -> None:
    def losses(compiled: bool) -> list[float]:
        task = tiny_task(setting(batch=8, compiled=compiled), dropout=0.0)
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
def test_measures_are_those_of_single_sentences_without_smoothing(
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


def test_a_limit_holds_for_steps_and_for_measuring() -> None:
    task = tiny_task(setting(batch=8, limit=2))
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


@needs(sets.MULTI30K)
@pytest.mark.slow
def test_a_short_run_on_the_real_sentences() -> None:
    task = EXPERIMENTS[0].task(setting(batch=20, limit=4))  # a tenth of the sentences: a CPU takes its time
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


@needs(sets.MULTI30K)
def test_nearly_all_batches_of_the_real_sentences_are_of_one_kind() -> None:
    from aida.lab.data.translation import multi30k

    real = multi30k()
    task = TranslationTask(setting(batch=200), tiny_transformer(), real.train, real.valid)
    kinds = [task.kind(i) for epoch in range(5) for i in range(task.begin_epoch(epoch))]
    assert len(kinds) == 5 * 145
    assert set(kinds) == {"200x3200x3200"}
    assert task.batch(0)[0].shape == (200, 48)
    assert int(task._valid_words[1].sum()) == 14_440
