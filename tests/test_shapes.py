"""The benchmark measures the models it names."""

from __future__ import annotations

import pytest

from shapes import MODELS, elements, many_tensors, resnet34, vgg11

#: Tensors and elements: the first three are the published counts of these models.
COUNTS = {
    "resnet34": (110, 21_282_122),
    "vgg11": (22, 9_750_922),
    "gpt2": (148, 124_439_808),
    "gpt-1.3b": (292, 1_315_723_264),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_published_size(model: str) -> None:
    shapes = MODELS[model]()
    assert (len(shapes), elements(shapes)) == COUNTS[model]


def test_a_hundred_classes_change_the_last_layer_alone() -> None:
    assert elements(resnet34(100)) == 21_328_292
    assert elements(vgg11(100)) == 9_797_092


def test_many_tensors_are_as_many_as_asked() -> None:
    assert [len(many_tensors(count)) for count in (1, 499, 500)] == [1, 499, 500]
