"""The experiments by name, in the order of the papers.

EP1: Ma and Belkin, "Diving into the shallows", arXiv 1703.10622, and the readme of its code.
EP3: Abedsoltan, Belkin and Pandit, "Toward Large Kernel Models", arXiv 2302.02605.
FALKON: Rudi, Carratino and Rosasco, slides of 2018 on arXiv 1705.10958.
Lecture: a lecture on large-scale kernel methods, 2017.
"""

from __future__ import annotations

from importlib import import_module

from experiments.experiment import Experiment

NAMES = (
    "ep3_fig1",
    "ep3_fig2",
    "ep3_fig3",
    "ep3_fig4",
    "ep3_fig5",
    "ep3_fig6",
    "ep3_table1",
    "ep3_table2",
    "ep3_projection",
    "ep3_algorithm1",
    "ep1_gradient_descent",
    "ep1_reach",
    "ep1_kep",
    "ep1_acceleration",
    "ep1_four_ways",
    "falkon_steps",
    "falkon_centers_count",
    "falkon_rates",
    "falkon_nytro",
    "falkon_divide",
    "falkon_leverage",
    "falkon_tables",
    "falkon_yelp",
    "lecture_fourier_nystrom",
    "lecture_feature_error",
    "lecture_nystrom_error",
    "lecture_tensorsketch",
    "lecture_stacked",
    "lecture_averaging",
    "lecture_kernel_pca",
    "lecture_kmeans",
    "lecture_svm",
    "lecture_precomputed",
)


def experiment_named(name: str) -> Experiment:
    """Return the experiment of the module `experiments.NAME`."""
    found: Experiment = import_module(f"experiments.{name}").EXPERIMENT
    return found
