"""One-shot pruning of LeNet-300-100 on MNIST: section 3 and figure 2 of the paper.

The protocol is that of the notebook published with the paper: plain SGD, batches of 60, truncated-normal fan-in
initialisation, the last 5,000 training images for validation, layer-wise pruning to int(p·n) weights for 20 values of p
from 1% to 100%, twice the fraction in the output layer. The preset `paper` has the values of the paper's table instead
(momentum 0.9, learning rate 0.0025, Gaussian Glorot). The learning rate decides the size of the effect: it is tuned for
every α, the baseline included.
"""

from __future__ import annotations

from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.experiment import oneshot_experiment
from powerprop.experiments.oneshot.report import Story

MNIST, LENET = "mnist", "lenet-300-100"

PRESETS = {
    "smoke": Config(
        data=MNIST, model=LENET, alphas=(1.0, 2.0), lrs=(0.2, 0.5), seeds=2, steps=40, every=10, points=5, test=500,
        train=2_000, validation=500,
    ),
    "demo": Config(data=MNIST, model=LENET, alphas=(1.0, 2.0, 3.0), lrs=(0.5,), seeds=2, steps=8_000),
    "cpu": Config(
        data=MNIST, model=LENET, alphas=(1.0, 2.0, 3.0, 4.0, 5.0), lrs=(0.1, 0.2, 0.5, 1.0, 2.0), seeds=5,
        tuning_seeds=5, steps=20_000,
    ),
    "paper": Config(
        data=MNIST, model=LENET, alphas=(1.0, 2.0, 3.0, 4.0, 5.0), lrs=(0.0025,), seeds=5, steps=50_000, momentum=0.9,
        init="glorot_normal",
    ),
}  # fmt: skip

STORY = Story(
    title="One-shot pruning of LeNet-300-100 on MNIST",
    paper="Section 3, figure 2 a–d. The paper shows these results as figures and prints no values.",
    intro="Powerpropagation trains the weights as `w = φ|φ|^(α-1)`: what is large grows, what is small stays small. "
    "Networks trained this way keep their accuracy at sparsities where ordinary ones (α = 1) collapse.",
    full=PRESETS["paper"],
)

EXPERIMENT = oneshot_experiment(
    name="mnist-oneshot",
    title="accuracy of LeNet-300-100 against weights kept, after one-shot pruning",
    paper="figure 2 a–d, section 3",
    presets=PRESETS,
    story=STORY,
)
