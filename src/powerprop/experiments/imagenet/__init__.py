"""ResNet-50 on ImageNet: figure 3 b and c, tables 1 and 2."""
