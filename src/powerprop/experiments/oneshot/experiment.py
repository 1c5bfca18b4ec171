"""The experiments that train, prune once and measure, made from their presets and their words."""

from __future__ import annotations

from powerprop.experiments.harness.experiment import Experiment
from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.report import Story, findings
from powerprop.experiments.oneshot.train import prepare, run_job
from powerprop.experiments.oneshot.tuning import jobs


def oneshot_experiment(name: str, title: str, paper: str, presets: dict[str, Config], story: Story) -> Experiment:
    """An experiment of the one-shot protocol."""
    return Experiment(
        name=name, title=title, paper=paper, presets=presets, prepare=prepare, jobs=jobs, run_job=run_job,
        report=lambda config, results, out: findings(config, results, out, story),
    )  # fmt: skip
