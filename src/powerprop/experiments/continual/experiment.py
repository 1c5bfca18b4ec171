"""Makes an experiment of the continual-learning protocol; the figures of the paper differ in presets and words."""

from __future__ import annotations

from powerprop.experiments.continual.arms import jobs
from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.report import Story, findings
from powerprop.experiments.continual.train import prepare_tasks, run_job
from powerprop.experiments.harness.experiment import Experiment


def continual_experiment(name: str, title: str, paper: str, presets: dict[str, Config], story: Story) -> Experiment:
    """An experiment in which tasks are learned one after the other."""
    return Experiment(
        name=name, title=title, paper=paper, presets=presets, prepare=prepare_tasks, jobs=jobs, run_job=run_job,
        report=lambda config, results, out: findings(config, results, out, story),
    )  # fmt: skip
