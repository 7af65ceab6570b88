"""Search spaces: the paper's sets, sets of the command line, and what distinguishes two searches."""

from __future__ import annotations

import pytest

from aida_lab.experiments import experiments, find_experiment
from aida_lab.parsing import UsageError
from aida_lab.request import RunRequest
from aida_lab.search.plan import plan_of
from aida_lab.search.space import Space, methods_of, parse_sets, space_of
from search_cases import DIGITS, plan

#: The sets of the paper's appendix.
TENS_8 = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
TENS_12 = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12)
EVEN_12 = (1e-6, 1e-8, 1e-10, 1e-12)
EVEN_14 = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14)
PAPER = [
    ("transformer-multi30k", "adam", {"eps": TENS_12}, 7),
    ("transformer-multi30k", "adabound", {"eps": TENS_12, "final_lr": (0.1, 0.01, 0.001)}, 21),
    ("transformer-multi30k", "yogi", {"eps": TENS_8}, 7),
    ("transformer-multi30k", "sgd", {"lr": (1.0, 0.1, 0.01, 0.001)}, 4),
    ("transformer-multi30k", "fromage", {"lr": (0.1, 0.01, 0.001, 0.0001)}, 4),
    ("transformer-multi30k", "adabelief", {"eps": (1e-8, 1e-10, 1e-12, 1e-14, 1e-16)}, 5),
    ("lstm2-ptb", "adamw", {"lr": (0.01, 0.001), "eps": EVEN_12}, 8),
    ("lstm2-ptb", "adabound", {"lr": (0.01, 0.001), "eps": EVEN_12, "final_lr": (0.1, 3.0, 30.0)}, 24),
    ("lstm1-ptb", "msvag", {"lr": (30.0, 1.0, 0.01, 0.001)}, 4),
    ("lstm3-ptb", "sgd", {"lr": (30.0, 3.0, 1.0, 0.1)}, 4),
    ("lstm3-ptb", "aida", {}, 1),
    ("wgan-gp-cifar10", "radam", {"eps": EVEN_14}, 6),
    ("wgan-gp-cifar10", "sgd", {"lr": (0.1, 0.02, 0.002, 0.0002), "momentum": (0.3, 0.5, 0.9)}, 12),
    ("wgan-gp-cifar10", "adabound", {"eps": (1e-2, 1e-4, 1e-6, 1e-8, 1e-10), "final_lr": (0.1, 0.01)}, 10),
    ("wgan-gp-cifar10", "adabelief", {}, 1),
    ("vgg11-cifar10", "adam", {"eps": TENS_8}, 7),
    ("resnet34-cifar100", "adabound", {"eps": TENS_8, "final_lr": (0.1, 0.01)}, 14),
    ("resnet34-cifar10", "yogi", {"eps": (1e-1, 1e-2, 1e-3)}, 3),
    ("vgg11-cifar100", "sgd", {}, 1),
    ("resnet18-imagenet", "adabelief", {"eps": (1e-8, 1e-9, 1e-10)}, 3),
]


@pytest.mark.parametrize(("experiment", "optimizer", "sets", "size"), PAPER)
def test_the_grid_is_the_papers(experiment, optimizer, sets, size):
    made = plan_of(RunRequest(find_experiment(experiment)), optimizer)
    assert {name: set(values) for name, values in made.space.sets.items()} == {
        name: set(values) for name, values in sets.items()
    }
    specs = {made.spec(each).key: made.spec(each) for each in made.space.grid()}
    assert len(specs) == len(made.space.grid()) == made.wanted == size
    for each in made.space.grid():
        assert {name: made.spec(each).hyper[name] for name in each} == each
    # all other values are the paper's tuned ones, and the length is the experiment's
    tuned = find_experiment(experiment).tuned(optimizer)
    for spec in specs.values():
        assert {name: value for name, value in spec.hyper.items() if name not in sets} == {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in tuned.items()
            if name not in sets
        }
        assert (spec.epochs, spec.seed) == (find_experiment(experiment).epochs, 0)


def test_every_method_of_every_table_can_be_searched():
    for experiment in experiments().values():
        methods = methods_of(experiment)
        assert [plan_of(RunRequest(experiment), method).method for method in methods] == list(methods)
        assert set(experiment.paper) <= set(methods)
        assert "aida-k2" in methods


def test_projections_have_their_own_tuned_values():
    cifar = find_experiment("vgg11-cifar10")
    assert plan_of(RunRequest(cifar), "aida-k1").base.hyper["eps"] == 1e-8
    assert plan_of(RunRequest(cifar), "aida-k2").base.hyper["eps"] == 1e-9


def test_no_value_of_a_papers_table_differs_from_the_paper():
    for experiment in (each for each in experiments().values() if each.paper):
        for method in experiment.paper:
            made = plan_of(RunRequest(experiment), method)
            specs = [made.spec(each) for each in made.space.grid()]
            assert not any(experiment.not_in_paper(each.optimizer, each.hyper) for each in specs)
            for spec in specs:
                changed = {**spec.hyper, "weight_decay": 0.123}
                assert experiment.not_in_paper(spec.optimizer, changed) == {"weight_decay": 0.123}


@pytest.mark.parametrize(
    ("experiment", "method", "given", "differing"),
    [
        ("lstm1-ptb", "adabelief", {"lr": 0.01, "eps": 1e-16}, {}),
        ("lstm1-ptb", "adabelief", {"lr": 0.003, "eps": 1e-16}, {"lr": 0.003}),
        ("transformer-multi30k", "adabelief", {"lr": 0.01, "eps": 1e-16}, {"lr": 0.01}),
        ("lstm3-ptb", "sgd", {"lr": 30}, {}),  # an int, as typed by a user
        ("vgg11-cifar10", "adam", {"betas": (0.9, 0.99)}, {"betas": [0.9, 0.99]}),
        ("vgg11-cifar10", "aida-k1", {"eps": 1e-9}, {"eps": 1e-9}),  # the paper uses 1e-8 with one projection
        ("vgg11-cifar10", "aida-k2", {"eps": 1e-8}, {"eps": 1e-8}),
        ("vgg11-cifar10", "aida-k2", {"clip_norm": 1.0}, {"clip_norm": 1.0}),
    ],
)
def test_values_that_differ_from_the_paper_are_named(experiment, method, given, differing):
    request = RunRequest(find_experiment(experiment), given=given)
    spec = plan_of(request, method).spec({})
    assert request.experiment.not_in_paper(spec.optimizer, spec.hyper) == differing


def test_given_values_are_not_searched_and_given_sets_are():
    lstm = find_experiment("lstm1-ptb")
    assert set(space_of(lstm, "adam", {"lr": 0.01}).sets) == {"eps"}
    over = parse_sets(["eps=1e-3,1e-4", "weight_decay=0.1"])
    assert space_of(lstm, "adam", over=over).sets == {
        "lr": (0.01, 0.001),
        "eps": (1e-3, 1e-4),
        "weight_decay": (0.1,),
    }
    with pytest.raises(UsageError, match=r"--set and --over both name eps"):
        space_of(lstm, "adam", {"eps": 1.0}, over)
    with pytest.raises(UsageError, match="--over"):
        parse_sets(["eps"])


def test_the_last_set_changes_fastest():
    assert Space({"a": (1, 2), "b": (3, 4)}).grid() == [
        {"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}
    ]  # fmt: skip


def test_pairs_can_be_searched():
    made = plan("adam", parse_sets(["betas=(0.9,0.999),(0.9,0.98)"]))
    assert [made.spec(each).hyper["betas"] for each in made.space.grid()] == [[0.9, 0.999], [0.9, 0.98]]


def test_equal_values_are_one_configuration_and_one_search():
    written = [plan(over={"lr": values}) for values in ((1.0, 0.1), (1, 0.1), (1, 1.0, 0.1))]
    assert len({each.name for each in written}) == 1
    assert [each.wanted for each in written] == [2, 2, 2]


def test_different_settings_are_different_searches():
    others = [
        plan(over={"lr": (0.1, 0.01)}),
        plan("adam", {"lr": (0.1, 0.01)}),
        plan(over={"lr": (0.1, 0.02)}),
        plan(over={"lr": (0.1, 0.01)}, epochs=3),
        plan(over={"lr": (0.1, 0.01)}, by="last"),
        plan(over={"lr": (0.1, 0.01)}, sampler="tpe"),
        plan(over={"lr": (0.1, 0.01)}, pruner="median"),
        plan(over={"lr": (0.1, 0.01)}, limit=1),
        plan(over={"lr": (0.1, 0.01)}, given={"momentum": 0.5}),
    ]
    assert len({each.name for each in others}) == len(others)


def test_more_repetitions_or_trials_are_the_same_search():
    same = [
        plan(over={"lr": (0.1, 0.01)}, sampler="tpe", **rest)
        for rest in ({}, {"seeds": (0, 1, 2, 3)}, {"trials": 99}, {"repeat_epochs": 9})
    ]
    assert len({each.name for each in same}) == 1


def test_repetitions_have_their_own_seed_and_length():
    short = plan_of(RunRequest(DIGITS, seeds=(7,), epochs=3), "adam", {"eps": (1e-3, 1e-8)})
    spec = short.repetition(short.base, 5)
    assert short.shortened
    assert (short.base.seed, short.base.epochs, spec.seed, spec.epochs) == (7, 3, 5, DIGITS.epochs)
    assert not plan_of(RunRequest(DIGITS), "adam").shortened


def test_a_search_of_one_configuration_is_as_long_as_the_repetitions():
    only = plan_of(RunRequest(DIGITS, epochs=3), "adam", repeat_epochs=5)
    assert (only.wanted, only.base.epochs, only.shortened) == (1, 5, False)


def test_tpe_needs_a_range_of_numbers():
    assert plan(over={"lr": (1.0, 0.001)}, sampler="tpe").space.ranges() == {"lr": (0.001, 1.0)}
    with pytest.raises(UsageError, match=r"--sampler tpe needs a range of numbers, and sgd on digits has none"):
        plan(over={"nesterov": (True, False)}, sampler="tpe")
