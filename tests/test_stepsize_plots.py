"""The figures: their lines, their shared axis, their bound, and the files they become."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aida.catalog import find
from aida.stepsizes import StepsizeProbe
from aida.stepsizes.drawing import save
from aida.stepsizes.plots import PAPER_FIGURES, draw, draw_paper_figures
from aida.stepsizes.sinks import JsonLines, StepsizeLog, read_jsonl


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, StepsizeLog]:
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name in ("adam", "adam-plus", "adabelief-star", "adabelief", "aida"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3))
        optimizer = find(name).build(net.parameters())
        with JsonLines(folder / f"{name}.jsonl") as sink:
            StepsizeProbe(optimizer, net.named_parameters(), every=1, sink=sink)
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(7, 5)).square().mean().backward()
                optimizer.step()
        found[name] = read_jsonl(folder / f"{name}.jsonl")
    return found


def test_one_column_a_run_one_line_a_weight_and_one_log_axis_for_all(logs):
    figure = draw([logs["adabelief"], logs["aida"]], ("mean", "std"))
    assert len(figure.axes) == 4
    means = figure.axes[:2]
    for axis in means:
        assert axis.get_yscale() == "log"
        assert [line.get_linestyle() for line in axis.lines].count("-") == 2  # biases are left out
        assert axis.get_ylim() == means[0].get_ylim()
    assert "AdaBelief" in means[0].get_title()
    assert "K = 2" in means[1].get_title()


def test_lines_hold_the_recorded_values(logs):
    axis = draw([logs["aida"]], ("std",)).axes[0]
    wanted = [record.std for record in logs["aida"].layers if record.layer == "0.weight"]
    assert list(axis.lines[0].get_ydata()) == wanted
    assert list(axis.lines[0].get_xdata()) == [1, 2, 3]


def test_bound_is_dashed_where_it_is_near_and_named_where_it_is_far(logs):
    near = draw([logs["aida"]]).axes[0]
    assert [line.get_ydata()[0] for line in near.lines if line.get_linestyle() == "--"] == [
        logs["aida"].layers[0].bound
    ]
    far = draw([logs["adam"]]).axes[0]
    assert all(line.get_linestyle() == "-" for line in far.lines)
    assert any("off the scale" in text.get_text() for text in far.texts)


def test_paper_figures_are_drawn_where_their_methods_are_there(logs, tmp_path):
    written = draw_paper_figures([logs["adabelief"], logs["adabelief-star"]], tmp_path)
    assert [path.name for path in written] == ["figure-3.png", "figure-3.svg"]
    assert all(path.stat().st_size > 5000 for path in written)
    names = {path.stem for path in draw_paper_figures(logs.values(), tmp_path)}
    assert names == set(PAPER_FIGURES)


def test_many_layers_get_a_scale_instead_of_names(logs):
    from dataclasses import replace

    first = logs["aida"].layers[0]
    many = replace(logs["aida"], layers=tuple(replace(first, layer=f"{i}.weight") for i in range(30)))
    figure = draw([many])
    assert len(figure.axes) == 2
    assert figure.axes[1].get_ylabel() == "layer, from the input on"
    assert len(figure.axes[0].lines) == 30 + 1


def test_the_same_data_give_the_same_files(logs, tmp_path):
    one, other = (save(draw([logs["aida"]]), tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="at least one log"):
        draw([])
