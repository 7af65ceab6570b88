"""The lab's text networks: the two weight drops of the LSTM, and the masks and tied matrix of the transformer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aida
from aida_lab.models import lstm, transformer
from aida_lab.models.lstm import (
    AwdLstm,
    WeightDrop,
    WeightDropLSTM,
    embedding_row_dropout,
    in_one_chunk,
    locked_dropout,
)
from aida_lab.models.transformer import Segments, Transformer, attend, sinusoid
from lab_cases import PAD, language_loss, one_thread_and_a_seed, tiny_transformer, translation_loss, words

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)


# -- LSTM ----------------------------------------------------------------------------------------


def small_lstm(layers: int = 2, weight_drop: WeightDrop = "correct") -> AwdLstm:
    return AwdLstm(layers, 60, weight_drop, embedding=16, hidden=24)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lstm_widths_and_outputs(layers: int) -> None:
    model = AwdLstm(layers, 60)
    assert model.widths == [1150] * (layers - 1) + [400]
    out = model(words(5, 3, vocabulary=60), model.initial_state(3))
    assert out.logits.shape == (5, 3, 60)
    assert out.raw.shape == out.dropped.shape == (5, 3, 400)
    assert [hidden.shape for hidden, _ in out.state] == [(1, 3, width) for width in model.widths]


def train_lstm(weight_drop: WeightDrop) -> tuple[list[Tensor], AwdLstm]:
    model, text = small_lstm(3, weight_drop), words(9, 4, vocabulary=60)
    before = [layer.weight_hh.detach().clone() for layer in model.layers]  # type: ignore[operator, union-attr]
    optimizer = aida.Aida(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        language_loss(model, text).backward()
        optimizer.step()
    return before, model


def test_faithful_weight_drop_leaves_the_recurrent_weights_at_their_start() -> None:
    before, model = train_lstm("faithful")
    for start, layer in zip(before, model.layers, strict=True):
        assert layer.weight_hh.grad is None
        assert torch.equal(layer.weight_hh, start)  # type: ignore[arg-type]
        assert layer.weight_ih.grad is not None


def test_correct_weight_drop_trains_the_recurrent_weights() -> None:
    before, model = train_lstm("correct")
    for start, layer in zip(before, model.layers, strict=True):
        assert layer.weight_hh.grad is not None
        assert not torch.equal(layer.weight_hh, start)  # type: ignore[arg-type]


def test_the_two_weight_drops_differ_in_the_gradient_alone() -> None:
    def gradients(weight_drop: WeightDrop) -> tuple[Tensor, dict[str, Tensor | None]]:
        torch.manual_seed(5)
        model = small_lstm(2, weight_drop)
        loss = language_loss(model, words(9, 4, vocabulary=60))
        loss.backward()
        return loss.detach(), {key: p.grad for key, p in model.named_parameters()}

    (loss, correct), (faithful_loss, faithful) = gradients("correct"), gradients("faithful")
    assert torch.equal(loss, faithful_loss)
    for key, gradient in correct.items():
        if key.endswith("weight_hh"):
            assert faithful[key] is None
        else:
            torch.testing.assert_close(faithful[key], gradient)


def test_weight_drop_zeroes_recurrent_entries_and_gives_them_no_gradient() -> None:
    layer = WeightDropLSTM(8, 8, 0.5, "correct")
    zeros = torch.zeros(1, 2, 8)
    layer(torch.randn(6, 2, 8), (zeros, zeros))[0].sum().backward()
    assert layer.weight_hh.grad is not None
    assert 0.3 < (layer.weight_hh.grad == 0).float().mean() < 0.7


def test_lstm_layer_is_torchs_when_nothing_is_dropped() -> None:
    ours, theirs = WeightDropLSTM(7, 9, 0.5, "correct").eval(), nn.LSTM(7, 9).eval()
    theirs.load_state_dict({f"{key}_l0": value for key, value in ours.state_dict().items()})
    x, zeros = torch.randn(5, 2, 7), torch.zeros(1, 2, 9)
    torch.testing.assert_close(ours(x, (zeros, zeros)), theirs(x))


def test_weights_in_one_chunk_are_the_same_weights_with_the_same_gradient() -> None:
    weights = [torch.randn(8, 3, requires_grad=True), torch.randn(8, 2, requires_grad=True), torch.randn(8)]
    parts = in_one_chunk(weights)
    start, offset = parts[0].data_ptr(), 0
    for part, weight in zip(parts, weights, strict=True):
        assert torch.equal(part, weight)
        assert part.data_ptr() == start + 4 * offset
        offset += weight.numel()
    sum((i + 1) * part.sum() for i, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert torch.equal(weights[0].grad, torch.ones(8, 3))  # type: ignore[arg-type]
    assert torch.equal(weights[1].grad, 2 * torch.ones(8, 2))  # type: ignore[arg-type]


def test_an_unknown_weight_drop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_drop='off'.*'correct'.*'faithful'"):
        small_lstm(weight_drop="off")  # type: ignore[arg-type]


def test_a_network_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers=0 must be at least 1"):
        AwdLstm(0)


def test_lstm_ties_its_projection_to_its_embedding() -> None:
    model = small_lstm().eval()
    out = model(words(3, 2, vocabulary=60), model.initial_state(2))
    torch.testing.assert_close(out.logits, out.dropped @ model.embedding.weight.T + model.decoder_bias)
    assert [p.shape for p in model.parameters()].count(torch.Size([60, 16])) == 1
    assert model.embedding.weight.abs().max() <= 0.1
    assert not model.decoder_bias.any()


def test_lstm_in_eval_drops_nothing_and_gives_the_same_output_in_chunks() -> None:
    model, text = small_lstm().eval(), words(8, 2, vocabulary=60)
    whole = model(text, model.initial_state(2))
    assert whole.raw is whole.dropped
    first = model(text[:3], model.initial_state(2))
    second = model(text[3:], first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), whole.logits)


def test_each_dropout_of_the_lstm_has_its_own_rate_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rates = AwdLstm(3, 60), []

    def recorded(x: Tensor, rate: float, training: bool) -> Tensor:
        rates.append(rate)
        return x

    monkeypatch.setattr(lstm, "locked_dropout", recorded)
    model(words(3, 2, vocabulary=60), model.initial_state(2))
    assert rates == [0.4, 0.25, 0.25, 0.4]
    assert model.dropout_words == 0.1
    assert [layer.rate for layer in model.layers] == [0.5] * 3


def test_locked_dropout_holds_its_mask_for_the_whole_sequence() -> None:
    dropped = locked_dropout(torch.ones(7, 30, 40), 0.4, training=True)
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))
    assert torch.unique(dropped).tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (dropped[0] == 0).float().mean().item() == pytest.approx(0.4, abs=0.05)


def test_embedding_dropout_drops_whole_words() -> None:
    embedding = nn.Embedding(500, 4)
    tokens = torch.arange(500).repeat(2, 1)
    kept = embedding_row_dropout(embedding, tokens, 0.1, training=True) / embedding(tokens)
    assert torch.equal(kept[0], kept[1])
    assert (kept.std(-1) < 1e-5).all()
    assert (kept[0, :, 0] == 0).float().mean().item() == pytest.approx(0.1, abs=0.05)


# -- transformer ---------------------------------------------------------------------------------


def test_transformer_ties_one_matrix_three_ways() -> None:
    model = Transformer(300, layers=1)
    assert [key for key, p in model.named_parameters() if p.shape == (300, 512)] == ["embedding.weight"]
    source, target = words(2, 5, vocabulary=300), words(2, 4, vocabulary=300)
    logits = model.eval()(source, target)
    assert logits.shape == (2, 4, 300)
    with torch.no_grad():
        model.embedding.weight[7] *= 2  # the word is in neither sentence: only its own logit may move
        assert not (torch.cat([source, target], 1) == 7).any()
        torch.testing.assert_close(model(source, target)[..., 7], 2 * logits[..., 7])


def test_transformer_matrices_start_from_xavier_uniform() -> None:
    for key, p in Transformer(300, layers=1).named_parameters():
        if p.dim() > 1:
            bound = math.sqrt(6 / sum(p.shape))
            assert 0.99 * bound < p.abs().max() <= bound, key
        assert ".bias" not in key or "norm" in key or "feed_forward" in key, f"{key}: attentions have no bias"


def test_layer_norms_use_the_specified_eps() -> None:
    assert {m.eps for m in Transformer(50, layers=1).modules() if isinstance(m, nn.LayerNorm)} == {1e-6}


def test_a_later_word_changes_no_earlier_logit() -> None:
    model = tiny_transformer().eval()
    source, target = words(2, 6, vocabulary=50), words(2, 7, vocabulary=50)
    changed = target.clone()
    changed[:, 4] = 4 + (changed[:, 4] - 3) % 46
    before, after = model(source, target), model(source, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_padding_does_not_affect_any_token() -> None:
    model = tiny_transformer().eval()
    source, target = words(2, 6, vocabulary=50), words(2, 5, vocabulary=50)
    padded = model(functional.pad(source, (0, 3), value=PAD), functional.pad(target, (0, 2), value=PAD))
    torch.testing.assert_close(padded[:, :5], model(source, target))


def test_a_sentence_of_padding_alone_stays_finite() -> None:
    model = tiny_transformer()
    source, target = words(2, 6, vocabulary=50), words(2, 5, vocabulary=50)
    source[1] = target[1] = PAD
    translation_loss(model, source, target).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_transformer_dropout_is_off_in_eval_and_on_in_training() -> None:
    model, source, target = tiny_transformer(0.1), words(1, 6, vocabulary=50), words(1, 5, vocabulary=50)
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    assert torch.equal(model(source, target), model(source, target))


def literal_logits(model: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """The transformer written out: masks as tensors, softmax and layer norms by hand."""
    weights = dict(model.named_parameters())
    embedding, heads, width = weights["embedding.weight"], 4, 32

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(name: str, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        mixed = []
        for part in range(heads):
            rows = slice(part * width // heads, (part + 1) * width // heads)
            q, k, v = (
                y @ weights[f"{name}.{role}.weight"][rows].T
                for role, y in (("query", x), ("key", memory), ("value", memory))
            )
            scores = q @ k.transpose(1, 2) / math.sqrt(width / heads)
            mixed.append(scores.masked_fill(hidden, -1e9).softmax(-1) @ v)
        return norm(f"{name}.norm", x + torch.cat(mixed, -1) @ weights[f"{name}.out.weight"].T)

    def feed(name: str, x: Tensor) -> Tensor:
        inner = (x @ weights[f"{name}.inner.weight"].T + weights[f"{name}.inner.bias"]).relu()
        return norm(f"{name}.norm", x + inner @ weights[f"{name}.out.weight"].T + weights[f"{name}.out.bias"])

    no_source = (source == PAD)[:, None, :]
    later = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
    x = norm("source_norm", embedding[source] + model.positions[: source.size(1)])
    y = norm("target_norm", embedding[target] + model.positions[: target.size(1)])
    for layer in range(2):
        x = feed(f"encoder.{layer}.feed_forward", attend(f"encoder.{layer}.attention", x, x, no_source))
    for layer in range(2):
        y = attend(f"decoder.{layer}.attention", y, y, later | (target == PAD)[:, None, :])
        y = attend(f"decoder.{layer}.source_attention", y, x, no_source)
        y = feed(f"decoder.{layer}.feed_forward", y)
    return y @ embedding.T * width**-0.5


def test_transformer_equals_the_literal_one_at_every_token_of_the_loss() -> None:
    model = tiny_transformer().double()
    source, target = words(3, 6, vocabulary=50), words(3, 5, vocabulary=50)
    source[0, 4:] = source[1, 2:] = target[1, 3:] = target[2, 4:] = PAD
    real = target != PAD
    ours, literal = model(source, target)[real], literal_logits(model, source, target)[real]
    torch.testing.assert_close(ours, literal, rtol=0, atol=1e-6)
    labels = words(len(ours), vocabulary=50)
    got, wanted = (
        torch.autograd.grad(functional.cross_entropy(logits, labels), list(model.parameters()))
        for logits in (ours, literal)
    )
    for name, a, b in zip(dict(model.named_parameters()), got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def test_attention_weights_are_dropped_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rates = tiny_transformer(0.1), []

    def recorded(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, dropout: float) -> Tensor:
        rates.append(dropout)
        return attend(query, key, value, seen, dropout)

    monkeypatch.setattr(transformer, "attend", recorded)
    source, target = words(1, 4, vocabulary=50), words(1, 3, vocabulary=50)
    model(source, target)
    model.eval()(source, target)
    assert rates == [0.1] * 6 + [0.0] * 6


def test_attention_is_torchs_own() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64).unbind()
    seen = torch.rand(2, 5, 5) < 0.5
    seen[:, :, 0] = True  # torch's has no number for what sees nothing
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    torch.testing.assert_close(attend(query, key, value, seen, 0.0), expected)


def test_the_mask_allows_the_same_sentence_and_if_causal_no_later_token() -> None:
    segments = Segments(torch.tensor([[5, 5, 5, 8, 8, 9]]), torch.tensor([[0, 1, 2, 0, 1, 0]]))
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2), torch.ones(1, 1)).bool()
    assert torch.equal(segments.attention_mask(segments)[0], blocks)
    assert torch.equal(segments.attention_mask(segments, causal=True)[0], blocks.tril())
    other = Segments(torch.tensor([[8, 5, 5, 7]]), torch.tensor([[0, 0, 1, 0]]))
    assert segments.attention_mask(other)[0].int().tolist() == [[0, 1, 1, 0]] * 3 + [[1, 0, 0, 0]] * 2 + [[0, 0, 0, 0]]


def test_segments_with_one_sentence_per_row_separate_tokens_from_padding() -> None:
    segments = Segments.one_per_row(torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())
    assert segments.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert segments.attention_mask(segments).int().tolist() == [
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]],
    ]


def test_sinusoid_is_the_published_table() -> None:
    table = sinusoid(200, 512)
    for position, feature in ((0, 0), (0, 1), (7, 10), (7, 11), (199, 510), (199, 511)):
        angle = position / 10_000 ** (2 * (feature // 2) / 512)
        assert table[position, feature].item() == pytest.approx((math.sin, math.cos)[feature % 2](angle), abs=1e-6)


def test_a_sentence_past_the_last_position_is_refused() -> None:
    model = tiny_transformer()
    with pytest.raises(ValueError, match="201 tokens is longer than the 200 positions"):
        model(words(1, 201, vocabulary=50), words(1, 2, vocabulary=50))
