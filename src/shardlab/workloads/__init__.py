"""What can be trained: every workload by name. Import paths, as in ``shardlab.strategies``."""

WORKLOADS = {
    "gpt2": "shardlab.workloads.gpt2:gpt2",
    "resnet_cifar10": "shardlab.workloads.resnet:resnet_cifar10",
    "cnn_mnist": "shardlab.workloads.cnn:cnn_mnist",
    "causal_lm": "shardlab.workloads.causal_lm:causal_lm",
}
