"""Published settings of continual-learning methods, by benchmark, or by benchmark and scenario.

Entries that are no arguments of a method say how its authors train; `reference` is where they are printed.

- EWC, Laplace, MAS, SI: their coefficient of Σ Ω (θ - θ*)² is half of `strength`. MAS takes the absolute value of means
  over batches of 128 there, which is smaller than the mean of absolute values.
- LwF: with the factor T² nothing but the first of the five tasks is known in the end (docs/methods/distill.md).
- ER: memories as large as those of the methods that keep a Fisher or a generator; 1,100 and 4,000 examples as large as
  the network. ER and joint training: Adam with 1e-3 for 4 epochs (400-400), 1e-4 for 10 epochs (1000-1000).
- GEM: Split-MNIST with plain SGD, 0.01, 4 epochs; Permuted-MNIST 256 examples of each of 20 tasks, plain SGD with 0.1,
  batches of 10, one epoch. AGEM: 25 examples of each class and task on Permuted-MNIST (20 tasks), 13 on Split-CIFAR100
  (17 tasks of 5 classes); plain SGD with 0.1 and 0.03, batches of 10, one epoch.
- DGR, RtF: Adam with the rates of the generator, 2,000 and 5,000 steps a task, batches of 128 and as many replayed; RtF
  of `replay_vae([784, 400, 400], 10)`, on Permuted-MNIST 1000 units.
- HAT: one setting for all, with SGD at 0.05 and as many periods as epochs; eight: a sequence of eight image sets.
- GPM: SGD at 0.01, for 5 epochs of 784-100-100-10 and at most 200 of AlexNet with a head per task; without biases.
- OWM: ten tasks of one digit, SGD at 0.2 for 20 epochs of 784-800-10. Their code changes P with every batch of
  training, and has 0.6 for the output layer.
- SupSup: 250 permutations, RMSprop at 1e-4, width 1024, 500 outputs for ten classes; Split-CIFAR100: 20 tasks, Adam at
  1e-3 for 100 epochs, ResNet-18 without affine norms, at several `kept`.
"""

from __future__ import annotations

from typing import Any

from powerprop_paper.experiments.baselines.published import CLASS, DOMAIN, TASK

__all__ = ["SETTINGS"]

HSU = "Hsu et al., Re-evaluating Continual Learning Scenarios, 2018, arXiv:1810.12488"
VEN_2018 = "van de Ven & Tolias, Generative replay with feedback connections, 2018"
VEN_2019 = "van de Ven & Tolias, Three scenarios for continual learning, 2019, arXiv:1904.07734"
CHAUDHRY = "Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019"
BUZZEGA = "Buzzega et al., Dark Experience for General Continual Learning, 2020, and their code"
NGUYEN = "Nguyen et al., 2018, arXiv:1710.10628; first means by maximum likelihood"
SAHA, SERRA = "Saha et al. 2021, appendix, and their code", "Serrà et al. 2018, sections 3 and 4, and their code"
WORTSMAN, ZENG = "Wortsman et al. 2020, and their code", "Zeng et al. 2019, and their code"
REBUFFI = "Rebuffi et al., iCaRL, 2017, of a ResNet-32 and all classes"
SPLIT, PERMUTED, CIFAR = "split-mnist", "permuted-mnist", "split-cifar100"
SCENARIOS = (CLASS, DOMAIN, TASK)

Settings = dict[str, dict[str, Any]]


def _penalties(split: tuple[float, ...], permuted: tuple[float, ...], **settings: Any) -> Settings:
    """Strengths of a penalty in the three scenarios."""
    return {
        f"{benchmark}/{scenario}": {"strength": strength, **settings, "reference": HSU}
        for benchmark, strengths in ((SPLIT, split), (PERMUTED, permuted))
        for scenario, strength in zip(SCENARIOS, strengths, strict=True)
    }


SETTINGS: dict[str, Settings] = {
    "AGEM": {
        PERMUTED: {"memory": 5000, "rehearsed": 256, "reference": CHAUDHRY},
        CIFAR: {"memory": 1105, "rehearsed": 256, "reference": CHAUDHRY},
    },
    "DER": {
        f"{PERMUTED}/{DOMAIN}": {"memory": 500, "strength": 1.0, "rehearsed": 128, "reference": BUZZEGA},
    },
    "DERpp": {
        f"{PERMUTED}/{DOMAIN}": {
            "memory": 500, "strength": 1.0, "labels_strength": 0.5, "rehearsed": 128, "reference": BUZZEGA,
        },
    },
    "DGR": {
        SPLIT: {"hidden": (400, 400), "latent": 100, "vae_lr": 1e-3, "reference": VEN_2019},
        PERMUTED: {"hidden": (1000, 1000), "latent": 100, "vae_lr": 1e-4, "reference": VEN_2019},
    },
    "ER": {
        SPLIT: {"memory": 4400, "loss_weight": 0.5, "reference": HSU},
        PERMUTED: {"memory": 16000, "loss_weight": 0.5, "reference": HSU},
    },
    "EWC": _penalties((1200.0, 200.0, 200.0), (20.0, 300.0, 1000.0), labels="predicted"),
    "GEM": {
        SPLIT: {"memory": 4400, "margin": 0.5, "reference": HSU},
        PERMUTED: {
            "memory": 5120, "margin": 0.5, "reference": "Lopez-Paz & Ranzato, Gradient Episodic Memory, 2017",
        },
    },
    "GPM": {
        f"{PERMUTED}/{DOMAIN}": {
            "threshold": {"fc1": 0.95, "fc2": 0.99, "fc3": 0.99}, "growth": 0.0, "samples": 300, "batch_size": 10,
            "reference": SAHA,
        },
        f"{CIFAR}/{TASK}": {"threshold": 0.97, "growth": 0.003, "samples": 125, "batch_size": 64, "reference": SAHA},
    },
    "HAT": {
        f"{benchmark}/{TASK}": {"s_max": 400.0, "strength": 0.75, "batch_size": 64, "reference": SERRA}
        for benchmark in (SPLIT, PERMUTED, "eight")
    },
    "ICaRL": {CIFAR: {"memory": 2000, "reference": REBUFFI}},
    "JointTraining": {SPLIT: {"reference": HSU}, PERMUTED: {"reference": HSU}},
    "Laplace": _penalties((200.0, 1400.0, 800.0), (100.0, 500.0, 1000.0), labels="predicted"),
    "LwF": {
        f"{benchmark}/{scenario}": {
            "strength": 1.0, "temperature": 2.0, "reference": f"{VEN_2019}; the whole loss there is 1/t of this one",
        }
        for benchmark in (SPLIT, PERMUTED) for scenario in SCENARIOS
    } | {
        f"{SPLIT}/{CLASS}": {
            "strength": 0.25, "temperature": 2.0,
            "reference": "Li & Hoiem, 2016, whose loss has no factor T², which van de Ven & Tolias add",
        },
    },
    "MAS": _penalties((2.0, 20000.0, 2.0), (0.006, 0.2, 0.02), mean=True) | {
        f"{PERMUTED}/{CLASS}": {
            "strength": 0.006, "mean": False,
            "reference": f"{HSU}; with the sum of Aljundi et al., as a mean over outputs that become more fades",
        },
    },
    "OWM": {
        f"disjoint-mnist/{CLASS}": {"ridge": 0.9, "decay": 0.001, "batch_size": 40, "reference": ZENG},
    },
    "RtF": {benchmark: {"temperature": 2.0, "reference": VEN_2018} for benchmark in (SPLIT, PERMUTED)},
    "SI": _penalties((1200.0, 6000.0, 600.0), (0.6, 20.0, 2.0), xi=0.1),
    "SupSup": {
        f"{PERMUTED}/{DOMAIN}": {"kept": None, "steps": 1000, "reference": WORTSMAN},
        f"{CIFAR}/{TASK}": {"distribution": "erk", "batch_size": 128, "reference": WORTSMAN},
    },
    "VCL": {
        name: {"samples": 10, "log_variance": -6.0, "prior_variance": 1.0, "reference": NGUYEN}
        for name in (f"{PERMUTED}/{DOMAIN}", f"{SPLIT}/{TASK}")
    },
}  # fmt: skip
