"""The two tables of continual generative modelling; `powerprop run generative --dataset notmnist` is the second."""

from __future__ import annotations

from powerprop.experiments.generative.arms import jobs
from powerprop.experiments.generative.config import MNIST, NOTMNIST, Config
from powerprop.experiments.generative.report import report
from powerprop.experiments.generative.train import prepare, run_job
from powerprop.experiments.harness.experiment import Experiment


def experiment(name: str, title: str, presets: dict[str, Config]) -> Experiment:
    """Ten characters of a data set."""
    return Experiment(
        name=name, title=title, paper="table 3 and the figures of appendix C", presets=presets, prepare=prepare,
        jobs=jobs, run_job=run_job, report=report,
    )  # fmt: skip


GENERATIVE = experiment("generative", "ten digits in one variational autoencoder, one after the other", MNIST)
GENERATIVE_NOTMNIST = experiment("generative-notmnist", "the same with the ten letters of notMNIST", NOTMNIST)
